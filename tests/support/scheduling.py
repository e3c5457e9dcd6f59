"""Which worker of pytest-xdist runs which tests: a file whole, so that what its tests share is made once.

Not `--dist loadgroup`: with pytest 9.2, pytest-xdist 3.8.0 loses the groups without a word. Then each test is on its
own, every fixture of a file is made by every worker, and there are as many Slurm sites as workers.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SITE = "tests/site/"
# The site mostly waits for Slurm: it begins first, beside tests that need no more than one core, and what trains two
# ranks for minutes comes before the many short files that let both workers end together.
ORDER = (SITE, "tests/stage/", *(f"tests/runner/test_{name}.py" for name in ("resume", "engines", "train")))


class ByFile(LoadFileScheduling):
    """Files whole; all on the Slurm site together."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SITE if file.startswith(SITE) else file


def in_order(items: list[pytest.Item]) -> None:
    """Sorts in place; what `ORDER` does not name comes last, as it was."""

    def place(item: pytest.Item) -> int:
        return next((number for number, start in enumerate(ORDER) if item.nodeid.startswith(start)), len(ORDER))

    items.sort(key=place)


def make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """For `--dist loadfile`; what somebody else asked for stays what it is."""
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None
