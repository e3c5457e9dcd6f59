"""Which worker of pytest-xdist runs which tests: one worker per file, which shares its fixtures.

Not `--dist loadgroup`: with pytest 9.2, pytest-xdist 3.8.0 ignores the groups without a message.
Then each worker makes every fixture of a file, and there are as many Slurm sites as workers.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SITE = "tests/site/"
# Tests on the site mostly wait for Slurm: they start first, and have a worker of their own. Folders
# with files that take half a minute come before the many short files, so all workers end together.
ORDER = (
    SITE,
    "tests/stage/",
    "tests/golden/",
    *(f"tests/runner/{name}/" for name in ("training", "tasks", "trials", "launch", "exec")),
    "tests/runner/test_",
    "tests/test_",
)


class ByFile(LoadFileScheduling):
    """One worker per file, and one worker for all files on the Slurm site."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SITE if file.startswith(SITE) else file


def in_order(items: list[pytest.Item]) -> None:
    """Sorts in place. Items that `ORDER` does not name come last and keep their order."""

    def place(item: pytest.Item) -> int:
        return next(
            (number for number, start in enumerate(ORDER) if item.nodeid.startswith(start)),
            len(ORDER),
        )

    items.sort(key=place)


def make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """The scheduler for `--dist loadfile`; None for any other `--dist`."""
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None
