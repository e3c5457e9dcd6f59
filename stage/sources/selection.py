"""Which files of a model repository travel: pure rules on a listing.

By default, what `from_pretrained` needs, in one weight format: safetensors before anything. Everything else is named
with the reason it stays behind, because a missing file is cheap on the laptop and dear on the cluster.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from stage.asset import EXCLUDED, NOT_INCLUDED, Ingredient, LeftOut, LockedFile
from stage.digest import Digest
from stage.disk import some_of
from stage.errors import PolicyError, UsageError
from stage.names import printable


@dataclass(frozen=True)
class RemoteFile:
    """A file as the Hub lists it: path in the repository, size in bytes, the Hub's digest of it."""

    path: str
    size: int
    evidence: Digest


PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")
_OTHER_WEIGHTS = {
    ".h5": "TensorFlow weights",
    ".msgpack": "Flax weights",
    ".ot": "Rust weights",
    ".onnx": "an ONNX copy",
    ".onnx_data": "an ONNX copy",
    ".gguf": "a GGUF copy",
    ".ggml": "a GGML copy",
    ".tflite": "a TensorFlow Lite copy",
    ".mlmodel": "a Core ML copy",
    ".mlpackage": "a Core ML copy",
}
CODE = "code of the repository"
_SHOWN = 8
_OTHER_FRAMEWORK = "weights of another framework"
_FOREIGN_REASONS = frozenset({*_OTHER_WEIGHTS.values(), _OTHER_FRAMEWORK})
_INDEX_ALONE = "an index of shards not taken"
_TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken", ".vocab", ".bpe", ".yaml", ".yml")
_DOCUMENTS = re.compile(r"(README|LICEN[CS]E|NOTICE|USE_POLICY|COPYING)([._-].*)?", re.IGNORECASE)
_TOKENIZER_FILES = re.compile(
    r"config\.json|tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template.*|"
    r".*\.(model|spm|tiktoken|bpe|jinja)|sentencepiece.*|spiece.*|bpe\.codes"
)
_WEIGHT_NAMES = r"(model|adapter_model|diffusion_pytorch_model)"
_SINGLE = re.compile(_WEIGHT_NAMES + r"\.safetensors")
_SHARD = re.compile(_WEIGHT_NAMES + r"-(\d{5})-of-(\d{5})\.safetensors")
_MODULE_FOLDER = re.compile(r"(\w+_)?\d+_\w+")
_PICKLED = re.compile(r"(pytorch_model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.bin")
_INDEX = re.compile(_WEIGHT_NAMES + r"\.safetensors\.index\.json")


def select_by_patterns(
    files: Sequence[RemoteFile],
    include: Sequence[str],
    exclude: Sequence[str],
    what: str,
    *,
    allow_code: bool = False,
) -> tuple[list[RemoteFile], list[LeftOut]]:
    """The files that match a person's own patterns (fnmatch as on the Hub: `*` matches `/` too; `x/` means all in x).

    The card and the licence files at the top travel with whatever is taken, unless `exclude` names them.

    Raises:
        UsageError: an `include` pattern matches no file.
        PolicyError: a pickle or code was asked for.
    """
    require_matches(include, [file.path for file in files], f"its {len(files)} files", what)
    taken, left_out = [], []
    for file in files:
        reason = why_left(file.path, () if is_document(file.path) else include, exclude)
        if reason is not None:
            left_out.append(LeftOut(file.path, file.size, reason))
        else:
            _refuse_code_and_pickles(file.path, what, allow_code=allow_code)
            taken.append(file)
    return taken, left_out


def select_model(
    files: Sequence[RemoteFile],
    exclude: Sequence[str],
    what: str,
    *,
    tokenizer_only: bool = False,
    allow_pickle: bool = False,
) -> tuple[list[RemoteFile], list[LeftOut]]:
    """The files that `from_pretrained` needs, and the others with the reason they stay.

    Args:
        allow_pickle: a part may have pickles only, if they are such as `pickled_weights` finds.

    Raises:
        PolicyError: the only weights are pickles.
        UsageError: shards are missing from the repository, or the only weights are another framework's.
    """
    kept, left_out = [], []
    for file in files:
        if any(matches(file.path, pattern) for pattern in exclude):
            left_out.append(LeftOut(file.path, file.size, EXCLUDED))
        else:
            kept.append(file)
    wanted_folders = _folders_with_parts({file.path for file in kept})
    weights = {folder: _weights([f.path for f in kept], folder, what) for folder in wanted_folders}
    parts = set(wanted_folders)
    if any(file.path == "model_index.json" for file in kept):
        weights[""] = frozenset()  # a diffusers pipeline loads its folders; what lies beside them is for other tools
        parts -= {""}
    taken = []
    for file in kept:
        folder, _, name = file.path.rpartition("/")
        if tokenizer_only:
            reason = _reason_against_tokenizer(folder, name)
        elif folder not in wanted_folders and not (folder == "additional_chat_templates" and name.endswith(".jinja")):
            reason = "in a folder that from_pretrained does not read"
        else:
            reason = _reason_against(file.path, name, weights.get(folder, frozenset()))
        if reason:
            left_out.append(LeftOut(file.path, file.size, reason))
        else:
            taken.append(file)
    if not tokenizer_only:
        for folder in sorted(parts):
            if not (allow_pickle and pickled_weights(taken, left_out, folder)):
                _refuse_no_weights(folder, taken, left_out, what)
    return taken, left_out


def pickled_weights(taken: Sequence[RemoteFile], left_out: Sequence[LeftOut], folder: str) -> list[str]:
    """The pickles that are the weights of a part without safetensors: one file, or the shards. None are found where
    there are safetensors, or where the pickles are others than `from_pretrained` reads."""
    if any(f.path.endswith(".safetensors") and f.path.rpartition("/")[0] == folder for f in taken):
        return []
    found = [o.path for o in left_out if o.reason == "a pickle" and o.path.rpartition("/")[0] == folder]
    weights = {path: match for path in found if (match := _PICKLED.fullmatch(path.rpartition("/")[2]))}
    single = [path for path, match in weights.items() if match[2] is None]
    return sorted(single or weights)


def _folders_with_parts(paths: set[str]) -> set[str]:
    """The folders that hold parts of the model: the top one, and those that a pipeline's own index speaks of."""
    folders = {
        path.split("/")[0] for path in paths if path.count("/") == 1 and path.endswith(("/config.json", "_config.json"))
    }
    if "model_index.json" in paths:  # diffusers
        return {"", *folders}
    if "modules.json" in paths:  # sentence-transformers: not `onnx/`, which has a config of its own
        return {"", *filter(_MODULE_FOLDER.fullmatch, folders)}
    return {""}


def _weights(paths: Iterable[str], folder: str, what: str) -> frozenset[str]:
    """The one set of safetensors that from_pretrained would read from a folder (it tries the single file first)."""
    inside = {path for path in paths if path.rpartition("/")[0] == folder and path.endswith(".safetensors")}
    names = {path: PurePosixPath(path).name for path in inside}
    chosen: set[str] = set()
    for stem in ("model", "adapter_model", "diffusion_pytorch_model"):
        single = {p for p in inside if (m := _SINGLE.fullmatch(names[p])) and m[1] == stem}
        shards = {p for p in inside if (m := _SHARD.fullmatch(names[p])) and m[1] == stem}
        if not single and shards:
            _refuse_missing_shards([names[p] for p in shards], what)
        chosen |= single or shards
    return frozenset(chosen or inside)


def _refuse_missing_shards(names: Iterable[str], what: str) -> None:
    matches = [m for m in map(_SHARD.fullmatch, names) if m]
    total = max(int(m[3]) for m in matches)
    missing = sorted(set(range(1, total + 1)) - {int(m[2]) for m in matches})
    if missing:
        raise UsageError(
            f"{what}: the repository lacks {len(missing)} of {total} weight files, number {missing[0]} first.",
            "The upload is not whole: try another revision, or tell its owner.",
        )


def _reason_against(path: str, name: str, weights: frozenset[str]) -> str | None:
    """Why a file of a folder that is read stays behind; None if it travels."""
    suffix = PurePosixPath(name).suffix.lower()
    if path in weights:
        return None
    if suffix == ".safetensors":
        return "another copy of the weights"
    if _INDEX.fullmatch(name):
        return None if any(_SHARD.fullmatch(w.rpartition("/")[2]) for w in weights) else _INDEX_ALONE
    if suffix in PICKLE_SUFFIXES or name.startswith("pytorch_model.bin"):
        return "a pickle"
    if suffix in _OTHER_WEIGHTS or name.startswith(("tf_model", "flax_model", "rust_model")):
        return _OTHER_WEIGHTS.get(suffix, _OTHER_FRAMEWORK)
    if suffix == ".py":
        return CODE
    if name.startswith("."):
        return "the Hub's own housekeeping"
    if suffix in _TEXT_SUFFIXES or _DOCUMENTS.fullmatch(name):
        return None
    return "not needed by from_pretrained"


def _reason_against_tokenizer(folder: str, name: str) -> str | None:
    if folder == "additional_chat_templates" and name.endswith(".jinja"):
        return None
    if folder or not (_TOKENIZER_FILES.fullmatch(name) or _DOCUMENTS.fullmatch(name)):
        return "not part of the tokenizer"
    return "a pickle" if name.lower().endswith(PICKLE_SUFFIXES) else None


def _refuse_no_weights(folder: str, taken: Sequence[RemoteFile], left_out: Sequence[LeftOut], what: str) -> None:
    """A part that has weights, but none that from_pretrained reads here, must not become a part without any."""

    def is_inside(path: str) -> bool:
        return path.rpartition("/")[0] == folder

    if any(file.path.endswith(".safetensors") for file in taken if is_inside(file.path)):
        return
    pickles = [o.path for o in left_out if o.reason == "a pickle" and is_inside(o.path)]
    if pickles:
        convertible = bool(pickled_weights(taken, left_out, folder))
        allow = "run with --allow-pickle to have them converted to safetensors here; or " if convertible else ""
        raise PolicyError(
            f"{what}: its weights are pickles ({printable(pickles[0])}), which can run code when loaded, "
            "and there are no safetensors of them.",
            "Take a revision with safetensors (often `revision: refs/pr/N`, see the repository's discussions); or "
            f'{allow}to train from scratch, leave the weights: `exclude: ["*.bin", "*.pt", "*.pth", "*.ckpt"]`.',
        )
    # Only at the top: a pipeline's folders may well be parts for another framework alone (SDXL's `vae_decoder`).
    others = [o for o in left_out if not folder and o.reason in _FOREIGN_REASONS and is_inside(o.path)]
    if others:
        suffixes = sorted({PurePosixPath(o.path).suffix for o in others})
        named = ", ".join(f'"*{suffix}"' for suffix in suffixes)
        raise UsageError(
            f"{what}: it has no safetensors; its weights are {others[0].reason} ({printable(others[0].path)}).",
            f"Take a repository or revision with safetensors. If these are what you want, name all you need with "
            f"`include`; to train from scratch, leave the weights: `exclude: [{named}]`.",
        )
    if any(o.reason == _INDEX_ALONE and is_inside(o.path) for o in left_out):
        raise UsageError(
            f"{what}: the repository has an index of weight files, and none of the files.",
            "The upload is not whole: try another revision, or tell its owner.",
        )


def is_document(path: str) -> bool:
    """Whether this is a card, a licence or the like at the top of a repository."""
    return _DOCUMENTS.fullmatch(path) is not None and not path.lower().endswith((*PICKLE_SUFFIXES, ".py"))


def _refuse_code_and_pickles(path: str, what: str, *, allow_code: bool) -> None:
    if path.lower().endswith(PICKLE_SUFFIXES):
        raise PolicyError(
            f"{what}: `include` asks for {printable(path)}, a pickle, which can run code when loaded.",
            "Ask for the safetensors instead.",
        )
    if path.lower().endswith(".py") and not allow_code:
        raise PolicyError(
            f"{what}: `include` asks for {printable(path)}: code of the repository would run on the cluster.",
            "Leave it out of `include`; or, after reading it, `allow_code: true`.",
        )


def locked_file(file: RemoteFile, path: str) -> LockedFile:
    """A listed file as the lock records it: for an LFS file the Hub's word is our sha256 already."""
    known = file.evidence.value if file.evidence.algorithm == "lfs-sha256" else None
    return LockedFile(path, file.size, known, file.evidence, file.path)


def ingredient_of(file: RemoteFile) -> Ingredient:
    """A listed file that others will be made of, as the lock records it."""
    known = file.evidence.value if file.evidence.algorithm == "lfs-sha256" else None
    return Ingredient(file.path, file.size, known, file.evidence)


def require_matches(include: Iterable[str], paths: Collection[str], whose: str, what: str) -> None:
    """Refuses a pattern that means no file: a slip of the hand would leave out what it was written for.

    Args:
        whose: the files, in words.

    Raises:
        UsageError: there is one.
    """
    for pattern in include:
        if not any(matches(path, pattern) for path in paths):
            raise UsageError(
                f"{what}: the pattern `{pattern[:80]}` matches none of {whose}.",
                f"There are: {some_of([printable(path) for path in sorted(paths)], _SHOWN)}",
            )


def why_left(path: str, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    """Why a person's patterns leave a file behind; None if they don't. No `include` takes everything."""
    if any(matches(path, pattern) for pattern in exclude):
        return EXCLUDED
    if include and not any(matches(path, pattern) for pattern in include):
        return NOT_INCLUDED
    return None


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern of a manifest means this path, by the Hub's rule."""
    return fnmatch.fnmatchcase(path, pattern + "*" if pattern.endswith("/") else pattern)
