"""A sweep: one run file, some keys with several values, one job array. Pure.

`optimizer.lr=1e-4,3e-4` and `seed=1,2` become four members, in that order. Each has its own run
folder in one parent folder, so that `runner report` compares them.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from runner.errors import UsageError, read_value

MOST_MEMBERS = 1000  # Slurm's own default bound is 1001 (MaxArraySize, slurm.conf)


@dataclass(frozen=True)
class Member:
    """One run of a sweep: the name of its folder, and its `--set` texts."""

    name: str
    overrides: tuple[str, ...]


def members(axes: Sequence[str]) -> tuple[Member, ...]:
    """Every combination of the values of `KEY=VALUE,VALUE,...` texts; the last key changes fastest.

    Raises:
        UsageError: no values, a key or a value twice, or more members than Slurm accepts.
    """
    parsed = [_axis(text) for text in axes]
    keys = [key for key, _ in parsed]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise UsageError(
            f"--array {twice.pop()}: given twice.", "List all its values in one: --array KEY=A,B,C."
        )
    combinations = list(
        itertools.product(*([(key, value) for value in values] for key, values in parsed))
    )
    if len(combinations) > MOST_MEMBERS:
        raise UsageError(
            f"--array: {len(combinations)} runs; Slurm takes {MOST_MEMBERS} at most.",
            "Give fewer values, or submit in parts.",
        )
    found = tuple(
        Member(
            ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs),
            tuple(f"{k}={v}" for k, v in pairs),
        )
        for pairs in combinations
    )
    if longest := next((one.name for one in found if len(one.name.encode()) > 200), ""):
        raise UsageError(
            f"--array: the folder of a run would be called {longest[:60]}..., which is too long.",
            "Sweep over fewer keys, or shorter values.",
        )
    return found


@lru_cache(maxsize=8)
def elements(script: str) -> dict[str, int]:
    """The names of the runs in the sbatch script of a sweep -> their indices; empty: no sweep."""
    found = {}
    for index, words in re.findall(r"^(\d+)\) set -- --output (.*) ;;$", script, re.MULTILINE):
        found[shlex.split(words)[0].rpartition("/")[2]] = int(index)
    return found


def is_among(index: int, tasks: str) -> bool:
    """Whether Slurm's list of an array's tasks, such as `0-2,5%1`, has an index."""
    spans = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", tasks.partition("%")[0])
    return any(index in range(int(a), int(b or a) + 1, int(step or 1)) for a, b, step in spans)


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not key or not equals or not all(values):
        raise UsageError(
            f"--array {text}: expected KEY=VALUE,VALUE,...",
            "For instance: --array optimizer.lr=1e-4,3e-4",
        )
    if len(set(values)) != len(values):
        raise UsageError(
            f"--array {text}: a value is given twice, which would be the same run twice.",
            "Give each value once.",
        )
    for value in values:
        if not re.fullmatch(r"[\w.+-]+", value):
            raise UsageError(
                f"--array {text}: `{value}` becomes part of a folder's name: letters, digits, `.`, "
                "`_`, `-`, `+`",
                "Write lists and texts with other characters in separate run files.",
            )
        read_value(value)
    return key.strip(), values
