"""The tokens that masked-lm hides: 15 %, other ones in each epoch.

The same seed, epoch and sample give the same mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.config.run_config import RunConfig
from runner.data.store import Rows
from runner.data.tokenizing import load_tokenizer
from runner.inputs import ModelInput, resolve
from runner.tasks import task_named
from runner.tasks.shared.task import Objective
from runner.training.components.batches import SamplePlace

LENGTH = 128


@pytest.fixture(scope="module")
def model(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelInput:
    return resolve(_config(tmp_path_factory.mktemp("run")), bundle).model


def _config(folder: Path, *overrides: str) -> Any:
    text = (
        "format: 1\ntask: masked-lm\nmodel: {asset: tiny-bert, init: scratch}\n"
        "dataset: {asset: reference}\n"
    )
    (folder / "mine.yaml").write_text(text)
    return RunConfig.load(folder / "mine.yaml", overrides)


@pytest.fixture(scope="module")
def task(model: ModelInput, tmp_path_factory: pytest.TempPathFactory) -> Objective[Rows]:
    return task_named("masked-lm").objective(_config(tmp_path_factory.mktemp("run")), model, None)


def special_ids(model: ModelInput) -> dict[str, int]:
    tokenizer: Any = load_tokenizer(model)
    return {
        name: tokenizer.convert_tokens_to_ids(name)
        for name in ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
    }


def rows(model: ModelInput, number: int) -> Any:
    """Ordinary tokens, a separator in the middle, the usual ends: int64 (number, LENGTH)."""
    special = special_ids(model)
    ids = np.random.default_rng(0).integers(100, 1000, (number, LENGTH))
    assert not np.isin(ids, list(special.values())).any()
    ids[:, 0], ids[:, LENGTH // 2], ids[:, -1] = (
        special["[CLS]"],
        special["[SEP]"],
        special["[SEP]"],
    )
    return ids


def joined(ids: Any) -> Any:
    """Full sequences, as a store gives them."""
    return Rows(ids, np.ones_like(ids), np.ones_like(ids, dtype=bool))


def collated(task: Objective[Rows], ids: Any, *, epoch: int = 0, first: int = 0) -> tuple[Any, Any]:
    batch = task.collate(joined(ids), [SamplePlace(first + n, epoch) for n in range(len(ids))])
    return batch["input_ids"].numpy(), batch["labels"].numpy()


def test_fifteen_percent_are_guessed_of_which_eighty_ten_ten(
    task: Objective[Rows], model: ModelInput
) -> None:
    before = rows(model, 1000)
    ids, labels = collated(task, before)
    guessed = labels != -100
    ordinary = before.size - 3 * len(before)
    assert guessed.sum() / ordinary == pytest.approx(0.15, abs=0.005)
    masked = (ids == special_ids(model)["[MASK]"])[guessed].mean()
    kept = (ids == before)[guessed].mean()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1, abs=0.02)
    assert 1 - masked - kept == pytest.approx(0.1, abs=0.02)


def test_what_is_not_guessed_is_left_alone_and_what_is_has_its_label(
    task: Objective[Rows], model: ModelInput
) -> None:
    before = rows(model, 50)
    ids, labels = collated(task, before)
    guessed = labels != -100
    assert (ids[~guessed] == before[~guessed]).all()
    assert (labels[guessed] == before[guessed]).all()
    assert task.num_predictions(task.collate(joined(before), _samples(50))) == guessed.sum()


def _samples(number: int) -> list[Any]:
    return [SamplePlace(n, 0) for n in range(number)]


def test_special_tokens_are_never_guessed(task: Objective[Rows], model: ModelInput) -> None:
    before = rows(model, 300)
    _, labels = collated(task, before)
    assert (labels[:, [0, LENGTH // 2, LENGTH - 1]] == -100).all()
    every_special = np.tile(np.array(list(special_ids(model).values())), (20, 4))
    ids, labels = collated(task, every_special)
    assert (ids == every_special).all() and (labels == -100).all()


def test_the_same_sample_is_masked_alike_whatever_batch_it_is_in(
    task: Objective[Rows], model: ModelInput
) -> None:
    before = rows(model, 8)
    ids, labels = collated(task, before)
    for n in range(8):
        alone_ids, alone_labels = collated(task, before[n : n + 1], first=n)
        assert (alone_ids[0] == ids[n]).all() and (alone_labels[0] == labels[n]).all()


def test_each_epoch_and_each_seed_masks_otherwise(
    task: Objective[Rows], model: ModelInput, tmp_path: Path
) -> None:
    before = rows(model, 8)
    other_seed = task_named("masked-lm").objective(_config(tmp_path, "seed=7"), model, None)
    masks = [
        (collated(task, before, epoch=0)[1] != -100),
        (collated(task, before, epoch=1)[1] != -100),
        (collated(task, before, epoch=-1)[1] != -100),
        (collated(other_seed, before, epoch=0)[1] != -100),
    ]
    for n, mask in enumerate(masks):
        assert all((mask != other).any() for other in masks[n + 1 :])
