"""`validation: 5%` holds out a part of the training split (`SplitPart`). Pure.

Its rows follow from a seed and their numbers alone. So they are the same on each machine, for each
number of ranks, for each `limit`, and when a run continues.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from runner.from_stage import WrongValueError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")
_BITS = 2**64
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SplitPart:
    """The rows of a split that are held out, or all others.

    Attributes:
        of: rows of the whole split.
        share: of the rows that are held out: `5%`.
        seed: decides which rows these are.
        is_held_out: whether it is the held-out rows.
    """

    of: int
    share: str
    seed: int
    is_held_out: bool

    @property
    def rows(self) -> int:
        """The number of its rows. At least one is held out, and one is not."""
        held_out = min(max(1, round(share_of(self.share) * self.of)), self.of - 1)
        return held_out if self.is_held_out else self.of - held_out

    def mask(self, first: int, number: int) -> NDArray[np.bool_]:
        """Returns which of the rows `first`, `first + 1`, ... belong to this part."""
        held_out = SplitPart(self.of, self.share, self.seed, True)
        is_held_out = _draws(first, number, self.seed) <= _highest(
            self.of, held_out.rows, self.seed
        )
        return is_held_out if self.is_held_out else ~is_held_out

    def place(self, number: int) -> int:
        """Returns which row of the whole split is the row `number` of this part."""
        return int(_places(self)[number])


def share_of(text: str) -> float:
    """Returns the share that a text such as `5%` states; 0: it states none."""
    found = _SHARE.fullmatch(text)
    return float(found[1]) / 100 if found else 0.0


def split_or_share(validation: str) -> str:
    """Refuses a percentage that is no part of a split; the name of a split is fine.

    Raises:
        WrongValueError: it is 0 %, or 100 % or more.
    """
    if "%" in validation and not 0 < share_of(validation) < 1:
        raise WrongValueError(
            "must be between 0 % and 100 %",
            "For instance: validation: 5%. Without validation: validation: null",
        )
    return validation


def _draws(first: int, number: int, seed: int) -> NDArray[np.uint64]:
    """A random number for each row, all different (Steele et al., SplitMix64, OOPSLA 2014)."""
    import numpy as np

    begin = _mixed(np.array([seed % _BITS], dtype=np.uint64))
    numbers: NDArray[np.uint64] = np.arange(first, first + number, dtype=np.uint64)
    return _mixed(begin + numbers * np.uint64(_STEP))


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The mixing function of SplitMix64, a bijection; products overflow as they must."""
    import numpy as np

    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


@lru_cache(maxsize=4)
def _highest(of: int, held_out: int, seed: int) -> np.uint64:
    """The number of the last row held out. The rows with the lowest numbers are held out."""
    import numpy as np

    found: np.uint64 = np.partition(_draws(0, of, seed), held_out - 1)[held_out - 1]
    return found


@lru_cache(maxsize=4)
def _places(part: SplitPart) -> NDArray[np.int64]:
    import numpy as np

    return np.flatnonzero(part.mask(0, part.of))
