"""What the endings of files say, to the `datasets` library and so to us (its packaged_modules/__init__.py)."""

from __future__ import annotations

_IMAGES = """blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib png apng jp2 j2k jpc jpf jpx
j2c icns ico im iim tif tiff jfif jpe jpg jpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba sgi ras tga icb vda vst webp
wmf emf xbm xpm"""
_AUDIO = """mpg aiff au avr caf flac htk svx mat4 mat5 mpc2k ogg paf pvf raw rf64 sd2 sds ircam voc w64 wav nist wavex
wve xi mp3 opus 3gp 3g2 asf flv m4v webm f4v wmv wma ogm mxf nut"""
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
# Ending -> format. The first five can be converted; the others are known so that they are not taken for something else.
FORMATS = {f".{ending}": format for format, endings in _ENDINGS.items() for ending in endings.split()}
CONVERTED = ("csv", "json", "text", "arrow", "imagefolder")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def endings(path: str) -> list[str]:
    """Every ending of a file's name, in lower case: `.csv` and `.gz` of `x/a.csv.gz`."""
    return [f".{ending.lower()}" for ending in path.rpartition("/")[2].split(".")[1:]]


def is_image(path: str) -> bool:
    """Whether `datasets`' imagefolder takes a file for an image."""
    return FORMATS.get((endings(path) or [""])[-1]) == "imagefolder"
