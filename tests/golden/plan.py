"""What is decided for a run: five run files, four devices, four numbers of ranks.

The models are those of the run files, by their config.json and the shapes of their weights. The
reasons of the choices are no part of it, because they may be worded otherwise; of a refusal the
numbers and settings are. In bytes: the model's state at each stage, the activations (of any micro
batch, and of each sequence), and the weights that a node of up to eight ranks holds while it loads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.job.host_memory import peak_at_load
from runner.job.memory import activation_bytes, state_needed
from runner.job.shapes import Device, ModelShape, with_lora
from tests.support.plans import decide

RUNS = Path(__file__).parents[2] / "runs"
GIB = 2**30
ALL_AUTO = "7b-all-auto"
TEXT = "format: 1\ntask: causal-lm\nmodel: {asset: mistral}\ndataset: {asset: texts}\n"
VALUE = re.compile(r"\d[\d.]* (?:[MG]B|ranks?|devices?)|(?:zero|offload): \w+")
"""What a refusal and its remedy say, without their words."""
RANKS = (1, 2, 8, 16)
DEVICES = {
    "CPU": Device.cpu(16 * GIB),
    "P100 16 GB": Device("cuda", "Tesla P100-PCIE-16GB", 16 * GIB, False, False, 64 * GIB),
    "V100 32 GB": Device("cuda", "Tesla V100-SXM2-32GB", 32 * GIB, False, True, 64 * GIB),
    "A800 80 GB": Device("cuda", "NVIDIA A800-SXM4-80GB", 80 * GIB, True, True, 128 * GIB),
}
BERT_LARGE = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 30522,
    "max_position_embeddings": 512,
}  # fmt: skip
GPT2_XL = {
    "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
VIT_TINY = {
    "model_type": "vit", "hidden_size": 192, "num_hidden_layers": 12, "image_size": 224,
    "patch_size": 16,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
    "max_position_embeddings": 32768,
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
    "input_layernorm": (4096,),
    "post_attention_layernorm": (4096,),
}
WEIGHTS_OF_MISTRAL = {
    "model.embed_tokens.weight": (32000, 4096),
    "lm_head.weight": (32000, 4096),
    "model.norm.weight": (4096,),
    **{f"model.layers.{n}.{name}.weight": s for n in range(32) for name, s in LAYER.items()},
}
# run file -> config.json of its model, number of parameters or shapes of the weights
MODELS: dict[str, tuple[dict[str, Any], int | Mapping[str, tuple[int, ...]]]] = {
    "bert-large-deepspeed": (BERT_LARGE, 335_174_458),
    "cifar10-ddp": (VIT_TINY, 5_717_416),
    "gpt2-xl-fsdp-offload": (GPT2_XL, 1_557_611_200),
    "neural-chat-qlora": (MISTRAL, WEIGHTS_OF_MISTRAL),
    ALL_AUTO: (MISTRAL, WEIGHTS_OF_MISTRAL),
}


def planned(run_file: Path, device: str, ranks: int) -> dict[str, Any]:
    """What is decided for a run file; or what a refusal names."""
    config = RunConfig.load(run_file)
    settings, weights = MODELS[run_file.stem]
    shapes = None if isinstance(weights, int) else weights
    number = weights if isinstance(weights, int) else sum(map(math.prod, weights.values()))
    shape = with_lora(ModelShape.of(settings, number), config, shapes, [])
    try:
        plan = decide(config, shape, DEVICES[device], ranks)
    except UsageError as error:
        return {"refused": VALUE.findall(f"{error.message} {error.remedy}")}
    decided = replace(config, precision=plan.precision)  # type: ignore[arg-type]
    return {
        "micro": plan.micro, "accumulation": plan.accumulation, "global": plan.total,
        "precision": plan.precision, "zero": plan.zero, "offload": plan.offload,
        "sequence_length": plan.sequence_length,
        "chosen": {choice.key: choice.value for choice in plan.choices},
        "state": [*state_needed(decided, shape, ranks).values()],
        "activations": activation_bytes(decided, shape, plan.sequence_length, plan.zero),
        "at_load": peak_at_load(decided, shape, plan, DEVICES[device], min(ranks, 8)),
    }  # fmt: skip


def record(folder: Path) -> str:
    """One plan in a line."""
    (folder / f"{ALL_AUTO}.yaml").write_text(TEXT, encoding="utf-8")
    lines = []
    for run in MODELS:
        path = (folder if run == ALL_AUTO else RUNS) / f"{run}.yaml"
        for device in DEVICES:
            for ranks in RANKS:
                row = {"run": run, "device": device, "ranks": ranks, **planned(path, device, ranks)}
                lines.append(json.dumps(row))
    return "[\n" + ",\n".join(lines) + "\n]\n"
