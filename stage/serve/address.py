"""What an address of a Hub names: a repository, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

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
        parts = parts[is_api:]
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
