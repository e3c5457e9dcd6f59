"""What a command wrote into its working folder: its results, and which of them are half-written.

`results` lists; `progress` and `is_quiet` judge a start; `half_written` finds the checkpoints that
a kill cut off, each by the rule of the library that writes it; `set_aside` moves them, so that the
next start finds the last whole one. Nothing is deleted. Needs no torch.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from runner.from_stage import DamageError, IncompleteError, hash_file, read_start, write_atomically
from runner.run_folder.layout import read_json
from stage.walk import matches

NO_RESULTS = frozenset({"__pycache__", ".cache"})

_LOG_FOLDERS = frozenset({"wandb", "tensorboard", "mlruns", ".hydra"})
_LOG_NAMES = re.compile(
    r"""events\.out\.tfevents.*       # TensorBoard
    | .*\.(?:log|out|err|lock)        # nohup.out is one of them
    | core(?:\.\d+)?                  # of a process that crashed
    | hparams\.yaml                   # Lightning writes a new one at each start
    | (?:.*[_.-])?(?:logs?|logging|metrics?|history|stats)(?:[_.-].*)?\.(?:jsonl|csv|txt)""",
    re.VERBOSE | re.IGNORECASE,
)
_CONFIG_SUFFIXES = (".json", ".yaml", ".yml", ".txt", ".md", ".csv", ".html", ".png")
CLOCKS_APART_S = 60.0
"""So far ahead may the clock of another node be; a later time is no sign of work."""


@dataclass(frozen=True)
class ResultFile:
    """A file that the command wrote.

    Attributes:
        path: in the working folder, with `/`.
        size: bytes.
        changed: its mtime, seconds since 1970.
    """

    path: str
    size: int
    changed: float


def results(
    work: Path, travelled: Mapping[str, tuple[int, str]], patterns: Sequence[str] = ()
) -> list[ResultFile]:
    """The regular files that did not travel, or have changed; the newest last.

    Of the files that travelled, those of the same size are hashed if they are newer than
    `work.json`, the end of unpacking: that keeps the times of the laptop, so these are few.

    Args:
        travelled: path -> bytes and SHA-256.
        patterns: of the run file's `results:`; a folder means all that is in it. Empty: all files.
    """
    mark = work.with_name(f"{work.name}.json")
    unpacked = mark.stat().st_mtime if mark.exists() else 0.0
    found = []
    for path, status in _walk(work):
        if not stat.S_ISREG(status.st_mode) or not is_asked(path, patterns):
            continue
        size, digest = travelled.get(path, (-1, ""))
        is_same = status.st_size == size and status.st_mtime <= unpacked
        if status.st_size == size and not is_same:
            with suppress(OSError):  # gone meanwhile, or not for this user
                is_same = hash_file(work / path).sha256 == digest
        if not is_same:
            found.append(ResultFile(path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda result: (result.changed, result.path))


def _walk(work: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The folders and regular files below a folder, in one pass; the command may work in it."""
    for folder, folders, files in os.walk(work):
        folders[:] = [name for name in folders if name not in NO_RESULTS]
        for name in (*folders, *files):
            path = f"{folder}/{name}"
            with suppress(OSError):  # gone meanwhile, or a stale handle of NFS
                status = os.lstat(path)
                if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
                    yield path.removeprefix(f"{work}/"), status


def is_asked(path: str, patterns: Sequence[str]) -> bool:
    """Whether `results:` of the run file names a path; without patterns it names all.

    By the rule of `include:`, where `*` crosses folders; so `**/` may be no folder at all.
    """
    names = [pattern.removeprefix("./").rstrip("/") for pattern in patterns]
    names += [name.replace("**/", "") for name in names]
    return not names or any(matches(path, one) for name in names for one in (name, f"{name}/"))


def is_log(path: str) -> bool:
    """Whether a file grows all the time and is no progress of its own."""
    *folders, name = path.split("/")
    return not _LOG_FOLDERS.isdisjoint(folders) or _LOG_NAMES.fullmatch(name) is not None


def progress(before: Iterable[ResultFile], after: Iterable[ResultFile]) -> list[ResultFile]:
    """The results that a start made or changed, and that are no logs; empty: it made nothing.

    A small text that was written again with the same size is none: scripts write their settings at
    each start.
    """
    known = {result.path: result for result in before}
    return [
        result
        for result in after
        if result != (old := known.get(result.path))
        and not is_log(result.path)
        and not (old and old.size == result.size and result.path.endswith(_CONFIG_SUFFIXES))
    ]


def is_quiet(work: Path, seconds: float, now: float) -> bool:
    """Whether no file that is not a log was changed in the last `seconds`.

    Args:
        now: by the clock of the disk (`runner.run_folder.run_lock.disk_time`), seconds since 1970.
    """
    return not any(
        -CLOCKS_APART_S < now - status.st_mtime < seconds
        for path, status in _walk(work)
        if stat.S_ISREG(status.st_mode) and not is_log(path)
    )


# ---- Half-written checkpoints ----

_NUMBERED = re.compile(
    r"(?:.*[^a-z])?(?:checkpoint|ckpt|epoch|step|iter|iteration)[-_=]?\d+(?:\.\w+)?", re.IGNORECASE
)
"""A folder for one checkpoint: checkpoint-20, checkpoint_1, global_step20, iter_0000020,
epoch=1-step=20.ckpt. Not `version_0` of Lightning, which holds all checkpoints of a start."""

OF_TRAINER = re.compile(r"checkpoint-\d+")  # PREFIX_CHECKPOINT_DIR, transformers/trainer_utils.py
_OF_DEEPSPEED = re.compile(r"global_step\d+")  # save_checkpoint, deepspeed/runtime/engine.py
_STATE = "trainer_state.json"
_WRITTEN_FIRST = {"README.md", "config.json", "generation_config.json"}
"""Before the weights: by save_pretrained of peft, and of transformers."""
_ZIPS = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".npz")
_JUST_NOW_S = 10.0
"""Before the last change of all: a save of that time may have been under way."""
_RECENTLY_S = 3600.0
"""Older files are not opened: each start sets aside what the end of the one before cut off."""


@dataclass
class _Checkpoint:
    """A folder for one checkpoint.

    Attributes:
        path: in the working folder.
        files: path in the folder -> mtime.
    """

    path: str
    files: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.path.rpartition("/")[2]

    @property
    def kinds(self) -> set[str]:
        """Names with `#` for numbers: those of steps, and of ranks, of which there may be fewer."""
        return {_without_numbers(name) for name in self.files if not is_log(name)}


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def half_written(work: Path, found: Sequence[ResultFile]) -> list[tuple[Path, str]]:
    """The checkpoints that are not whole, each with the reason in words.

    Reads headers and ends of files only. A folder that has a file that travelled is never one.

    Args:
        found: all `results`, not narrowed by patterns.
    """
    known = {result.path: result for result in found}
    end = max((result.changed for result in found), default=0.0)
    broken = {
        path: why
        for path, result in known.items()
        if result.changed > end - _RECENTLY_S and (why := _cut_off(work / path))
    }
    families = _checkpoints(work, known)
    for family in families.values():
        for checkpoint in family:
            inside = [path for path in broken if path.startswith(f"{checkpoint.path}/")]
            whys = [f"{path.rpartition('/')[2]}: {broken.pop(path)}" for path in inside]
            if checkpoint is family[-1]:  # only the newest may be under way
                whys.append(_unfinished(work, checkpoint, family[:-1], end))
            if why := next(filter(None, whys), ""):
                broken[checkpoint.path] = why
    for path in [path for path in known if path.rpartition("/")[2] == "latest"]:
        broken |= _not_latest(work, path, families)
    return [(work / path, broken[path]) for path in sorted(broken)]


def _checkpoints(
    work: Path, known: Mapping[str, ResultFile]
) -> dict[tuple[str, str], list[_Checkpoint]]:
    """(Folder, name without numbers) -> the checkpoints there, in order of their numbers.

    A folder that has checkpoints inside is none: `step1` of a training in stages.
    """
    found: dict[str, _Checkpoint] = {}
    foreign = set[str]()
    for path, status in _walk(work):
        is_folder = stat.S_ISDIR(status.st_mode)
        folder = _checkpoint_of(path.split("/") if is_folder else path.split("/")[:-1])
        if folder:
            checkpoint = found.setdefault(folder, _Checkpoint(folder))
        if folder and not is_folder:
            checkpoint.files[path.removeprefix(f"{folder}/")] = status.st_mtime
            if path not in known:
                foreign.add(folder)
    foreign |= {outer.as_posix() for folder in found for outer in PurePosixPath(folder).parents}
    families: dict[tuple[str, str], list[_Checkpoint]] = {}
    for folder in sorted(found.keys() - foreign, key=_numbers):
        parent, _, name = folder.rpartition("/")
        families.setdefault((parent, _without_numbers(name)), []).append(found[folder])
    return families


def _checkpoint_of(folders: Sequence[str]) -> str:
    """The innermost folder for one checkpoint; DeepSpeed's is a part of the one it is in."""
    for depth in reversed(range(len(folders))):
        name, above = folders[depth], folders[depth - 1] if depth else ""
        is_part = _OF_DEEPSPEED.fullmatch(name) and _NUMBERED.fullmatch(above)
        if _NUMBERED.fullmatch(name) and not is_part:
            return "/".join(folders[: depth + 1])
    return ""


def _numbers(path: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d{1,18}", path)]


def _unfinished(
    work: Path, checkpoint: _Checkpoint, older: Sequence[_Checkpoint], end: float
) -> str:
    """Why the newest of some checkpoints is not whole, though no file in it is cut off."""
    files = checkpoint.files
    if OF_TRAINER.fullmatch(checkpoint.name):
        # transformers/trainer.py, _save_checkpoint: weights, training_args.bin, optimizer.pt,
        # scheduler.pt, rng_state*.pth (each rank its own), and trainer_state.json last.
        if files.keys() <= _WRITTEN_FIRST:
            return "it has no weights"
        if _STATE in files:
            is_read = isinstance(read_json(work / checkpoint.path / _STATE), dict)
            return "" if is_read else f"{_STATE} is cut off"
        if "training_args.bin" in files or any(_STATE in other.files for other in older):
            return f"it has no {_STATE}, which transformers' Trainer writes last"
    is_just_written = max(files.values(), default=end) > end - _JUST_NOW_S
    if not older:
        is_named = not _OF_DEEPSPEED.fullmatch(checkpoint.name) or (
            (work / checkpoint.path).with_name("latest").exists()
        )
        is_whole = is_named or not is_just_written
        return "" if is_whole else "there is no file `latest`, which DeepSpeed writes last"
    # accelerate/checkpointing.py, save_accelerator_state: random_states_N.pkl last;
    # torch/distributed/checkpoint: .metadata last.
    missing = set.intersection(*(other.kinds for other in older)) - checkpoint.kinds
    for kind in sorted(missing):
        # What people add later (an evaluation of each checkpoint) is text.
        if is_just_written or not kind.endswith(_CONFIG_SUFFIXES):
            return f"it has no {kind}, as {older[-1].name} has"
    return ""


def _not_latest(
    work: Path, path: str, families: Mapping[tuple[str, str], Sequence[_Checkpoint]]
) -> dict[str, str]:
    """DeepSpeed's checkpoints that are newer than the one that `latest` names; or `latest` itself.

    deepspeed/runtime/engine.py, save_checkpoint: `latest` is written when all ranks have saved.
    """
    with suppress(OSError, UnicodeDecodeError), open(work / path, encoding="utf-8") as file:
        tag = file.read(200).strip()
        parent = work / path.rpartition("/")[0]
        if not tag and _newest_of_deepspeed(parent):  # the end came between open and write
            return {path: "it is empty"}
        family = families.get((path.rpartition("/")[0], _without_numbers(tag)), ())
        names = [checkpoint.name for checkpoint in family]
        if tag in names:
            newer = family[names.index(tag) + 1 :]
            return {checkpoint.path: f"`latest` names {tag}, before it" for checkpoint in newer}
        if _OF_DEEPSPEED.fullmatch(tag) and not (work / path).with_name(tag).is_dir():
            return {path: f"it names {tag}, which is not there"}
    return {}


def _cut_off(path: Path) -> str:
    """Why a file is not whole; empty: it is, or its kind cannot be judged, or it is gone."""
    from stage.bundle.inspect import safetensors_header  # slow to import; `status` needs none

    try:
        if path.name.endswith(".index.json"):
            return _missing_shard(path)
        if path.suffix == ".safetensors":
            safetensors_header(path)
        elif path.suffix in _ZIPS:
            return _cut_zip(path)
    except DamageError as error:
        return error.message.partition(": ")[2].rstrip(".")
    except OSError:
        pass
    return ""


def _missing_shard(path: Path) -> str:
    index = read_json(path)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    names = {name for name in shards.values() if isinstance(name, str)} if shards else set()
    missing = sorted(name for name in names if not path.with_name(name).exists())
    return f"it names {missing[0]}, which is not there" if missing else ""


def _cut_zip(path: Path) -> str:
    """torch.save writes a zip (torch/serialization.py), whose directory is at its end."""
    start = read_start(path, 4)
    is_whole = zipfile.is_zipfile(path) if start == b"PK\x03\x04" else start != b""
    return "" if is_whole else "it is cut off"


def set_aside(work: Path, broken: Sequence[tuple[Path, str]], aside: Path) -> list[str]:
    """Moves what is half-written out of the command's way; deletes nothing.

    Args:
        broken: what `half_written` found.
        aside: a folder on the same disk, of this start: `RUNFOLDER/half-written/START`.

    Returns:
        A line to print for each.

    Raises:
        IncompleteError: one cannot be moved.
    """
    lines = []
    for path, why in broken:
        inside = path.relative_to(work)
        target = aside / inside
        while target.exists():
            target = target.with_name(f"{target.name}.again")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        except OSError as error:
            raise IncompleteError(
                f"{path}: half-written ({why}), and cannot be moved to {target}: {error.strerror}.",
                "Correct that, then run the same command again.",
            ) from None
        lines.append(f"{inside.as_posix()}: half-written ({why}); moved to {target}")
        # Without the file DeepSpeed begins anew, without a word.
        if path.name == "latest" and (tag := _newest_of_deepspeed(path.parent)):
            write_atomically(path, tag.encode())
            lines.append(f"{inside.as_posix()}: names {tag} now, the newest that is there")
    return lines


def _newest_of_deepspeed(folder: Path) -> str:
    """The name of DeepSpeed's newest checkpoint in a folder; empty: there is none."""
    names = [path.name for path in folder.glob("global_step*") if path.is_dir()]
    return max(filter(_OF_DEEPSPEED.fullmatch, names), key=_numbers, default="")


def is_of_checkpoint(path: str) -> bool:
    """Whether a result is part of a checkpoint: by its folder, or as numbered weights."""
    *folders, name = path.split("/")
    is_weights = name.endswith((*_ZIPS, ".safetensors"))
    return _checkpoint_of(folders) != "" or (is_weights and _NUMBERED.fullmatch(name) is not None)
