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
from transformers import LlamaConfig, LlamaForCausalLM

from runner.config.run_config import RunConfig
from runner.job.plan import TrainingPlan
from runner.training.engines.base import Engine
from runner.training.setup import make_engine
from tests.runner.training.engines.conftest import RUN_FILE

# Several: equal blocks must be one graph, not one each.
LAYERS = 3


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """What torch captures, in order; it runs as captured."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
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

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, bos_token_id=0, eos_token_id=0, hidden_size=16,
                intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
                num_key_value_heads=1,
            )
        )  # fmt: skip
        # As with LoRA: blocks have weights that are not trained.
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "mlp" not in name

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")


def made(folder: Path, engine: str, precision: str, *, compiled: bool) -> Engine:
    """An engine around new, equal weights."""
    (folder / "run.yaml").write_text(RUN_FILE)
    name = "deepspeed" if engine.startswith("zero") else engine
    overrides = [f"engine.name={name}", f"compile={json.dumps(compiled)}"]
    config = RunConfig.load(folder / "run.yaml", overrides)
    zero = int(engine[-1]) if engine.startswith("zero") else 3 if engine == "fsdp" else 0
    plan = TrainingPlan(8, 1, 2, 2, 1, precision, zero, ())
    return make_engine(Trained(), config, plan, torch.device("cpu"))


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
    ("engine", "precision"), [("ddp", "fp32"), ("fsdp", "fp32"), ("zero3", "bf16")]
)
def test_equal_blocks_are_one_graph_in_which_attention_has_no_mask(
    ranks: object,
    graphs: list[torch.fx.GraphModule],
    tmp_path: Path,
    engine: str,
    precision: str,
) -> None:
    eager = made(tmp_path, engine, precision, compiled=False)
    expected = [one_step(eager, step) for step in range(3)]
    assert not graphs
    compiled = made(tmp_path, engine, precision, compiled=True)
    found = [one_step(compiled, step) for step in range(3)]

    assert found == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)
    assert len(graphs) == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert attention(graphs[0]) == [{"attn_mask": None, "is_causal": True}]
    assert any(f"block by block, {LAYERS} x " in note for note in compiled.notes)
    # An evaluation takes a graph of its own, once.
    for step in range(3, 5):
        with torch.no_grad():
            compiled.forward({"ids": torch.ones(2, 12, dtype=torch.long)})
        one_step(compiled, step)
    assert len(graphs) == 2
    # Nobody sees it in what is saved.
    assert list(compiled.export()) == list(eager.export())
