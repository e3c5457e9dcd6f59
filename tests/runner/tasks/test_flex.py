"""Documents kept apart by flex attention: the same losses and gradients as with a mask.

Flex attention has no backward pass for CPUs: torch refuses it before it begins. The formula that
torch has for both passes where nothing is compiled runs on CPUs, though, and is what runs here.
tests/gpu/test_kernels.py compares the compiled kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

from runner.config.run_config import RunConfig
from runner.data.store import IGNORED, StoreFacts
from runner.inputs import resolve
from runner.tasks import task_named
from runner.training.components import language
from runner.training.components.language import (
    BLOCK,
    block_mask,
    blocks_of,
    choose_flex,
    whole_blocks,
)
from tests.runner.tasks.test_documents_apart import rows, small_model
from tests.support.training.calls import WAITS, Calls


def sees(documents: Any) -> Any:
    """(rows, length, length): which token sees which."""
    same = documents[:, :, None] == documents[:, None, :]
    return same & np.tri(documents.shape[1], dtype=bool)


PACKED = ([150, 40, 190, 4], [384], [20] * 15)
ON_A100 = (8, 0)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flex attention by its formula, also backward."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def test_a_block_mask_is_made_without_waiting_for_the_device() -> None:
    documents = whole_blocks(rows(*PACKED, layout="separate")).documents
    given = torch.from_numpy(documents), torch.from_numpy(blocks_of(documents))
    with Calls() as calls:
        mask = block_mask(*given)
    assert calls.names and not WAITS & {*calls.names}
    assert mask.shape == (3, 1, 384, 384)
    # On an H100 views gave gradients that were wrong by 80 percent for all rows but the first.
    parts = {name: part for name, part in vars(mask).items() if isinstance(part, torch.Tensor)}
    assert len(parts) == 8 and all(part.is_contiguous() for part in parts.values())


def test_losses_and_gradients_are_those_of_a_mask(uncompiled: None) -> None:
    assert_like_a_mask("llama", "cpu", 1e-5)


def assert_like_a_mask(kind: str, device: str, difference: float) -> None:
    """Compares a small model with flex attention with the same model with SDPA and a mask."""
    model = small_model(kind).to(device)
    by_mask = language.Language(model, causal=True)
    by_blocks = language.Language(copy.deepcopy(model), causal=True)
    by_blocks.model.set_attn_implementation("flex_attention")
    given = language.whole_blocks(rows(*PACKED, layout="separate"))
    ids = torch.from_numpy(given.ids)
    labels = ids.masked_fill(torch.from_numpy(~given.learned), IGNORED)
    batch = {"input_ids": ids, "labels": labels, **language.position_inputs(given, 0)}
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    blocks = torch.from_numpy(language.blocks_of(given.documents)).to(device)
    expected, found = by_mask(**batch), by_blocks(**batch, blocks=blocks)
    (expected / 1000).backward()
    (found / 1000).backward()
    assert found.item() == pytest.approx(expected.item(), rel=difference)
    for (name, ours), theirs in zip(
        by_blocks.named_parameters(), by_mask.parameters(), strict=True
    ):
        assert theirs.grad is not None and ours.grad is not None and theirs.grad.norm() > 0
        assert (ours.grad - theirs.grad).norm() < difference * theirs.grad.norm(), name


def task(bundle: Any, folder: Any) -> Any:
    (folder / "run.yaml").write_text(
        "format: 1\ntask: causal-lm\nmodel: {asset: tiny-chat, init: scratch}\n"
        "dataset: {asset: reference}\n"
    )
    config = RunConfig.load(folder / "run.yaml")
    facts = StoreFacts({}, "", [], documents="separate")
    return task_named("causal-lm").objective(config, resolve(config, bundle).model, facts)


def test_a_batch_names_its_blocks_only_where_flex_attention_is_used(
    twins_bundle: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, uncompiled: None
) -> None:
    on_cpu = task(twins_bundle, tmp_path)
    monkeypatch.setattr(language, "gpu_capability", lambda: ON_A100)
    on_gpu = task(twins_bundle, tmp_path)
    given = rows([30, 20], [44], layout="separate")
    masked, blocked = on_cpu.collate(given, []), on_gpu.collate(given, [])
    assert "blocks" not in masked and masked["input_ids"].shape == (2, 50)
    assert blocked["blocks"].shape == (2, 2, 1, 2) and blocked["input_ids"].shape == (2, 128)
    assert "blocks" not in on_gpu.collate(given._replace(layout="alone"), [])
    for count in ("num_tokens", "num_predictions"):
        assert getattr(on_gpu, count)(blocked) == getattr(on_cpu, count)(masked)
    expected = on_cpu.module(**masked).item()
    assert on_gpu.module(**blocked).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "capability", "switch", "why"),
    [
        ("llama", ON_A100, {}, None),
        ("qwen3", (9, 0), {}, None),
        ("llama", None, {}, "GPUs only"),
        ("llama", (7, 0), {}, "8.0 or newer, this one is 7.x"),
        ("llama", ON_A100, {"AIRLIFT_KERNELS": "reference"}, "AIRLIFT_KERNELS=reference says so"),
        ("gpt2", ON_A100, {}, "transformers has no flex attention for gpt2"),
        ("bert", ON_A100, {}, "no dropout, and this model's attention has 0.1"),
    ],
)
def test_what_cannot_use_it_has_a_mask_and_says_why(
    kind: str, capability: Any, switch: dict[str, str], why: str | None
) -> None:
    chosen, line = choose_flex(small_model(kind), capability, switch)
    assert chosen == (why is None)
    assert (why or "AIRLIFT_KERNELS=reference turns it off") in line


def test_the_blocks_are_those_in_which_a_token_sees_another() -> None:
    given = whole_blocks(rows(*PACKED, [1] * 300, layout="separate"))
    number, length = given.documents.shape
    count = length // BLOCK
    pairs = sees(given.documents).reshape(number, count, BLOCK, count, BLOCK)
    wholly, at_all = pairs.all((2, 4)), pairs.any((2, 4))
    found = np.zeros((number, 2, count, count), dtype=bool)
    blocks = blocks_of(given.documents)
    for row, kind, query in np.ndindex(number, 2, count):
        amount, *keys = blocks[row, kind, query]
        found[row, kind, query, keys[:amount]] = True
    assert (found[:, 1] == wholly).all()
    assert (found[:, 0] == (at_all & ~wholly)).all()
    assert found[:, 1].any() and found[:, 0].any() and not found.any(1).all()
