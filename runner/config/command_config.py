"""The run file of a command: a program of the user's own, which runs as it is typed on the laptop.

`runs/x.yaml` (+ `--set key=value`) -> `CommandConfig`, frozen and checked. How the command is
started on the nodes of a job is decided in `runner.job.launchers`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import yaml

from runner.config.fields import override
from runner.config.job_config import FORMAT, NO_RESULT, JobConfig, name_of_file
from runner.config.run_config import RunConfig
from runner.from_stage import (
    RUN_FILE,
    Lines,
    Reader,
    UsageError,
    WrongValueError,
    keys_of,
    reading_yaml,
    setting,
    suggest,
)

OF_FILES = ("task", "model", "dataset", "datasets")
"""Keys of a training that say what a file was meant to be."""
Words = str | tuple[str, ...]


def _not_empty(command: Words) -> Words:
    words = command.split() if isinstance(command, str) else command
    if not words or not all(isinstance(word, str) for word in words) or not words[0]:
        raise WrongValueError(
            "has no words", "Write the line that you type on the laptop: command: torchrun train.py"
        )
    if "\0" in "".join(words):
        raise WrongValueError("has a null byte in it")
    return command


def _words(text: Words) -> Words:
    try:
        return tuple(shlex.split(text)) if isinstance(text, str) else text
    except ValueError:
        raise WrongValueError("has a quote that does not end", "Close it.") from None


@dataclass(frozen=True, kw_only=True)
class CommandConfig(JobConfig):
    """The settings of the run of a command. `CommandConfig.load` reads them.

    Attributes:
        command: as a shell reads it, or a list of words. `${NAME}` is a value of `values`.
        code: the project's folder, relative to the run file; None: the git checkout around the run
            file, else its folder.
        include: patterns of private files that travel all the same.
        results: patterns of what the command writes; empty: every file.
        launch: how many of it start: one per rank, one per node, or one.
        values: words of the command that a sweep changes.
        resumes: the command goes on from its own checkpoints when it is started again.
        on_limit: the signal that its ranks get before the time limit, without `SIG`.
        on_resume: more words of the command, where an earlier start has left results.
    """

    command: Words = setting(convert=_not_empty, like="command: torchrun train.py")
    code: str | None = setting(None, "the git checkout around the run file, else its folder")
    include: tuple[str, ...] = setting((), "private files stay here", is_one=True)
    results: tuple[str, ...] = setting((), "every file that it writes", is_one=True)
    launch: Literal["auto", "rank", "node", "once"] = setting("auto", "as the command's launcher")
    values: dict[str, str | int | float | bool] = setting(dict, "none")
    resumes: bool = setting(False, "a start begins anew", decides=NO_RESULT)
    on_limit: Literal["TERM", "INT", "USR1", "USR2"] | None = setting(
        None, "no signal: the job ends when nothing is being written", decides=NO_RESULT
    )
    on_resume: Words = setting((), "the same words", convert=_words, decides=NO_RESULT)

    @staticmethod
    def load(path: Path, overrides: Sequence[str] = ()) -> CommandConfig:
        """Reads a run file with `command:`.

        Args:
            path: the YAML file.
            overrides: `a.b=value` texts, as given with `--set`; each value is read as YAML.

        Raises:
            UsageError: all mistakes, with file:line.
        """
        with reading_yaml(path, RUN_FILE) as (data, lines):
            override(data, lines, overrides)
            lines.check_format(data, FORMAT)
            for key in [key for key in data if key in keys_of(RunConfig)]:
                if key not in keys_of(CommandConfig):
                    del data[key]
                    with lines.mistakes:
                        raise _of_a_training(key, lines)
            reader = Reader(lines)
            config = reader.read(CommandConfig, data)
            given = frozenset(".".join(map(str, where)) for where in lines.numbers)
            config = replace(config, path=Path(path), given=given, lines=lines)
            config = replace(config, name=name_of_file(config, reader))
            if not lines.mistakes.found:
                _check(config)
            return config

    @property
    def project(self) -> Path | None:
        """The folder of `code:`; None: it is to be found."""
        if self.code is None:
            return None
        return (self.path.parent / Path(self.code).expanduser()).resolve()

    def with_values(self) -> Words:
        """The command with the values in the place of `${NAME}`.

        In a text they are quoted for the shell that would read it.
        """

        def put(place: re.Match[str]) -> str:
            if place[1] not in self.values:
                return place[0]  # a variable of the shell
            value = self._value(place[1])
            return shlex.quote(value) if isinstance(self.command, str) else value

        if isinstance(self.command, str):
            return _NAME.sub(put, self.command)
        return tuple(_NAME.sub(put, word) for word in self.command)

    def _value(self, name: str) -> str:
        value = self.values[name]
        return str(value).lower() if isinstance(value, bool) else str(value)


_NAME = re.compile(r"\$\{(\w+)\}")


def _of_a_training(key: str, lines: Lines) -> UsageError:
    what = f"`{key}` and `command` are both given"
    if key not in OF_FILES:
        what = f"`{key}` is a key of a training, and a command has its own settings"
    return UsageError(
        f"{what}.",
        "Keep `command:` for a program of your own, or `task:` to let Airlift train; remove "
        f"`{key}:` or `command:`.",
        place=lines.place(key),
    )


def _check(config: CommandConfig) -> None:
    """Checks values against each other. Keeps the mistakes."""
    text = config.command if isinstance(config.command, str) else "\n".join(config.command)
    used = set(_NAME.findall(text))
    for name in config.values.keys() - used:
        with config.lines.mistakes:
            raise UsageError(
                f"the command has no `${{{name}}}`.",
                suggest(name, used, f"Write ${{{name}}} where the command takes it."),
                place=config.place(f"values.{name}"),
            )
    if config.on_resume and not config.resumes:
        with config.lines.mistakes:
            raise UsageError(
                "`on_resume` adds words to a command that goes on, and `resumes` is false.",
                "Set resumes: true, if the command goes on from its own checkpoints.",
                place=config.place("on_resume"),
            )


def has_command(path: Path, overrides: Sequence[str] = ()) -> bool:
    """Whether a run file is that of a command. What reads it next says what is wrong in it."""
    if any(text.partition("=")[0].strip() == "command" for text in overrides):
        return True
    try:
        text = path.read_text("utf-8")
        top = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return re.search(r"^[\"']?command[\"']?[ \t]*:", text, re.MULTILINE) is not None
    except (OSError, ValueError):
        return False
    # The keys as they stand, for a file in braces (JSON is YAML), too.
    return isinstance(top, yaml.MappingNode) and any(key.value == "command" for key, _ in top.value)


def names_a_bundle(keys: Collection[str]) -> bool:
    """Whether a run file with these keys names something of a bundle, which a command need not."""
    return not {"manifest", "bundle", "environment"}.isdisjoint(keys)


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig | CommandConfig:
    """Reads a run file of either kind.

    Raises:
        UsageError: as for `RunConfig.load` and `CommandConfig.load`.
    """
    kind = CommandConfig if has_command(path, overrides) else RunConfig
    return kind.load(path, overrides)
