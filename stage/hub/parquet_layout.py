"""Finds the config and split of each parquet file of a dataset repository: pure rules on a listing.

The order is that of the `datasets` library: the card's `configs`, else the names of folders and
files. The Hub's own conversion is on `refs/convert/parquet` as `<config>/<split>/0000.parquet`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stage.convert.formats import is_hidden
from stage.errors import UsageError

Layout = dict[str, dict[str, list[str]]]  # config -> split -> paths in order

_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATORS = r"[-._ 0-9]"
_SHARDED = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_NUMBERED = re.compile(r"(.*?)[-_.](\d{5,9})-of-(\d{5,9})(?:-[0-9a-f]+)?(?:\.\w+)+")
CONVERSION_BRANCH = "refs/convert/parquet"
MAX_SHARDS = 100_000  # a larger number in a name is not a count of files


def published(configs: Any, paths: Sequence[str]) -> Layout:
    """The layout of a repository's parquet files: by the card's `configs`, else by names.

    Args:
        configs: as for `from_card`.
        paths: all files of the repository.
    """
    return from_card(configs, paths) if entries(configs) else from_names(paths)


def from_card(configs: Any, paths: Sequence[str]) -> Layout:
    """The layout that a card's `configs` declares; only configs that are all parquet.

    Args:
        configs: the card's YAML: a list of `{config_name, data_files, data_dir}`, where
            `data_files` is a pattern, a list of patterns, or a list of `{split, path}`
            (huggingface.co/docs/hub/datasets-manual-configuration).
        paths: all files of the repository.
    """
    layout: Layout = {}
    for entry in entries(configs):
        splits = declared_splits(entry, paths, _visible(paths))
        if splits and all(p.endswith(".parquet") for found in splits.values() for p in found):
            layout[config_name(entry)] = splits
    return layout


def entries(configs: Any) -> list[dict[str, Any]]:
    """The entries of a card's list of mappings; malformed ones are skipped."""
    return [entry for entry in _as_list(configs) if isinstance(entry, dict)]


def config_name(entry: Mapping[str, Any]) -> str:
    """The name of the config in an entry of a card's `configs`."""
    return str(entry.get("config_name") or "default")


def declared_splits(
    entry: Mapping[str, Any], paths: Sequence[str], visible: Sequence[str]
) -> dict[str, list[str]]:
    """Split -> paths, of one entry of a card's `configs`; splits without files are omitted.

    Args:
        paths: files that the entry's patterns may match.
        visible: files whose names decide, where the entry has no patterns.
    """
    base = str(entry.get("data_dir") or "").strip("/")
    if "data_files" not in entry:
        return _splits_in(f"{base}/" if base else "", visible, sharded_in="data/")
    splits: dict[str, list[str]] = {}
    for split, patterns in _declared(entry["data_files"]):
        globs = [_glob(_join(base, pattern)) for pattern in patterns]
        found = sorted({p for p in paths if any(_matches(glob, p) for glob in globs)}, key=natural)
        splits.setdefault(split, []).extend(p for p in found if p not in splits.get(split, []))
    return {split: found for split, found in splits.items() if found}


def default_config(configs: Any, layout: Mapping[str, Any]) -> str | None:
    """The config of a manifest that names none; None where that is ambiguous.

    It is the only one, else the one marked `default: true`, else `default`.
    """
    if len(layout) == 1:
        return next(iter(layout))
    for entry in entries(configs):
        if entry.get("default") is True and entry.get("config_name") in layout:
            return str(entry["config_name"])
    return "default" if "default" in layout else None


def from_names(paths: Sequence[str]) -> Layout:
    """The layout by the names of folders and files, for a card without `configs`.

    Top folders whose parquet files name splits are configs (`wikitext-2-raw-v1/train-...`). Files
    at the top or in `data/` are config `default`.
    """
    configs: dict[str, list[str]] = {}
    for path in _visible(paths):
        folder = path.split("/")[0] if "/" in path else ""
        is_config = folder not in ("", "data") and not _keyword_splits([folder], last=False)
        configs.setdefault(folder if is_config else "", []).append(path)
    return {
        folder or "default": _splits_in(f"{folder}/", inside, sharded_in="")
        if folder
        else _splits_by_name(inside, sharded_in="data/")
        for folder, inside in sorted(configs.items())
    }


def from_conversion(paths: Sequence[str], what: str, config: str | None) -> Layout:
    """The layout of `refs/convert/parquet`.

    Args:
        config: the requested config; None: any.

    Raises:
        UsageError: only a part of the requested config was converted (the Hub stops at 5 GB).
    """
    layout: Layout = {}
    for path in sorted(paths, key=natural):
        parts = path.split("/")
        if len(parts) != 3 or not path.endswith(".parquet"):
            continue
        if parts[1].startswith("partial-"):
            if config in (None, parts[0]):
                raise UsageError(
                    f"{what}: the Hub converted only a part (5 GB) of config `{parts[0]}`, "
                    "and the repository has no parquet of it.",
                    "Name another config, or download the files and name them with `path:`.",
                )
            continue
        layout.setdefault(parts[0], {}).setdefault(parts[1], []).append(path)
    return layout


def splits_of_names(paths: Sequence[str]) -> dict[str, list[str]]:
    """Split -> paths in order, by the names of files of any format, as `datasets` reads them."""
    return _splits_by_name(paths, sharded_in="data/")


def declared_rows(dataset_info: Any, config: str) -> dict[str, int]:
    """Split -> number of rows in the card's `dataset_info`; empty where it has none."""
    splits = info_of(dataset_info, config).get("splits")
    return {
        str(s["name"]): s["num_examples"]
        for s in entries(splits)
        if "name" in s and type(s.get("num_examples")) is int
    }


def info_of(dataset_info: Any, config: str) -> Mapping[str, Any]:
    """The entry of a card's `dataset_info` on one config; empty if there is none."""
    infos = dataset_info if isinstance(dataset_info, list) else [dataset_info]
    for entry in infos:
        unnamed, meant = (config, (config, "default")) if len(infos) == 1 else (None, (config,))
        if isinstance(entry, dict) and entry.get("config_name", unnamed) in meant:
            return entry
    return {}


def check_shards_are_whole(paths: Iterable[str], what: str) -> None:
    """Checks that no shard is missing, by names such as `train-00000-of-00004`.

    Raises:
        UsageError: one is missing.
    """
    groups: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if match := _NUMBERED.fullmatch(path):
            groups.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, total), found in sorted(groups.items()):
        if len(found) < total <= MAX_SHARDS:
            missing = next(number for number in range(total) if number not in found)
            raise UsageError(
                f"{what}: {stem} has {len(found)} of {total} files; number {missing} is missing.",
                "The upload is incomplete: try another revision, or ask its owner.",
            )


def _declared(data_files: Any) -> list[tuple[str, list[str]]]:
    if isinstance(data_files, str):
        return [("train", [data_files])]
    if isinstance(data_files, Mapping):
        return [(str(split), _patterns(patterns)) for split, patterns in data_files.items()]
    declared: list[tuple[str, list[str]]] = []
    for item in _as_list(data_files):
        if isinstance(item, str):
            declared.append(("train", [item]))
        elif isinstance(item, Mapping):
            declared.append((str(item.get("split", "train")), _patterns(item.get("path"))))
    return declared


def _patterns(value: Any) -> list[str]:
    several = [value] if isinstance(value, str) else _as_list(value)
    return [pattern for pattern in several if isinstance(pattern, str)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _join(base: str, pattern: str) -> str:
    return f"{base}/{pattern}" if base else pattern.removeprefix("./")


def _glob(pattern: str) -> list[str]:
    """The parts of a glob as fsspec reads it: only `**` crosses folders, `*` and `?` do not."""
    return re.findall(r"\*\*/?|\*|\?|\[[^\]]+\]|.", pattern, re.DOTALL)


def _matches(glob: list[str], path: str) -> bool:
    """Whether a glob matches a whole path, in at most (length of glob x length of path) steps.

    A regular expression from a stranger's card could run for years.
    """
    size = len(path)
    at = {0}  # positions in the path that the parts so far can reach
    for part in glob:
        if part in ("**", "*"):
            reached: set[int] = set()
            for start in sorted(at):
                position = start
                while position not in reached:
                    reached.add(position)
                    if position == size or (part == "*" and path[position] == "/"):
                        break
                    position += 1
            at = reached
        elif part == "**/":
            first = min(at, default=size)
            at |= {position + 1 for position in range(first, size) if path[position] == "/"}
        else:
            at = {
                position + 1
                for position in at
                if position < size and _is_one_of(part, path[position])
            }
        if not at:
            return False
    return size in at


def _is_one_of(part: str, character: str) -> bool:
    """Whether one part of a glob (`a`, `?`, `[a-z]`, `[!ab]`) matches this character."""
    if part == "?":
        return character != "/"
    if len(part) == 1:
        return part == character
    inside = part[1:-1]
    negated = inside[0] in "!^" and len(inside) > 1
    ranges = re.findall(r"(.)-(.)|(.)", inside[negated:], re.DOTALL)
    return negated != any(
        low <= character <= high if low else one == character for low, high, one in ranges
    )


def _splits_by_name(paths: Sequence[str], *, sharded_in: str) -> dict[str, list[str]]:
    """Split -> paths by the rules of `datasets.data_files`, in its order.

    First `<split>-00000-of-00001` in the folder `sharded_in`; else keywords in the names of
    folders; else in those of files; else everything is `train`. The first rule that finds a split
    decides alone: files that it does not match are in no split.

    Args:
        paths: relative to the config's folder.
    """
    paths = sorted(paths, key=natural)
    rules: tuple[Callable[[str], list[str]], ...] = (
        lambda path: _sharded_split(path, sharded_in),
        lambda path: _keyword_splits(path.split("/")[:-1], last=False),
        lambda path: _keyword_splits(path.split("/")[-1:], last=True),
    )
    for rule in rules:
        splits: dict[str, list[str]] = {}
        for path in paths:
            for split in rule(path):
                splits.setdefault(split, []).append(path)
        if splits:
            return splits
    return {"train": list(paths)} if paths else {}


def _splits_in(base: str, paths: Sequence[str], *, sharded_in: str) -> dict[str, list[str]]:
    """`_splits_by_name` of the files below a folder; names above it do not count."""
    inside = [path.removeprefix(base) for path in paths if path.startswith(base)]
    found = _splits_by_name(inside, sharded_in=sharded_in)
    return {split: [base + path for path in names] for split, names in found.items()}


def _visible(paths: Iterable[str]) -> list[str]:
    """The parquet files that are not hidden (`.x`, `__x`)."""
    return [path for path in paths if path.endswith(".parquet") and not is_hidden(path)]


def _sharded_split(path: str, folder: str) -> list[str]:
    match = _SHARDED.fullmatch(path.removeprefix(folder)) if path.startswith(folder) else None
    return [match[1]] if match else []


def _keyword_splits(names: Sequence[str], *, last: bool) -> list[str]:
    """Splits whose keyword is in a name between separators.

    Args:
        last: these are names of files; a separator must follow the keyword.
    """
    end = _SEPARATORS if last else rf"(?:{_SEPARATORS}|$)"
    return [
        split
        for split, keywords in _KEYWORDS.items()
        if any(
            re.search(rf"(?:^|{_SEPARATORS})(?:{'|'.join(keywords)}){end}", name) for name in names
        )
    ]


def natural(path: str) -> list[tuple[int, int, str]]:
    """A sort key that puts `part-2` before `part-10`."""
    parts = re.split(r"([0-9]{1,18})", path)
    return [(0, int(t), "") if re.fullmatch("[0-9]{1,18}", t) else (1, 0, t) for t in parts if t]
