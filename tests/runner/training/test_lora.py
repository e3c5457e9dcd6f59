"""LoRA and QLoRA on two real ranks.

Every engine learns the same and resumes exactly, and plain peft loads the adapter.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    ResNetConfig,
    ResNetForImageClassification,
)

from runner.config.run_config import RunConfig
from runner.data.prepare import store_path
from runner.data.recipe import recipes
from runner.data.store import Rows, Store, Stores
from runner.from_stage import UsageError
from runner.inputs import ModelInput, resolve
from runner.training.loading import attach, load_model, merged, write_adapter
from runner.training.saving.export import loading_code
from tests.runner.conftest import Cluster, in_ranks, metrics

pytestmark = pytest.mark.xdist_group("twins")
# Every linear layer, as in QLoRA. Between random frozen weights, attention alone learns less in six
# steps than one batch differs from the next.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {"rank": 8, "alpha": 32, "dropout": 0.05, "targets": TARGETS}
NF4 = {"bits": 4, "type": "nf4", "double": True}
RUNS: dict[str, dict[str, Any]] = {
    "lora-ddp": {"engine": {"name": "ddp"}},
    "lora-zero3": {"engine": {"zero": 3}},
    "lora-fsdp": {"engine": {"name": "fsdp"}},
    "nf4-ddp": {"engine": {"name": "ddp"}, "quantization": NF4, "activation_checkpointing": True},
    "nf4-zero2": {"engine": {"zero": 2}, "quantization": NF4},
    "int8-ddp": {"engine": {"name": "ddp"}, "quantization": {"bits": 8}},
}
# Stopped after step 3 and resumed; then the matrices are merged into the model.
STOPPED = ("lora-ddp", "nf4-zero2")
STEPS = 6
SAME_MODEL = [(name, f"{name.partition('-')[0]}-ddp") for name in RUNS if not name.endswith("-ddp")]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, twins_bundle: Path) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"), twins_bundle)


def write(cluster: Cluster, name: str, steps: int, settings: dict[str, Any], **lora: Any) -> Path:
    return cluster.write(
        name, task="causal-lm", model={"asset": "tiny-chat"}, steps=steps, lora={**LORA, **lora},
        dataset={"asset": "reference", "limit": {"train": 200, "validation": 24}},
        optimizer={"lr": 0.01}, schedule={"name": "constant", "warmup": 0},
        checkpoint={"every": 100, "keep": 1},
        **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(shared_cluster: Cluster) -> Cluster:
    """All runs trained to the end on two ranks; two of them stopped and resumed."""
    runs = [write(shared_cluster, name, STEPS, settings) for name, settings in RUNS.items()]
    for name in STOPPED:
        often = {**RUNS[name], "evaluation": {"every": 1}}  # must not change the result
        runs.append(write(shared_cluster, f"{name}-stopped.1", 3, often))
        runs.append(write(shared_cluster, f"{name}-stopped.2", STEPS, often, merge=True))
    shared_cluster.prepare(runs[0])
    in_ranks(shared_cluster, 2, *runs)
    return shared_cluster


def losses(cluster: Cluster, name: str) -> list[float]:
    found = metrics(cluster.output(name))
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    return [loss for _, loss in found]


@pytest.mark.parametrize(("name", "like"), SAME_MODEL)
def test_every_engine_learns_the_same(trained: Cluster, name: str, like: str) -> None:
    assert losses(trained, name) == pytest.approx(losses(trained, like), abs=1e-4)


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_that_was_stopped_and_evaluated_at_every_step_resumes_exactly(
    trained: Cluster, name: str
) -> None:
    assert losses(trained, f"{name}-stopped") == pytest.approx(losses(trained, name), abs=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_plain_peft_loads_the_adapter_and_gives_the_loss_of_the_run(
    trained: Cluster, name: str
) -> None:
    from peft import PeftModel

    folder = trained.output(name) / "model"
    settings = json.loads((folder / "adapter_config.json").read_text())
    asset = resolve(RunConfig.load(trained.folder / f"{name}.yaml"), trained.bundle).model
    assert (settings["base_model_name_or_path"], settings["revision"]) == (
        "acme/tiny-chat",
        asset.commit,
    )
    assert (settings["task_type"], settings["target_modules"]) == (
        "CAUSAL_LM",
        sorted(LORA["targets"]),
    )
    assert not (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
    model = PeftModel.from_pretrained(base(asset.path, RUNS[name].get("quantization")), str(folder))
    assert loss_of(model, trained, name) == pytest.approx(
        metrics(trained.output(name), "validation_loss")[-1][1]
    )


@pytest.mark.parametrize("name", STOPPED)
def test_what_is_merged_gives_the_loss_of_the_run(trained: Cluster, name: str) -> None:
    folder = trained.output(f"{name}-stopped")
    assert "quantization_config" not in json.loads((folder / "model" / "config.json").read_text())
    found = loss_of(base(folder / "model", None), trained, name)
    assert found == pytest.approx(metrics(folder, "validation_loss")[-1][1], abs=1e-5)


def base(folder: Path, quantization: dict[str, Any] | None) -> Any:
    """A model as a user of transformers loads it; none of its weights may be missing."""
    settings: Any = None
    if quantization:
        four = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        }
        settings = BitsAndBytesConfig(
            **(four if quantization["bits"] == 4 else {"load_in_8bit": True})
        )
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=settings, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = (
                False  # or bitsandbytes rounds the scales, see runner.training.loading
            )
    return model


def loss_of(model: Any, cluster: Cluster, name: str) -> float:
    """The mean loss over the validation split, as transformers computes it."""
    config = RunConfig.load(cluster.folder / f"{name}.yaml")
    (recipe,) = recipes(config, resolve(config, cluster.bundle), 32)["validation"]
    store = Stores([Store(store_path(recipe, cluster.output(name).parent / ".stores"))])
    rows = store.rows(list(range(len(store))), Rows.of)
    ids = torch.from_numpy(rows.ids)
    labels = ids.clone()
    labels[:, 1:][torch.from_numpy(rows.documents[:, 1:] != rows.documents[:, :-1])] = -100
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=ids, labels=labels).loss)


@pytest.mark.parametrize(
    ("asset", "task", "quantization"),
    [
        ("gpt2-bare", "causal-lm", None),
        ("gpt2-bare", "causal-lm", NF4),
        ("tiny-vit", "image-classification", None),
    ],
)
def test_merging_changes_nothing_in_layers_of_other_kinds(
    shared_cluster: Cluster, asset: str, task: str, quantization: dict[str, Any] | None
) -> None:
    """Layers that keep their weights transposed, and a new head that is trained whole."""
    images = task == "image-classification"
    data = {"asset": "cifar-10", "validation": "test"} if images else {"asset": "reference"}
    path = shared_cluster.write(
        "other", task=task, model={"asset": asset}, dataset=data, lora={},
        quantization=quantization, sequence_length=None, engine={"name": "ddp"},
    )  # fmt: skip
    config = RunConfig.load(path)
    source = resolve(config, shared_cluster.bundle).model
    auto = getattr(transformers, f"AutoModelFor{'ImageClassification' if images else 'CausalLM'}")
    extra: dict[str, Any] = {"fresh": ("classifier",), "num_labels": 10} if images else {}
    model, note = load_model(auto, config, source, **extra)
    assert ("peft's own for gpt2" in note) or ("and all of classifier" in note)
    model.eval()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter, std=0.2)
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, 32, 32, generator=random)
    given = {"pixel_values": pixels} if images else {"input_ids": torch.arange(48).view(2, 24)}
    trained = {
        name: p.detach()
        for name, p in model.named_parameters()
        if quantization is None or p.requires_grad
    }
    bare, weights = merged(model, trained)
    whole = type(bare)(bare.config).eval()
    assert not whole.load_state_dict(weights, strict=False).unexpected_keys
    whole.tie_weights()
    assert torch.allclose(whole(**given).logits, model(**given).logits, atol=1e-4)


def test_an_adapter_of_a_local_model_loads_where_its_base_is(
    shared_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base was `../../my-llm`, which means nothing where the adapter is."""
    config = RunConfig.load(write(shared_cluster, "local", 1, {}))
    found = resolve(config, shared_cluster.bundle).model
    source = replace(found, commit=None, source="../../my-llm")
    model, _ = load_model(AutoModelForCausalLM, config, source)
    write_adapter(model, dict(model.named_parameters()), adapter := tmp_path / "model")
    (tmp_path / source.asset).symlink_to(source.path)
    monkeypatch.chdir(tmp_path)
    assert "lora_A" in str(AutoModelForCausalLM.from_pretrained(adapter))
    code, places = loading_code(config, source).removeprefix("```python").split("```")
    assert "`BASE` is `../../my-llm` of the manifest" in places and "`data/models/" in places
    exec(
        code.replace("BASE", str(source.path))
        .replace('"."', f"{str(adapter)!r}")
        .replace("tokenizer =", "# "),
        values := dict[str, Any](),
    )
    assert "lora_A" in str(values["model"])


def test_batch_norm_under_lora_keeps_the_statistics_that_its_adapter_is_used_with(
    tmp_path: Path,
) -> None:
    """Running statistics that moved in training changed the validation loss, but no adapter."""
    (tmp_path / "run.yaml").write_text(
        "format: 1\ntask: image-classification\nmodel: {asset: m}\ndataset: {asset: d}\n"
        "lora: {rank: 2, targets: [classifier.1]}\n"
    )
    shape: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    model = ResNetForImageClassification(ResNetConfig(**shape, layer_type="basic", num_labels=3))
    source = ModelInput("m", tmp_path, "acme/m", None, {}, {"model_type": "resnet"})
    config = RunConfig.load(tmp_path / "run.yaml")
    with pytest.raises(UsageError, match=r"does not have 1 weights .*: they would stay random"):
        attach(model, config, source, ["classifier.1.weight", "resnet.embedder.x"], ("classifier",))
    message = attach(model, config, source, [], ())
    assert "batch norm stays at the base's running statistics" in message
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    model.train()  # as the loop does around an evaluation
    model(pixel_values=1 + 3 * torch.randn(8, 3, 32, 32))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
