"""Which parquet files of a dataset repository are which config and split: pure rules on a listing.

The order of trust is that of the `datasets` library: what the card's `configs` say, else what folders and file names
say. What the Hub converted by itself lies on `refs/convert/parquet` as `<config>/<split>/0000.parquet`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
MAX_SHARDS = 100_000  # beyond that a name means something else


def from_card(configs: Any, paths: Sequence[str]) -> Layout:
    """The layout that a card's `configs` declares, as far as it is made of parquet files.

    Args:
        configs: the card's YAML: a list of `{config_name, data_files, data_dir}`, where `data_files` is a pattern, a
            list of patterns, or a list of `{split, path}` (huggingface.co/docs/hub/datasets-manual-configuration).
    """
    layout: Layout = {}
    for entry in entries(configs):
        splits = declared_splits(entry, paths, _visible(paths))
        if splits and all(p.endswith(".parquet") for found in splits.values() for p in found):
            layout[config_name(entry)] = splits
    return layout


def entries(configs: Any) -> list[dict[str, Any]]:
    """The configs a card declares; what makes no sense among them is passed over."""
    return [entry for entry in configs if isinstance(entry, dict)] if isinstance(configs, list) else []


def config_name(entry: Mapping[str, Any]) -> str:
    """What a card's entry calls its config."""
    return str(entry.get("config_name") or "default")


def declared_splits(entry: Mapping[str, Any], paths: Sequence[str], visible: Sequence[str]) -> dict[str, list[str]]:
    """Split -> paths, of one entry of a card's `configs`; splits without files are left out.

    Args:
        paths: what its patterns may mean.
        visible: what names are looked at of, where it has no patterns.
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
    """The config a person means who names none: the only one, the one marked `default: true`, or `default`."""
    if len(layout) == 1:
        return next(iter(layout))
    for entry in entries(configs):
        if entry.get("default") is True and entry.get("config_name") in layout:
            return str(entry["config_name"])
    return "default" if "default" in layout else None


def from_names(paths: Sequence[str]) -> Layout:
    """The layout that folders and names suggest, where no card says anything.

    Top folders whose parquet files name splits are configs (`wikitext-2-raw-v1/train-...`); files at the top or in
    `data/` are config `default`.
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

    Raises:
        UsageError: the config asked for was converted only in part (the Hub stops at 5 GB).
    """
    layout: Layout = {}
    for path in sorted(paths, key=natural):
        parts = path.split("/")
        if len(parts) != 3 or not path.endswith(".parquet"):
            continue
        if parts[1].startswith("partial-"):
            if config in (None, parts[0]):
                raise UsageError(
                    f"{what}: the Hub converted config `{parts[0]}` only in part (5 GB), and none is published.",
                    "Name another config, or bring the files yourself with `path:`.",
                )
            continue
        layout.setdefault(parts[0], {}).setdefault(parts[1], []).append(path)
    return layout


def splits_of_names(paths: Sequence[str]) -> dict[str, list[str]]:
    """Split -> paths in order, as names tell them to `datasets`, whatever the files' format."""
    return _splits_by_name(paths, sharded_in="data/")


def declared_rows(dataset_info: Any, config: str) -> dict[str, int]:
    """Split -> rows as the card's `dataset_info` declares them; empty where it does not."""
    splits = info_of(dataset_info, config).get("splits")
    return {
        str(s["name"]): s["num_examples"]
        for s in (splits if isinstance(splits, list) else [])
        if isinstance(s, dict) and "name" in s and type(s.get("num_examples")) is int
    }


def info_of(dataset_info: Any, config: str) -> Mapping[str, Any]:
    """The entry of a card's `dataset_info` on one config; empty if there is none."""
    entries = dataset_info if isinstance(dataset_info, list) else [dataset_info]
    for entry in entries:
        unnamed, meant = (config, (config, "default")) if len(entries) == 1 else (None, (config,))
        if isinstance(entry, dict) and entry.get("config_name", unnamed) in meant:
            return entry
    return {}


def check_shards_are_whole(paths: Iterable[str], what: str) -> None:
    """Names such as `train-00000-of-00004` say how many files a split has.

    Raises:
        UsageError: one of them is missing.
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
                "The upload is not whole: try another revision, or tell its owner.",
            )


def _declared(data_files: Any) -> list[tuple[str, list[str]]]:
    if isinstance(data_files, str):
        return [("train", [data_files])]
    if isinstance(data_files, Mapping):
        return [(str(split), _as_list(patterns)) for split, patterns in data_files.items()]
    declared: list[tuple[str, list[str]]] = []
    for item in data_files if isinstance(data_files, list) else []:
        if isinstance(item, str):
            declared.append(("train", [item]))
        elif isinstance(item, Mapping):
            declared.append((str(item.get("split", "train")), _as_list(item.get("path"))))
    return declared


def _as_list(value: Any) -> list[str]:
    return (
        [value]
        if isinstance(value, str)
        else [v for v in value if isinstance(v, str)]
        if isinstance(value, list)
        else []
    )


def _join(base: str, pattern: str) -> str:
    return f"{base}/{pattern}" if base else pattern.removeprefix("./")


def _glob(pattern: str) -> list[str]:
    """The parts of a glob as fsspec reads it: `*` and `?` stay in one folder, `**` crosses folders."""
    return re.findall(r"\*\*/?|\*|\?|\[[^\]]+\]|.", pattern, re.DOTALL)


def _matches(glob: list[str], path: str) -> bool:
    """Whether a glob matches all of a path, in steps of their lengths multiplied: a card is anybody's, and a regular
    expression made of it could run for years.
    """
    size = len(path)
    at = {0}  # how much of the path the parts so far can have taken
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
            at = {position + 1 for position in at if position < size and _is_one_of(part, path[position])}
        if not at:
            return False
    return size in at


def _is_one_of(part: str, character: str) -> bool:
    """Whether one part of a glob (`a`, `?`, `[a-z]`, `[!ab]`) is this character."""
    if part == "?":
        return character != "/"
    if len(part) == 1:
        return part == character
    inside = part[1:-1]
    negated = inside[0] in "!^" and len(inside) > 1
    ranges = re.findall(r"(.)-(.)|(.)", inside[negated:], re.DOTALL)
    return negated != any(low <= character <= high if low else one == character for low, high, one in ranges)


def _splits_by_name(paths: Sequence[str], *, sharded_in: str) -> dict[str, list[str]]:
    """Splits as names tell them, by the rules of `datasets.data_files` in the order it tries them.

    `<split>-00000-of-00001` in the folder `sharded_in` names any split; else keywords in the names of folders; else in
    those of files; else everything is `train`. As soon as one rule finds a split, files it says nothing of are in none.

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
    """`_splits_by_name` of what lies below a folder; names above it say nothing of splits."""
    inside = [path.removeprefix(base) for path in paths if path.startswith(base)]
    found = _splits_by_name(inside, sharded_in=sharded_in)
    return {split: [base + path for path in names] for split, names in found.items()}


def _visible(paths: Iterable[str]) -> list[str]:
    """The parquet files that no folder hides (`.x`, `__x`)."""
    return [path for path in paths if path.endswith(".parquet") and not is_hidden(path)]


def is_hidden(path: str) -> bool:
    """Whether `datasets` passes over a path that nobody names."""
    return any(part.startswith((".", "__")) for part in path.split("/"))


def _sharded_split(path: str, folder: str) -> list[str]:
    match = _SHARDED.fullmatch(path.removeprefix(folder)) if path.startswith(folder) else None
    return [match[1]] if match else []


def _keyword_splits(names: Sequence[str], *, last: bool) -> list[str]:
    """Splits whose keyword stands in a name between separators. In a file's name something must follow it."""
    end = _SEPARATORS if last else rf"(?:{_SEPARATORS}|$)"
    return [
        split
        for split, keywords in _KEYWORDS.items()
        if any(re.search(rf"(?:^|{_SEPARATORS})(?:{'|'.join(keywords)}){end}", name) for name in names)
    ]


def natural(path: str) -> list[tuple[int, int, str]]:
    """Sorts `part-2` before `part-10`."""
    parts = re.split(r"([0-9]{1,18})", path)
    return [(0, int(t), "") if re.fullmatch("[0-9]{1,18}", t) else (1, 0, t) for t in parts if t]
