"""A moment's patience before a verification, so that a receipt of it can be kept.

A file that was changed just now could be changed again without another stamp (adr/0020). Whoever verifies what has just
arrived waits until that is over: a tick of the disk's clock, or two seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from stage.bundle import require_bundle
from stage.stamp import TICK_NS, now_ns, stamp_of, unsure_ns

_NOTICED_NS = 5 * 10**8


def settle(root: Path, note: Callable[[str], None]) -> None:
    """Waits until what was changed a moment ago is old enough for a receipt.

    Looks at the bundle's folder and what is directly in it: `fetch`, `push` and `cp` write there last, and rsync gives
    folders their times when all is there. To ask for the state of a hundred thousand files takes longer than the wait.
    Where that is wrong, the verification leaves no receipt.

    Args:
        note: told, where a person would notice.

    Raises:
        UsageError: not a bundle.
    """
    require_bundle(root)
    try:
        with os.scandir(root) as listing:
            statuses = [root.stat(), *(entry.stat(follow_symlinks=False) for entry in listing)]
    except OSError:  # the verification says so
        return
    newest = stamp_of(statuses).newest
    unsure = unsure_ns(root, newest)
    missing = newest + unsure - now_ns()
    # Since Linux 6.13 a stamp can be up to a tick ahead of that clock. One that is ahead by more is not waited for.
    if 0 <= missing <= unsure + TICK_NS:
        if missing > _NOTICED_NS:
            note("files were changed just now: it begins in two seconds, so that a receipt of it can be kept")
        time.sleep((missing + TICK_NS) / 10**9)
