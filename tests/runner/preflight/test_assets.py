"""Tokenizers and weights that do not fit the model are found by `check`, in their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import Inputs, ModelInput, resolve
from runner.job.check import check_everything
from runner.job.findings import Findings
from runner.job.job import Job
from runner.job.model import newer_transformers
from runner.job.with_torch import judge
from runner.job.without_torch import check_config, compare
from runner.run_folder.layout import RunFolder
from stage.digests import hash_file
from tests.runner.conftest import Cluster

GPT2 = {"task": "causal-lm", "model": {"asset": "tiny-gpt2"}}


def looked_at(cluster: Cluster, change: Callable[[Path], None], **run: Any) -> Findings:
    """What is found where a model's folder was changed."""
    config = RunConfig.load(cluster.write(**run))
    inputs = resolve(config, cluster.bundle)
    inputs = changed(inputs, cluster, change)
    job = Job(config, inputs, RunFolder(cluster.output()), cluster.bundle, ())
    return check_everything(job, 2, None, ahead=True)


def changed(inputs: Inputs, cluster: Cluster, change: Callable[[Path], None]) -> Inputs:
    """The inputs with a copy of the model, in which something was changed."""
    folder = Path(shutil.copytree(inputs.model.path, cluster.folder / "model"))
    change(folder)
    digests = {path.name: hash_file(path).sha256 for path in folder.iterdir()}
    settings = json.loads((folder / "config.json").read_text())
    model = replace(inputs.model, path=folder, digests=digests, settings=settings)
    return replace(inputs, model=model)


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Changes a JSON file of a model."""

    def apply(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return apply


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes the weights of a model."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def without_layer(number: int) -> Callable[[dict[str, Any]], None]:
    def remove(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if f".{number}." in name]:
            del tensors[name]

    return remove


def narrow(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("layer.1.output.LayerNorm.weight"))
    tensors[name] = tensors[name][:-8].copy()


def fewer_rows(tensors: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith("word_embeddings.weight"):
            tensors[name] = tensors[name][:1000].copy()


def an_index(folder: Path) -> None:
    first = next(iter(load_file(folder / "model.safetensors")))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {first: "model-00002-of-00002.safetensors"}})
    )


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a tokenizer without tokens": (
        edit("tokenizer.json", lambda d: d["model"]["vocab"].clear()),
        ("has no tokenizer", "or they hold no tokens"),
    ),
    "a model without a tokenizer": (
        no_tokenizer,
        ("has no tokenizer: none of its files", "from the same repository"),
    ),
    "a vocabulary larger than the model": (
        edit("tokenizer.json", lambda d: d["model"]["vocab"].update(further=5000)),
        ("ids up to 5000", "stage both from one repository"),
    ),
    "a token that was added and is drawn at random": (
        edit(
            "tokenizer.json",
            lambda d: d["added_tokens"].append(
                {**d["added_tokens"][0], "id": 1024, "content": "<new>"}
            ),
        ),
        ("adds <new> (1024) beyond the model's 1024 ids", "resize_token_embeddings"),
    ),
    "a tokenizer that was cut off": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vo'),
        ("no tokenizer can be loaded",),
    ),
    "an embedding smaller than config.json says": (
        weights(fewer_rows),
        ("has shape [1000, 64], and by config.json [1024, 64]", "ids up to 1023"),
    ),
    "a config.json of a wider model": (
        edit("config.json", lambda d: d.update(hidden_size=128)),
        ("by config.json [128] (hidden_size is 128)",),
    ),
    "a config.json of a deeper model": (
        edit("config.json", lambda d: d.update(num_hidden_layers=9)),
        ("the weights lack bert.encoder.layer.2.", "which would be random"),
    ),
    "a layer that is missing": (
        weights(without_layer(1)),
        ("the weights lack bert.encoder.layer.1.",),
    ),
    "a layer of another width": (
        weights(narrow),
        ("layer.1.output.LayerNorm.weight has shape [56]",),
    ),
    "a shard that is missing": (
        an_index,
        ("names model-00002-of-00002.safetensors, which is not here", "Fetch the whole model"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_model_is_found_before_a_rank_starts(cluster: Cluster, fault: str) -> None:
    change, words = FAULTS[fault]
    found = looked_at(cluster, change)
    said = "\n".join(map(str, found.errors))
    for word in words:
        assert word in said
    assert {error.exit_code for error in found.errors} == {2}


def tokenizer(size: int, added: dict[int, str], **roles: str) -> Any:
    """What `compare` reads of a tokenizer."""
    words = {f"w{n}": n for n in range(size)} | {text: n for n, text in added.items()}
    return SimpleNamespace(
        get_vocab=lambda: words, added_tokens_decoder=added, chat_template="", **roles
    )


IMAGE = {262: "<image_soft_token>"}
LEGAL: dict[str, tuple[str, Any, int, int]] = {
    "an embedding padded to a multiple of 64": ("masked-lm", tokenizer(257, {}), 320, 0),
    "as many tokens as rows": ("causal-lm", tokenizer(1024, {}), 1024, 0),
    "a token of images beyond the rows (Gemma 3 1B)": (
        "causal-lm", tokenizer(262, IMAGE), 262, 1,
    ),
    "a padding token beyond the rows": (
        "instruction", tokenizer(320, {320: "<pad>"}, pad_token="<pad>"), 320, 1,
    ),
    "few tokens": ("causal-lm", tokenizer(100, {}), 300, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", LEGAL)
def test_an_odd_but_legal_vocabulary_is_not_refused(cluster: Cluster, case: str) -> None:
    task, made, rows, warned = LEGAL[case]
    found = Findings()
    compare(found, task, model_of(cluster), made, rows, "vocab_size")
    assert not found.errors
    assert len(found.others) == warned


def test_a_token_of_the_chat_template_beyond_the_rows_is_refused(cluster: Cluster) -> None:
    chat = tokenizer(320, {320: "<|im_start|>"})
    chat.chat_template = "<|im_start|>user"
    found = Findings()
    compare(found, "instruction", model_of(cluster), chat, 320, "vocab_size")
    assert "<|im_start|> (320)" in str(found.errors[0])


def model_of(cluster: Cluster) -> ModelInput:
    return resolve(RunConfig.load(cluster.write()), cluster.bundle).model


def test_weights_of_a_deeper_model_are_told() -> None:
    found = Findings()
    judge(found, "m", {"unexpected_keys": ["model.layers.4.up.weight", "lm_head.weight"]}, {})
    assert not found.errors
    assert "model.layers.4.up.weight, for which" in str(found.others[0])


def test_a_head_that_is_missing_or_of_another_size_is_drawn() -> None:
    found = Findings()
    head = ("classifier.weight", (2, 8), (5, 8))
    info = {"missing_keys": ["bert.pooler.dense.weight"], "mismatched_keys": [head]}
    judge(found, "m", info, {}, "bert.")
    assert (found.errors, found.others) == ([], [])


@pytest.mark.parametrize("run", [{}, GPT2, {"model": {"asset": "headless-bert"}}])
def test_good_models_are_silent(cluster: Cluster, run: dict[str, Any]) -> None:
    found = looked_at(cluster, lambda _folder: None, **run)
    assert (found.errors, found.others) == ([], [])


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"model_type": "qwen99", "transformers_version": "99.1.0"}, "99.1.0"),
        ({"model_type": "qwen99", "transformers_version": "99.1.0.dev0"}, "99.1.0"),
        ({"model_type": "qwen99", "transformers_version": "4.0.0"}, ""),
        ({"model_type": "qwen99"}, ""),
    ],
)
def test_a_config_of_a_newer_transformers_says_which(
    cluster: Cluster, settings: dict[str, str], written: str
) -> None:
    model = resolve(RunConfig.load(cluster.write()), cluster.bundle).model
    assert newer_transformers(replace(model, settings=settings)) == written


def test_check_refuses_a_model_that_only_a_newer_transformers_knows(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = RunConfig.load(cluster.write())
    model = resolve(config, cluster.bundle).model
    newer = {**model.settings, "model_type": "qwen99", "transformers_version": "99.1.0"}
    (tmp_path / "config.json").write_text(json.dumps(newer))
    with pytest.raises(UsageError, match="model type `qwen99`") as refused:
        check_config(config, replace(model, settings=newer, path=tmp_path))
    assert "transformers 99.1.0 wrote it" in refused.value.remedy
    assert "pip install -U 'transformers>=99.1.0'" in refused.value.remedy
