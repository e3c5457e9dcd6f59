"""Which remedies the tests obey that tell a story of several commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

OBEYED: list[tuple[str, str]] = []
"""(file, how its remedy begins or what is in it) of each story."""
Story = TypeVar("Story", bound=Callable[..., None])


def obeys(file: str, *remedies: str) -> Callable[[Story], Story]:
    """Notes which remedies a story obeys."""
    OBEYED.extend((file, remedy) for remedy in remedies)
    return lambda story: story


def in_it(remedy: str, pattern: str) -> str:
    """The part of a remedy that the pattern describes."""
    found = re.search(pattern, remedy)
    assert found is not None, remedy
    return found[0]
