"""`clusters.yaml`: the clusters of a person or a group, by name; and what `--to` means.

The file is beside the run file, or in the configuration folder (`~/.config/airlift`). Nothing in it
is secret: how to log in is in `~/.ssh/config`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stage.carry.ssh import PushTarget
from stage.errors import UsageError, quoted, suggest
from stage.lock.reader import Lines, Reader, WrongValueError, setting
from stage.lock.yaml_lines import reading_yaml

NAME = "clusters.yaml"


@dataclass(frozen=True)
class Cluster:
    """One entry of `clusters.yaml`, or what `--to` said.

    Attributes:
        name: as the user wrote it.
        target: host and folder; host None: a folder here, such as a carried disk.
        profile: the profile of its nodes, for environments; None: not known yet.
        setup: lines of shell that run before each command there.
        modules: names for `module load`, before `setup`.
        partition, account, time: defaults for `slurm:` of a run file.
        verify: where every byte is read there: on the login node, or inside a job.
        copy: a transfer host that has the same folder; None: the host itself.
        file: the `clusters.yaml` that has it; None: none has.
        place: for messages: FILE:LINE, or `--to NAME`.
    """

    name: str
    target: PushTarget
    profile: Path | None = None
    setup: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    verify: Literal["login", "job"] = "login"
    copy: str | None = None
    file: Path | None = None
    place: str = ""


def _host(text: str) -> str:
    """A host as ssh takes it."""
    if text.startswith("-") or re.search(r"[\s/:\x00-\x1f]", text.strip("[]")) or not text:
        raise WrongValueError("names no host", "An alias of ~/.ssh/config, or me@host.")
    return text


def _words(text: str) -> str:
    """A name for Slurm: no option, no second word."""
    if text.startswith("-") or not re.fullmatch(r"[\w.,:@+-]+", text):
        raise WrongValueError("is no name that Slurm takes", "sinfo and sacctmgr list them.")
    return text


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """The keys of one cluster in the file."""

    host: str | None = setting(None, convert=_host)
    folder: str | None = None
    profile: str | None = setting(None, is_path=True)
    setup: tuple[str, ...] = setting((), is_one=True)
    modules: tuple[str, ...] = setting((), is_one=True)
    partition: str | None = setting(None, convert=_words)
    account: str | None = setting(None, convert=_words)
    time: str | None = setting(
        None, takes=str | int | None, convert=lambda found: _words(str(found))
    )
    verify: Literal["login", "job"] = "login"
    copy: str | None = setting(None, convert=_host)


def users_file(environment: Mapping[str, str] = os.environ) -> Path:
    """The `clusters.yaml` in the user's configuration folder."""
    home = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "airlift" / NAME


def files_of(beside: Path | None) -> list[Path]:
    """The `clusters.yaml` files that are there, the nearest first.

    Args:
        beside: the run file, or a folder; None: only the user's own.
    """
    near = [] if beside is None else [beside if beside.is_dir() else beside.parent]
    return [file for file in (*(folder / NAME for folder in near), users_file()) if file.is_file()]


def find_cluster(to: str, beside: Path | None, *, needs_folder: bool = True) -> Cluster:
    """What `--to` means: a name in `clusters.yaml`, `HOST:FOLDER`, or a folder here.

    Args:
        to: as the user wrote it. What begins with `/`, `./` or `../`, or ends in `/`, and has no
            colon, is a folder here.
        beside: the run file, or a folder: its `clusters.yaml` comes before the user's own.
        needs_folder: False: a host alone will do; the target's folder is then `.`, its home.

    Raises:
        UsageError: neither; the message names the clusters that are known. Or a mistake in the
            file, with file:line.
    """
    if ":" not in to and (to.startswith(("/", "./", "../")) or to.endswith("/")):
        return Cluster(to, PushTarget.parse(to), place=f"--to {to}")
    known: dict[str, Path] = {}
    for file in files_of(beside):
        with reading_yaml(file) as (data, lines):
            if to in data:
                return _cluster(to, data[to], lines, needs_folder)
            for name in data:
                known.setdefault(str(name), file)
    if ":" in to:
        return Cluster(to, PushTarget.parse(to), place=f"--to {to}")
    if not needs_folder:
        return Cluster(to, PushTarget(_host_of(to), "."), place=f"--to {to}")
    places = ", ".join(f"{name} ({file})" for name, file in known.items())
    raise UsageError(
        f"--to {to}: no cluster has that name"
        + (f"; these are known: {places}." if known else f", for there is no {NAME}."),
        suggest(
            to,
            known,
            f"If it is a host, give a folder there too: --to {to}:FOLDER. Which folders it has: "
            f"stage env probe --to {quoted(to)}",
        ),
    )


def _host_of(to: str) -> str:
    try:
        return _host(to)
    except WrongValueError as error:
        raise UsageError(f"--to {to!r}: {error}.", error.remedy) from None


def _cluster(name: str, data: Any, lines: Lines, needs_folder: bool) -> Cluster:
    entry = Reader(lines).read(_Entry, data, (name,))
    lines.mistakes.check(str(lines.path))
    place = lines.place(name)
    if entry.folder is None and (needs_folder or entry.host is None):
        raise UsageError(
            f"{place}: `{name}` has no `folder`.",
            "Add `folder:`, a path there. Which folders it has: "
            f"stage env probe --to {quoted(name)}"
            if entry.host
            else "Add `host:` and `folder:`, or a `folder:` of this machine.",
        )
    try:
        folder = entry.folder or "."
        target = PushTarget.parse(f"{entry.host}:{folder}" if entry.host else folder)
    except UsageError as error:
        raise UsageError(f"{lines.place(name, 'folder')}: {error.message}", error.remedy) from None
    return Cluster(
        name=name,
        target=target,
        profile=lines.path.parent / entry.profile if entry.profile else None,
        setup=entry.setup,
        modules=entry.modules,
        partition=entry.partition,
        account=entry.account,
        time=entry.time,
        verify=entry.verify,
        copy=entry.copy,
        file=lines.path,
        place=place,
    )
