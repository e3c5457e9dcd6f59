"""Prepares once, outside the ranks: parquet -> a store of sequences (`tokens`) or of images (`images`).

A store is written under another name and renamed. Its key is the digest of everything that decides its content, so a
second call finds it and returns at once.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from runner.data import images, tokens
from runner.data.images import ImageStore
from runner.data.recipe import Recipe
from runner.data.store import FACTS, TokenStore, facts_text
from runner.errors import UsageError, human_count, human_size

AnyStore: TypeAlias = TokenStore | ImageStore
ABANDONED_S = 24 * 3600  # a preparation writes every few seconds


def is_prepared(recipe: Recipe, stores: Path) -> bool:
    """Whether the store is there."""
    return (stores / recipe.key / FACTS).is_file()


def prepare(recipe: Recipe, stores: Path, say: Callable[[str], None]) -> AnyStore:
    """The store of a recipe, made now if it is not there.

    Raises:
        UsageError: the tokenizer lacks a token the task needs, or the text is too short for one sequence.
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = stores / recipe.key
    if is_prepared(recipe, stores):
        store = _open(recipe, folder)
        say(f"{recipe.split.name}: already prepared: {_described(store)}")
        return store
    temporary = stores / f"{recipe.key}.{platform.node()}-{os.getpid()}.tmp"
    _drop_abandoned(stores)
    temporary.mkdir(parents=True)
    try:
        _write(recipe, temporary)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    store = _open(recipe, folder)
    say(f"{recipe.split.name}: prepared {_described(store)} in {folder}")
    return store


def _drop_abandoned(stores: Path) -> None:
    """Removes what a killed preparation left: of a process of this machine that is gone, or untouched for a day."""
    for left in stores.glob("*.tmp"):
        host, _, process = left.name.removesuffix(".tmp").partition(".")[2].rpartition("-")
        gone = host == platform.node() and process.isdecimal() and not _is_alive(int(process))
        try:
            last_written = max(path.stat().st_mtime for path in (left, *left.iterdir()))
        except OSError:  # its process has just finished it
            continue
        if gone or time.time() - last_written > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def open_prepared(recipe: Recipe, stores: Path, command: str) -> AnyStore:
    """The store of a recipe, in a rank: never made here.

    Args:
        command: what makes it, for the message.

    Raises:
        UsageError: it is not there.
    """
    if not is_prepared(recipe, stores):
        raise UsageError(f"{stores / recipe.key}: split `{recipe.split.name}` is not prepared.", command)
    return _open(recipe, stores / recipe.key)


def check_together(prepared: Mapping[str, Sequence[AnyStore]]) -> None:
    """Refuses stores that are each in order and cannot be trained on together.

    Raises:
        UsageError: images of another size, or labels that training never sees.
    """
    train = prepared["train"]
    if not isinstance(train[0], ImageStore):
        return
    images = [store for stores in prepared.values() for store in stores if isinstance(store, ImageStore)]
    known = max(store.facts.num_classes for store in train if isinstance(store, ImageStore))
    for store in images:
        if store.facts.num_classes > known:
            raise UsageError(
                f"{store.folder}: labels up to {store.facts.num_classes - 1}; the training split has {known} classes.",
                "Choose another validation split, or `validation: null`.",
            )
        if store.facts.side != images[0].facts.side:
            raise UsageError(
                f"images of {images[0].facts.side} and of {store.facts.side} pixels.",
                "Give each dataset one image_size.",
            )


def _write(recipe: Recipe, folder: Path) -> None:
    facts = images.write(recipe, folder) if recipe.task == "image-classification" else tokens.write(recipe, folder)
    (folder / FACTS).write_bytes(facts_text(facts))
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _publish(temporary: Path, folder: Path) -> None:
    """Renames a finished store into place, read-only; if another process was first, its store stays."""
    for path in temporary.iterdir():
        path.chmod(0o444)
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / FACTS).is_file():
            raise


def _open(recipe: Recipe, folder: Path) -> AnyStore:
    return ImageStore.open(folder) if recipe.task == "image-classification" else TokenStore.open(folder)


def _described(store: AnyStore) -> str:
    size = human_size(sum(path.stat().st_size for path in store.folder.iterdir()))
    if isinstance(store, ImageStore):
        shown = store.facts
        pixels = f"{shown.side} x {shown.side} pixels"
        return f"{human_count(shown.num_sequences, 'image')} of {pixels} in {shown.num_classes} classes ({size})"
    facts = store.facts
    if facts.documents == "joined":
        left = f"the last {facts.dropped_tokens} tokens fill no sequence"
        what = f"{human_count(facts.num_sequences, 'sequence')} of {facts.sequence_length} tokens"
    else:
        left = f"{facts.dropped_documents} dropped: empty or too long; {facts.cut_documents} cut"
        full = facts.num_tokens / (facts.num_sequences * facts.sequence_length)
        what = (
            f"{human_count(facts.num_sequences, 'sequence')} of up to {facts.sequence_length} tokens, {full:.0%} full, "
            f"documents {facts.documents},"
        )
    return f"{what} from {human_count(facts.num_documents, 'text')} ({facts.dtype}, {size}; {left})"
