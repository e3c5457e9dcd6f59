"""Which worker of pytest-xdist runs which tests: a file whole, so that what its tests share is made once.

Not `--dist loadgroup`: with pytest 9.2, pytest-xdist 3.8.0 loses the groups without a word. Then each test is on its
own, every fixture of a file is made by every worker, and there are as many Slurm sites as workers.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SITE = "tests/site/"
# What takes minutes begins first: no worker is left alone with it at the end. The site's tests mostly wait.
FIRST = (SITE, "tests/runner/test_resume.py", "tests/runner/test_train.py", "tests/stage/hostile/")


class ByFile(LoadFileScheduling):
    """Files whole; all on the Slurm site together."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SITE if file.startswith(SITE) else file


def long_ones_first(items: list[pytest.Item]) -> None:
    """Sorts in place; the rest stays in its order."""

    def place(item: pytest.Item) -> int:
        return next((number for number, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))

    items.sort(key=place)


def make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """For `--dist loadfile`; what somebody else asked for stays what it is."""
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None
