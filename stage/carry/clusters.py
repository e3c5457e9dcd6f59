"""`clusters.yaml`: the clusters of a person or a group, by name; and what `--to` means.

The file is beside the run file, or in the configuration folder (`~/.config/airlift`). Nothing in it
is secret: how to log in is in `~/.ssh/config`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stage.carry.ssh import PushTarget
from stage.errors import Place, StageError, UsageError, about, quoted, suggest
from stage.files import make_folder, read_file, write_atomically
from stage.lock.reader import HIDDEN, Lines, Reader, WrongValueError, setting
from stage.lock.yaml_lines import reading_yaml, scalar

NAME = "clusters.yaml"


def _host(text: str) -> str:
    """A host as ssh takes it."""
    if text.startswith("-") or re.search(r"[\s/:\x00-\x1f]", text.strip("[]")) or not text:
        raise WrongValueError("names no host", "An alias of ~/.ssh/config, or me@host.")
    return text


def _word(found: str | int) -> str:
    """A word for Slurm: no option, no second word."""
    text = str(found)
    if text.startswith("-") or not re.fullmatch(r"[\w.,:@+-]+", text):
        raise WrongValueError("is not a name that Slurm accepts", "sinfo and sacctmgr list them.")
    return text


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One entry of `clusters.yaml`, or what `--to` said.

    Attributes:
        name: as the user wrote it.
        target: host and folder; host None: a folder here, such as a carried disk.
        place: for messages: FILE:LINE, or `--to NAME`.
        file: the `clusters.yaml` that has it; None: no file has it.
        host, folder: as in the file; `target` has both.
        profile: the profile of its nodes, for environments; None: not known yet.
        setup: lines of shell that run before each command there.
        modules: names for `module load`, before `setup`.
        partition, account, time: defaults for `slurm:` of a run file.
        options: of sbatch, by their long names: qos, constraint, ...; for each job there.
        verify: where every byte is read there: on the login node, or inside a job.
        copy: a transfer host that has the same folder; None: the host itself.
    """

    name: str = field(default="", metadata=HIDDEN)
    target: PushTarget = field(default=PushTarget(None, "."), metadata=HIDDEN)
    place: Place | str = field(default="", metadata=HIDDEN)
    file: Path | None = field(default=None, metadata=HIDDEN)
    host: str | None = setting(None, convert=_host)
    folder: str | None = None
    profile: Path | None = setting(None, takes=str | None, is_path=True, convert=Path)
    setup: tuple[str, ...] = setting((), is_one=True)
    modules: tuple[str, ...] = setting((), is_one=True)
    partition: str | None = setting(None, convert=_word)
    account: str | None = setting(None, convert=_word)
    time: str | None = setting(None, takes=str | int | None, convert=_word)
    options: dict[str, str | int | float | bool] = setting(dict)
    verify: Literal["login", "job"] = "login"
    copy: str | None = setting(None, convert=_host)

    def sbatch_words(self, others: Mapping[str, str | int | float | bool]) -> list[str]:
        """The words of `options` for a job that is no run; `others` of these names win."""
        every = self.options | {name: others[name] for name in others.keys() & self.options.keys()}
        return [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in every.items()
            if value is not False
        ]

    def beside(self) -> str:
        """How to get another folder there, with all that is known about the cluster."""
        folder = f"{self.target.folder.rstrip('/')}-2"
        if self.file is None:
            return f"--to {quoted(f'{self.target.host}:{folder}')}"
        return (
            f"repeat the lines of `{self.name}` in {self.file} under another name, with `folder: "
            f"{folder}`; then --to that name"
        )


def users_file() -> Path:
    """The `clusters.yaml` in the user's configuration folder."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "airlift" / NAME


def files_of(beside: Path | None) -> list[Path]:
    """The `clusters.yaml` files that are there, the nearest first.

    Args:
        beside: the run file, or a folder, whose `runs` counts too; None: only the user's own.
    """
    return [file for file in _looked_for(beside) if file.is_file()]


def _looked_for(beside: Path | None) -> list[Path]:
    folder = beside.parent if beside and not beside.is_dir() else beside
    near = [folder, folder / "runs"] if folder else []
    return [*(folder / NAME for folder in near), users_file()]


def find_cluster(to: str, beside: Path | None, *, needs_folder: bool = True) -> Cluster:
    """What `--to` means: a name in `clusters.yaml`, `HOST:FOLDER`, or a folder here.

    Args:
        to: as the user wrote it. What begins with `/`, `./` or `../`, or ends in `/`, and has no
            colon, is a folder here.
        beside: the run file, or a folder: its `clusters.yaml` comes before the user's own.
        needs_folder: False: a host alone will do; the target's folder is then `.`, its home.

    Raises:
        UsageError: neither; the message names the clusters that are known, and where it was
            looked. Or a mistake in the file, with file:line.
    """
    if ":" not in to and (to.startswith(("/", "./", "../")) or to.endswith("/")):
        return Cluster(name=to, target=PushTarget.parse(to), place=f"--to {to}")
    known: dict[str, Path] = {}
    for file in files_of(beside):
        with reading_yaml(file) as (data, lines):
            if to in data:
                return _cluster(to, data[to], lines, needs_folder)
            for name in data:
                known.setdefault(str(name), file)
    if ":" in to:
        return Cluster(name=to, target=PushTarget.parse(to), place=f"--to {to}")
    if not needs_folder:
        return Cluster(name=to, target=PushTarget(_host_of(to), "."), place=f"--to {to}")
    places = ", ".join(f"{name} ({file})" for name, file in known.items())
    looked = ", ".join(str(file.absolute()) for file in _looked_for(beside))
    raise UsageError(
        f"--to {to}: no cluster has that name"
        + (f"; these are known: {places}" if known else f", for there is no {NAME}")
        + f" (looked for: {looked}).",
        suggest(
            to,
            known,
            f"{NAME} counts for the run files beside it, and in its folder where no run file is "
            "given: cd FOLDER, or give RUN by its path. "
            f"If it is a host, give a folder there too: --to {to}:FOLDER. Which folders it has: "
            f"stage env probe --to {quoted(to)}",
        ),
    )


def to_option(beside: Path | None) -> str:
    """`--to NAME` of the nearest cluster, for the line about the next step; empty: none is known.

    Args:
        beside: as for `find_cluster`.
    """
    known = dict.fromkeys(quoted(str(name)) for _, name, _ in _entries(beside))
    if not known:
        return ""
    first, *others = known
    return f"--to {first}" + (f"   (or: {', '.join(others)})" if others else "")


def profiles(beside: Path | None) -> list[Path]:
    """The profiles that the entries name; `beside` as for `find_cluster`."""
    entries = [(file, entry) for file, _, entry in _entries(beside) if isinstance(entry, dict)]
    named = [(file, entry.get("profile")) for file, entry in entries]
    return [file.parent / profile for file, profile in named if isinstance(profile, str)]


def _entries(beside: Path | None) -> Iterator[tuple[Path, Any, Any]]:
    """File, name and entry of each cluster; a file with a mistake has none, or some."""
    for file in files_of(beside):
        with suppress(StageError), reading_yaml(file) as (data, _):
            for name, entry in data.items():
                yield file, name, entry


def _host_of(to: str) -> str:
    try:
        return _host(to)
    except WrongValueError as error:
        raise UsageError(f"{error}.", error.remedy, place=f"--to {to!r}") from None


def _cluster(name: str, data: Any, lines: Lines, needs_folder: bool) -> Cluster:
    found = Reader(lines).read(Cluster, data, (name,))
    lines.mistakes.check(str(lines.path))
    place = lines.place(name)
    if found.folder is None and (needs_folder or found.host is None):
        raise UsageError(
            f"`{name}` has no `folder`.",
            "Add `folder:`, a path there. Which folders it has: "
            f"stage env probe --to {quoted(name)}"
            if found.host
            else "Add `host:` and `folder:`, or a `folder:` of this machine.",
            place=place,
        )
    folder = found.folder or "."
    with about(lines.place(name, "folder")):
        target = PushTarget.parse(f"{found.host}:{folder}" if found.host else folder)
    profile = lines.path.parent / found.profile if found.profile else None
    return replace(found, name=name, target=target, place=place, file=lines.path, profile=profile)


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [str(value)]


def note(file: Path, name: str, found: Mapping[str, str]) -> list[str]:
    """Adds to a `clusters.yaml` what was found; lines that are there stay as they are.

    Args:
        file: made if it is not there.
        found: the keys of the entry, with their values as text.

    Returns:
        Lines for the user: what was written, and where the file says something else.

    Raises:
        UsageError: a mistake in the file.
    """
    rows, there, said, at = list[str](), None, list[str](), 0
    if file.exists():
        with reading_yaml(file) as (data, lines):
            there = data.get(name)
            rows = read_file(file).decode("utf-8-sig").splitlines()
            at = lines.numbers.get((name,), 0)
        for key, value in found.items():
            if there and value not in (there.get(key, value), *_items(there.get(key))):
                place = lines.place(name, key)
                said.append(f"{place}: kept: `{key}: {there[key]}`; found: `{value}`")
    new = {key: value for key, value in found.items() if key not in (there or {})}
    added = [f"{key}: {scalar(value)}" for key, value in new.items()]
    if not new:
        return said
    if there is None:
        rows += [f"{scalar(name)}:", *(f"  {line}" for line in added)]
    elif re.fullmatch(r"\S[^#]*:\s*(#.*)?", rows[at - 1]) and len(rows) > at:
        margin = re.match(r"\s*", rows[at])
        rows[at:at] = [f"{margin[0] if margin else '  '}{line}" for line in added]
    else:  # on one line: written in a way of their own
        return [f"{file}:{at}: add to `{name}`: {', '.join(added)}", *said]
    make_folder(file.parent)
    write_atomically(file, ("\n".join(rows) + "\n").encode())
    return [f"{file}: `{name}`: {'; '.join(added)}", *said]
