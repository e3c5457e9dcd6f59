"""Models of several kinds on two ranks: what rank 1 gets is what it would have loaded itself.

python -m tests.runner.training.spread_models FOLDER

Prints one line per model on rank 1: its name and what differs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from runner.config.run_config import RunConfig
from runner.inputs import ModelInput
from runner.training.loading import load_model
from runner.training.weights import Weights

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 64, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
# Name: the class that is saved, its settings, the type of the file, how it is loaded.
MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype, str, dict[str, Any]]] = {
    "rotary": ("LlamaForCausalLM", {"num_key_value_heads": 2}, torch.bfloat16, "CausalLM", {}),
    "long-rotary": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        torch.float32,
        "CausalLM",
        {},
    ),
    "tied": ("GPT2LMHeadModel", {}, torch.float16, "CausalLM", {}),
    "experts": ("MixtralForCausalLM", {"num_local_experts": 2}, torch.bfloat16, "CausalLM", {}),
    "no-head": ("BertModel", {}, torch.float32, "MaskedLM", {}),
    "sinusoidal": (
        "DistilBertForMaskedLM",
        {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "sinusoidal_pos_embds": True},
        torch.bfloat16,
        "MaskedLM",
        {},
    ),
    "batch-norm": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        torch.float16,
        "ImageClassification",
        {"fresh": ("classifier",), "num_labels": 7},
    ),
    "patches": (
        "ViTForImageClassification",
        {"image_size": 16, "patch_size": 8},
        torch.float32,
        "ImageClassification",
        {"fresh": ("classifier",), "num_labels": 7},
    ),
}


def saved(folder: Path, name: str) -> ModelInput:
    """A model with random weights, as a bundle would have it."""
    kind, extra, dtype, _, _ = MODELS[name]
    torch.manual_seed(1)
    made = getattr(transformers, kind)
    settings = made.config_class(**({**SMALL, **extra} if kind[:3] not in ("Res",) else extra))
    made(settings).to(dtype).save_pretrained(folder / name)
    told = json.loads((folder / name / "config.json").read_text())
    return ModelInput(name, folder / name, name, None, {}, told)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters under all their names, buffers that are saved or not, and plain attributes."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **{
            f"{path}.{key}": value
            for path, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        },
    }


def differences(config: RunConfig, source: ModelInput) -> list[str]:
    """What a spread model has that differs from the one which this rank loads itself."""
    _, _, _, task, extra = MODELS[source.asset]
    auto = getattr(transformers, f"AutoModelFor{task}")
    given = {key: value for key, value in extra.items() if key != "fresh"}
    torch.manual_seed(config.seed)
    own = auto.from_pretrained(
        str(source.path), dtype=torch.float32, ignore_mismatched_sizes="fresh" in extra, **given
    )
    spread, _ = load_model(auto, config, source, **extra)
    assert dist.get_rank() == 0 or all(p.is_meta for p in spread.parameters())
    # Every second model as DeepSpeed has it: its weights in bf16, its buffers as they are.
    narrow = torch.bfloat16 if list(MODELS).index(source.asset) % 2 else None
    weights = Weights(spread, torch.device("cpu"), narrow=narrow)
    weights.fill(spread.parameters())
    weights.finish()
    for parameter in own.parameters():
        parameter.data = parameter.data.to(narrow or parameter.dtype)
    expected, found = tensors(own.train()), tensors(spread)
    wrong = sorted(expected.keys() ^ found.keys())
    for name in expected.keys() & found.keys():
        one, other = expected[name], found[name]
        if (
            one.dtype != other.dtype
            or one.requires_grad != other.requires_grad
            or not torch.equal(one, other)
        ):
            wrong.append(name)
    ties = [len({id(t) for t in each.parameters()}) for each in (own, spread)]
    return [*wrong, *(["ties"] if ties[0] != ties[1] else [])]


def say(*words: str) -> None:
    """Prints a line in one write: both ranks print into one pipe."""
    os.write(1, f"{' '.join(words)}\n".encode())


def one_rank(rank: int, folder: Path) -> None:
    """All models, on one rank; then one whose weights do not fit."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    torch.set_num_threads(1)
    config = RunConfig.load(folder / "run.yaml", ["precision=fp32"])
    for name in MODELS:
        source = ModelInput(name, folder / name, name, None, {}, {})
        found = differences(config, source)
        if rank == 1:
            say(name, *found)
    (folder / "no-head" / "model.safetensors").write_bytes(b"damaged")
    try:
        differences_of_damaged(config, folder)
    except Exception as error:  # noqa: BLE001 - both ranks say what they raise
        say(f"damaged-{rank}", type(error).__name__)
    dist.destroy_process_group()


def differences_of_damaged(config: RunConfig, folder: Path) -> None:
    """Loads a model whose file is damaged."""
    source = ModelInput("no-head", folder / "no-head", "no-head", None, {}, {})
    load_model(transformers.AutoModelForMaskedLM, config, source)


if __name__ == "__main__":
    from torch.multiprocessing.spawn import start_processes

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = Path(sys.argv[1])
    for each in MODELS:
        saved(place, each)
    start_processes(one_rank, (place,), nprocs=2, start_method="fork")
