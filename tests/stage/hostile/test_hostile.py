"""Each hostile input is rejected with the right exit code and message; no file lands outside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.stage.bundle.test_standalone import TEMPLATE, pythons
from tests.stage.hostile import (
    archives,
    bags,
    contents,
    hubs,
    locks,
    manifests,
    patches,
    signatures,
)
from tests.stage.hostile.runner import Case, Place, in_a_process, printed, run

ROOMS = (manifests, locks, bags, archives, contents, hubs, patches, signatures)
COLLECTION = [
    pytest.param(
        case,
        id=f"{room.__name__.rpartition('.')[2]}-{case.name}",
    )
    for room in ROOMS
    for case in room.CASES
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        folder = tmp_path / "beside" / "here"
        folder.mkdir(parents=True)
        (folder.parent / "precious").write_bytes(b"not to be touched")
        yield Place(folder, stack)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("case", COLLECTION)
def test_it_is_met_with_words_and_nothing_lands_outside(
    case: Case, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(case, place, monkeypatch)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "case",
    [p for p in COLLECTION if isinstance(p.id, str) and p.id.startswith(("bags-", "locks-sealed"))],
)
def test_the_verifier_in_the_bundle_says_the_same(
    case: Case, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same findings from the oldest Python here, or the exit code where it cannot look."""
    command, *arguments = case.prepare(place)
    if command != "verify":
        return
    monkeypatch.chdir(place.folder)
    standalone = [pythons()[0], "-I", "-S", str(TEMPLATE)]
    done = in_a_process([*arguments, "--json"], case, place, standalone)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == case.code, done.stderr
    if case.code <= 1 or "unreadable" in case.says:
        said = printed(["verify", *arguments, "--json"], case, place, monkeypatch)
        assert json.loads(done.stdout) == json.loads(said)
    else:
        assert done.stdout == "" and done.stderr.startswith("error: ")
