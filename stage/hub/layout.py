"""Finds the config, split and format of each file of a dataset repository: pure rules on a listing.

They are those of `datasets` (data_files.py, load.py, packaged_modules): the card's `configs`
decide, else the names of folders and files; the format is the one that most files have. Where the
library would read a file in a way that our conversion does not know (an option in the card, a
foreign format), the result is a described problem, never a guess. The Hub's own conversion to
parquet is on `refs/convert/parquet` as `<config>/<split>/0000.parquet`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from stage.convert.formats import (
    CONVERTED,
    READ_COMPRESSED,
    conversion,
    endings,
    format_of,
    is_data,
    is_of,
    is_skipped,
)
from stage.errors import UsageError
from stage.hub.model_files import RemoteFile

CONVERSION_BRANCH = "refs/convert/parquet"
MAX_SHARDS = 100_000  # a larger number in a name is not a count of files
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATORS = r"[-._ 0-9]"
_SHARDED = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_NUMBERED = re.compile(r"(.*?)[-_.](\d{5,9})-of-(\d{5,9})(?:-[0-9a-f]+)?(?:\.\w+)+")
_COMPRESSED = (*READ_COMPRESSED, ".xz", ".lz4", ".7z", ".rar", ".lzma", ".zip")
# Options of a card's config that change the rows; the conversion knows `sep` and `delimiter`.
_CHANGES_ROWS = """
column_names comment converters date_format decimal dialect doublequote drop_labels drop_metadata
encoding encoding_errors escapechar features field filters header index_col keep_default_na
keep_linebreaks lineterminator metadata_filenames na_filter na_values names nrows on_bad_lines
on_mixed_types parse_agent_traces prefix quotechar quoting sample_by skip_blank_lines skipfooter
skipinitialspace skiprows thousands true_values false_values usecols"""

Splits = dict[str, list[str]]  # split -> paths in order


@dataclass(frozen=True)
class Config:
    """A config of a dataset.

    Attributes:
        splits: split -> paths in order.
        convert: the conversion that makes parquet of it, one of `requests.CONVERSIONS`; empty: it
            is parquet.
        separator: between the cells of its CSV, where the card names one.
        problem: why it cannot be taken; None: it can.
        files: path -> file, of the listing that the paths are from.
        parquet_commit: the commit of `refs/convert/parquet`, where the files are from there.
    """

    splits: Splits = field(default_factory=dict)
    convert: str = ""
    separator: str | None = None
    problem: str | None = None
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    parquet_commit: str | None = None

    @property
    def is_published_parquet(self) -> bool:
        """Whether its files are taken from the repository as they are."""
        return self.problem is None and not self.convert and self.parquet_commit is None


def published(configs: Any, paths: Sequence[str]) -> dict[str, Config]:
    """Config -> its files, for each config with files of a format that `datasets` knows.

    Args:
        configs: the card's YAML: a list of `{config_name, data_files, data_dir}`, where
            `data_files` is a pattern, a list of patterns, or a list of `{split, path}`
            (huggingface.co/docs/hub/datasets-manual-configuration).
        paths: all files of the repository.
    """
    paths = [path for path in paths if is_data(path)]
    found = {}
    for entry in entries(configs) or [{}]:
        if splits := _declared_splits(entry, paths):
            found[config_name(entry)] = _of_one_format(splits, entry)
    return found


def entries(configs: Any) -> list[dict[str, Any]]:
    """The entries of a card's list of mappings; malformed ones are skipped."""
    listed = configs if isinstance(configs, list) else []
    return [entry for entry in listed if isinstance(entry, dict)]


def config_name(entry: Mapping[str, Any]) -> str:
    """The name of the config in an entry of a card's `configs`."""
    return str(entry.get("config_name") or "default")


def default_config(configs: Any, names: Iterable[str]) -> str | None:
    """The config of a manifest that names none; None where that is ambiguous.

    It is the only one, else the one marked `default: true`, else `default`.
    """
    names = list(names)
    marked = [config_name(entry) for entry in entries(configs) if entry.get("default") is True]
    for name in names if len(names) == 1 else [*marked, "default"]:
        if name in names:
            return name
    return None


def converted(paths: Iterable[str]) -> dict[str, Config]:
    """The configs of `refs/convert/parquet`. The Hub stops at 5 GB of a config."""
    found: dict[str, Config] = {}
    for path in sorted(paths, key=natural):
        config, _, rest = path.partition("/")
        split = rest.partition("/")[0]
        if path.count("/") != 2 or not path.endswith(".parquet"):
            continue
        if split.startswith("partial-"):
            found[config] = Config(problem="the Hub converted only a part of it (5 GB)")
        else:
            found.setdefault(config, Config()).splits.setdefault(split, []).append(path)
    return found


def declared_rows(dataset_info: Any, config: str) -> dict[str, int]:
    """Split -> number of rows in the card's `dataset_info`; empty where it has none."""
    return {
        str(split["name"]): split["num_examples"]
        for split in entries(info_of(dataset_info, config).get("splits"))
        if "name" in split and type(split.get("num_examples")) is int
    }


def info_of(dataset_info: Any, config: str) -> Mapping[str, Any]:
    """The entry of a card's `dataset_info` on one config; empty if there is none."""
    infos = dataset_info if isinstance(dataset_info, list) else [dataset_info]
    for entry in infos:
        unnamed, meant = (config, (config, "default")) if len(infos) == 1 else (None, (config,))
        if isinstance(entry, dict) and entry.get("config_name", unnamed) in meant:
            return entry
    return {}


def check_shards_are_whole(paths: Iterable[str]) -> None:
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
                f"{stem} has {len(found)} of {total} files; number {missing} is missing.",
                "The upload is incomplete: try another revision, or ask its owner.",
            )


def splits_of_names(paths: Sequence[str]) -> Splits:
    """Split -> paths in order, by the names of files of any format, as `datasets` reads them.

    First `data/<split>-00000-of-00001`; else keywords in the names of folders; else in those of
    files; else everything is `train`. The first rule that finds a split decides alone: files that
    it does not match are in no split.
    """
    paths = sorted(paths, key=natural)
    rules: tuple[Callable[[str], list[str]], ...] = (
        lambda path: [match[1]] if (match := _SHARDED.fullmatch(path)) else [],
        lambda path: _keyword_splits(path.split("/")[:-1], rf"(?:{_SEPARATORS}|$)"),
        lambda path: _keyword_splits(path.split("/")[-1:], _SEPARATORS),
    )
    for rule in rules:
        splits: Splits = {}
        for path in paths:
            for split in rule(path):
                splits.setdefault(split, []).append(path)
        if splits:
            return splits
    return {"train": paths} if paths else {}


def _keyword_splits(names: Sequence[str], end: str) -> list[str]:
    """Splits whose keyword is in a name, between a separator and `end`."""
    return [
        split
        for split, keywords in _KEYWORDS.items()
        if any(
            re.search(rf"(?:^|{_SEPARATORS})(?:{'|'.join(keywords)}){end}", name) for name in names
        )
    ]


def _declared_splits(entry: Mapping[str, Any], paths: Sequence[str]) -> Splits:
    """Split -> paths, of one entry of a card's `configs`; splits without files are omitted."""
    base = str(entry.get("data_dir") or "").strip("/")
    folder = f"{base}/" if base else ""
    if "data_files" not in entry:
        inside = [p.removeprefix(folder) for p in paths if p.startswith(folder)]
        found = splits_of_names([path for path in inside if not is_skipped(path)])
        return {split: [folder + path for path in names] for split, names in found.items()}
    splits: Splits = {}
    for split, patterns in _declared(entry["data_files"]):
        patterns = [folder + pattern.removeprefix("./") for pattern in patterns]
        matched = {p for p in paths if any(_matches(pattern, p) for pattern in patterns)}
        if new := sorted(matched - set(splits.get(split, [])), key=natural):
            splits.setdefault(split, []).extend(new)
    return splits


def _declared(data_files: Any) -> list[tuple[str, list[str]]]:
    """(split, patterns) of each item of a card's `data_files`."""
    if isinstance(data_files, Mapping):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    declared = []
    for item in data_files if isinstance(data_files, list) else [data_files]:
        item = item if isinstance(item, Mapping) else {"path": item}
        path = item.get("path")
        patterns = [p for p in (path if isinstance(path, list) else [path]) if isinstance(p, str)]
        declared.append((str(item.get("split", "train")), patterns))
    return declared


def _matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a whole path as in fsspec: only `**` crosses folders.

    Hidden files match if the pattern has their hidden parts. One regular expression for the whole,
    from a stranger's card, could run for years; here the steps are at most the product of parts.
    """
    parts = path.split("/")
    if not all(part in pattern for part in parts if is_skipped(part)):
        return False
    reached = {0}  # parts of the path that the pattern so far can match
    for glob in pattern.split("/"):
        if glob == "**":
            reached = set(range(min(reached, default=len(parts) + 1), len(parts) + 1))
        else:
            reached = {n + 1 for n in reached if n < len(parts) and fnmatchcase(parts[n], glob)}
    return len(parts) in reached


def _of_one_format(splits: Splits, entry: Mapping[str, Any]) -> Config:
    formats = sorted({format for paths in splits.values() if (format := format_of(paths))})
    if len(formats) > 1:
        return Config(problem=f"its splits are in different formats ({', '.join(formats)})")
    if not formats or formats[0] not in (*CONVERTED, "parquet"):
        return Config(problem=f"its files are {formats[0] if formats else 'of no known format'}")
    format = formats[0]
    chosen = {split: [p for p in paths if is_of(format, p)] for split, paths in splits.items()}
    every = [path for paths in chosen.values() for path in paths]
    separator = entry.get("delimiter", entry.get("sep"))
    return Config(
        splits={split: paths for split, paths in chosen.items() if paths},
        convert="" if format == "parquet" else conversion(format, every),
        separator=None if separator is None else str(separator),
        problem=_problem(format, every, entry, separator),
    )


def _problem(
    format: str, paths: Sequence[str], entry: Mapping[str, Any], separator: Any
) -> str | None:
    readable = READ_COMPRESSED if format in ("csv", "json", "text") else ()
    for path in paths:
        if endings(path)[-1] in _COMPRESSED and endings(path)[-1] not in readable:
            return f"{path} is compressed in a way that stage cannot read"
    changes = set(_CHANGES_ROWS.split())
    if str(entry.get("encoding", "utf-8")).lower() in ("utf-8", "utf8"):
        changes.remove("encoding")
    if option := next((key for key in entry if key in changes), None):
        return f"its card asks for `{option}: {entry[option]}`, which stage does not support"
    if separator is not None and len(str(separator).encode()) != 1:
        return f"its card asks for the separator {separator!r}, which is not one character"
    return None


def natural(path: str) -> list[tuple[int, int, str]]:
    """A sort key that puts `part-2` before `part-10`."""
    parts = re.split(r"([0-9]{1,18})", path)
    return [(0, int(t), "") if re.fullmatch("[0-9]{1,18}", t) else (1, 0, t) for t in parts if t]
