"""The loss of the language tasks: at masked positions only, and in parts where logits are many."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers.activations import NewGELUActivation

from runner.tasks import causal_lm, masked_lm
from runner.tasks.masked_lm import guessed_positions
from runner.training.components import language
from runner.training.components.device import SWITCH, use_tanh_gelu
from tests.runner.tasks.test_documents_apart import ENCODERS, rows, small_model


def module_of(kind: str, layout: str = "alone") -> tuple[Any, dict[str, Any]]:
    """The model of a kind with the loss that its task makes, and a batch with padding."""
    model, causal = small_model(kind), kind not in ENCODERS
    given = (
        rows([9, 11], [20], layout=layout)
        if layout == "separate"
        else rows([9], [20], layout=layout)
    )
    labels = np.where(given.documents > 0, given.ids, -100)
    labels[:, ::3] = -100
    batch = {"input_ids": given.ids, "labels": labels}
    if causal:
        module = language.Language(model, causal=True, head=methodcaller("get_output_embeddings"))
    else:
        batch["guessed"] = masked_lm.guessed_positions(labels, static=True)

        def head(model: Any) -> Any:
            return getattr(model, masked_lm.HEADS[kind])

        module = language.Language(model, causal=False, head=head)
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    return module, tensors | language.position_inputs(given, language.first_position(model.config))


def every_head() -> list[str]:
    return sorted({*causal_lm.HEADS, *masked_lm.HEADS} & {*ENCODERS, *causal_lm.HEADS})


def expected_loss(module: Any, batch: dict[str, Any], **settings: Any) -> Any:
    """The loss from all logits of the model."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits, labels = module.model(**inputs).logits, batch["labels"]
    if "guessed" not in batch:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100, **settings
    )


def gradients(module: Any, loss: Any) -> dict[str, Any]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("at_once", [2**26, 64 * 5], ids=["whole", "in parts"])
@pytest.mark.parametrize("kind", every_head())
def test_the_loss_is_that_of_all_logits_and_so_are_its_gradients(
    kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "LOGITS_AT_ONCE", at_once)
    module, batch = module_of(kind)
    expected = expected_loss(module, batch)
    wanted = gradients(module, expected)
    found = module(**batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in gradients(module, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_batch_with_a_label_at_every_place_has_no_place_to_add() -> None:
    assert guessed_positions(np.ones((2, 1), np.int64), static=True).tolist() == [0, 1]


def test_gelu_new_is_computed_in_one_pass_unless_the_user_says_otherwise() -> None:
    model, inputs = small_model("gpt2"), torch.arange(20)[None]
    before = model(inputs).logits
    assert use_tanh_gelu(model, {SWITCH: "reference"}) == ""
    assert sum(isinstance(m, NewGELUActivation) for m in model.modules()) == 2
    assert "same formula" in use_tanh_gelu(model, {})
    assert not any(isinstance(m, NewGELUActivation) for m in model.modules())
    torch.testing.assert_close(model(inputs).logits, before, rtol=0, atol=1e-6)
    assert use_tanh_gelu(model, {}) == ""
    assert model.config.activation_function == "gelu_new"  # what is exported stays


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_label_smoothing_is_that_of_torch_in_training_and_absent_in_evaluation(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "LOGITS_AT_ONCE", 64 * 5)
    module, batch = module_of(kind)
    module.model.eval()  # no dropout, in both
    module._smoothing = 0.1
    module.training = True
    smoothed = expected_loss(module, batch, label_smoothing=0.1)
    torch.testing.assert_close(module(**batch), smoothed)
    module.training = False
    plain = expected_loss(module, batch)
    torch.testing.assert_close(module(**batch), plain)
    assert not torch.isclose(plain, smoothed)
