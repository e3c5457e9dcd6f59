"""Prepares data once, outside the ranks: parquet -> a store of sequences or of images.

A store is written under a temporary name and then renamed. Its key is the digest of everything that
decides its content. So a second call finds the store and returns at once.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from runner.config.tasks import data_of
from runner.data import images, tokens
from runner.data import labelled_store as labelled
from runner.data.classes import Classes, listed
from runner.data.images import ImageFacts, ImageStore
from runner.data.labelled_store import LabelledFacts, LabelledStore
from runner.data.recipe import Recipe
from runner.data.store import FACTS, StoreFacts, TokenStore, facts_text
from runner.data.table import reading
from runner.errors import UsageError, human_count, human_size
from runner.inputs import check_file
from runner.processes import is_alive

AnyStore: TypeAlias = TokenStore | ImageStore | LabelledStore
AnyFacts: TypeAlias = StoreFacts | ImageFacts | LabelledFacts
ABANDONED_S = 24 * 3600  # a preparation writes every few seconds


def is_prepared(recipe: Recipe, stores: Path) -> bool:
    """Returns whether the store of a recipe exists.

    Args:
        recipe: what the store is made from.
        stores: the folder of all stores.
    """
    return (stores / recipe.key / FACTS).is_file()


def prepare(recipe: Recipe, stores: Path, say: Callable[[str], None]) -> AnyStore:
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
    folder = stores / recipe.key
    if is_prepared(recipe, stores):
        store = _open(recipe, folder)
        say(f"{recipe.split.name}: already prepared: {_describe(store)}")
        _warn(store, recipe, say)
        return store
    temporary = stores / f"{recipe.key}.{platform.node()}-{os.getpid()}.tmp"
    _remove_abandoned(stores)
    temporary.mkdir(parents=True)
    try:
        _write(recipe, temporary)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    store = _open(recipe, folder)
    say(f"{recipe.split.name}: prepared {_describe(store)} in {folder}")
    _warn(store, recipe, say)
    return store


def _warn(store: AnyStore, recipe: Recipe, say: Callable[[str], None]) -> None:
    if isinstance(store, LabelledStore):
        facts = store.facts
        classes = Classes(facts.class_names, facts.kind)
        if doubtful := labelled.doubt(recipe, classes, facts.dropped):
            say(f"warning: {doubtful} {labelled.COLUMNS}")


def _remove_abandoned(stores: Path) -> None:
    """Removes temporary folders of killed preparations.

    Their process is gone from this machine, or nobody has written to them for a day.
    """
    for left in stores.glob("*.tmp"):
        host, _, process = left.name.removesuffix(".tmp").partition(".")[2].rpartition("-")
        gone = host == platform.node() and process.isdecimal() and not is_alive(int(process))
        try:
            last_written = max(path.stat().st_mtime for path in (left, *left.iterdir()))
        except OSError:  # its process has just renamed it
            continue
        if gone or time.time() - last_written > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)


def open_prepared(recipe: Recipe, stores: Path, command: str) -> AnyStore:
    """Opens the store of a recipe in a rank, which never prepares one.

    Args:
        recipe: what the store is made from.
        stores: the folder of all stores.
        command: the command that prepares it, for the message.

    Raises:
        UsageError: the store does not exist.
    """
    if not is_prepared(recipe, stores):
        raise UsageError(
            f"{stores / recipe.key}: split `{recipe.split.name}` is not prepared.", command
        )
    return _open(recipe, stores / recipe.key)


def check_together(prepared: Mapping[str, Sequence[AnyStore]]) -> None:
    """Refuses stores that cannot be used together in one run; numbers their classes alike.

    Args:
        prepared: `train` and `validation` -> their stores.

    Raises:
        UsageError: images have different sizes, or training never sees a label.
    """
    train = prepared["train"]
    if isinstance(train[0], LabelledStore):
        both = (train, prepared.get("validation", ()))
        labelled.unite(*([s for s in several if isinstance(s, LabelledStore)] for several in both))
    if not isinstance(train[0], ImageStore):
        return
    images = [
        store for stores in prepared.values() for store in stores if isinstance(store, ImageStore)
    ]
    known = max(store.facts.num_classes for store in train if isinstance(store, ImageStore))
    for store in images:
        if store.facts.num_classes > known:
            raise UsageError(
                f"{store.folder}: labels up to {store.facts.num_classes - 1}; "
                f"the training split has {known} classes.",
                "Choose another validation split, or `validation: null`.",
            )
        if store.facts.side != images[0].facts.side:
            raise UsageError(
                f"images of {images[0].facts.side} and of {store.facts.side} pixels.",
                "Give each dataset one image_size.",
            )


def write(recipe: Recipe, folder: Path) -> AnyFacts:
    """Writes the files of a store, without `store.json`, into an empty folder.

    Raises:
        UsageError: as for `prepare`.
    """
    kind = data_of(recipe.task)
    if kind == "images":
        return images.write(recipe, folder)
    return labelled.write(recipe, folder) if kind == "labelled" else tokens.write(recipe, folder)


def _check_sources(recipe: Recipe) -> None:
    """Compares what a store is made from with the digests in its key, by which it is found later.

    Of texts with a limit, only the files that have these rows.

    Raises:
        DamageError: they differ, or a file cannot be read.
    """
    import pyarrow.parquet as pq

    split, kind, rows = recipe.split, data_of(recipe.task), 0
    wanted = None if split.part or kind == "labelled" else recipe.limit  # classes: of all rows
    for path, digest in zip(split.files, split.digests, strict=True):
        if wanted is None or rows < wanted:
            check_file(path, digest)
            with reading(path):
                rows += pq.read_metadata(path).num_rows
    if kind != "images":
        for name, digest in recipe.model.digests.items():
            if not name.endswith(".safetensors"):
                check_file(recipe.model.path / name, digest)


def _write(recipe: Recipe, folder: Path) -> None:
    _check_sources(recipe)
    facts = write(recipe, folder)
    (folder / FACTS).write_bytes(facts_text(facts))
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _publish(temporary: Path, folder: Path) -> None:
    """Renames a finished store into place, read-only. A store of a faster process stays."""
    for path in temporary.iterdir():
        path.chmod(0o444)
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / FACTS).is_file():
            raise


def _open(recipe: Recipe, folder: Path) -> AnyStore:
    kind = data_of(recipe.task)
    if kind == "images":
        return ImageStore.open(folder)
    return LabelledStore.open(folder) if kind == "labelled" else TokenStore.open(folder)


def _describe(store: AnyStore) -> str:
    size = human_size(sum(path.stat().st_size for path in store.folder.iterdir()))
    if isinstance(store, ImageStore):
        return _describe_images(store.facts, size)
    if isinstance(store, LabelledStore):
        return labelled.describe(store.facts, size)
    return _describe_tokens(store.facts, size)


def _describe_images(facts: ImageFacts, size: str) -> str:
    pixels = f"{facts.side} x {facts.side} pixels"
    left = (
        f"; {human_count(facts.dropped, 'row')} left out: no image or no label"
        if facts.dropped
        else ""
    )
    images = human_count(facts.num_sequences, "image")
    names = f": {listed(facts.class_names)}" if facts.class_names else ""
    return f"{images} of {pixels} in {facts.num_classes} classes{names} ({size}{left})"


def _describe_tokens(facts: StoreFacts, size: str) -> str:
    left = f"{human_count(facts.empty_documents, 'row')} left out: empty"
    if facts.documents == "joined":
        left = f"{left}; " if facts.empty_documents else ""
        left += f"the last {human_count(facts.dropped_tokens, 'token')} would fill no sequence"
        what = f"{human_count(facts.num_sequences, 'sequence')} of {facts.sequence_length} tokens"
    else:
        is_instruction = facts.recipe.get("task") == "instruction"
        left += " or without an answer" if is_instruction else ""
        too_long = facts.dropped_documents - facts.empty_documents
        left += f"; {too_long} too long; {facts.cut_documents} cut" if is_instruction else ""
        left += (
            f"; {facts.unasked_documents} kept with an empty prompt"
            if facts.unasked_documents
            else ""
        )
        full = facts.num_tokens / (facts.num_sequences * facts.sequence_length)
        what = (
            f"{human_count(facts.num_sequences, 'sequence')} of up to {facts.sequence_length} "
            f"tokens, {full:.0%} full, documents {facts.documents},"
        )
    return f"{what} from {human_count(facts.num_documents, 'text')} ({facts.dtype}, {size}; {left})"
