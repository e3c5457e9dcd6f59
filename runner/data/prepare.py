"""Prepares data once, outside the ranks: parquet -> a store of sequences or of images.

A store is written under a temporary name and then renamed. Its key is the digest of everything that
decides its content. So a second call finds the store and returns at once.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner.data.recipe import Recipe, sample_task
from runner.data.store import Store, write_store
from runner.data.table import COLUMNS, Classes, footer, united
from runner.from_stage import UsageError, human_size
from runner.inputs import check_file
from runner.processes import is_alive

ABANDONED_S = 24 * 3600  # a preparation writes every few seconds


def store_path(recipe: Recipe, stores: Path) -> Path:
    """Where the store of a recipe is, among all stores."""
    return stores / f"{recipe.key}.arrow"


def is_prepared(recipe: Recipe, stores: Path) -> bool:
    """Returns whether the store of a recipe exists.

    Args:
        recipe: what the store is made from.
        stores: the folder of all stores.
    """
    return store_path(recipe, stores).is_file()


def prepare(recipe: Recipe, stores: Path, say: Callable[[str], None]) -> Store:
    """Opens the store of a recipe. Writes it first if it does not exist.

    Args:
        recipe: what the store is made from.
        stores: the folder of all stores.
        say: prints a line for the user.

    Raises:
        UsageError: the tokenizer lacks a token that the task needs, or the text is too short for
            one sequence.
        DamageError: what it is made from is not as it was fetched.
        OSError: the disk is full, or the folder cannot be written.
    """
    path, is_new = store_path(recipe, stores), not is_prepared(recipe, stores)
    if is_new:
        stores.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(stores)
        temporary = stores / f"{recipe.key}.{platform.node()}-{os.getpid()}.tmp"
        _check_sources(recipe)
        try:
            write_store(temporary, sample_task(recipe.task).samples(recipe))
            temporary.chmod(0o444)
            if not path.exists():  # a faster process has the same
                temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    store = Store(path)
    notes = "; ".join([human_size(path.stat().st_size), *store.facts.notes])
    description = f"{store.facts.what} ({notes})"
    how = f"prepared {description} in {path}" if is_new else f"already prepared: {description}"
    say(f"{recipe.split.name}: {how}")
    if store.facts.warning:
        say(f"warning: {store.facts.warning} {COLUMNS}")
    return store


def _remove_abandoned(stores: Path) -> None:
    """Removes temporary files of killed preparations.

    Their process is gone from this machine, or they have not changed for a day.
    """
    for left in stores.glob("*.tmp"):
        host, _, process = left.name.removesuffix(".tmp").partition(".")[2].rpartition("-")
        gone = host == platform.node() and process.isdecimal() and not is_alive(int(process))
        try:
            if gone or time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
        except FileNotFoundError:  # its process has just renamed it
            continue


def open_prepared(path: Path, what: str, command: str) -> Store:
    """Opens a store that was prepared before.

    Args:
        path: the store.
        what: is prepared in it, for the message.
        command: the command that prepares it, for the message.

    Raises:
        UsageError: the store does not exist.
    """
    if not path.is_file():
        raise UsageError(f"{path}: {what} is not prepared.", command)
    return Store(path)


def check_together(prepared: Mapping[str, Sequence[Store]]) -> None:
    """Refuses stores that cannot be used together in one run; numbers their classes alike.

    Args:
        prepared: `train` and `validation` -> their stores.

    Raises:
        UsageError: images have different sizes, or training never sees a class.
    """
    every = [store for stores in prepared.values() for store in stores]
    if not (first := every[0].facts).class_kind:
        return
    train, others = (
        [Classes(store.facts.class_names, store.facts.class_kind) for store in stores]
        for stores in (prepared["train"], prepared.get("validation", ()))
    )
    names = united(train, others)
    for store in every:
        store.number_as(names)
        if store.facts.side != first.side:
            raise UsageError(
                f"images of {first.side} and of {store.facts.side} pixels.",
                "Give each dataset one image_size.",
            )


def _check_sources(recipe: Recipe) -> None:
    """Compares what a store is made from with the digests in its key, by which it is found later.

    Of texts with a limit, only the files that have these rows.

    Raises:
        DamageError: they differ, or a file cannot be read.
    """
    split, task, rows = recipe.split, sample_task(recipe.task), 0
    # The classes of texts are those of all rows. Of images, a file may have a hundred gigabytes.
    needs_all = split.part is not None or (task.has_classes and task.has_tokens)
    wanted = None if needs_all else recipe.limit
    for path, digest in zip(split.files, split.digests, strict=True):
        if wanted is None or rows < wanted:
            check_file(path, digest)
            rows += footer(path).num_rows
    if task.has_tokens:
        for name, digest in recipe.model.digests.items():
            if not name.endswith(".safetensors"):
                check_file(recipe.model.path / name, digest)
