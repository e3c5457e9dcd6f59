"""What patterns leave out that a model needs: told when the listing is known, not after the download.

Pure rules on an asset of the lock. The load test at the end of a fetch (`stage.loadcheck`) would find the same, hours
later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stage.lockfile import LockedAsset

WEIGHTS = re.compile(r"model(-.*)?\.safetensors")
TOKENIZER = re.compile(
    r"tokenizer\.(json|model)|tokenizer_config\.json|vocab\.(txt|json)|spiece\.model|sentencepiece.*|.*\.tiktoken"
)
_INDEX = "model.safetensors.index.json"
_SHOWN = 3


@dataclass(frozen=True)
class Lacking:
    """What is left out though it is in the repository.

    Attributes:
        needed: files without which what is taken does not load.
        notes: what else a person may miss, in words.
    """

    needed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def lacking(asset: LockedAsset) -> Lacking:
    """What the `include` and `exclude` of a model leave out. Pipelines of several folders are not looked at."""
    if asset.kind != "model" or not {"include", "exclude"} & asset.request.keys():
        return Lacking()
    taken = {file.path.removeprefix(f"{asset.folder}/") for file in asset.files}
    left = {left.path for left in asset.left_out if "`include`" in left.reason or "by the manifest" in left.reason}
    if {"model_index.json", "modules.json"} & (taken | left):
        return Lacking()
    weights = {name for name in taken if WEIGHTS.fullmatch(name)}
    needed = []
    if weights and "config.json" in left:
        needed.append("config.json")
    if any(re.search(r"-\d{5}-of-\d{5}", name) for name in weights):
        needed += [_INDEX] * (_INDEX in left)
        needed += sorted(name for name in left if WEIGHTS.fullmatch(name) and "-of-" in name)
    if "include" not in asset.request:  # who excludes weights or a tokenizer by name knows it
        return Lacking(tuple(needed))
    notes = []
    if not weights and not asset.made_from and (others := sorted(name for name in left if WEIGHTS.fullmatch(name))):
        notes.append(f"its weights ({_listed(others)}): without them it can only be trained from scratch")
    if not any(map(TOKENIZER.fullmatch, taken)) and (others := sorted(filter(TOKENIZER.fullmatch, left))):
        notes.append(f"its tokenizer ({_listed(others)})")
    return Lacking(tuple(needed), tuple(notes))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
