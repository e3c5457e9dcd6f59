"""What patterns leave out that a model needs: told when the listing is known, not after the download.

Pure rules on an asset of the lock. The load test at the end of a fetch (`stage.loadcheck`) would find the same, hours
later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stage.asset import EXCLUDED, NOT_INCLUDED, LockedAsset
from stage.disk import some_of

WEIGHTS = re.compile(r"model(-.*)?\.safetensors")
TOKENIZER = re.compile(
    r"tokenizer\.(json|model)|tokenizer_config\.json|vocab\.(txt|json)|spiece\.model|sentencepiece.*|.*\.tiktoken"
)
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
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
    """What the `include` and `exclude` of a model leave out. Judged by the folders that its weights lie in."""
    if asset.kind != "model" or not {"include", "exclude"} & asset.request.keys():
        return Lacking()
    taken = {file.path.removeprefix(f"{asset.folder}/") for file in asset.files}
    left = {left.path for left in asset.left_out if left.reason in (EXCLUDED, NOT_INCLUDED)}
    folders = sorted({_folder(path) for path in taken if _is(WEIGHTS, path)})
    needed = [path for folder in folders for path in _needed(folder, taken, left)]
    if "include" not in asset.request:  # who excludes weights or a tokenizer by name knows it
        return Lacking(tuple(needed))
    notes = []
    others = sorted(path for path in left if WEIGHTS.fullmatch(path))
    if others and not asset.made_from and not any(_is(WEIGHTS, path) for path in taken):
        notes.append(f"its weights ({some_of(others, _SHOWN)}): without them it can only be trained from scratch")
    is_pipeline = "model_index.json" in taken | left  # its tokenizers have folders of their own
    others = sorted(p for p in left if _is(TOKENIZER, p) and (is_pipeline or _folder(p) in {"", *folders}))
    if others and not any(_is(TOKENIZER, path) for path in taken):
        notes.append(f"its tokenizer ({some_of(others, _SHOWN)})")
    return Lacking(tuple(needed), tuple(notes))


def _needed(folder: str, taken: set[str], left: set[str]) -> list[str]:
    """What the weights in one folder do not load without: the config beside them; of shards all, and their index."""
    needed = [folder + "config.json"] * (folder + "config.json" in left)
    if any(_folder(path) == folder and _is(WEIGHTS, path) and _SHARD.search(path) for path in taken):
        needed += [folder + _INDEX] * (folder + _INDEX in left)
        needed += sorted(path for path in left if _folder(path) == folder and _is(WEIGHTS, path) and "-of-" in path)
    return needed


def _folder(path: str) -> str:
    """With a `/` at its end; of a file at the top: nothing."""
    return path[: path.rfind("/") + 1]


def _is(pattern: re.Pattern[str], path: str) -> bool:
    return pattern.fullmatch(path.rpartition("/")[2]) is not None
