"""The key `checkpoint` of a run file. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runner.errors import WrongValueError, setting

_INTERVAL = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>s|min|h)")


def _seconds(every: int | str) -> float | None:
    match = _INTERVAL.fullmatch(str(every))
    return float(match["number"]) * {"s": 1, "min": 60, "h": 3600}[match["unit"]] if match else None


def _interval(every: int | str) -> int | str:
    if isinstance(every, str) and every != "epoch" and not _seconds(every):
        raise WrongValueError(
            "is neither steps nor a time nor `epoch`",
            "For instance: every: 500, every: 10 min, or every: epoch",
        )
    return every


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept.

    Attributes:
        every: steps, a time (`10 min`), or `epoch`. One more is written at the end.
        keep: how many of the newest are kept.
        best: whether the one with the lowest validation loss is kept too, and exported in the end.
    """

    every: int | str = setting(500, "loses some minutes at worst", at_least=1, convert=_interval)
    keep: int = setting(3, "the newest and two before it", at_least=1)
    best: bool = setting(False, "the last one is what is exported")

    @property
    def seconds(self) -> float | None:
        """The time between two checkpoints; None: steps or epochs say when."""
        return _seconds(self.every)
