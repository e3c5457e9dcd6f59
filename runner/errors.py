"""The runner's door to `stage`: faults a user can meet, and the reading of YAML with line numbers.

Together with `inputs`, the only room of `runner` that imports `stage`.
"""

from __future__ import annotations

from stage import __version__
from stage.disk import age_in_words, human_count, human_size, sync_folder, write_atomically
from stage.errors import DamageError, IncompleteError, PolicyError, StageError, UsageError, as_shown
from stage.fence import wall
from stage.terminal import Group
from stage.yamlfile import Lines, check_keys, load_yaml_with_lines, read_value

__all__ = [
    "CommandGroup",
    "DamageError",
    "IncompleteError",
    "Lines",
    "LostPeerError",
    "PolicyError",
    "StageError",
    "UsageError",
    "__version__",
    "age_in_words",
    "as_shown",
    "check_keys",
    "human_count",
    "human_size",
    "load_yaml_with_lines",
    "read_value",
    "sync_folder",
    "wall",
    "write_atomically",
]


class CommandGroup(Group):
    """The commands of `runner`: what fills the disk is a run, not the store of bundles."""

    make_room = "Make room there (older runs, checkpoints), or choose another --output"


class LostPeerError(IncompleteError):
    """This rank only lost another one: whoever looks for the cause looks there."""
