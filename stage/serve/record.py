"""What the requests of a script ask of a Hub: pure rules on addresses and answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stage.digests import is_hex
from stage.serve.address import Address


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
        exists: whether the Hub has it.
        commits: each revision that the script asked for -> its commit; None: no answer named it.
        files: paths whose bytes were there, by revision.
    """

    kind: str
    name: str
    exists: bool = False
    commits: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, set[str]] = field(default_factory=dict)

    def note(self, address: Address, exchange: Exchange, *, names_file: bool) -> None:
        """Adds one request; `names_file`: an answer without an error shows that the file exists."""
        is_there = exchange.status < 400
        if not is_there and exchange.commit is None:  # with a commit, only the file is missing
            return
        self.exists = True
        revision, path = address.split()
        commit = revision if is_hex(revision, 40) else exchange.commit
        self.commits[revision] = commit or self.commits.get(revision)
        if names_file and is_there:
            self.files.setdefault(revision, set()).add(path)

    def revisions(self) -> Iterator[tuple[str, set[str]]]:
        """Each revision by the name that the script used, with the files that were read.

        Clients ask for a commit where the script named a branch or a tag: that is the same
        revision. If the script named none, it is `main`.
        """
        named = [r for r in self.commits if not is_hex(r, 40)]
        behind = {self.commits[r] for r in named}
        for revision in [*named, *(r for r in self.commits if r not in named and r not in behind)]:
            same = (revision, self.commits[revision] or "")
            yield revision, set().union(*(self.files.get(r, ()) for r in same))


def gather(exchanges: Iterable[Exchange]) -> list[Asked]:
    """The repositories that requests asked for; an old name and its new one are one repository."""
    found: dict[tuple[str, str], Asked] = {}
    for exchange in exchanges:
        address = Address.parse(exchange.target)
        if address is None:
            continue
        asked = found.setdefault((address.kind, address.name), Asked(address.kind, address.name))
        moved = Address.parse(exchange.location) if exchange.location else None
        has_moved = moved is not None and (moved.kind, moved.name) != (address.kind, address.name)
        if moved and has_moved:
            # If the new name was asked for before, its record goes on under the old one.
            other = found.setdefault((moved.kind, moved.name), asked)
            found[address.kind, address.name] = other
            other.name = asked.name
            asked = other
        # The Hub redirects an old name without a look whether the file exists.
        asked.note(address, exchange, names_file=address.is_file and not has_moved)
    return list({id(asked): asked for asked in found.values()}.values())
