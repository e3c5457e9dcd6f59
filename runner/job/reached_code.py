"""Which files of a project a command reaches: its scripts, and what they import. Nothing is run.

A command names a script, or a module of the project; a shell script names several. From there on
the imports lead to the other files, as Python's own search does: beside the script, the working
folder for `-m`, PYTHONPATH, and what the files add to `sys.path`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path, PurePosixPath

from runner.job.commands import shell_code, shell_script
from runner.job.source_code import Said, Source, read_source

MAX_FILES = 500  # of Python that are read: about 5 s; timm has 300


_STARTS_MODULES = re.compile(r"(^|/)(python|torchrun|accelerate|deepspeed)")


@dataclass(frozen=True)
class OwnCode:
    """A project, and the command that starts it.

    Attributes:
        root: the folder of the project on this machine.
        paths: of the files that travel, relative to it.
        words: of the command.
        folder: where the command starts, relative to the project.
    """

    root: Path
    paths: frozenset[str]
    words: tuple[str, ...]
    folder: str = ""

    def path(self, *parts: str) -> str:
        """A path that the command names, relative to the project; empty: the project itself."""
        return _join(self.folder, *parts)

    @property
    def program(self) -> tuple[str, ...]:
        """The words from the program on."""
        return tuple(dropwhile(re.compile(r"env$|\w+=").match, self.words)) or self.words

    @property
    def variables(self) -> dict[str, str]:
        """The variables that the command sets before its program."""
        front = self.words[: len(self.words) - len(self.program)]
        return dict(word.split("=", 1) for word in front if word != "env")


def values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option of a command with its value, or an empty one; each other word without an option.

    `--rate 0.1`, `--rate=0.1` and Hydra's `rate=0.1` are the option `rate`.
    """
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        if is_option and option:
            yield option, ""
        if equals and re.fullmatch(r"[-+]*[A-Za-z][\w.-]*", name):
            yield name.lstrip("-+").replace("-", "_"), value
        elif not is_option:
            yield option, word
        option = word.lstrip("-").replace("-", "_") if is_option and not equals else ""
    yield option, ""


@dataclass
class Reached:
    """What a command reaches.

    Attributes:
        scripts: the files that it starts.
        arguments: the words after the script.
        folders: where Python looks for modules of the project.
        modules: that the command starts, and that are no files of the project.
        shell: the words of a shell script that the command starts.
        sources: path -> file, of those that are read.
        sure: path -> how sure it is that the file is read, as in `Said`.
        calls: functions and classes that these files call.
        outside: imports of what is not in the project.
        lost: imports of modules of the project that are not there; `more` is their path.
    """

    scripts: list[str] = field(default_factory=list)
    arguments: tuple[str, ...] = ()
    folders: list[str] = field(default_factory=list)
    modules: list[Said] = field(default_factory=list)
    shell: tuple[str, ...] = ()
    sources: dict[str, Source] = field(default_factory=dict)
    sure: dict[str, int] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)
    outside: list[Said] = field(default_factory=list)
    lost: list[Said] = field(default_factory=list)


def reach(code: OwnCode) -> Reached:
    """The files that a command reaches."""
    reached, modules = _start(code), _Modules(code.paths)
    known = -1
    while known != len(reached.folders):  # a file that is read later may have added one
        known = len(reached.folders)
        reached.sure, reached.outside, reached.lost = {}, [*reached.modules], []
        todo = [(script, 2) for script in reached.scripts if script in code.paths]
        while todo and len(reached.sources) < MAX_FILES:
            path, sure = todo.pop()
            if reached.sure.get(path, -1) >= sure:
                continue
            reached.sure[path] = sure
            if path not in reached.sources:
                source = read_source(code.root, path, is_script=path in reached.scripts)
                reached.sources[path] = source
                reached.calls |= source.calls
            for said in reached.sources[path].said:
                if said.what == "import":
                    read = modules.resolve(said._replace(sure=min(sure, said.sure)), reached)
                    todo += [(file, min(sure, said.sure)) for file in read]
                elif said.what == "folder":
                    found = _folders_of(said, code.folder)
                    reached.folders += [one for one in found if one not in reached.folders]
    return reached


def _start(code: OwnCode) -> Reached:
    """The scripts of a command, and where Python looks first."""
    names = code.variables.get("PYTHONPATH", "").split(":")
    folders = [code.path(name) for name in names if name]
    words = code.program
    if any(PurePosixPath(word).name == "deepspeed" for word in words):
        folders.append(code.folder)  # its launcher adds this folder to PYTHONPATH
    name, text = shell_script(words, code.root / code.folder)
    if name:
        shell = tuple(re.findall(r"[^\s\\\"';]+", shell_code(text)))
        scripts = sorted({code.path(word) for word in shell} & _Modules(code.paths).files)
        folders = [code.folder, *(_join(script, "..") for script in scripts), *folders]
        return Reached(scripts, (), folders, [], shell)
    modules: list[Said] = []
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        module = code.path(word.replace(".", "/"))
        found = [p for p in (f"{module}.py", f"{module}/__main__.py") if p in code.paths]
        # `srun -m block` is no module.
        if before in ("-m", "--module") and any(map(_STARTS_MODULES.search, words[:number])):
            if found:
                return Reached(found[:1], words[number + 1 :], [code.folder, *folders])
            modules.append(Said("import", word))
        if word.endswith(".py"):
            path = code.path(word)
            return Reached([path], words[number + 1 :], [_join(path, ".."), *folders], modules)
    return Reached(folders=[code.folder, *folders], modules=modules)


def _join(*parts: str) -> str:
    path = posixpath.normpath(posixpath.join(*parts))
    return "" if path == "." else path


def _folders_of(said: Said, start: str) -> list[str]:
    """The folders that an expression may add to `sys.path`, by the texts in it."""
    is_near = "__file__" in said.more
    above = [str(folder) for folder in PurePosixPath(said.path).parents] if is_near else [start]
    return [_join(folder, text) for folder in above for text in ("", *said.more)]


class _Modules:
    """The modules of a project."""

    def __init__(self, paths: frozenset[str]) -> None:
        self.files = {path for path in paths if path.endswith(".py")}
        self.folders = {str(folder) for path in self.files for folder in Path(path).parents}

    def resolve(self, said: Said, reached: Reached) -> list[str]:
        """The files of the project that an import reads; what it does not find is noted."""
        module = said.text.lstrip(".")
        level, parts = len(said.text) - len(module), module.split(".") if module else []
        places = [_join(said.path, *[".."] * level)] if level else reached.folders
        place = next((one for one in places if level or not self.find(parts[:1], one)[1]), None)
        if place is None:
            reached.outside.append(said)
            return []
        read, lost = self.find(parts, place)
        if lost:
            reached.lost.append(said._replace(more=(lost,)))
        for name in () if lost else said.more:
            more, missing = self.find([*parts, name], place)
            read += [] if missing else more
        return read

    def find(self, parts: Sequence[str], folder: str) -> tuple[list[str], str]:
        """The files that an import reads, and the path of the part that is not there."""
        read: list[str] = []
        for part in parts:
            folder = _join(folder, part)
            if f"{folder}/__init__.py" in self.files:
                read.append(f"{folder}/__init__.py")
            elif f"{folder}.py" in self.files:
                return [*read, f"{folder}.py"], ""
            elif folder not in self.folders:
                return read, folder
        return read, ""
