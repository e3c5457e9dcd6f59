"""Which layers of a model a rehearsal keeps. Pure.

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

_NUMBERED = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Small:
    """The same model with fewer layers.

    Attributes:
        settings: its config.json.
        layers, of: how many layers it has, and how many the whole model has.
    """

    settings: dict[str, Any]
    layers: int
    of: int


def number_of_layers(settings: Mapping[str, Any]) -> int | None:
    """Returns how many layers a config.json names; None: it names none."""
    inner = _inner(settings)
    key = _key_of_layers(inner)
    return None if key is None else inner[key]


def cut(settings: Mapping[str, Any]) -> Small | None:
    """Returns the model with its first layers only; None: it is small, or has no known layers.

    Two layers, or as many as it takes until each kind of layer is among them.

    Args:
        settings: config.json.
    """
    inner = _inner(settings)
    key = _key_of_layers(inner)
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


def _key_of_layers(inner: Mapping[str, Any]) -> str | None:
    """The key of a config.json that says how many layers there are."""
    return next((name for name in LAYERS if isinstance(inner.get(name), int)), None)
