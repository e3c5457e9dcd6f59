"""`runner pull RUN --to X`: the results of a run come here, every byte compared.

The far end lists size, sha256 and name of each file (`go.sh --list`). Only names of a kind that
results have are taken (`runner.remote.listing`). Each file is streamed into the folder `.pull`,
from the byte that is here on, and hashed as it comes. What belongs together (a model, a checkpoint)
is renamed into place when all of it is right. So any interruption leaves the results as they were,
and the next pull goes on in the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from runner.from_stage import (
    DamageError,
    IncompleteError,
    StageError,
    UsageError,
    as_shown,
    human_count,
    human_size,
    print_line,
    quoted,
    silent,
    sync_folder,
    write_atomically,
)
from runner.remote.listing import Result, group_of, is_name, is_of_command, read_listing
from runner.remote.road import find_run
from runner.remote.there import go
from runner.run_folder.history import History
from runner.run_folder.layout import EXPORTED, PULLED, read_json
from runner.run_folder.report import write_report
from stage.carry.ssh import RemoteShell, connected
from stage.progress import Reporter

PARTS = ".pull"
_SHOWN = 3  # folders in a message
LIST, RESULTS = "results.sha256", "results"  # on a carried disk
_RUN = re.compile(r"[\w+=,@-][\w.+=,@-]*")


@dataclass(frozen=True)
class Wanted:
    """What a user wants of a run.

    Attributes:
        checkpoints: the newest checkpoint of a training; checkpoints and large files of a command.
        only: patterns of names, and only these; empty: all.
    """

    checkpoints: bool = False
    only: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The words after `go.sh --list RUN`."""
        return [*(["--checkpoints"] if self.checkpoints else []), *self.only]


@dataclass(frozen=True)
class Host:
    """A cluster, where `go.sh` lists the results."""

    remote: RemoteShell
    name: str

    def listing(self, run: str, wanted: Wanted) -> str:
        words = shlex.join(["--list", run, *wanted.words])
        answer = go(self.remote, self.name, f"{words} 2>&1")
        if answer.code:
            said = as_shown(answer.text.strip().partition("\n")[0].removeprefix("error: "))[:300]
            runs = f"runner status --to {quoted(self.name)}"
            raise UsageError(f"{self.name}: {said}", f"{runs} shows the runs there.")
        return answer.text

    def stream(self, run: str, name: str, offset: int, sink: Callable[[bytes], object]) -> None:
        self.remote.stream(f"output/{run}/{name}", offset, sink)


@dataclass(frozen=True)
class Disk:
    """A carried disk, where `go.sh --results` wrote them and their list."""

    folder: Path
    name: str

    def listing(self, run: str, wanted: Wanted) -> str:
        with self._open(run, LIST) as file:
            return file.read().decode("utf-8", "replace")

    def stream(self, run: str, name: str, offset: int, sink: Callable[[bytes], object]) -> None:
        with self._open(run, name) as file:
            file.seek(offset)
            while part := file.read(2**20):
                sink(part)

    def _open(self, run: str, name: str) -> BinaryIO:
        path = self.folder / RESULTS / run / name
        try:
            return path.open("rb")
        except OSError as error:
            if not any((self.folder / name).exists() for name in ("go.sh", RESULTS)):
                raise UsageError(
                    f"{self.folder}: nothing was submitted to this folder: it has no go.sh.",
                    f"Give the folder of the disk, or: runner submit RUN --to {quoted(self.name)}",
                ) from None
            raise UsageError(
                f"{path}: {error.strerror}: not all results of {run} were written to this disk.",
                f"On the cluster, with the disk: sh FOLDER/go.sh --results DISK {quoted(run)}",
            ) from None


def pull(run: str, to: str, output: Path | None, wanted: Wanted, *, quiet: bool) -> int:
    """Brings the results of a run, by its file or name; 1 if something was refused, and is named.

    `to`: a cluster, or a carried disk. `output`: the folder here; None: `output/<name>`.
    """
    cluster, name = find_run(to, run)
    if not _RUN.fullmatch(name := Path(name).name):
        raise UsageError(f"{run}: no run file, and no name of a run.", "Give one of them.")
    folder = output or Path("output") / name
    with silent(if_=quiet):
        if cluster.target.host is None:
            disk = Disk(Path(cluster.target.folder), to)
            return bring(disk, name, folder, wanted, quiet=quiet)
        with connected(cluster.target) as remote:
            return bring(Host(remote, to), name, folder, wanted, quiet=quiet)


def bring(
    source: Host | Disk, run: str, folder: Path, wanted: Wanted, *, quiet: bool = True
) -> int:
    """Brings all results of a run into a folder. As `pull`."""
    origin = str(source.folder.resolve() if isinstance(source, Disk) else source.remote.target)
    with _own(folder, origin, run), Reporter(quiet=quiet) as reporter:
        with reporter.at_work(f"{source.name}: its results are read and listed there"):
            listed, refused, left = read_listing(source.listing(run, wanted), wanted.only)
        if not listed and not refused and not left:
            to = f" --to {quoted(source.name)}" if isinstance(source, Host) else ", there,"
            problem = f"{source.name}: {run} has no results yet."
            raise UsageError(problem, f"runner status{to} shows what it does.")
        held = {group_of(name) for name, _ in refused}
        names = {*held, *listed, *left}
        has_none = not any("checkpoints/" in name or is_of_command(name) for name in names)
        if wanted.checkpoints and has_none:
            refused.append(("checkpoints", "there is none"))
        results = [result for name, result in listed.items() if group_of(name) not in held]
        inner = {path for r in results for path in Path(r.name).parents} - {Path()}
        if linked := [path for path in inner if (folder / path).is_symlink()]:
            problem = f"{linked[0]} in it is a link to another folder. Nothing was changed."
            raise _refused(folder, problem, origin, run)
        _check_room(folder, results)
        with reporter.bytes_bar("compared", sum(result.size for result in results)) as count:
            wrong = [r.name for r in results if not _bring(source, run, folder, r, count)]
        held |= {group_of(name) for name in wrong}
        right = [result for result in results if group_of(result.name) not in held]
        _put_in_place(folder, origin, right)
        if not wrong:
            shutil.rmtree(folder / PARTS, ignore_errors=True)
        refused += [(name, "its bytes are not those that were listed") for name in wrong]
    _tell(source, folder, right)
    if left:
        _tell_left(source, run, left)
    for name, why in refused:
        print_line(f"refused: {as_shown(f'{name}: {why}')}", err=True)
    if wrong:
        raise DamageError(
            f"{folder}: {human_count(len(wrong), 'file')} refused, the first: {wrong[0]}. "
            "It changed while it came, or it was damaged on the way or there.",
            "Run the same command again. If it says so again, look at that disk.",
        )
    return 1 if refused else 0


def _mark(folder: Path) -> tuple[str, set[str]]:
    """What an earlier pull noted in a folder: source and files; empty where it cannot be read."""
    found = read_json(folder / PULLED)
    mark = found if isinstance(found, dict) else {}
    source, files = mark.get("source"), mark.get("files")
    names = map(str, files if isinstance(files, list) else ())
    return source if isinstance(source, str) else "", {*filter(is_name, names)}


def _not_for(folder: Path, origin: str) -> str:
    """Why a folder may not take results of this source; empty: it is new, empty, or has some."""
    if not folder.is_dir() or not {*folder.iterdir()} - {folder / PARTS}:
        return ""
    if not (folder / PULLED).exists():
        return "is not a folder that `runner pull` made: a run of this machine?"
    came, _ = _mark(folder)
    return "" if came in ("", origin) else f"has results of {came}, and these are of {origin}."


def _refused(folder: Path, problem: str, origin: str, run: str) -> UsageError:
    near = folder if folder.name not in ("", "..") else folder / run
    others = (Path(f"{near}-{n}") for n in itertools.count(2))
    other = next(path for path in others if not _not_for(path, origin))
    return UsageError(f"{folder}: {problem}", f"Give another: -o {quoted(other)}")


@contextmanager
def _own(folder: Path, origin: str, run: str) -> Iterator[None]:
    """Holds a folder that is for this source; else UsageError."""
    if problem := _not_for(folder, origin):
        raise _refused(folder, problem, origin, run)
    parts = folder / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    with open(parts / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"{folder}: another `runner pull` is at work there."
            raise UsageError(problem, "Let it end.") from None
        try:
            yield
        finally:
            with suppress(OSError):  # something came
                Path(lock.name).unlink()
                parts.rmdir()
                folder.rmdir()


def _check_room(folder: Path, results: Iterable[Result]) -> None:
    needed = sum(r.size for r in results if not _is_here(folder / r.name, r.size))
    needed -= sum(part.stat().st_size for part in (folder / PARTS).iterdir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise IncompleteError(
            f"{folder}: the results still need {human_size(needed)}; {human_size(free)} are free.",
            "Free space there, or give another folder: -o FOLDER. What has come is kept.",
        )


def _is_here(path: Path, size: int) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == size


def _part_of(folder: Path, result: Result) -> Path:
    key = hashlib.sha256(f"{result.name}\n{result.sha256}".encode())
    return folder / PARTS / key.hexdigest()


def _bring(
    source: Host | Disk, run: str, folder: Path, result: Result, count: Callable[[int], None]
) -> bool:
    """Brings one file into `.pull`, unless it is here; whether its bytes are right."""
    part, known, digest = _part_of(folder, result), folder / result.name, hashlib.sha256()

    def take(data: bytes) -> None:  # never more than was listed: a log may grow
        data = data[: result.size - file.tell()]
        file.write(data)
        digest.update(data)
        count(len(data))
        if file.tell() == result.size:
            raise EOFError

    if _is_here(known, result.size) and not part.exists():
        with open(known, "rb") as here:
            if _hash(here, hashlib.sha256(), count) == result.sha256:
                return True
    with open(part, "a+b") as file:
        if file.tell() > result.size:
            file.truncate(0)
        file.seek(0)
        _hash(file, digest, count)
        if file.tell() < result.size:
            with suppress(EOFError):
                source.stream(run, result.name, file.tell(), take)
        file.flush()
        os.fsync(file.fileno())
        is_right = file.tell() == result.size and digest.hexdigest() == result.sha256
    if not is_right:
        part.unlink()
    return is_right


def _hash(file: BinaryIO, digest: hashlib._Hash, count: Callable[[int], object]) -> str:
    while data := file.read(2**20):
        digest.update(data)
        count(len(data))
    return digest.hexdigest()


def _put_in_place(folder: Path, origin: str, right: Sequence[Result]) -> None:
    """Renames what came; removes what an earlier pull brought of the same model, and is no more."""
    names = {result.name for result in right}
    _, earlier = _mark(folder)
    mark = {"source": origin, "files": sorted(earlier | names)}
    write_atomically(folder / PULLED, json.dumps(mark, indent=1).encode())
    groups = {group_of(name) for name in names}
    for name in earlier - names:
        if group_of(name) in groups:
            (folder / name).unlink(missing_ok=True)
    for result in right:
        part, path = _part_of(folder, result), folder / result.name
        if part.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part.replace(path)
    for parent in {(folder / name).parent for name in names}:
        sync_folder(parent)


def _tell_left(source: Host | Disk, run: str, left: Mapping[str, int]) -> None:
    """Prints what stays there, the largest folders first, and how it comes."""
    parts = Counter[str]()
    for name, size in left.items():
        parts[name.rpartition("/")[0]] += size
    shown = [f"{part}/ ({human_size(size)})" for part, size in parts.most_common(_SHOWN)]
    more = ", ..." if len(parts) > _SHOWN else ""
    count = human_count(len(left), "file")
    print_line(f"not brought: {count}, {human_size(sum(left.values()))}: {', '.join(shown)}{more}")
    again = f"runner pull {quoted(run)} --to {quoted(source.name)}"
    folder = next(iter(dict(parts.most_common(1))))
    print_line(f"  all: {again} --checkpoints; or: {again} --only {quoted(f'{folder}/')}")


def _tell(source: Host | Disk, folder: Path, right: Sequence[Result]) -> None:
    """Prints what came, and how far each run is; makes a report where none came."""
    size = human_size(sum(result.size for result in right))
    print_line(f"{folder}: {len(right)} files, {size} of {source.name}, every byte compared")
    came = {group_of(result.name) for result in right}
    configs = [name for name in came if name.endswith("config.yaml") and not is_of_command(name)]
    for member in sorted(name.removesuffix("config.yaml") for name in configs):
        root = folder / member
        if f"{member}metrics.jsonl" in came and f"{member}report.html" not in came:
            with suppress(StageError):
                write_report([root], None)
        with suppress(StageError):
            history = History.read(root)
            if history.starts:
                ended = history.starts[-1].get("kind")
                how = "ended with exit code 0" if ended == "done" else "has not ended well yet"
                print_line(f"{root}: the command {how}; what it wrote: {history.folder.work}")
                continue
            model = f"model: {history.model}" if f"{member}model" in came else "no model came"
            if history.facts.get(EXPORTED) != history.done:
                model = "not finished"
            elif f"{member}model" not in came and history.folder.model.is_dir():
                model += f"; {history.folder.model} is of an earlier pull"
            print_line(f"{root}: step {history.done} of {history.num_steps or '?'}; {model}")
