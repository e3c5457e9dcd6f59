"""1,000 random damages to bundles of all sizes: `stage verify` and `stage-verify.py` find each.

In every test run 109 of them; `pytest -m slow` has all (seeds: AIRLIFT_DAMAGE_SEED).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from stage.cli import main
from tests.stage.bundle.test_standalone import TEMPLATE, pythons
from tests.stage.bundles import contents, make_bundle, many, tiny
from tests.stage.damages import DAMAGES, NEED_BIG, Damage, edit_the_lock_and_the_index
from tests.stage.workbench import Workbench

SEED = int(os.environ.get("AIRLIFT_DAMAGE_SEED") or 20_260_203)
# How often each damage is done to a bundle of each size; that of the big file only to `big`.
ROUNDS = {"tiny": 10, "small": 10, "many": 10, "big": 5}  # x 27 damages = 945
ROUNDS_OF_BIG = 60
QUICK = {"tiny": 3, "small": 0, "many": 0, "big": 1}  # x 27 damages = 108
QUICK_OF_BIG = 1
MAKERS: dict[str, Callable[[Path], object]] = {
    "tiny": lambda root: make_bundle(root, big=False, files=tiny()),
    "small": lambda root: make_bundle(root, big=False),
    "many": lambda root: make_bundle(root, big=False, files={**contents(), **many(3000)}),
    "big": lambda root: make_bundle(root),
}


def cases(rounds: dict[str, int], of_big: int) -> list[tuple[str, Damage, int]]:
    return [
        (size, damage, of_big if damage in NEED_BIG else rounds[size])
        for size in MAKERS
        for damage in DAMAGES
        if rounds[size] and (damage not in NEED_BIG or size == "big")
    ]


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Workbench]]:
    made: dict[str, Workbench] = {}

    def bench(size: str) -> Workbench:
        if size not in made:
            sound = tmp_path_factory.mktemp(f"{size}-sound") / "bundle"
            MAKERS[size](sound)
            made[size] = Workbench(sound, tmp_path_factory.mktemp(size))
        return made[size]

    yield bench
    for size, workbench in made.items():
        assert agreed(workbench.root) == 0, f"{size}: undoing did not"


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Counts what was found where, and prints it at the end."""
    counts: Counter[str] = Counter()
    yield counts
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        by_size = ", ".join(
            f"{count} in {size}" for size, count in counts.items() if size in MAKERS
        )
        by_code = ", ".join(
            f"exit {code[5:]}: {count}"
            for code, count in counts.items()
            if code.startswith("exit ")
        )
        print(f"\n{sum(counts[size] for size in MAKERS)} damages: {by_size}; {by_code}")


def agreed(
    root: Path, *options: str, damaged: set[str] | None = None, lock_edited: bool = False
) -> int:
    """Verifies with both, whose reports must be equal. Returns the exit code of `stage verify`.

    Args:
        damaged: paths of which at least one must have a finding.
        lock_edited: the lock was edited, and the tag manifest with it. `stage-verify.py` checks
            of its fields only those about bytes, so only both verdicts must be equal: not sound.
    """
    arguments = ["verify", str(root), "--json", "--jobs", "1", *options]
    with TemporaryDirectory() as state:  # `stage-verify.py` knows of no earlier verification
        ours = CliRunner().invoke(main, arguments, env={"XDG_STATE_HOME": state})
    command = [pythons()[0], "-I", "-S", str(TEMPLATE), str(root), "--json", *options]
    theirs = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert isinstance(ours.exception, SystemExit | None) and "Traceback" not in theirs.stderr, (
        theirs.stderr
    )
    if lock_edited:
        assert ours.exit_code in (1, 2) and theirs.returncode in (1, 2), ours.output + theirs.stderr
        return ours.exit_code
    assert theirs.returncode == ours.exit_code, ours.output + theirs.stderr
    if ours.exit_code > 1:
        assert (
            theirs.stdout == "" and theirs.stderr.startswith("error: ") and "\n  -> " in ours.output
        )
        return ours.exit_code
    document = json.loads(ours.output)
    assert json.loads(theirs.stdout) == document
    if damaged is not None:
        named = {finding["path"] for finding in document["findings"]}
        assert named & damaged, f"done to {sorted(damaged)[:9]}, found {sorted(named)[:9]}"
        assert all(finding["expected"] and finding["found"] for finding in document["findings"])
    return ours.exit_code


def damage_and_compare(
    bench: Workbench, size: str, damage: Damage, rounds: int, tally: Counter[str]
) -> None:
    for number in range(rounds):
        seed = f"{SEED}-{size}-{damage.__name__}-{number}"
        print(f"seed {seed} (AIRLIFT_DAMAGE_SEED={SEED})")
        try:
            damaged = damage(bench.root, random.Random(seed))
            lock_edited = damage is edit_the_lock_and_the_index
            code = agreed(bench.root, damaged=damaged, lock_edited=lock_edited)
            assert code != 0, "nothing was found"
            if number % 5 == 0:
                agreed(bench.root, "--fast", lock_edited=lock_edited)
        finally:
            bench.undo()
        tally.update((size, f"exit {code}"))


@pytest.mark.parametrize(
    ("size", "damage", "rounds"),
    cases(QUICK, QUICK_OF_BIG),
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_both_find_every_damage(
    benches: Callable[[str], Workbench], tally: Counter[str], size: str, damage: Damage, rounds: int
) -> None:
    damage_and_compare(benches(size), size, damage, rounds, tally)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "damage", "rounds"),
    cases(ROUNDS, ROUNDS_OF_BIG),
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_both_find_a_thousand_damages(
    benches: Callable[[str], Workbench], tally: Counter[str], size: str, damage: Damage, rounds: int
) -> None:
    damage_and_compare(benches(size), size, damage, rounds, tally)


def test_there_are_a_thousand() -> None:
    assert sum(rounds for *_, rounds in cases(ROUNDS, ROUNDS_OF_BIG)) >= 1000
    assert sum(rounds for *_, rounds in cases(QUICK, QUICK_OF_BIG)) >= 100
