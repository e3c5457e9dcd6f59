"""The format of people's data files, by their names: the rules of `datasets`, pure.

The table of suffixes is that of `datasets` (its packaged_modules/__init__.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

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
READ_COMPRESSED = (".gz", ".bz2", ".zst")
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
