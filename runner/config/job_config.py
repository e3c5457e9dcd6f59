"""What the run files of a training and of a command have in common, and the base of both.

`JobConfig` has the keys of anything that Slurm runs from a bundle. `run_config.RunConfig` adds what
is trained, `command_config.CommandConfig` a command of the user's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from runner.from_stage import (
    HIDDEN,
    Lines,
    Place,
    Reader,
    WrongValueError,
    keys_of,
    plain,
    setting,
)

FORMAT = 1
# What a key decides that does not decide the result, which is what a model has learned: how long it
# learns, where the run is, or neither. A key that must not change when a run resumes is also in
# `signature` of `runner.run_folder.resume`; and in `MAY_BE_ABSENT` there, if older checkpoints lack
# it.
LENGTH, PLACE, NO_RESULT = "length", "place", "nothing"
LONGEST_NAME = 200
"""Bytes. Names on a disk have 255 at most, and folders beside a run's have longer names."""
Auto = Literal["auto"]
OF_COMMANDS = (
    "code",
    "include",
    "results",
    "launch",
    "values",
    "resumes",
    "on_limit",
    "on_resume",
)
"""The keys of `command_config.CommandConfig` that a training does not have, beside `command`."""


def _folder_name(name: str) -> str:
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        raise WrongValueError(
            "cannot be the name of the run folder",
            "A name has letters, digits, `.`, `_`, `-` and `+`, and begins with a letter or digit.",
        )
    if len(name.encode()) > LONGEST_NAME:
        raise WrongValueError(
            f"has {len(name)} characters: the run folder gets this name, so it must be shorter",
            f"Give a shorter one, of at most {LONGEST_NAME}.",
        )
    return name


def _bundle_id(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise WrongValueError(
            "must be a bundle id, 64 hex digits", "`stage show BUNDLE` prints it."
        )
    return text


def _lines_of_a_shell(lines: tuple[str, ...]) -> tuple[str, ...]:
    for line in (line for line in lines if line.lstrip().startswith("#SBATCH")):
        raise WrongValueError(
            f": `{line}` has no effect here: sbatch reads #SBATCH lines only at the top of a "
            "script",
            "Write it into slurm.options: slurm: {options: {mem: 64G}} for --mem=64G.",
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class BundleConfig:
    """Which bundle a run may read.

    Attributes:
        id: the bundle's id, 64 hex digits; None: any bundle.
        verified: whether `stage verify` must have found the bundle sound on this machine, and
            nothing changed since.
    """

    id: str | None = setting(None, "the bundle of --bundle; its id is recorded", convert=_bundle_id)
    verified: Literal["optional", "required"] = setting(
        "optional", "its state is printed, not required"
    )


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What `runner submit` requests from Slurm."""

    partition: str | None = setting(None, "the site's default")
    nodes: int = setting(1, "one node", at_least=1)
    gpus_per_node: int = setting(0, "none asked for", at_least=0)
    tasks_per_node: int | Auto = setting(
        "auto", "one for each GPU; one where there is none", at_least=1
    )
    time: str | None = setting(None, "the site's default")
    modules: tuple[str, ...] = setting((), "none")
    setup: tuple[str, ...] = setting((), "nothing", convert=_lines_of_a_shell)
    container: tuple[str, ...] = setting(
        (), "none: the ranks run on the node as it is", is_path=True
    )
    srun: tuple[str, ...] = setting((), "none", is_path=True)
    options: dict[str, str | int | float | bool] = setting(dict, "none")

    @property
    def around_ranks(self) -> tuple[str, ...]:
        """The words between srun's own options and the ranks' command."""
        return (*self.srun, *self.container)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Which environment of the bundle runs the ranks, and whether it runs from each node's disk."""

    asset: str = setting()
    node_local: bool | Auto = setting("auto", "from each node's own disk instead of a network disk")


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The keys of every run file.

    Attributes:
        path: the run file.
        manifest: what its bundle is fetched from, relative to the run file; for `submit --to`.
        given: dotted keys that the user set: in the run file, with `--set`, or in a ds_config.json.
        lines: the run file's line numbers, for messages.
    """

    format: int = setting(decides=NO_RESULT)
    name: str = setting("auto", "the run file's name", convert=_folder_name, decides=NO_RESULT)
    manifest: str | None = setting(None, is_path=True, decides=PLACE)
    bundle: BundleConfig = setting(BundleConfig, decides=NO_RESULT)
    environment: EnvironmentConfig | None = setting(
        None, "the environment that runs this command", decides=PLACE
    )
    hang_after: float | Auto = setting(
        "auto", "ten times the longest silence so far; 300 s at least", above=0, decides=NO_RESULT
    )
    slurm: SlurmConfig = setting(SlurmConfig, decides=NO_RESULT)
    path: Path = field(default=Path("run.yaml"), metadata=HIDDEN)
    given: frozenset[str] = field(default=frozenset(), metadata=HIDDEN)
    lines: Lines = field(
        default_factory=lambda: Lines(Path("run.yaml")),
        compare=False,
        repr=False,
        metadata=HIDDEN,
    )

    def place(self, key: str) -> Place:
        """The line of a dotted key; of the nearest key around it if the user did not set it."""
        return self.lines.place(*(int(k) if k.isdecimal() else k for k in key.split(".")))

    def to_mapping(self) -> dict[str, Any]:
        """Returns the settings as YAML data with all defaults: the content of a run file."""
        data: dict[str, Any] = plain(self)
        return data

    def to_yaml(self) -> str:
        """Returns the text of `config.yaml` in a run folder."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)


C = TypeVar("C", bound=JobConfig)


def name_of_file(config: JobConfig, reader: Reader) -> str:
    """The name of a run: that of its file, if the file gives no other. Keeps a mistake."""
    name = config.name
    if name == "auto":
        name = config.path.stem
        with config.lines.mistakes:
            name = reader.value(keys_of(JobConfig)["name"], name, ("name",))
    return name
