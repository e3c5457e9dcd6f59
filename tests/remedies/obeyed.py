"""What tests of remedies share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

Story = TypeVar("Story", bound=Callable[..., None])


def obeys(file: str, *remedies: str) -> Callable[[Story], Story]:
    """Says which remedies a test obeys: how they begin, or what is in them."""
    del file, remedies
    return lambda story: story


def in_it(remedy: str, pattern: str) -> str:
    """The part of a remedy that the pattern describes."""
    found = re.search(pattern, remedy)
    assert found is not None, remedy
    return found[0]
