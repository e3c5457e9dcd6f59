"""A row for each fault: what is given, the command that fails, and how what it prints is obeyed.

A row names a fault as data. `obey` makes it, takes parts of the printed remedy by patterns, does
what they say, and asks again.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config.run_config import RunConfig
from runner.from_stage import StageError
from runner.inputs import Inputs, resolve
from runner.job.shapes import check_model
from runner.job.training_run import TrainingRun
from tests.first_job.harness import run_runner, run_stage
from tests.remedies.obeyed import in_it
from tests.runner.conftest import RUN

PRINT = "runner submit mine.yaml --print"
FILL = {"BUNDLE": "bundle", "RUN": "mine.yaml", "COLUMN": "text", "NAME": "another"}
BASES: dict[str, dict[str, Any]] = {"assets": {"format": 1, "name": "m"}, "channels": {}}
"""A key of a manifest or of an environment.yml -> what else each has."""
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}


@dataclass(frozen=True)
class Row:
    """A fault, and the ways out of it that its remedy prints.

    Attributes:
        file, remedy: where the remedy stands, and a part of it; `stories` reads these two.
        ways: of each, in turn, a pattern that finds a part of what is printed, and what is done
            with that: a verb of `World.do`, and its words, in which `{}` is that part.
        settings: changes to the run file `mine.yaml`; or a manifest or environment.yml, `m.yaml`.
        does: the command, or a function; it fails, or what it finds is printed.
        tail: more words of the command, in whose place a way puts others.
        files: of the person: path -> content.
        given: lines of commands, done before.
        environ: variables of the command.
        code: the exit code; 0 where the remedy is that of a warning.
        fill: what a person writes for words of a remedy that stand for something.
    """

    file: str
    remedy: str
    ways: tuple[tuple[str, ...], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    does: str | Callable[[World], object] = PRINT
    tail: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    given: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    code: int = 2
    fill: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", f"{Path(self.file).stem}-{self.remedy}")[:60]

    def is_in(self, printed: str) -> bool:
        """Whether the words of the remedy are printed, between the values of the code."""
        return all(part.strip() in printed for part in re.split(r"\{\w*\}", self.remedy))


class World:
    """A person's folder, in which the tests are: a run file or a manifest, a command, variables."""

    def __init__(self, row: Row, patch: pytest.MonkeyPatch) -> None:
        self.row, self.patch = row, patch
        kind = next((key for key in BASES if key in row.settings), "")
        self.path = Path("m.yaml" if kind else "mine.yaml")
        self.first = {**BASES.get(kind, {**RUN, "name": "mine"}), **row.settings}

    def begin(self) -> None:
        """All is as it was, but for what was done to files."""
        self.settings = copy.deepcopy(self.first)
        self.does, self.tail, self.environ = self.row.does, "", {**self.row.environ}

    @property
    def sets(self) -> list[str]:
        """The `--set` texts of the command."""
        return [word for word in shlex.split(self.tail) if "=" in word]

    def config(self) -> RunConfig:
        return RunConfig.load(self.path, self.sets)

    def inputs(self) -> Inputs:
        return resolve(self.config(), Path("bundle"))

    def run_itself(self) -> TrainingRun:
        return TrainingRun.load(self.path, Path("bundle"), None, self.sets)

    def check_model(self) -> None:
        """Whether the model is one for the task."""
        run = self.run_itself()
        check_model(run.config, run.inputs.model, run.outline)

    def write(self) -> None:
        self.path.write_text(yaml.safe_dump(self.settings, sort_keys=False))

    def ask(self) -> tuple[int, str]:
        """The exit code of the command, and what it printed, in one line."""
        self.write()
        if isinstance(self.does, str):
            return self.run(f"{self.does} {self.tail}")
        try:
            told = self.does(self)
        except StageError as error:
            return error.exit_code, " ".join(str(error).split())
        return 0, " ".join(" ".join(map(str, told if isinstance(told, list) else [])).split())

    def run(self, command: str) -> tuple[int, str]:
        """Runs a command, ours in this process; returns its exit code, and what it printed."""
        program, *words = shlex.split(command)
        ours = {"runner": run_runner, "stage": run_stage}.get(program)
        if ours is not None:
            code, out, err = ours(Path.cwd(), *words, **NO_HUB, **self.environ)
        else:
            line, environ = ["bash", "-ec", command], {**os.environ, **NO_HUB, **self.environ}
            done = subprocess.run(line, env=environ, capture_output=True, text=True)
            code, out, err = done.returncode, done.stdout, done.stderr
        return code, " ".join(f"{err} {out}".split())

    def works(self, command: str) -> str:
        """Runs a command, which succeeds; or, after a `!`, finds damage. Returns what it prints."""
        code, printed = self.run(command.removeprefix("! "))
        assert code == command.startswith("! "), f"{command}\n{printed}"
        return printed

    def do(self, verb: str, words: str) -> str:
        """Does what a part of a remedy says; returns what that printed."""
        match verb:
            case "edit":  # lines of YAML; `a.b: x` is below `a`
                for key, value in yaml.safe_load(words).items():
                    self.put(key.split("."), value)
                self.write()
            case "remove":
                *above, last = words.split(".")
                self.inner(above).pop(last)
            case "words":
                self.tail = words
            case "instead":
                self.does = words
            case "export":
                self.environ |= dict(pair.split("=", 1) for pair in shlex.split(words))
            case "unset":
                self.environ = {k: v for k, v in self.environ.items() if k not in words.split()}
            case "run" | "show":
                return self.works(words)
        return ""

    def inner(self, keys: list[str]) -> dict[str, Any]:
        """The mapping below these keys."""
        found = self.settings
        for name in keys:
            found = found.setdefault(name, {})
        return found

    def put(self, keys: list[str], value: Any) -> None:
        """Sets a key of the file; what is below it and not named stays."""
        inner, last = self.inner(keys[:-1]), keys[-1]
        if isinstance(value, dict) and isinstance(inner.get(last), dict):
            for name, below in value.items():
                self.put([*keys, name], below)
        else:
            inner[last] = value


def obey(row: Row, patch: pytest.MonkeyPatch) -> None:
    """Makes the fault in the folder where the tests are, and does what is printed."""
    world = World(row, patch)
    for name, content in row.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    world.begin()
    world.write()
    for line in row.given.splitlines():
        world.works(line)
    world.tail = row.tail
    code, printed = world.ask()
    assert (code, row.is_in(printed)) == (row.code, True), f"{code} {printed}"
    for way in row.ways:
        world.begin()
        told, verb = printed, ""
        for pattern, action in zip(way[::2], way[1::2], strict=True):
            part = in_it(told, pattern)
            for word, written in {**row.fill, **FILL, **row.fill}.items():
                part = re.sub(rf"\b{word}\b" if word.isalpha() else re.escape(word), written, part)
            verb, _, words = action.partition(" ")
            told += " " + world.do(verb, (words or "{}").replace("{}", part))
        if verb != "show":
            code, now = world.ask()
            assert (code, row.is_in(now)) == (0, False), f"{way}\n{now}"
