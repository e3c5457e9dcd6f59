"""A plan says where each missing file comes from; `--dry-run` prints it and a fetch does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.lock.model import Ingredient, LockedAsset, LockedFile, Lockfile, Source
from stage.progress import Reporter
from stage.staging.fetch import SPACE_FOR_TAGS, Plan
from stage.staging.working_folder import SHARED_FROM, SharedStore, Sharing

ARCHIVE = Ingredient("https://x/a.zip", 500, "a" * 64)


def file(name: str, size: int, made_by: str | None = None) -> LockedFile:
    return LockedFile(f"data/files/r/{name}", size, f"{size:064x}", None, name, made_by)


def lock_of(*files: LockedFile, source: str = "url", made_from: bool = True) -> Lockfile:
    inputs = (ARCHIVE, ARCHIVE) if made_from else ()  # a file may be in two splits
    asset = LockedAsset("r", "files", {}, Source(source, "x"), files, made_from=inputs)
    return Lockfile("m", {"r": asset})


def plan(lock: Lockfile, *here: LockedFile, root: Path, store: SharedStore | None = None) -> Plan:
    with Reporter(quiet=True) as reporter:
        sharing = Sharing(store, root, reporter)
        return Plan.of(lock, {one.path for one in here}, sharing, 0)


A, B, C = file("a", SHARED_FROM, "unpack"), file("b", 20, "unpack"), file("c", 3)


def test_where_all_files_are_here_nothing_is_done(tmp_path: Path) -> None:
    found = plan(lock_of(A, B, C), A, B, C, root=tmp_path)
    assert not (found.shared or found.downloads or found.built or found.made or found.unknown)
    assert found.space == 0


@pytest.mark.parametrize(("source", "inputs"), [("url", (500,)), ("path", ())])
def test_a_missing_file_that_is_made_brings_what_it_is_made_from(
    tmp_path: Path, source: str, inputs: tuple[int, ...]
) -> None:
    """Not where files of this machine are read in place."""
    found = plan(lock_of(A, B, C, source=source), A, root=tmp_path)
    assert (found.built, found.made, found.downloads) == (frozenset("r"), (B,), (C,))
    assert found.inputs == inputs
    assert found.space == SPACE_FOR_TAGS + 20 + 3 + sum(inputs)


def test_what_was_never_made_is_unknown(tmp_path: Path) -> None:
    lock = lock_of()
    found = plan(lock, root=tmp_path)
    assert (found.built, found.unknown) == (frozenset("r"), (lock.assets["r"],))


def test_a_made_file_in_the_store_is_taken_unless_its_asset_is_made_anyway(tmp_path: Path) -> None:
    store = SharedStore(tmp_path / "store")
    entry = store.entry(str(A.sha256))
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"")
    alone = plan(lock_of(A, C), C, root=tmp_path, store=store)
    assert (alone.shared, alone.built, alone.inputs) == ((A,), frozenset(), ())
    with_others = plan(lock_of(A, B, C), C, root=tmp_path, store=store)
    assert (with_others.shared, with_others.built, with_others.made) == ((), frozenset("r"), (A, B))
