"""Addresses, requests and answers of a Hub, as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from stage.errors import as_shown

KINDS = ("models", "datasets", "spaces")
_OF_A_FILE = ("resolve", "raw")
_OF_A_REPOSITORY = ("revision", "tree", "paths-info", "refs", "commits", "auth-check")
MAIN = "main"


@dataclass(frozen=True)
class Address:
    """An address, taken apart.

    Attributes:
        kind: one of `KINDS`.
        name: `owner/name`, or `name`.
        verb: what is asked: `resolve` and `raw` name a file; empty asks for the repository itself.
        rest: the decoded parts after the verb: a revision, and a path in the repository. The first
            may contain slashes, because huggingface_hub encodes those of a revision.
    """

    kind: str
    name: str
    verb: str = ""
    rest: tuple[str, ...] = ()

    @staticmethod
    def parse(target: str) -> Address | None:
        """Reads the target of a request or of a redirect; None: it names no repository."""
        # Names come from here into our log. A line end in one would forge a line there.
        decoded = map(unquote, urlsplit(target).path.split("/")[1:])
        parts = [as_shown(part).replace("\n", "\\n") for part in decoded]
        while parts and not parts[-1]:
            parts.pop()
        is_api = parts[:1] == ["api"]
        if is_api:
            del parts[0]
        has_kind = parts[:1] and parts[0] in KINDS
        if is_api and not has_kind:
            return None
        kind, parts = (parts[0], parts[1:]) if has_kind else (KINDS[0], parts)
        for length in (1, 2):
            name, rest = "/".join(parts[:length]), tuple(parts[length:])
            if rest[:1] and rest[0] in (_OF_A_REPOSITORY if is_api else _OF_A_FILE):
                return Address(kind, name, rest[0], rest[1:])
        return Address(kind, "/".join(parts)) if is_api and len(parts) in (1, 2) else None

    @property
    def is_file(self) -> bool:
        """Whether it is the address of a file's bytes."""
        return self.verb in _OF_A_FILE

    def of(self, name: str) -> str:
        """The same address of the API for another repository: where an old name redirects to."""
        parts = ("api", self.kind, name, self.verb, *(quote(part, safe="") for part in self.rest))
        return "/" + "/".join(filter(None, parts))

    def split(self, is_revision: Callable[[str], bool] = lambda name: False) -> tuple[str, str]:
        """The revision and the path after it. Without both, it is `main` and an empty path.

        Args:
            is_revision: whether a name is one. The longest that is one counts, because not all
                clients encode its slashes.
        """
        rest = self.rest or (MAIN,)
        unencoded = 3 if rest[0] == "refs" else 1  # refs/convert/parquet, refs/pr/3
        lengths = [n for n in range(len(rest), 0, -1) if is_revision("/".join(rest[:n]))]
        length = next(iter(lengths), unencoded)
        return "/".join(rest[:length]), "/".join(rest[length:])


@dataclass(frozen=True)
class Request:
    """One request: path and query as they came; header names are in lower case."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def all(self, name: str) -> list[str]:
        """All values of a parameter, which may be called `name[]` too."""
        values = parse_qs(self.query)
        return [*values.get(name, ()), *values.get(f"{name}[]", ())]

    def first(self, name: str) -> str:
        """The value of a parameter; empty if it is not there."""
        return next(iter(self.all(name)), "")

    def flag(self, name: str) -> bool:
        """Whether a parameter is `true` or `1`."""
        return self.first(name).lower() in ("true", "1")


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
