"""The list of a run's results, one line per file: written on the cluster, read on the laptop.

`go.sh --list` writes that of a training, `list_results` that of a command: size, sha256 and name.
A file that does not come has `-`, a word why, and its name. The laptop takes only names of a kind
that a result has: a far end may not be honest.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from runner.from_stage import UsageError
from runner.run_folder.layout import WORK, RunFolder
from runner.run_folder.project import description_of, read_description
from runner.run_folder.results import is_asked, is_of_checkpoint, results

LARGE = 10**9
"""Bytes. A larger file of a command comes only if it is asked for, and so does a checkpoint."""
_MEMBER = r"(?:[A-Za-z_][A-Za-z0-9_.+,-]*=[A-Za-z0-9_.+=,-]*/)?"
_GROUP = re.compile(rf"{_MEMBER}(?:model|checkpoints/step-[0-9]{{1,18}})(?=/|\Z)")
_SECTION = r"(?:\.metadata|[A-Za-z0-9_][A-Za-z0-9_.+=,@-]*)"
# What a script may call its files: also `sample 1.png`, and names that are not Latin. Of names
# with a dot in front those of Hydra and the like; git would obey a `.git` that came.
_OWN = r"(?:\.(?!git)[a-z0-9_-][a-z0-9_.-]*|[^./\\][^/\\]*)"
_NAME = re.compile(
    rf"{_MEMBER}(?:metrics\.jsonl|report\.html|config\.yaml|environment\.json|missing\.yaml)"
    rf"|{_MEMBER}logs/[A-Za-z0-9_-]+\.(?:out|log)"
    rf"|{_GROUP.pattern}(?:/{_SECTION}){{1,6}}"
    rf"|{_MEMBER}{WORK}(?:/{_OWN}){{1,30}}",
    re.IGNORECASE,
)
_WHY = {
    "name": "has a name that no result has",
    "link": "is a link, or another thing that is no file",
    "unreadable": "cannot be read there",
}


class Result(NamedTuple):
    """A file that the far end lists."""

    name: str
    size: int
    sha256: str


class Listing(NamedTuple):
    """What a far end lists.

    Attributes:
        results: those to bring, by name.
        refused: (name, why) of those that cannot come.
        left: name -> bytes of those that stay there until they are asked for.
    """

    results: dict[str, Result]
    refused: list[tuple[str, str]]
    left: dict[str, int]


def is_name(name: str) -> bool:
    """Whether a result can have this name: it leads to no other folder, and hides nothing."""
    odd = any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn") for c in name)
    is_short = all(len(part.encode("utf-8", "replace")) <= 255 for part in name.split("/"))
    return not odd and "\ufffd" not in name and is_short and _NAME.fullmatch(name) is not None


def group_of(name: str) -> str:
    """What is put into place together, or not at all: a model, a checkpoint, or this file alone."""
    match = _GROUP.match(name)
    return match[0] if match else name


def is_of_command(name: str) -> bool:
    """Whether a name is one that only the run of a command has."""
    return re.match(rf"{_MEMBER}(?:{WORK}|logs)/", name) is not None


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Whether patterns name a result, with or without `work/` in front; no patterns name all."""
    path = re.sub(rf"\A{_MEMBER}{WORK}/", "", name)
    return is_asked(path, patterns) or is_asked(name, patterns)


def list_results(root: Path, patterns: Sequence[str], *, every: bool) -> Iterator[str]:
    """The lines of a command's run, whose files may still change.

    Args:
        root: the run folder.
        patterns: of the files to bring, and only these; empty: what `results:` of its run file
            names, without checkpoints and large files.
        every: with them.

    Raises:
        UsageError: it is no run folder of a command.
    """
    folder = RunFolder(root)
    packed = read_description(description_of(folder))
    if packed is None:
        raise UsageError(f"{root}: it is no run folder of a command.", "Give the folder of a run.")
    config = yaml.safe_load(folder.config.read_text("utf-8"))
    asked = patterns or config.get("results") or ()
    beside = (folder.config, folder.environment, folder.missing, *sorted(folder.logs.glob("*")))
    for path in beside:
        if path.is_file() and is_name(name := path.relative_to(root).as_posix()):
            yield _line(path, name)
    found = results(folder.work, packed.files) if folder.work.is_dir() else []
    for one in found:
        name = f"{WORK}/{one.path}"
        if not is_asked(one.path, asked) and not is_asked(name, asked):
            continue
        if not is_name(name):
            yield f"- name {ascii(name)[1:-1].replace(' ', '?')}"
        elif not (patterns or every) and (one.size > LARGE or is_of_checkpoint(one.path)):
            yield f"- left:{one.size} {name}"
        else:
            yield _line(folder.work / one.path, name)


def _line(path: Path, name: str) -> str:
    digest, size = hashlib.sha256(), 0
    try:
        most = path.stat().st_size  # a log may grow meanwhile
        with path.open("rb") as file:
            while data := file.read(min(2**20, most - size)):
                digest.update(data)
                size += len(data)
    except OSError:
        return f"- unreadable {name}"
    return f"{size} {digest.hexdigest()} {name}"


def read_listing(text: str, patterns: Sequence[str] = ()) -> Listing:
    """What a far end lists. Pure.

    Args:
        patterns: only these are brought; empty: all that it lists.
    """
    listing, seen = Listing({}, [], {}), set[str]()
    for line in text.splitlines():
        size, _, rest = line.partition(" ")
        digest, _, name = rest.partition(" ")
        bytes_left = re.fullmatch(r"left:([0-9]{1,18})", digest)
        if size == "-" and bytes_left and is_name(name):
            listing.left[name] = int(bytes_left[1])
        elif size == "-":
            listing.refused.append((name, _WHY.get(digest, "cannot be brought")))
        elif not is_name(name) or not re.fullmatch("[0-9]{1,18}", size):
            listing.refused.append((name or line, _WHY["name"]))
        elif not re.fullmatch("[0-9a-f]{64}", digest):
            listing.refused.append((name, "is listed without its sha256"))
        elif seen & {_folded(f"{path}") for path in (Path(name), *Path(name).parents)}:
            listing.refused.append((name, "is listed twice"))
        elif is_wanted(name, patterns):
            seen.add(_folded(name))
            listing.results[name] = Result(name, int(size), digest)
    return listing


def _folded(name: str) -> str:
    """Names that are one file on a disk of macOS: it knows no case, and decomposes letters."""
    return unicodedata.normalize("NFD", name).casefold()
