"""Which layers of a model a rehearsal keeps, and how wide they are. Pure.

config.json -> the config.json of the small model, and which of the weights belong to it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LEAST = 2
"""A model of one layer has no weights between two layers, which engines partition and gather."""
HIDDEN = ("hidden_size", "n_embd", "dim", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
GROUPS = ("num_key_value_heads", "multi_query_group_num")
INNER = ("intermediate_size", "n_inner", "hidden_dim", "ffn_dim", "moe_intermediate_size")

_NUMBERED = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Small:
    """A smaller model of the same kind.

    Attributes:
        settings: its config.json.
        layers, of: how many layers it has, and how many the whole model has.
        width: of its hidden states; None: as in the whole model, so its weights are the model's.
    """

    settings: dict[str, Any]
    layers: int
    of: int
    width: int | None = None


def number_of_layers(settings: Mapping[str, Any]) -> int | None:
    """Returns how many layers a config.json names; None: it names none."""
    inner = _inner(settings)
    return next((inner[name] for name in LAYERS if isinstance(inner.get(name), int)), None)


def cut(settings: Mapping[str, Any]) -> Small | None:
    """Returns the model with its first layers only; None: it is small, or has no known layers.

    Two layers, or as many as it takes until each kind of layer is among them.

    Args:
        settings: config.json.
    """
    inner = _inner(settings)
    key = next((name for name in LAYERS if isinstance(inner.get(name), int)), None)
    if key is None:
        return None
    of = inner[key]
    kept = max(LEAST, _until_each_kind(inner, of))
    if of <= kept:
        return None
    shorter = {
        name: value[:kept] if isinstance(value, list) and len(value) == of else value
        for name, value in inner.items()
    }
    return Small(_with_inner(settings, {**shorter, key: kept}), kept, of)


def narrowed(small: Small) -> Small | None:
    """Returns it with the fewest attention heads that its head groups allow; None: not known how.

    The vocabulary stays: it belongs to the tokenizer.
    """
    inner = _inner(small.settings)
    hidden, heads, groups = (_first(inner, names) for names in (HIDDEN, HEADS, GROUPS))
    if hidden is None or heads is None or inner[hidden] % inner[heads]:
        return None
    number = inner[groups] if groups else inner[heads]
    fewer = max(1, inner[heads] // max(1, number))
    fewer *= 2 if groups is None or number == inner[heads] else 1
    width = inner[hidden] // inner[heads] * fewer
    if width >= inner[hidden]:
        return None
    share = width / inner[hidden]
    changed = {
        name: max(8, int(inner[name] * share) // 8 * 8)
        for name in INNER
        if isinstance(inner.get(name), int)
    }
    if groups:
        changed[groups] = fewer if number == inner[heads] else 1
    smaller = _with_inner(small.settings, {**inner, **changed, hidden: width, heads: fewer})
    return Small(smaller, small.layers, small.of, width)


def kept_weights(names: Iterable[str], layers: int, of: int) -> set[str]:
    """Returns the names of the weights that the model with fewer layers has.

    Layers are numbered in the names: `encoder.layer.0.output`. A numbered part counts as layers if
    it has as many numbers as the model has layers.

    Args:
        names: of all weights.
        layers: how many are kept.
        of: how many there are.
    """
    everything = set(names)
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in everything:
        for match in _NUMBERED.finditer(name):
            numbers[name[: match.start()]].add(int(match[1]))
    stacks = {prefix for prefix, found in numbers.items() if found == set(range(of))}

    def is_kept(name: str) -> bool:
        return all(
            int(match[1]) < layers
            for match in _NUMBERED.finditer(name)
            if name[: match.start()] in stacks
        )

    return {name for name in everything if is_kept(name)}


def _until_each_kind(inner: Mapping[str, Any], of: int) -> int:
    """How many of the first layers show each kind that config.json lists, one entry a layer."""
    most = 0
    for name, value in inner.items():
        if isinstance(value, list) and len(value) == of and name.endswith(("_types", "_type")):
            most = max(most, *(value.index(kind) + 1 for kind in value))
    dense = inner.get("first_k_dense_replace")  # DeepSeek: the layers after it are experts
    return max(most, dense + 1 if isinstance(dense, int) else 0)


def _inner(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    text = settings.get("text_config")
    return text if isinstance(text, dict) else settings


def _with_inner(settings: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(settings.get("text_config"), dict):
        return {**settings, "text_config": dict(inner)}
    return dict(inner)


def _first(inner: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((name for name in names if isinstance(inner.get(name), int)), None)
