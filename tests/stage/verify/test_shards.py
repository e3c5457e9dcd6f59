"""Shards together read every byte once, and report what one verification would."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.errors import UsageError
from stage.util.digests import BLOCK_SIZE
from stage.verify.payload import COST_OF_OPENING, PayloadFile, units
from stage.verify.report import Shard, VerificationReport, joined
from stage.verify.shards import merge, parse_shard
from stage.verify.verify import verify
from tests.stage.bundles import BIG, BIG_SIZE, make_bundle


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Path]:
    """Two blocks of the large file that no shard has both of, a small file changed, one gone."""
    root = make_bundle(tmp_path / "bundle").root
    for offset in (0, BIG_SIZE - 1):
        with open(root / BIG, "r+b") as file:
            file.seek(offset)
            file.write(b"x")
    (root / "data/models/bert/config.json").write_bytes(b'{"model_type": "berT"}\n')
    (root / "data/files/notes/empty").unlink()
    yield root
    shutil.rmtree(tmp_path, ignore_errors=True)


def reports(root: Path, count: int) -> list[tuple[Path, VerificationReport]]:
    return [(Path(f"{n}.json"), verify(root, shard=Shard(n, count))) for n in range(1, count + 1)]


sizes = st.lists(st.integers(0, 100_000) | st.integers(65 * 2**20, 2**31), min_size=1, max_size=30)


@settings(max_examples=50)
@given(sizes, st.integers(1, 12))
def test_every_byte_is_in_one_shard_and_shards_are_even(sizes: list[int], count: int) -> None:
    files = [
        PayloadFile(str(i), size, "s", ("d",) * -(-size // BLOCK_SIZE) if size > 64 * 2**20 else ())
        for i, size in enumerate(sizes)
    ]
    shards = [units(files, Shard(n, count)) for n in range(1, count + 1)]
    assert list(itertools.chain(*shards)) == units(files)
    costs = [sum(unit.end - unit.start + COST_OF_OPENING for unit in shard) for shard in shards]
    assert max(costs) <= sum(costs) / count + BLOCK_SIZE + COST_OF_OPENING


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_merged_shards_say_what_one_verification_says(damaged: Path, count: int) -> None:
    whole = verify(damaged)
    assert next(f.ranges for f in whole.findings if f.path == BIG) == (
        (0, BLOCK_SIZE),
        (4 * BLOCK_SIZE, BIG_SIZE),
    )
    assert merge(reports(damaged, count)).to_json() == whole.to_json()


def test_by_the_command_as_slurm_would_run_it(damaged: Path, tmp_path: Path) -> None:
    for task in range(3):
        environment = {**os.environ, "SLURM_PROCID": str(task), "SLURM_NTASKS": "3"}
        arguments = [
            "verify",
            damaged,
            "--shard",
            "auto",
            "--report",
            tmp_path / "part-%.json",
            "-q",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "stage", *arguments], env=environment, capture_output=True
        )
        assert done.returncode == 1  # a missing file is known to all
    parts = [tmp_path / f"part-{n}.json" for n in (2, 3, 1)]
    command = [sys.executable, "-m", "stage", "verify", "--json", "--merge", *map(str, parts)]
    merged = subprocess.run(command, capture_output=True, text=True)
    assert merged.returncode == 1 and json.loads(merged.stdout) == verify(damaged).to_json()
    lacking = subprocess.run(command[:-1], capture_output=True, text=True)
    assert lacking.returncode == 2 and "shards are missing: 1 (1 of 3)" in lacking.stderr


def test_a_missing_doubled_or_foreign_shard_is_refused(damaged: Path) -> None:
    three = reports(damaged, 3)
    other = reports(damaged, 2)[0]
    (path, last) = three[2]
    for given_, said in (
        (three[:2], "shards are missing: 3"),
        ([*three, three[0]], "is there already"),
        ([*three[:2], other], "2 shards, not 3"),
        ([*three[:2], (path, replace(last, bundle_id="0" * 64))], "bundle id 0000"),
        ([*three[:2], (path, replace(last, seal="0" * 64))], "not the same"),
        ([*three[:2], (path, replace(last, level="fast"))], "level fast, not full"),
        ([*three[:2], (path, replace(last, shard=None))], "not a shard"),
    ):
        with pytest.raises(UsageError, match=said):
            merge(given_)


@pytest.mark.parametrize("text", ["0/3", "4/3", "x", "1/", "1/0", "auto", "-1/3"])
def test_a_shard_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        parse_shard(text, {})


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=12))
def test_joined_ranges_are_the_same_bytes(pairs: list[tuple[int, int]]) -> None:
    ranges = [(start, start + length) for start, length in pairs]
    result = joined(ranges)
    assert {b for s, e in result for b in range(s, e)} == {
        b for s, e in ranges for b in range(s, e)
    }
    assert all(one[1] < other[0] for one, other in itertools.pairwise(result))
