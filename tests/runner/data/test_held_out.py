"""`validation: 5%`: the rows that are held out are always the same, and no run trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.config.data import DatasetConfig
from runner.config.held_out import SplitPart
from runner.config.run_config import RunConfig
from runner.data.prepare import check_together, prepare
from runner.data.recipe import data_key, recipes
from runner.data.table import columns
from runner.from_stage import Place, UsageError
from runner.inputs import SplitInput, _parts, resolve
from runner.job.run_data import describe_dataset
from tests.runner.conftest import Cluster

ALL = {
    "causal-lm": ("gpt2-bare", {"asset": "reference"}),
    "instruction": ("tiny-chat", {"asset": "prompts", "prompt": "User", "response": "Prompt"}),
    "text-classification": (
        "still-bert",
        {"asset": "glue-mrpc", "text": "sentence1", "pair": "sentence2"},
    ),
    "token-classification": ("still-bert", {"asset": "conll2003"}),
    "image-classification": ("tiny-vit", {"asset": "cifar-10"}),
}


def split_of(folder: Path, rows: int, part: SplitPart | None, shards: int = 3) -> SplitInput:
    files = [folder / f"{number}.parquet" for number in range(shards)]
    for number, path in enumerate(files):
        pq.write_table(pa.table({"n": list(range(number, rows, shards))}), path, row_group_size=7)
    return SplitInput("train", tuple(files), (), part.rows if part else rows, {}, part)


def read(split: SplitInput, limit: int | None = None) -> list[int]:
    return [n for batch in columns(split, ["n"], limit, at_once=5) for n in batch["n"]]


@pytest.mark.parametrize("share", ["1%", "5%", "12.5 %", "60%", "99.9%"])
def test_each_row_is_trained_on_or_held_out_and_never_both(tmp_path: Path, share: str) -> None:
    whole = read(split_of(tmp_path, 200, None))
    kept, held_out = (
        read(split_of(tmp_path, 200, SplitPart(200, share, 42, is_held_out)))
        for is_held_out in (False, True)
    )
    assert sorted([*kept, *held_out]) == sorted(whole)
    expected = min(199, max(1, round(float(share.rstrip("% ")) * 2)))
    assert (len(kept), len(held_out)) == (200 - expected, expected)
    assert kept == [n for n in whole if n not in set(held_out)], "in the order of the files"


def test_nothing_is_held_out_of_one_row(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 1 row: nothing can be held out"):
        _parts(DatasetConfig(asset="a", validation="5%"), split_of(tmp_path, 1, None), Place)


def test_the_rows_are_those_of_the_first_release_and_another_seed_gives_others() -> None:
    """A new version of Airlift or numpy that changed them would train on what it validates."""
    part = SplitPart(1000, "1%", 42, True)
    places = [part.place(number) for number in range(part.rows)]
    assert places == [353, 442, 495, 499, 526, 538, 660, 669, 790, 807]
    other = SplitPart(1000, "1%", 43, True)
    assert [other.place(number) for number in range(other.rows)] != places


@pytest.fixture
def twins(tmp_path: Path, twins_bundle: Path) -> Cluster:
    return Cluster(tmp_path, twins_bundle)


def written(twins: Cluster, task: str, **changes: Any) -> Path:
    model, dataset = ALL[task]
    settings = {"validation": "10%", **dataset, **changes}
    length = None if task == "image-classification" else 64
    return twins.write(task=task, model={"asset": model}, dataset=settings, sequence_length=length)


@pytest.mark.parametrize("task", ALL)
def test_every_task_holds_out_a_share_of_train(twins: Cluster, task: str) -> None:
    config = RunConfig.load(written(twins, task))
    inputs = resolve(config, twins.bundle)
    wanted = recipes(config, inputs, 64)
    prepared = {
        role: [prepare(recipe, twins.folder / "stores", print) for recipe in several]
        for role, several in wanted.items()
    }
    check_together(prepared)
    data = inputs.datasets[0]
    assert data.validation is not None and data.train.part is not None
    assert data.train.rows + data.validation.rows == data.train.part.of
    assert len(prepared["train"][0]) > len(prepared["validation"][0]) > 0
    assert "(10% of train, by validation_seed 42)" in describe_dataset(config, data, 64)


def test_other_held_out_rows_are_other_training_data(twins: Cluster) -> None:
    """So a run does not resume on them from its checkpoint."""

    def key(**changes: Any) -> str:
        config = RunConfig.load(written(twins, "causal-lm", **changes))
        return data_key(recipes(config, resolve(config, twins.bundle), 64)["train"])

    keys = [key(), key(validation="5%"), key(validation_seed=1), key(validation=None)]
    assert len(set(keys)) == 4
    assert key() == keys[0]
