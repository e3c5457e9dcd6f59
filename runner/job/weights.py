"""Compares the shapes in the safetensors headers with config.json, layer by layer. Pure.

transformers draws a weight that is missing at random, with one line in a log, and ends a rank where
a shape is another. Both are known here from the headers alone. What is legal stays silent: heads
that are missing, embeddings tied to the output, experts, layers that are shared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import StageError, UsageError
from runner.job.findings import Finding

Shapes = Mapping[str, Sequence[int]]
EMBEDDINGS = (
    "embed_tokens.weight", "word_embeddings.weight", "word_embedding.weight", "wte.weight",
    "embed_in.weight", "tok_embeddings.weight", "shared.weight",
)  # fmt: skip
"""The ends of the names of token embeddings in transformers."""
WIDTHS = ("hidden_size", "n_embd", "dim", "d_model", "embedding_size", "word_embed_proj_dim")
"""Keys of config.json that can be the width of an embedding (ALBERT, OPT: not the hidden size)."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
IN_LAYER = re.compile(r"(?P<stack>(?:.*\.)?(?:layers?|h|blocks?))\.(?P<number>\d+)\.(?P<name>.+)")
NORMS = re.compile(
    r"(?:input_layernorm|post_attention_layernorm|ln_1|ln_2|attention\.output\.LayerNorm"
    r"|output\.LayerNorm|layernorm_before|layernorm_after)\.weight"
)
"""Weights with the width of the hidden states in every architecture that has them."""
OTHER_TOWERS = re.compile(r"vision|visual|image|audio|speech|mtp|draft")
"""Stacks of layers that `text_config` does not describe."""
SHARED = ("num_hidden_groups", "num_hidden_layers_shared")
"""Keys of models with fewer stored layers than layers (ALBERT)."""
EXTRA_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of models that store layers beyond those of config.json (multi-token prediction)."""

WRAPPERS = {
    "base_model.model.": "from peft, without merge_and_unload()",
    "_orig_mod.": "after torch.compile",
    "module.": "from within DistributedDataParallel or DeepSpeed",
}
"""The begin of all names in weights that were saved with a wrapper around the model."""


@dataclass(frozen=True)
class Embedding:
    """The token embedding in the weights."""

    name: str
    rows: int
    width: int


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that describes the language model."""
    inner = settings.get("text_config")
    return inner if isinstance(inner, dict) else settings


def embedding_of(shapes: Shapes) -> Embedding | None:
    """Returns the token embedding; None: there is none, or several of different shapes."""
    found = [
        Embedding(name, shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2 and any(name == end or name.endswith(f".{end}") for end in EMBEDDINGS)
    ]
    same = len({(embedding.rows, embedding.width) for embedding in found}) == 1
    return found[0] if same else None


def check_weights(
    asset: str, settings: Mapping[str, Any], shapes: Shapes
) -> tuple[list[StageError], list[Finding]]:
    """Compares weights with the config.json beside them.

    Args:
        asset: the name of the model, for messages.
        settings: the content of config.json.
        shapes: name -> shape of each weight.

    Returns:
        Errors, and warnings.
    """
    if not shapes or "quantization_config" in settings:
        return [], []  # packed weights have shapes of their own
    if wrapped := _wrapped(asset, shapes):
        return [wrapped], []
    text = text_settings(settings)
    problems = _of_embedding(text, embedding_of(shapes))
    warnings = []
    stack = _deepest(shapes)
    two_stacks = bool(settings.get("is_encoder_decoder"))  # each has a number of layers of its own
    if stack and not two_stacks and not any(text.get(key) for key in SHARED):
        missing, extra = _of_layers(text, stack)
        problems += missing or _of_norms(text, stack) or _of_names(stack)
        warnings += extra
    remedy = "Stage config.json and weights again, both from one revision: see `stage show BUNDLE`."
    errors: list[StageError] = [
        UsageError(f"`{asset}`: its weights and its config.json differ: {problem}.", remedy)
        for problem in problems
    ]
    return errors, [Finding("warning", f"`{asset}`: {warning}.", remedy) for warning in warnings]


def _wrapped(asset: str, shapes: Shapes) -> StageError | None:
    """The error of weights that all have a wrapper's name before their own."""
    for prefix, how in WRAPPERS.items():
        if all(name.startswith(prefix) for name in shapes):
            return UsageError(
                f"`{asset}`: its weights are named `{prefix}...`: they were saved {how}, and "
                "transformers would find none of them and draw all at random.",
                "Save the model again with `save_pretrained` of the model inside, or rename: "
                "save_file({k.removeprefix('" + prefix + "'): v for k, v in "
                "load_file(F).items()}, F, {'format': 'pt'}), of safetensors.torch; then stage it.",
            )
    return None


def _of_embedding(text: Mapping[str, Any], embedding: Embedding | None) -> list[str]:
    if embedding is None:
        return []
    problems = []
    vocabulary = text.get("vocab_size")
    if isinstance(vocabulary, int) and vocabulary != embedding.rows:
        problems.append(f"{embedding.name} has {embedding.rows} rows, vocab_size is {vocabulary}")
    widths = {key: text[key] for key in WIDTHS if isinstance(text.get(key), int)}
    if widths and embedding.width not in widths.values():
        key, width = next(iter(widths.items()))
        problems.append(f"{embedding.name} has {embedding.width} columns, {key} is {width}")
    return problems


def _deepest(shapes: Shapes) -> dict[int, dict[str, Sequence[int]]]:
    """Returns the layers of the stack with the most layers: number -> its weights."""
    stacks: dict[str, dict[int, dict[str, Sequence[int]]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        # The first number in a name counts the layers; later ones count experts.
        match = None if OTHER_TOWERS.search(name) else IN_LAYER.fullmatch(name)
        if match and not re.search(r"\.\d+\.", f"{match['stack']}."):
            stacks[match["stack"]][int(match["number"])][match["name"]] = shape
    return max(stacks.values(), key=len, default={})


def _of_layers(
    text: Mapping[str, Any], layers: Mapping[int, object]
) -> tuple[list[str], list[str]]:
    """Returns what is wrong with the number of layers, and what is odd with it."""
    number = next((text[key] for key in LAYERS if isinstance(text.get(key), int)), None)
    if number is None:
        return [], []
    missing = sorted(set(range(number)) - set(layers))
    if missing:
        named = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        return [
            f"it has {number} layers, and the weights lack {len(missing)} of them ({named}): "
            "these would be random"
        ], []
    if len(layers) > number and not any(text.get(key) for key in EXTRA_LAYERS):
        return [], [
            f"its weights have {len(layers)} layers, its config.json {number}: "
            f"only the first {number} are loaded"
        ]
    return [], []


def _of_norms(
    text: Mapping[str, Any], layers: Mapping[int, Mapping[str, Sequence[int]]]
) -> list[str]:
    hidden = next((text[key] for key in WIDTHS[:4] if isinstance(text.get(key), int)), None)
    for number, layer in sorted(layers.items()):
        for name, shape in layer.items():
            if hidden and NORMS.fullmatch(name) and list(shape) != [hidden]:
                return [f"{name} of layer {number} has shape {list(shape)}, the width is {hidden}"]
    return []


def _of_names(layers: Mapping[int, Mapping[str, Sequence[int]]]) -> list[str]:
    """Returns the first inner layer that lacks weights which all other layers have.

    The first and the last layer may differ (ModernBERT, T5). A layer that has other weights instead
    is of another kind (experts, state space).
    """
    names = {number: set(layer) for number, layer in layers.items()}
    for number in sorted(names)[1:-1]:
        others = set.intersection(*(found for other, found in names.items() if other != number))
        if names[number] < others:
            lost = sorted(others - names[number])
            return [
                f"layer {number} lacks {lost[0]}, which all other layers have "
                f"({len(lost)} of its weights would be random)"
            ]
    return []
