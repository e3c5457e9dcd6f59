"""Converts other formats to parquet on the laptop, so that the cluster reads a single format.

Which format people's data files have is known by their names: the rules of `datasets`, pure. The
table of suffixes is that of `datasets` (its packaged_modules/__init__.py).

Memory is bounded: batches stream from reader to writer, whatever the sizes of the files. The output
is deterministic: the same files, pyarrow and Python give the same bytes (`made_with`; encoders
change). No code in the input is run, not even in a pickle.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from stage.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

_IMAGES = """
blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib png apng jp2 j2k jpc
jpf jpx j2c icns ico im iim tif tiff jfif jpe jpg jpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba
sgi ras tga icb vda vst webp wmf emf xbm xpm
"""
_AUDIO = """
mpg aiff au avr caf flac htk svx mat4 mat5 mpc2k ogg paf pvf raw rf64 sd2 sds ircam voc w64 wav nist
wavex wve xi mp3 opus 3gp 3g2 asf flv m4v webm f4v wmv wma ogm mxf nut
"""
_ENDINGS = {
    "csv": "csv tsv",
    "json": "json jsonl ndjson",
    "text": "txt",
    "arrow": "arrow",
    "imagefolder": _IMAGES,
    "parquet": "parquet geoparquet gpq",
    "audio": _AUDIO,
    "video": "mpeg avi mp4 mov mkv",
    "WebDataset": "tar",
    "zip": "zip",
    "XML": "xml",
    "HDF5": "hdf5 h5",
    "CoNLL": "conll conllu",
    "PDF": "pdf",
    "Lance": "lance",
    "Vortex": "vortex",
    "time series": "tsfile",
    "NIfTI": "nii",
    "3D": "glb gltf ply stl",
    "evaluation logs": "eval",
    "Harbor tasks": "toml md",
    "biology": "fa fasta fna ffn faa frn afa gb gbk genbank fq fastq pdb ent cif mmcif",
}
# Suffix -> format. The first five can be converted. The others are listed so that no file is taken
# for another format.
FORMATS = {
    f".{ending}": format for format, endings in _ENDINGS.items() for ending in endings.split()
}
CONVERTED = ("csv", "json", "text", "arrow", "imagefolder")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_IGNORED = {
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
}
_PREFERRED = (".parquet", ".lance", ".vortex", ".arrow", ".jsonl", ".json", ".csv")

# Of a model, at its top: settings beside its weights; and those of a model in several folders.
_SETTINGS = {"config.json", "adapter_config.json", "params.json"}
_PIPELINES = {"model_index.json", "config_sentence_transformers.json"}
_BESIDE_SETTINGS = re.compile(
    r"((diffusion_)?pytorch_|adapter_)?model.*\.(safetensors|bin)|consolidated.*\.(safetensors|pth)"
    r"|(tokenizer|preprocessor|generation)_config\.json"
    r"|tokenizer\.json|vocab\.(json|txt)"
)


def endings(path: str) -> list[str]:
    """Every suffix of a file's name, in lower case: `.csv` and `.gz` of `x/a.csv.gz`."""
    return [f".{ending.lower()}" for ending in path.rpartition("/")[2].split(".")[1:]]


def is_image(path: str) -> bool:
    """Whether a file is an image to `datasets`' imagefolder, by its suffix."""
    return FORMATS.get((endings(path) or [""])[-1]) == "imagefolder"


def is_data(path: str) -> bool:
    """Whether a file can hold rows: it has a known suffix, and is no description of others."""
    return _name(path) not in _IGNORED and any(ending in FORMATS for ending in endings(path))


def is_skipped(path: str) -> bool:
    """Whether `datasets` skips a path that no pattern names."""
    return any(part.startswith((".", "__")) for part in path.split("/"))


def format_of(paths: Iterable[str]) -> str | None:
    """The format that most of these files have; a tie is decided as in `datasets.load`."""
    counts = Counter(
        (ending, _name(path) in METADATA_FILES) for path in paths for ending in endings(path)
    )

    def rank(item: tuple[tuple[str, bool], int]) -> tuple[Any, ...]:
        (ending, is_metadata), count = item
        return (not is_metadata, count, *(ending == preferred for preferred in _PREFERRED), ending)

    ranked = sorted(counts.items(), key=rank, reverse=True)
    return next((FORMATS[ending] for (ending, _), _ in ranked if ending in FORMATS), None)


def is_of(format: str, path: str) -> bool:
    """Whether a file is of a format, or belongs to a folder of images."""
    if format == "imagefolder" and _name(path) in METADATA_FILES:
        return True
    return any(FORMATS.get(ending) in (format, "zip") for ending in endings(path))


def conversion(format: str, paths: Sequence[str]) -> str:
    """`json` reads JSON lines too; `jsonl` reports the number of a malformed line."""
    if format == "json" and not any(".json" in endings(path) for path in paths):
        return "jsonl"
    return format


def conversion_of(paths: Iterable[str]) -> str | None:
    """The `convert:` of a folder's files: of the format that most of them have, if any has one."""
    can = (*CONVERTED, "parquet")
    files = [path for path in paths if is_data(path) and not is_skipped(path)]
    files = [path for path in files if any(is_of(format, path) for format in can)]
    format = format_of(files)
    return conversion(format, [p for p in files if is_of(format, p)]) if format in can else None


def is_model(paths: Iterable[str]) -> bool:
    """Whether a folder with these files is a model's: settings, and weights or a tokenizer.

    A pipeline (diffusers, sentence-transformers) has them in folders, and names these at its top.
    """
    names = set(paths)
    if _PIPELINES & names:
        return True
    return bool(_SETTINGS & names) and any(_BESIDE_SETTINGS.fullmatch(name) for name in names)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


CONFIG = "default"
_SUFFIXES = {
    "csv": (".csv", ".tsv"),
    "json": (".json",),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "text": (".txt",),
    "arrow": (".arrow", ".feather", ".ipc"),
    "parquet": (".parquet",),
}
READ_COMPRESSED = (".gz", ".bz2", ".zst")


@dataclass(frozen=True)
class Split:
    """A converted split.

    Attributes:
        shards: its parquet files, in order.
        origin: names the files that it is made from. It is part of the lock.
    """

    shards: tuple[Path, ...]
    origin: str


def made_with() -> dict[str, str]:
    """The versions here of what decides the bytes of converted files."""
    import pyarrow as pa

    python = ".".join(platform.python_version_tuple()[:2])
    return {"pyarrow": pa.__version__, "python": python}


def convert(
    how: str,
    files: Mapping[str, Path],
    splits_of: Callable[[Sequence[str]], Mapping[str, list[str]]],
    target: Path,
    separator: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Split]:
    """Converts files to parquet, `target/<split>-00000-of-0000N.parquet`.

    Args:
        how: one of `stage.lock.manifest.CONVERSIONS`.
        files: relative POSIX path -> the file.
        splits_of: returns the splits, by the names of files; not used for `cifar`.
        target: a new folder.
        separator: between the cells of a CSV; None: as the suffixes of the files say.
        note: called with a line for each column that `load_dataset` would read otherwise, for each
            of a CSV that begins with numbers and is text, and for a file in two splits.

    Raises:
        UsageError: no file of that format, or rows that do not fit together.
        DamageError: a file that is not of that format.
        PolicyError: a pickle that would build more than plain data.
    """
    splits = {} if how == "cifar" else splits_of(chosen(how, files))
    return convert_splits(how, files, splits, target, separator, note)


def convert_splits(
    how: str,
    files: Mapping[str, Path],
    splits: Mapping[str, list[str]],
    target: Path,
    separator: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Split]:
    """Converts files of a known format, split by split.

    Args:
        how, files, target, separator, note: as for `convert`.
        splits: split -> paths, in order; not used for `cifar`.

    Raises:
        StageError: as for `convert`.
    """
    from stage.convert import images, readers

    target.mkdir(parents=True)
    for path, count in Counter(path for paths in splits.values() for path in paths).items():
        if count > 1:
            both = " and ".join(split for split in splits if path in splits[split])
            note(f"{path} is in {both}, as with `load_dataset`: its rows are in each")
    if how == "cifar":
        return _write(how, images.cifar_parts(files), target)
    with TemporaryDirectory(dir=target, prefix="cells-") as scratch:
        if how == "imagefolder":
            return _write(how, images.parts(files, splits, Path(scratch)), target)
        groups = {split: [(path, files[path]) for path in paths] for split, paths in splits.items()}
        every = [pair for group in groups.values() for pair in group]
        table = readers.Table(how, every, Path(scratch), separator, note)
        parts = {
            split: (table.schema, table.rows(group), splits[split])
            for split, group in groups.items()
        }
        return _write(how, parts, target)


def _write(
    how: str,
    parts: Mapping[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]],
    target: Path,
) -> dict[str, Split]:
    from stage.convert.parquet_writer import write_split

    made = {}
    for split, (schema, rows, paths) in parts.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        shards = write_split(schema, rows, target, split)
        made[split] = Split(tuple(shards), f"{how}: {paths[0]}{more}")
    return made


def chosen(how: str, files: Collection[str]) -> list[str]:
    """The files of a format, by their suffixes. A single file is accepted with any suffix.

    Args:
        how: one of `stage.lock.manifest.CONVERSIONS`.
        files: relative POSIX paths.

    Raises:
        UsageError: there is none, or the folder is a model's.
    """
    if is_model(files):
        raise UsageError(
            f"`convert: {how}`: this is a model's folder, not rows of data.",
            "Remove `convert`: a model is taken as it is.",
        )
    visible = [path for path in sorted(files) if not is_skipped(path)]
    if how == "cifar":  # `images.cifar_parts` finds its files by their names
        return sorted(files)
    if how == "imagefolder":
        return [
            path for path in visible if is_image(path) or path.rpartition("/")[2] in METADATA_FILES
        ] or visible
    if len(files) == 1:
        return list(files)
    found = [path for path in visible if _without_compression(path).endswith(_SUFFIXES[how])]
    if not found:
        other = conversion_of(files)
        raise UsageError(
            f"`convert: {how}`: no file ends in {' or '.join(_SUFFIXES[how])}.",
            (f"Write `convert: {other}`. " if other not in (None, how) else "")
            + f"There are: {', '.join(sorted(files)[:6])}{', ...' if len(files) > 6 else ''}",
        )
    return found


def _without_compression(path: str) -> str:
    path = path.lower()
    return next(
        (path.removesuffix(suffix) for suffix in READ_COMPRESSED if path.endswith(suffix)), path
    )
