"""What the requests of a script ask of a Hub: pure rules on addresses and answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from urllib.parse import unquote, urlsplit

from stage.util.digests import is_hex

KINDS = ("models", "datasets", "spaces")
_VERBS = frozenset({"revision", "tree", "paths-info", "refs", "commits", "auth-check"})
_NO_NAME = frozenset({"whoami-v2", "telemetry", "resolve-cache", "agent-harnesses"})


@dataclass(frozen=True)
class Address:
    """The repository that an address of a Hub names; `path` is that of a file whose bytes it is."""

    kind: str
    name: str
    revision: str | None = None
    path: str | None = None

    @staticmethod
    def parse(target: str) -> Address | None:
        """Reads a request's target, or a redirect's; None: it names no repository."""
        parts = [unquote(part) for part in urlsplit(target).path.split("/")[1:]]
        if parts[:1] == ["api"]:
            return _of_api(parts[1], parts[2:]) if parts[1:2] and parts[1] in KINDS else None
        kind, rest = (parts[0], parts[1:]) if parts[0] in KINDS else ("models", parts)
        for length in (2, 1):
            if len(rest) > length + 2 and rest[length] in ("resolve", "raw"):
                revision, path = _split(rest[length + 1 :])
                return Address(kind, "/".join(rest[:length]), revision, path)
        return None


def _of_api(kind: str, rest: list[str]) -> Address | None:
    rest = [part for part in rest if part]
    if not rest or rest[0] in _NO_NAME:
        return None
    length = 1 if len(rest) == 1 or rest[1] in _VERBS else 2
    name, verb, tail = "/".join(rest[:length]), rest[length : length + 1], rest[length + 1 :]
    revision = _split(tail)[0] if verb and verb[0] in _VERBS and tail else None
    return Address(kind, name, revision)


def _split(parts: list[str]) -> tuple[str, str]:
    """Splits a revision from the path after it; `refs/convert/parquet` may come without `%2F`."""
    length = 3 if parts[0] == "refs" and len(parts) > 2 else 1
    return "/".join(parts[:length]), "/".join(parts[length:])


@dataclass(frozen=True)
class Exchange:
    """A request to the Hub, and what its answer says.

    Attributes:
        status: of the answer.
        commit: the commit that a file's answer names.
        location: of a redirect.
    """

    target: str
    status: int
    commit: str | None = None
    location: str | None = None


@dataclass
class Asked:
    """A repository that a script used, by the first name that it used.

    Attributes:
        revisions: the asked revisions that are no commits -> commit; None: no answer named one.
        commits: commits that were asked for.
        files: paths whose bytes were there, by revision or commit.
        exists: whether the Hub has it.
    """

    kind: str
    name: str
    names: set[str] = field(default_factory=set)
    revisions: dict[str, str | None] = field(default_factory=dict)
    commits: set[str] = field(default_factory=set)
    files: dict[str, set[str]] = field(default_factory=dict)
    exists: bool = False

    def note(self, address: Address, exchange: Exchange) -> None:
        """Adds one request."""
        there = exchange.status < 400
        self.exists |= there
        revision = address.revision or ("main" if there else None)
        if revision is None:
            return
        if is_hex(revision, 40):
            self.commits.add(revision)
        elif there or revision in self.revisions:
            self.revisions[revision] = exchange.commit or self.revisions.get(revision)
        if there and address.path:
            self.files.setdefault(revision, set()).add(address.path)


def gather(exchanges: Iterable[Exchange]) -> list[Asked]:
    """The repositories that requests asked for; an old name and its new one are one repository."""
    found: dict[tuple[str, str], Asked] = {}
    for exchange in exchanges:
        address = Address.parse(exchange.target)
        if address is None:
            continue
        key = address.kind, address.name
        asked = found.setdefault(key, Asked(*key))
        asked.names.add(address.name)
        moved = Address.parse(exchange.location) if exchange.location else None
        if moved and moved.kind == address.kind and moved.name != address.name:
            other = found.setdefault((moved.kind, moved.name), asked)
            if other is not asked:  # the new name was asked for before
                found[key] = other
                asked, other = other, asked
                asked.names |= other.names
                asked.name = other.name
            # The Hub redirects without a look whether the file exists; the next request shows it.
            address = replace(address, path=None)
        asked.note(address, exchange)
    unique = {id(asked): asked for asked in found.values()}
    return list(unique.values())
