"""What a user asks from one run of `stage fetch` or `stage lock`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stage.staging.store import SharedStore

ALL = "*"


@dataclass(frozen=True)
class FetchOptions:
    """The options of one run. Those of the command have the same names (`--dry-run`: `dry_run`).

    Attributes:
        endpoint: URL of the Hub; None: $HF_ENDPOINT, else the public Hub.
        jobs: downloads at the same time.
        locked: refuse to move or add any pin.
        update: assets to resolve again, whatever the lock says; `ALL`: all of them.
        dry_run: print the plan; download and write nothing.
        allow_pickle: take models that have only pickles, to be converted to safetensors.
        offline_check: load what came, in a process without network, before the bundle is finished.
        store: the contents that bundles of this machine share; None: nothing is shared.
    """

    endpoint: str | None = None
    jobs: int = 8
    locked: bool = False
    update: Collection[str] = ()
    dry_run: bool = False
    allow_pickle: bool = False
    offline_check: bool = True
    store: SharedStore | None = None
