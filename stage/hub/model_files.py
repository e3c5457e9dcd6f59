"""Chooses the files of a model repository that a bundle contains: pure rules on a listing.

By default they are the files that `from_pretrained` needs, in one weight format, safetensors
first. Every other file is listed with the reason why it is left out: a missing file is cheap to
fix on the laptop and expensive on the cluster.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from stage.digests import Expected
from stage.errors import PolicyError, UsageError, join_errors
from stage.files import join_limited
from stage.lock.model import EXCLUDED, NOT_INCLUDED, Ingredient, LeftOut, LockedFile
from stage.paths import printable


@dataclass(frozen=True)
class RemoteFile(Expected):
    """A file as the Hub lists it: path in the repository, size, and the Hub's digest of it."""

    size: int


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
_TEXT_SUFFIXES = (
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".spm",
    ".tiktoken",
    ".vocab",
    ".bpe",
    ".yaml",
    ".yml",
)
_DOCUMENTS = re.compile(r"(README|LICEN[CS]E|NOTICE|USE_POLICY|COPYING)([._-].*)?", re.IGNORECASE)
_TOKENIZER_FILES = re.compile(
    r"config\.json|tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|"
    r"chat_template.*|.*\.(model|spm|tiktoken|bpe|jinja)|sentencepiece.*|spiece.*|bpe\.codes"
)
_WEIGHT_NAMES = r"(model|adapter_model|diffusion_pytorch_model)"
_SINGLE = re.compile(_WEIGHT_NAMES + r"\.safetensors")
_SHARD = re.compile(_WEIGHT_NAMES + r"-(\d{5})-of-(\d{5})\.safetensors")
_MODULE_FOLDER = re.compile(r"(\w+_)?\d+_\w+")
_PICKLED = re.compile(
    r"(pytorch_model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.bin"
)
_INDEX = re.compile(_WEIGHT_NAMES + r"\.safetensors\.index\.json")


def select_by_patterns(
    files: Sequence[RemoteFile],
    include: Sequence[str],
    exclude: Sequence[str],
    what: str,
    *,
    allow_code: bool = False,
) -> tuple[list[RemoteFile], list[LeftOut]]:
    """The files that match the manifest's own patterns, and the others with the reason.

    The patterns are fnmatch's, as on the Hub: `*` matches `/` too, and `x/` means all files in x.
    The card and the licence files at the top are always chosen, unless `exclude` names them.

    Raises:
        UsageError: an `include` pattern matches no file.
        PolicyError: the patterns ask for a pickle, or for code that is not allowed.
    """
    check_matches(include, [file.path for file in files], "its files", what)
    taken, left_out = [], []
    for file in files:
        reason = why_left(file.path, () if is_document(file.path) else include, exclude)
        if reason is not None:
            left_out.append(LeftOut(file.path, file.size, reason))
        else:
            _check_code_and_pickles(file.path, what, allow_code=allow_code)
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
    """The files that `from_pretrained` needs, and the others with the reason.

    Args:
        tokenizer_only: only the files of the tokenizer.
        allow_pickle: a part may have only pickles, if `pickled_weights` finds them.

    Raises:
        PolicyError: the only weights are pickles.
        UsageError: shards are missing, or the only weights are another framework's.
    """
    kept, left_out = [], []
    for file in files:
        if any(matches(file.path, pattern) for pattern in exclude):
            left_out.append(LeftOut(file.path, file.size, EXCLUDED))
        else:
            kept.append(file)
    paths = {file.path for file in kept}
    parts = set() if tokenizer_only else _folders_with_parts(paths)
    excluded = {left.path for left in left_out}
    weights = {folder: _weights(paths, folder, what, excluded) for folder in parts}
    if "model_index.json" in paths:
        # A diffusers pipeline loads its folders; weights beside them are for other tools.
        weights[""] = frozenset()
        parts -= {""}
    taken = []
    for file in kept:
        against = _reason_against_tokenizer if tokenizer_only else _reason_against
        reason = against(file.path, weights)
        if reason:
            left_out.append(LeftOut(file.path, file.size, reason))
        else:
            taken.append(file)
    for folder in sorted(parts):
        if not (allow_pickle and pickled_weights(taken, left_out, folder)):
            _check_weights(folder, taken, left_out, what)
    return taken, left_out


def pickled_weights(
    taken: Sequence[RemoteFile], left_out: Sequence[LeftOut], folder: str
) -> list[str]:
    """The pickles that are the weights of a part: one file, or the shards.

    Empty where the part has safetensors, or where `from_pretrained` does not read its pickles.

    Args:
        folder: of the part; empty for the top.
    """
    if any(f.path.endswith(".safetensors") and f.path.rpartition("/")[0] == folder for f in taken):
        return []
    found = [
        o.path for o in left_out if o.reason == "a pickle" and o.path.rpartition("/")[0] == folder
    ]
    weights = {
        path: match for path in found if (match := _PICKLED.fullmatch(path.rpartition("/")[2]))
    }
    single = [path for path, match in weights.items() if match[2] is None]
    return sorted(single or weights)


def _folders_with_parts(paths: set[str]) -> set[str]:
    """The folders that contain parts of the model: the top, and those of a pipeline's index."""
    folders = {
        path.split("/")[0]
        for path in paths
        if path.count("/") == 1 and path.endswith(("/config.json", "_config.json"))
    }
    if "model_index.json" in paths:  # diffusers
        return {"", *folders}
    if "modules.json" in paths:  # sentence-transformers; `onnx/` has a config and is no part
        return {"", *filter(_MODULE_FOLDER.fullmatch, folders)}
    return {""}


def _weights(
    paths: Iterable[str], folder: str, what: str, excluded: Iterable[str]
) -> frozenset[str]:
    """The safetensors that from_pretrained reads from a folder: it tries a single file first.

    Args:
        paths: of the files that `exclude` leaves.
        folder: the folder; empty for the top.
        what: the asset's name in messages.
        excluded: paths that `exclude` leaves out.
    """
    inside = {
        path
        for path in paths
        if path.rpartition("/")[0] == folder and path.endswith(".safetensors")
    }
    names = {path: PurePosixPath(path).name for path in inside}
    chosen: set[str] = set()
    for stem in ("model", "adapter_model", "diffusion_pytorch_model"):
        single = {p for p in inside if (m := _SINGLE.fullmatch(names[p])) and m[1] == stem}
        shards = {p for p in inside if (m := _SHARD.fullmatch(names[p])) and m[1] == stem}
        if not single and shards:
            mine = [path for path in excluded if path.rpartition("/")[0] == folder]
            _check_no_missing_shards([names[p] for p in shards], what, stem, mine)
        chosen |= single or shards
    return frozenset(chosen or inside)


def _check_no_missing_shards(
    names: Iterable[str], what: str, stem: str, excluded: Iterable[str]
) -> None:
    matches = [m for m in map(_SHARD.fullmatch, names) if m]
    total = max(int(m[3]) for m in matches)
    missing = sorted(set(range(1, total + 1)) - {int(m[2]) for m in matches})
    dropped = sorted(
        path
        for path in excluded
        if (match := _SHARD.fullmatch(PurePosixPath(path).name)) and match[1] == stem
    )
    if missing and dropped:
        raise UsageError(
            f"{what}: `exclude` drops {len(dropped)} of {total} weight files "
            f"({printable(dropped[0])}): the others do not load without it.",
            "Remove the pattern from `exclude`; to train from scratch, exclude all weights: "
            '`exclude: ["*.safetensors"]`.',
        )
    if missing:
        raise UsageError(
            f"{what}: the repository lacks {len(missing)} of {total} weight files, "
            f"number {missing[0]} first.",
            "The upload is incomplete: try another revision, or ask its owner.",
        )


def _reason_against(path: str, by_folder: Mapping[str, frozenset[str]]) -> str | None:
    """Why a file is left out; None if it is chosen.

    Args:
        by_folder: folder that from_pretrained reads -> paths of its weights.
    """
    folder, _, name = path.rpartition("/")
    if folder not in by_folder and not _is_chat_template(folder, name):
        return "in a folder that from_pretrained does not read"
    weights = by_folder.get(folder, frozenset())
    suffix = PurePosixPath(name).suffix.lower()
    if path in weights:
        return None
    if suffix == ".safetensors":
        return "another copy of the weights"
    if _INDEX.fullmatch(name):
        return (
            None if any(_SHARD.fullmatch(w.rpartition("/")[2]) for w in weights) else _INDEX_ALONE
        )
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


def _is_chat_template(folder: str, name: str) -> bool:
    return folder == "additional_chat_templates" and name.endswith(".jinja")


def _reason_against_tokenizer(path: str, by_folder: Mapping[str, frozenset[str]]) -> str | None:
    folder, _, name = path.rpartition("/")
    if _is_chat_template(folder, name):
        return None
    if folder or not (_TOKENIZER_FILES.fullmatch(name) or _DOCUMENTS.fullmatch(name)):
        return "not part of the tokenizer"
    return "a pickle" if name.lower().endswith(PICKLE_SUFFIXES) else None


def _check_weights(
    folder: str, taken: Sequence[RemoteFile], left_out: Sequence[LeftOut], what: str
) -> None:
    """Checks that a part with weights in the repository has weights in the bundle.

    Raises:
        PolicyError: its only weights are pickles.
        UsageError: they are another framework's, or only their index exists.
    """

    def is_inside(path: str) -> bool:
        return path.rpartition("/")[0] == folder

    if any(file.path.endswith(".safetensors") for file in taken if is_inside(file.path)):
        return
    pickles = [o.path for o in left_out if o.reason == "a pickle" and is_inside(o.path)]
    if pickles:
        convertible = bool(pickled_weights(taken, left_out, folder))
        allow = (
            "run with --allow-pickle to convert them to safetensors here; or "
            if convertible
            else ""
        )
        raise PolicyError(
            f"{what}: its weights are pickles ({printable(pickles[0])}), "
            "which can run code when loaded, and there are no safetensors of them.",
            "Take a revision with safetensors (often `revision: refs/pr/N`, see the repository's "
            f"discussions); or {allow}to train from scratch, exclude the weights: "
            '`exclude: ["*.bin", "*.pt", "*.pth", "*.ckpt"]`.',
        )
    # Only at the top: a pipeline may have folders for another framework (SDXL's `vae_decoder`).
    others = [
        o for o in left_out if not folder and o.reason in _FOREIGN_REASONS and is_inside(o.path)
    ]
    if others:
        suffixes = sorted({PurePosixPath(o.path).suffix for o in others})
        named = ", ".join(f'"*{suffix}"' for suffix in suffixes)
        raise UsageError(
            f"{what}: it has no safetensors; its weights are {others[0].reason} "
            f"({printable(others[0].path)}).",
            "Take a repository or revision with safetensors. If you want these weights, name all "
            "files you need with `include`; to train from scratch, exclude the weights: "
            f"`exclude: [{named}]`.",
        )
    if any(o.reason == _INDEX_ALONE and is_inside(o.path) for o in left_out):
        raise UsageError(
            f"{what}: the repository has an index of weight files, and none of the files.",
            "The upload is incomplete: try another revision, or ask its owner.",
        )


def is_document(path: str) -> bool:
    """Whether a path is a card, a licence or the like at the top of a repository."""
    return _DOCUMENTS.fullmatch(path) is not None and not path.lower().endswith(
        (*PICKLE_SUFFIXES, ".py")
    )


def _check_code_and_pickles(path: str, what: str, *, allow_code: bool) -> None:
    if path.lower().endswith(PICKLE_SUFFIXES):
        raise PolicyError(
            f"{what}: `include` asks for {printable(path)}, a pickle, "
            "which can run code when loaded.",
            "Ask for the safetensors instead, or add it to `exclude`.",
        )
    if path.lower().endswith(".py") and not allow_code:
        raise PolicyError(
            f"{what}: `include` asks for {printable(path)}: "
            "code of the repository would run on the cluster.",
            "Remove it from `include`; or read it, then write `allow_code: true`.",
        )


def locked_file(file: RemoteFile, path: str) -> LockedFile:
    """A listed file as the lock records it, with its path in the bundle."""
    return LockedFile(path, file.size, file.sha256, file.upstream, file.path)


def ingredient_of(file: RemoteFile) -> Ingredient:
    """A listed file that a conversion reads, as the lock records it."""
    return Ingredient(file.path, file.size, file.sha256, file.upstream)


def check_matches(include: Iterable[str], paths: Collection[str], whose: str, what: str) -> None:
    """Checks that each pattern matches a file: a typo would leave out the files it is meant for.

    Args:
        whose: describes the files in the message.

    Raises:
        UsageError: for all patterns that match no file.
    """
    there = join_limited([printable(path) for path in sorted(paths)], _SHOWN)
    problems = [
        UsageError(
            f"{what}: the pattern `{pattern[:80]}` matches none of {whose}.", f"There are: {there}"
        )
        for pattern in include
        if not any(matches(path, pattern) for path in paths)
    ]
    if problems:
        raise join_errors(problems, "mistakes", what)


def why_left(path: str, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    """Why the manifest's patterns leave a file out; None if they take it.

    An empty `include` takes everything.
    """
    if any(matches(path, pattern) for pattern in exclude):
        return EXCLUDED
    if include and not any(matches(path, pattern) for pattern in include):
        return NOT_INCLUDED
    return None


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern of a manifest matches this path, by the Hub's rule."""
    return fnmatch.fnmatchcase(path, pattern + "*" if pattern.endswith("/") else pattern)
