"""Short names of runs: `demo · lr=2e-4`, the name and what differs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.run_folder.history import History

MOST_KEYS = 3
LONGEST = 24
"""Characters of one value."""

_NO_DIFFERENCE = ("name", "format", "output")


def short_names(runs: Sequence[History]) -> list[str]:
    """The name of each run on the page.

    Runs of one name get the settings in which they differ; where none differ, their folders.
    """
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    keys = _differing(runs)
    leaves = [key.rpartition(".")[2] for key in keys]
    labels = [
        leaf if leaves.count(leaf) == 1 else key for leaf, key in zip(leaves, keys, strict=True)
    ]
    found = []
    for run, name in zip(runs, names, strict=True):
        pairs = zip(keys[:MOST_KEYS], labels, strict=False)
        parts = [f"{label}={_short(run.settings.get(key))}" for key, label in pairs]
        found.append(" · ".join([name, *parts]))
    return [
        name if found.count(name) == 1 else f"{name} · {_folder(run, runs)}"
        for name, run in zip(found, runs, strict=True)
    ]


def _differing(runs: Sequence[History]) -> list[str]:
    """The settings in which the runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [
        key
        for key in keys
        if key not in _NO_DIFFERENCE and len({_short(run.settings.get(key)) for run in runs}) > 1
    ]


def _folder(run: History, runs: Sequence[History]) -> str:
    """The last parts of the run's folder that no other run has."""
    parts = run.folder.root.parts
    for count in range(1, len(parts)):
        if sum(other.folder.root.parts[-count:] == parts[-count:] for other in runs) == 1:
            return "/".join(parts[-count:])
    return str(run.folder.root)


def _short(value: Any) -> str:
    if isinstance(value, float) and value and not 0.001 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
