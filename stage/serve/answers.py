"""HTTP requests and answers as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """One request. `path` is decoded and has no query; header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class FileBody:
    """A file that is sent whole or in part; `size` is the locked size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        missing: describes what the bundle does not have, for the log of the server; None: nothing.
    """

    status: int
    body: bytes | FileBody
    headers: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None


def json_answer(document: object, headers: Mapping[str, str] | None = None) -> Answer:
    """200 with a JSON document."""
    return Answer(
        200, json.dumps(document).encode(), {"Content-Type": "application/json", **(headers or {})}
    )


def error_answer(
    status: int, message: str, code: str = "", *, missing: str | None = None
) -> Answer:
    """An error in the Hub's form.

    Args:
        code: the X-Error-Code that huggingface_hub reads (`utils/_http.py`, hf_raise_for_status).
        missing: as for `Answer`.
    """
    headers = {"Content-Type": "application/json", "X-Error-Message": " ".join(message.split())}
    if code:
        headers["X-Error-Code"] = code
    return Answer(status, json.dumps({"error": message}).encode(), headers, missing)
