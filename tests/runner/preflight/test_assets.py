"""Tokenizers and weights that do not fit the model are found by `check`, in their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import Inputs, resolve
from runner.job.findings import Findings
from runner.job.model import check_model, newer_transformers
from runner.job.preflight import examine
from runner.job.vocabulary import Vocabulary, check_vocabulary, read_vocabulary
from runner.job.weights import check_weights
from runner.run_folder.layout import RunFolder
from tests.runner.conftest import Cluster

GPT2 = {"task": "causal-lm", "model": {"asset": "tiny-gpt2"}}


def looked_at(cluster: Cluster, change: Callable[[Path], None], **run: Any) -> Findings:
    """What is found where a model's folder was changed."""
    config = RunConfig.load(cluster.write(**run))
    inputs = resolve(config, cluster.bundle)
    return examine(config, changed(inputs, cluster, change), RunFolder(cluster.output()), 2)


def changed(inputs: Inputs, cluster: Cluster, change: Callable[[Path], None]) -> Inputs:
    """The inputs with a copy of the model, in which something was changed."""
    folder = Path(shutil.copytree(inputs.model.path, cluster.folder / "model"))
    change(folder)
    digests = {path.name: "" for path in folder.iterdir()}
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
        ("tokenizer.json holds no tokens", "Stage the tokenizer again"),
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
            lambda d: d["added_tokens"].append({"id": 1024, "content": "<new>"}),
        ),
        ("adds <new> (1024) beyond the model's 1024 ids", "resize_token_embeddings"),
    ),
    "a tokenizer that was cut off": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vo'),
        ("not a tokenizer that can be read", "Stage the tokenizer's files again"),
    ),
    "an embedding smaller than config.json says": (
        weights(fewer_rows),
        ("has 1000 rows, vocab_size is 1024", "ids up to 1023"),
    ),
    "a config.json of a wider model": (
        edit("config.json", lambda d: d.update(hidden_size=128)),
        ("columns, hidden_size is 128",),
    ),
    "a config.json of a deeper model": (
        edit("config.json", lambda d: d.update(num_hidden_layers=9)),
        ("it has 9 layers", "these would be random"),
    ),
    "a layer that is missing": (
        weights(without_layer(1)),
        ("the weights lack 1 of them (1)",),
    ),
    "a layer of another width": (weights(narrow), ("output.LayerNorm.weight of layer 1",)),
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


def test_a_vocab_txt_without_a_line_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("")
    found = read_vocabulary(tmp_path)
    assert found is not None
    errors, _ = check_vocabulary("bert", "masked-lm", found, 30522, "vocab_size")
    assert "vocab.txt holds no tokens" in str(errors[0])


def test_slow_files_are_counted_as_transformers_counts_them(tmp_path: Path) -> None:
    """Lines of vocab.txt end with a newline only: other separators of Unicode are tokens."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n\u2028\n\x85\nword\n", encoding="utf-8")
    (tmp_path / "added_tokens.json").write_text('{"<a>": 4}')
    found = read_vocabulary(tmp_path)
    assert found is not None and (found.size, found.highest, found.added) == (4, 3, {4: "<a>"})
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 7}')
    found = read_vocabulary(tmp_path)
    assert found is not None and (found.size, found.highest) == (2, 7)
    (tmp_path / "vocab.json").unlink()
    assert read_vocabulary(tmp_path) is None


LEGAL: dict[str, tuple[str, Vocabulary, int, int]] = {
    "an embedding padded to a multiple of 64": (
        "masked-lm", Vocabulary("tokenizer.json", 50257, 50256), 50304, 0,
    ),
    "as many tokens as rows": ("causal-lm", Vocabulary("tokenizer.json", 1024, 1023), 1024, 0),
    "a token of images beyond the rows (Gemma 3 1B)": (
        "causal-lm",
        Vocabulary("tokenizer.json", 262144, 262143, {262144: "<image_soft_token>"}),
        262144,
        1,
    ),
    "a padding token beyond the rows": (
        "instruction",
        Vocabulary("tokenizer.json", 32000, 31999, {32000: "<pad>"}, template="{{ m }}</s>"),
        32000,
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEGAL)
def test_an_odd_but_legal_vocabulary_is_not_refused(case: str) -> None:
    task, vocabulary, rows, warned = LEGAL[case]
    errors, warnings = check_vocabulary("m", task, vocabulary, rows, "vocab_size")
    assert not errors
    assert len(warnings) == warned


def test_a_token_of_the_chat_template_beyond_the_rows_is_refused() -> None:
    chat = Vocabulary(
        "tokenizer.json", 32000, 31999, {32000: "<|im_start|>"}, template="<|im_start|>user"
    )
    errors, _ = check_vocabulary("m", "instruction", chat, 32000, "vocab_size")
    assert "<|im_start|> (32000)" in str(errors[0])


def a_llama(layers: int, **extra: list[int]) -> dict[str, list[int]]:
    inner = {"input_layernorm.weight": [8], "mlp.up_proj.weight": [16, 8]}
    shapes = {
        f"model.layers.{number}.{name}": shape
        for number in range(layers)
        for name, shape in inner.items()
    }
    return {"model.embed_tokens.weight": [100, 8], **shapes, **extra}


LLAMA = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 4}
ODD: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "as it should be": (LLAMA, a_llama(4)),
    "experts": (LLAMA, a_llama(4, **{"model.layers.2.mlp.experts.77.w1.weight": [4, 8]})),
    "layers for multi-token prediction": ({**LLAMA, "num_nextn_predict_layers": 1}, a_llama(5)),
    "layers that are shared (ALBERT)": (
        {"vocab_size": 100, "hidden_size": 8, "embedding_size": 4, "num_hidden_layers": 12,
         "num_hidden_groups": 1},
        {"albert.embeddings.word_embeddings.weight": [100, 4],
         "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight": [16, 8]},
    ),
    "an embedding narrower than the model (OPT 350M)": (
        {"vocab_size": 100, "hidden_size": 8, "word_embed_proj_dim": 4, "num_hidden_layers": 1},
        {"model.decoder.embed_tokens.weight": [100, 4],
         "model.decoder.layers.0.fc1.weight": [16, 8]},
    ),
    "a first layer without a norm (ModernBERT)": (
        LLAMA,
        {n: s for n, s in a_llama(4).items() if n != "model.layers.0.input_layernorm.weight"},
    ),
    "weights that are quantised": (
        {**LLAMA, "quantization_config": {"bits": 4}},
        a_llama(4, **{"model.embed_tokens.weight": [1, 1]}),
    ),
    "a tower of images beside the text": (
        {"text_config": LLAMA, "vision_config": {"num_hidden_layers": 6}},
        a_llama(4, **{f"vision.encoder.layers.{n}.w": [3, 3] for n in range(6)}),
    ),
    "an encoder and a decoder of two depths (BART)": (
        {"is_encoder_decoder": True, "num_hidden_layers": 2, "d_model": 8, "vocab_size": 100},
        {f"model.decoder.layers.{n}.fc1.weight": [16, 8] for n in range(6)},
    ),
    "no vocab_size in config.json": ({"hidden_size": 8}, a_llama(4)),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_but_legal_weights_are_silent(case: str) -> None:
    assert check_weights("m", *ODD[case]) == ([], [])


def test_weights_of_a_deeper_model_are_told() -> None:
    errors, warnings = check_weights("m", LLAMA, a_llama(6))
    assert not errors
    assert "only the first 4 are loaded" in str(warnings[0])


def test_a_weight_that_only_one_inner_layer_lacks_is_found() -> None:
    shapes = a_llama(4)
    del shapes["model.layers.2.mlp.up_proj.weight"]
    errors, _ = check_weights("m", LLAMA, shapes)
    assert "layer 2 lacks mlp.up_proj.weight" in str(errors[0])


@pytest.mark.parametrize("run", [{}, GPT2, {"model": {"asset": "headless-bert"}}])
def test_good_models_are_silent(cluster: Cluster, run: dict[str, Any]) -> None:
    found = looked_at(cluster, lambda _folder: None, **run)
    assert (found.errors, found.others) == ([], [])


def test_neither_torch_nor_transformers_is_needed_for_a_faulty_tokenizer(
    cluster: Cluster, run_python: Callable[[str], Any]
) -> None:
    code = f"""
import sys
from pathlib import Path
from runner.job import vocabulary
from runner.job import weights
from runner.job import access
from runner.job import places
from runner.job import preflight
print(vocabulary.read_vocabulary(Path({str(cluster.bundle)!r}) / "data/models/tiny-bert").size)
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = run_python(code)
    assert done.stdout.split() == ["1024", "False", "False"], done.stderr


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


def test_check_refuses_a_model_that_only_a_newer_transformers_knows(cluster: Cluster) -> None:
    config = RunConfig.load(cluster.write())
    model = resolve(config, cluster.bundle).model
    newer = {**model.settings, "model_type": "qwen99", "transformers_version": "99.1.0"}
    with pytest.raises(UsageError) as refused:
        check_model(config, replace(model, settings=newer))
    assert "was written by transformers 99.1.0" in refused.value.message
    assert "pip install -U 'transformers>=99.1.0'" in refused.value.remedy
