"""Hubs for tests with one interface: our own, and an independent one if it is beside the checkout.

Tests run `stage` against both, so they notice a mistake that the fetcher and our own Hub share.
Equal files get equal commit shas on both.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.lib.hub.loopback_hub import LoopbackHub
from scripts.lib.hub.repositories import FIRST_COMMIT, LFS_ATTRIBUTES

ROOT = Path(__file__).resolve().parents[3]
INDEPENDENT = ROOT.parent / "shared" / "hub" / "hub_server.py"
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


class TestHub(ABC):
    """A running Hub. `endpoint`, `cdn_endpoint`: addresses; `faults.add(...)`: rules of both."""

    __test__ = False
    endpoint: str
    cdn_endpoint: str
    faults: Any

    def __init__(self) -> None:
        self._commits: dict[tuple[str, str], int] = {}

    def commit(
        self,
        kind: str,
        id: str,
        files: Mapping[str, bytes],
        *,
        ref: str = "refs/heads/main",
        tag: str | None = None,
    ) -> str:
        """Makes a commit with these files and the Hub's usual LFS rules; returns its sha."""
        count = self._commits.setdefault((kind, id), 0)
        self._commits[kind, id] += 1
        whole = {".gitattributes": LFS_ATTRIBUTES.encode(), **files}
        return self._commit(kind, id, whole, ref, tag, FIRST_COMMIT + 3600 * count)

    @abstractmethod
    def _commit(
        self, kind: str, id: str, files: dict[str, bytes], ref: str, tag: str | None, timestamp: int
    ) -> str: ...

    @abstractmethod
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

    @abstractmethod
    def requests(self, path: str = "", **equal: object) -> list[Request]:
        """Lines of the log whose URL path or file matches `path` and whose fields are `equal`."""

    @abstractmethod
    def forget_requests(self) -> None: ...


class OwnHub(TestHub):
    """scripts/lib/hub/loopback_hub.py"""

    def __init__(self, root: Path, stack: ExitStack, **options: Any) -> None:
        super().__init__()
        self._hub = stack.enter_context(LoopbackHub(root, **options))
        self.endpoint, self.cdn_endpoint, self.faults = (
            self._hub.endpoint,
            self._hub.cdn_endpoint,
            self._hub.faults,
        )

    def _commit(
        self, kind: str, id: str, files: dict[str, bytes], ref: str, tag: str | None, timestamp: int
    ) -> str:
        return self._hub.repositories.commit(
            kind, id, files, ref=ref, tag=tag, author=AUTHOR, timestamp=timestamp
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
        self._hub.repositories.configure(
            kind, id, gated=gated, private=private, members=members, moved_to=moved_to
        )

    def requests(self, path: str = "", **equal: Any) -> list[Request]:
        return [
            Request(e.side, e.method, e.path, e.file, e.range, e.token, e.status, e.sent, e.at)
            for e in self._hub.log.find(path, **equal)
        ]

    def forget_requests(self) -> None:
        self._hub.log.clear()


class IndependentHub(TestHub):
    """A Hub of other authors, over real git repositories, if it is beside the checkout."""

    def __init__(self, root: Path, stack: ExitStack, **options: Any) -> None:
        super().__init__()
        module = _independent_module()
        self._store = module.Store(root)
        self._hub = stack.enter_context(module.HubServer(self._store, **options))
        self.endpoint, self.cdn_endpoint, self.faults = (
            self._hub.endpoint,
            self._hub.cdn_endpoint,
            self._hub.faults,
        )

    def _commit(
        self, kind: str, id: str, files: dict[str, bytes], ref: str, tag: str | None, timestamp: int
    ) -> str:
        where = (
            {"branch": ref.removeprefix("refs/heads/")}
            if ref.startswith("refs/heads/")
            else {"ref": ref}
        )
        sha: str = self._store.commit(
            kind, id, files, tag=tag, author=AUTHOR, date=timestamp, **where
        )
        return sha

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
        settings = {
            "gated": gated,
            "private": private,
            "access": list(members),
            "moved_to": moved_to,
        }
        self._store.configure(kind, id, **settings)

    def requests(self, path: str = "", **equal: object) -> list[Request]:
        rows = [
            Request(
                r["side"],
                r["method"],
                r["path"],
                r["file"],
                r["range"],
                r["auth"] is not None,
                r["status"],
                r["sent"],
                r["time"],
            )
            for r in self._hub.log.rows()
        ]
        return [
            row
            for row in rows
            if (re.search(path, row.path) or re.search(path, row.file or ""))
            and all(getattr(row, name) == value for name, value in equal.items())
        ]

    def forget_requests(self) -> None:
        self._hub.log.clear()


HUBS: dict[str, type[TestHub]] = {"own": OwnHub, "independent": IndependentHub}


def _independent_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("independent_hub", INDEPENDENT)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {INDEPENDENT}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
