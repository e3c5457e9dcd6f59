"""HTTP requests and answers as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """One request. `path` is as it came, without the query; header names are in lower case.

    Attributes:
        query: each parameter with all its values.
        query_text: the query as it came, without the `?`.
    """

    method: str
    path: str
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    query_text: str = ""

    def first(self, name: str) -> str:
        """The value of a parameter; empty if it is not there."""
        return next(iter(self.query.get(name, ())), "")

    def flag(self, name: str) -> bool:
        """Whether a parameter is `true` or `1`."""
        return self.first(name).lower() in ("true", "1")

    def several(self, name: str) -> list[str]:
        """All values of a parameter, which may be called `name[]` too."""
        return [*self.query.get(name, ()), *self.query.get(f"{name}[]", ())]


@dataclass(frozen=True)
class FileBody:
    """A file below `root` that is sent whole or in part; `size` is the locked size in bytes."""

    path: Path
    size: int
    root: Path


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        missing: describes what the bundle does not have, for the log of the server; None: nothing.
        note: a choice that was made, for the log of the server.
    """

    status: int
    body: bytes | FileBody
    headers: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None
    note: str | None = None


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
