"""Chooses the files of a model repository that a bundle contains: pure rules on a listing.

By default they are the files that `from_pretrained` needs, in one weight format, safetensors
first. Every other file is listed with the reason why it is left out: a missing file is cheap to
fix on the laptop and expensive on the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from stage.errors import PolicyError, UsageError, join_errors
from stage.files import Expected, join_limited
from stage.lock.model import EXCLUDED, NOT_INCLUDED, Ingredient, LeftOut, LockedFile
from stage.paths import printable
from stage.walk import matches


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
_PICKLE = "a pickle"
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
_MODULE_FOLDER = re.compile(r"(\w+_)?\d+_\w+")
_CHAT_TEMPLATE = re.compile(r"additional_chat_templates/[^/]*\.jinja")
_STEMS = ("model", "adapter_model", "diffusion_pytorch_model")
_SHARD = re.compile(rf"((?:.*/)?(?:{'|'.join(_STEMS)}))-(\d{{5}})-of-(\d{{5}})\.safetensors")
_INDEX = re.compile(rf"({'|'.join(_STEMS)})\.safetensors\.index\.json")
_PICKLED = re.compile(
    r"(pytorch_model|adapter_model|diffusion_pytorch_model)(?:-(\d{5})-of-(\d{5}))?\.bin"
)


def select_by_patterns(
    files: Sequence[RemoteFile],
    include: Sequence[str],
    exclude: Sequence[str],
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
    check_matches(include, [file.path for file in files], "its files")
    taken, left_out = [], []
    for file in files:
        reason = why_left(file.path, () if is_document(file.path) else include, exclude)
        if reason is not None:
            left_out.append(LeftOut(file.path, file.size, reason))
            continue
        taken.append(file)
        asked = f"`include` asks for {printable(file.path)}"
        if file.path.lower().endswith(PICKLE_SUFFIXES):
            raise PolicyError(
                f"{asked}, a pickle, which can run code when loaded.",
                "Ask for the safetensors instead, or add it to `exclude`.",
            )
        if file.path.lower().endswith(".py") and not allow_code:
            raise PolicyError(
                f"{asked}: code of the repository would run on the cluster.",
                "Remove it from `include`; or read it, then write `allow_code: true`.",
            )
    return taken, left_out


def select_tokenizer(
    files: Sequence[RemoteFile], exclude: Sequence[str]
) -> tuple[list[RemoteFile], list[LeftOut]]:
    """The files of a tokenizer, and the others with the reason."""
    reasons = {file.path: _why_no_tokenizer(file.path, exclude) for file in files}
    return _parted(files, reasons)


def select_model(
    files: Sequence[RemoteFile], exclude: Sequence[str], *, allow_pickle: bool = False
) -> tuple[list[RemoteFile], list[LeftOut], list[str]]:
    """The files that `from_pretrained` needs, and the others with the reason.

    Args:
        allow_pickle: a part may have only pickles: its weights are the third result.

    Raises:
        PolicyError: the only weights are pickles.
        UsageError: shards are missing, the only weights are another framework's, an index is
            there alone and `exclude` took no weights, or nothing there can be loaded.
    """
    paths = [file.path for file in files]
    kept = [path for path in paths if why_left(path, (), exclude) is None]
    folders = _folders_with_parts(kept)
    weights = {folder: _weights(folder, kept) for folder in folders}
    if "model_index.json" in kept:
        # A diffusers pipeline loads its folders; weights beside them are for other tools.
        weights[""] = set()
        folders.remove("")
    reasons = {path: _reason_against(path, weights) for path in kept}
    pickles = []
    has_excluded = any(p.endswith((".safetensors", *PICKLE_SUFFIXES)) for p in {*paths} - {*kept})
    for folder in sorted(folders):
        inside = {path: reasons[path] for path in kept if _folder(path) == folder}
        if not weights[folder]:
            found = _pickled_weights(inside)
            if not (allow_pickle and found):
                _check_weights(inside, found, is_top=not folder)
                if _INDEX_ALONE in inside.values() and not has_excluded:
                    raise UsageError(
                        "the repository has an index of weight files, and none of the files.",
                        "The upload is incomplete: try another revision, or ask its owner.",
                    )
            _check_no_shard_missing(map(_PICKLED.fullmatch, map(_name, found)))
            pickles += found
    taken, left_out = _parted(files, {path: reasons.get(path, EXCLUDED) for path in paths})
    if taken and not (pickles or exclude or any(_is_loaded(file.path) for file in taken)):
        others = [file.path for file in left_out if not file.path.startswith(".")]
        raise UsageError(
            f"neither weights nor a config.json are among the files that from_pretrained "
            f"reads ({join_limited([printable(file.path) for file in taken], _SHOWN)}).",
            "Name with `include` what you need; what is a pickle download (hf download) and name "
            f"with `path:`. The others: {join_limited(list(map(printable, others)), _SHOWN)}"
            if others
            else "Is it the right repository and revision? Its files are no model.",
        )
    return taken, left_out, pickles


def _is_loaded(path: str) -> bool:
    """Whether something reads a file: weights, settings, or a part of a tokenizer."""
    name = _name(path)
    return name.endswith((".safetensors", "config.json", "modules.json", "index.json")) or bool(
        _TOKENIZER_FILES.fullmatch(name)
    )


def _parted(
    files: Iterable[RemoteFile], reasons: Mapping[str, str | None]
) -> tuple[list[RemoteFile], list[LeftOut]]:
    taken = [file for file in files if reasons[file.path] is None]
    left_out = [LeftOut(f.path, f.size, reason) for f in files if (reason := reasons[f.path])]
    return taken, left_out


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _folders_with_parts(paths: Collection[str]) -> set[str]:
    """The folders that contain parts of the model: the top, and those of a pipeline's index."""
    folders = {
        _folder(path)
        for path in paths
        if path.count("/") == 1 and path.endswith(("/config.json", "_config.json"))
    }
    if "model_index.json" in paths:  # diffusers
        return {"", *folders}
    if "modules.json" in paths:  # sentence-transformers; `onnx/` has a config and is no part
        return {"", *filter(_MODULE_FOLDER.fullmatch, folders)}
    return {""}


def _weights(folder: str, kept: Iterable[str]) -> set[str]:
    """The safetensors that from_pretrained reads from a folder: it tries a single file first.

    Raises:
        UsageError: shards are missing.
    """
    inside = [p for p in kept if _folder(p) == folder and p.endswith(".safetensors")]
    chosen: set[str] = set()
    for stem in _STEMS:
        single = {p for p in inside if _name(p) == f"{stem}.safetensors"}
        shards = [m for p in inside if (m := _SHARD.fullmatch(p)) and _name(m[1]) == stem]
        if not single:
            _check_no_shard_missing(shards)
        chosen |= single or {shard[0] for shard in shards}
    return chosen or set(inside)


def _check_no_shard_missing(matches: Iterable[re.Match[str] | None]) -> None:
    """Checks that of N shards all are there, by the groups 2 and 3 of their names' matches.

    Raises:
        UsageError: with the number of the first that is missing.
    """
    shards = [(int(match[2]), int(match[3])) for match in matches if match and match[2]]
    total = max((total for _, total in shards), default=0)
    if missing := set(range(1, total + 1)) - {number for number, _ in shards}:
        raise UsageError(
            f"{len(missing)} of {total} weight files are missing, number {min(missing)} "
            "first: the others do not load without them.",
            "If a pattern of `exclude` takes it, remove that pattern; to train from scratch, "
            'exclude all weights: `exclude: ["*.safetensors", "*.bin"]`. Else the upload is '
            "incomplete: try another revision, or ask its owner.",
        )


def _reason_against(path: str, by_folder: Mapping[str, set[str]]) -> str | None:
    """Why a file is left out; None if it is chosen.

    Args:
        by_folder: folder that from_pretrained reads -> paths of its weights.
    """
    folder, name = _folder(path), _name(path)
    suffix = PurePosixPath(name).suffix.lower()
    weights = by_folder.get(folder, set())
    if path in weights or _CHAT_TEMPLATE.fullmatch(path):
        return None
    if folder not in by_folder:
        return "in a folder that from_pretrained does not read"
    if suffix == ".safetensors":
        return "another copy of the weights"
    if _INDEX.fullmatch(name):
        return None if any(map(_SHARD.fullmatch, weights)) else _INDEX_ALONE
    if name == "pytorch_model.bin.index.json":
        return _INDEX_ALONE
    if suffix in PICKLE_SUFFIXES or name.startswith("pytorch_model.bin"):
        return _PICKLE
    if suffix in _OTHER_WEIGHTS or name.startswith(("tf_model", "flax_model", "rust_model")):
        return _OTHER_WEIGHTS.get(suffix, _OTHER_FRAMEWORK)
    if suffix == ".py":
        return CODE
    if name.startswith("."):
        return "the Hub's own housekeeping"
    if suffix in _TEXT_SUFFIXES or _DOCUMENTS.fullmatch(name):
        return None
    return "not needed by from_pretrained"


def _why_no_tokenizer(path: str, exclude: Sequence[str]) -> str | None:
    if reason := why_left(path, (), exclude):
        return reason
    if _CHAT_TEMPLATE.fullmatch(path):
        return None
    if "/" in path or not (_TOKENIZER_FILES.fullmatch(path) or _DOCUMENTS.fullmatch(path)):
        return "not part of the tokenizer"
    return _PICKLE if path.lower().endswith(PICKLE_SUFFIXES) else None


def _pickled_weights(reasons: Mapping[str, str | None]) -> list[str]:
    """The pickles that `from_pretrained` reads as weights of a part: one file, or the shards.

    Args:
        reasons: path -> why it is left out, of all files of the part.
    """
    found = {p: _PICKLED.fullmatch(_name(p)) for p in reasons if reasons[p] == _PICKLE}
    weights = {path: match for path, match in found.items() if match}
    return sorted([path for path, match in weights.items() if not match[2]] or weights)


def _check_weights(
    reasons: Mapping[str, str | None], pickled: Sequence[str], *, is_top: bool
) -> None:
    """Checks that a part without safetensors has no weights in the repository either.

    Args:
        pickled: its pickles that could be converted.

    Raises:
        PolicyError: its only weights are pickles.
        UsageError: they are another framework's.
    """
    if pickles := [*pickled, *(path for path in reasons if reasons[path] == _PICKLE)]:
        allow = "run with --allow-pickle to convert them to safetensors here; or "
        raise PolicyError(
            f"its weights are pickles ({printable(pickles[0])}), "
            "which can run code when loaded, and there are no safetensors of them.",
            "Take a revision with safetensors (often `revision: refs/pr/N`, see the repository's "
            f"discussions); or {allow if pickled else ''}to train from scratch, exclude the "
            'weights: `exclude: ["*.bin", "*.pt", "*.pth", "*.ckpt"]`.',
        )
    # Only at the top: a pipeline may have folders for another framework (SDXL's `vae_decoder`).
    others = [path for path in reasons if is_top and reasons[path] in _FOREIGN_REASONS]
    if others:
        suffixes = sorted({PurePosixPath(path).suffix for path in others})
        named = ", ".join(f'"*{suffix}"' for suffix in suffixes)
        raise UsageError(
            f"it has no safetensors; its weights are {reasons[others[0]]} "
            f"({printable(others[0])}).",
            "Take a repository or revision with safetensors. If you want these weights, name all "
            "files you need with `include`; to train from scratch, exclude the weights: "
            f"`exclude: [{named}]`.",
        )


def is_document(path: str) -> bool:
    """Whether a path is a card, a licence or the like at the top of a repository."""
    return _DOCUMENTS.fullmatch(path) is not None and not path.lower().endswith(
        (*PICKLE_SUFFIXES, ".py")
    )


def locked_file(file: RemoteFile, path: str) -> LockedFile:
    """A listed file as the lock records it, with its path in the bundle."""
    return LockedFile(path, file.size, file.sha256, file.upstream, file.path)


def ingredient_of(file: RemoteFile) -> Ingredient:
    """A listed file that a conversion reads, as the lock records it."""
    return Ingredient(file.path, file.size, file.sha256, file.upstream)


def check_matches(include: Iterable[str], paths: Collection[str], whose: str) -> None:
    """Checks that each pattern matches a file: a typo would leave out the files it is meant for.

    Args:
        whose: describes the files in the message.

    Raises:
        UsageError: for all patterns that match no file.
    """
    there = join_limited([printable(path) for path in sorted(paths)], _SHOWN)
    problems = [
        UsageError(f"the pattern `{pattern[:80]}` matches none of {whose}.", f"There are: {there}")
        for pattern in include
        if not any(matches(path, pattern) for path in paths)
    ]
    if problems:
        raise join_errors(problems, "mistakes")


def why_left(path: str, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    """Why the manifest's patterns leave a file out; None if they take it.

    An empty `include` takes everything.
    """
    if any(matches(path, pattern) for pattern in exclude):
        return EXCLUDED
    if include and not any(matches(path, pattern) for pattern in include):
        return NOT_INCLUDED
    return None
