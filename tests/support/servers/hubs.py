"""The Hub of the tests: scripts/lib/hub/loopback_hub.py, with what tests ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.hub.loopback_hub import LoopbackHub
from scripts.lib.hub.repositories import FIRST_COMMIT

AUTHOR = "acme <acme@example.com>"
MEMBER_TOKEN, STRANGER_TOKEN = "hf_tester", "hf_outsider"


@dataclass(frozen=True)
class Request:
    """One line of a Hub's log. `file`: `<kind>/<id>/<path>`; `at`: seconds since 1970."""

    side: str
    method: str
    path: str
    file: str | None
    range: str | None
    token: bool
    status: int | None
    sent: int
    at: float


class TestHub:
    """A running Hub. `endpoint`, `cdn_endpoint`: addresses; `faults.add(...)`: rules of both.

    Args:
        options: of `LoopbackHub`, such as `cdn_ttl`, `page_size`, `certificate`.
    """

    __test__ = False

    def __init__(self, root: Path, stack: ExitStack, **options: Any) -> None:
        self._hub = stack.enter_context(LoopbackHub(root, **options))
        self._commits: dict[tuple[str, str], int] = {}
        self.endpoint, self.cdn_endpoint, self.faults = (
            self._hub.endpoint,
            self._hub.cdn_endpoint,
            self._hub.faults,
        )

    def commit(
        self,
        kind: str,
        id: str,
        files: Mapping[str, bytes],
        *,
        ref: str = "refs/heads/main",
        tag: str | None = None,
    ) -> str:
        """Makes a commit with these files and the Hub's usual LFS rules; returns its sha.

        Equal files and an equal history get equal shas: a repository's commits are an hour apart.
        """
        count = self._commits.setdefault((kind, id), 0)
        self._commits[kind, id] += 1
        when = FIRST_COMMIT + 3600 * count
        return self._hub.repositories.commit(
            kind, id, files, ref=ref, tag=tag, author=AUTHOR, timestamp=when
        )

    def configure(
        self,
        kind: str,
        id: str,
        *,
        gated: str | bool = False,
        private: bool = False,
        members: tuple[str, ...] = (),
        moved_to: str | None = None,
    ) -> None:
        """Sets who may read a repository. The user of `MEMBER_TOKEN` is "tester"."""
        self._hub.repositories.configure(
            kind, id, gated=gated, private=private, members=members, moved_to=moved_to
        )

    def requests(self, path: str = "", **equal: Any) -> list[Request]:
        """Lines of the log whose URL path or file matches `path` and whose fields are `equal`."""
        return [
            Request(e.side, e.method, e.path, e.file, e.range, e.token, e.status, e.sent, e.at)
            for e in self._hub.log.find(path, **equal)
        ]

    def forget_requests(self) -> None:
        self._hub.log.clear()
