"""`compile: true`: which graphs torch captures, in every engine. One rank; nothing is compiled.

A backend that only counts takes the place of torch's own, which needs a C++ compiler and minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    ResNetConfig,
    ResNetForImageClassification,
)

from runner.config.run_config import RunConfig
from runner.job.plan import TrainingPlan
from runner.training.engines import Engine, make_engine
from runner.training.engines.compiling import compile_model

RUN_FILE = "format: 1\ntask: masked-lm\nmodel: {asset: bert}\ndataset: {asset: wikitext}\n"
# Several: equal blocks must be one graph, not one each.
LAYERS = 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is the only rank."""
    import torch.distributed as dist

    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    meeting = tmp_path_factory.mktemp("meeting") / "ranks"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables | {"DS_ACCELERATOR": "cpu"}).items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """What torch captures, in order; it runs as captured."""
    captured: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        captured.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    with torch._dynamo.config.patch(cache_size_limit=8):
        yield captured
    torch._dynamo.reset()


class Trained(nn.Module):
    """A transformer with its loss as a sum, as in tasks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        ends: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
        wide = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
        if kind == "gpt2":
            config: Any = GPT2Config(
                n_layer=LAYERS, n_embd=16, n_head=2, n_positions=16,
                resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **ends,
            )  # fmt: skip
        elif kind == "llama":
            config = LlamaConfig(**wide, **ends, intermediate_size=32, num_key_value_heads=1)
        else:
            drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = BertConfig(**wide, **drop, vocab_size=64, intermediate_size=32)
        auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
        self.model = auto.from_config(config)
        self.told = {} if kind == "bert" else {"use_cache": False}
        # As with LoRA: blocks have weights that are not trained.
        for name, parameter in self.named_parameters():
            if "mlp" in name or "intermediate" in name:
                parameter.requires_grad = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, **self.told).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")


def made(folder: Path, engine: str, kind: str, precision: str, *, compiled: bool) -> Engine:
    """An engine around new, equal weights."""
    (folder / "run.yaml").write_text(RUN_FILE)
    name = "deepspeed" if engine.startswith("zero") else engine
    overrides = [f"engine.name={name}", f"compile={json.dumps(compiled)}"]
    config = RunConfig.load(folder / "run.yaml", overrides)
    zero = int(engine[-1]) if engine.startswith("zero") else 3 if engine == "fsdp" else 0
    plan = TrainingPlan(8, 1, 2, 2, 1, precision, zero, ())
    return make_engine(Trained(kind), config, plan, torch.device("cpu"))


def one_step(engine: Engine, step: int) -> float:
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(step))
    loss = engine.forward({"ids": ids}, last=True) / 24
    engine.backward(loss, last=True)
    engine.step(0.01)
    return loss.item()


def attention(graph: torch.fx.GraphModule) -> list[dict[str, Any]]:
    """The mask, and whether it is causal, of each attention in a graph."""
    return [
        {name: node.kwargs[name] for name in ("attn_mask", "is_causal")}
        for node in graph.graph.nodes
        if "scaled_dot_product" in str(node.target)
    ]


@pytest.mark.parametrize(
    ("engine", "kind", "precision"),
    [
        ("ddp", "bert", "fp32"),
        ("fsdp", "llama", "fp32"),
        ("zero3", "gpt2", "bf16"),
    ],
)
def test_equal_blocks_are_one_graph_in_which_attention_has_no_mask(
    alone: None,
    graphs: list[torch.fx.GraphModule],
    tmp_path: Path,
    engine: str,
    kind: str,
    precision: str,
) -> None:
    eager = made(tmp_path, engine, kind, precision, compiled=False)
    expected = [one_step(eager, step) for step in range(3)]
    assert not graphs
    compiled = made(tmp_path, engine, kind, precision, compiled=True)
    found = [one_step(compiled, step) for step in range(3)]

    assert found == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)
    assert len(graphs) == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert attention(graphs[0]) == [{"attn_mask": None, "is_causal": kind != "bert"}]
    assert any(f"block by block, {LAYERS} x " in note for note in compiled.notes)
    # An evaluation takes a graph of its own, once.
    for step in range(3, 5):
        with torch.no_grad():
            compiled.forward({"ids": torch.ones(2, 12, dtype=torch.long)})
        one_step(compiled, step)
    assert len(graphs) == 2
    # Nobody sees it in what is saved.
    assert list(compiled.export()) == list(eager.export())


def test_a_model_without_transformer_blocks_is_compiled_whole(
    graphs: list[torch.fx.GraphModule],
) -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    model = ResNetForImageClassification(config)
    names = list(model.state_dict())
    assert compile_model(model).startswith("compile: the whole model (")
    for _ in range(2):
        model(torch.zeros(2, 3, 32, 32)).logits.sum().backward()
    assert len(graphs) == 1
    assert list(model.state_dict()) == names
