"""A moment's patience before a verification, so that a receipt of it can be kept.

A file that was changed just now could be changed again without another stamp (adr/0020). Whoever verifies what has just
arrived waits until that is over: a tick of the disk's clock, or two seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from stage.bundle import MANIFEST, PAYLOAD, require_bundle
from stage.stamp import TICK_NS, now_ns, stamp_of, unsure_ns

_NOTICED_NS = 5 * 10**8
_SLACK_NS = 10**8  # others came with the last one, and a little later
_LONGEST = 2**13  # bytes of a line of a manifest


def settle(root: Path, note: Callable[[str], None]) -> None:
    """Waits until what was changed a moment ago is old enough for a receipt.

    Looks at what lies directly in the bundle, which `fetch`, `push` and `cp` write last, and at the last file of the
    payload, which rsync brings last. To ask for the state of a hundred thousand files takes longer than the wait. Where
    that is wrong, the verification leaves no receipt.

    Args:
        note: told, where a person would notice.

    Raises:
        UsageError: not a bundle.
    """
    require_bundle(root)
    try:
        with os.scandir(root) as listing:
            statuses = [entry.stat(follow_symlinks=False) for entry in listing]
        statuses += [os.lstat(path) for path in _last_of_payload(root)]
    except (OSError, ValueError):  # the verification says so
        return
    newest = stamp_of(statuses).newest
    patience = unsure_ns(root, newest) + _SLACK_NS
    missing = newest + patience - now_ns()
    # A stamp can be a tick ahead of that clock (Linux 6.13). What is further ahead is not waited for.
    if 0 < missing <= patience + TICK_NS:
        if missing > _NOTICED_NS:
            note("files were changed just now: it begins in two seconds, so that a receipt of it can be kept")
        time.sleep(missing / 10**9)


def _last_of_payload(root: Path) -> list[Path]:
    """The path of the last file that the manifest lists, if it has one."""
    # Not blocking: it may be a pipe that nobody writes to.
    descriptor = os.open(root / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as manifest:
        manifest.seek(max(0, os.fstat(manifest.fileno()).st_size - _LONGEST))
        _, _, path = manifest.read().rstrip(b"\n").rpartition(b"\n")[2].partition(b"  ")
    return [root / os.fsdecode(path)] if path.startswith(PAYLOAD.encode()) and b".." not in path else []
