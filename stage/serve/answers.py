"""What is asked and what is answered, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Question:
    """One request. `path` is decoded and has no query; header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class FileBody:
    """A file that is sent whole or in part; `size` is what the lock says."""

    path: Path
    size: int


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        missing: what was asked for that the bundle does not have, in words for whoever runs the server.
    """

    status: int
    body: bytes | FileBody
    headers: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None


def json_answer(document: object, headers: Mapping[str, str] | None = None) -> Answer:
    """200 with a JSON document."""
    return Answer(200, json.dumps(document).encode(), {"Content-Type": "application/json", **(headers or {})})


def refusal(status: int, message: str, code: str = "", *, missing: str | None = None) -> Answer:
    """An error as the Hub words it: `code` is what huggingface_hub goes by (`utils/_http.py`, hf_raise_for_status)."""
    headers = {"Content-Type": "application/json", "X-Error-Message": " ".join(message.split())}
    if code:
        headers["X-Error-Code"] = code
    return Answer(status, json.dumps({"error": message}).encode(), headers, missing)
