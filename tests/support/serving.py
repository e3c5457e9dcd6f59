"""`stage serve` in this process, and what it prints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stage.bundle.bundle import Bundle
from stage.serve.catalogue import Catalogue
from stage.serve.server import BundleServer
from tests.support.servers.hubs import TestHub
from tests.support.staging import Laptop


@dataclass(frozen=True)
class Served:
    """A served bundle: its address, its folder, and the lines that the server printed."""

    address: str
    bundle: Path
    said: list[str]


@contextmanager
def serving_here(bundle: Path) -> Iterator[Served]:
    said: list[str] = []
    with BundleServer(Catalogue.of(Bundle.open(bundle)), "127.0.0.1", 0, said.append) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        try:
            yield Served(server.address, bundle, said)
        finally:
            server.shutdown()


def fetched(folder: Path, hub: TestHub, assets: str) -> Path:
    """A bundle of the assets (the lines below `assets:`), from a Hub."""
    folder.mkdir(exist_ok=True)
    laptop = Laptop(folder, hub)
    laptop.write(f"format: 1\nname: tiny\nassets:\n{assets}")
    laptop.fetched()
    return laptop.bundle
