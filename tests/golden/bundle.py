"""The golden of a bundle: what `stage fetch` makes of every kind of asset, and from what.

It has each row of the lock, the sha256 of each file of `data/` (all but environments), the values
of what was converted, and the packages of the environment. Left out are what changes with each
commit: Airlift's own wheel, the image and what is in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq

from tests.golden.everything import fetch_everything

Json = dict[str, Any]
KEPT_VERSIONS = ("greeter", "links", "made")  # of packages that tests make; others are installed
MADE_WITH = "made with"
MADE = "made files"
"""The files that a library wrote: their bytes depend on its version."""


def record(folder: Path) -> str:
    bundle, web = fetch_everything(folder)
    lock = json.loads((bundle / "stage.lock").read_bytes())
    document: Json = {
        MADE_WITH: {
            "pyarrow": pyarrow.__version__,
            "zlib": zlib.ZLIB_RUNTIME_VERSION,
            "python": ".".join(platform.python_version_tuple()[:2]),
        },
        "assets": {},
        "files": {},
        MADE: {},
        "values": {},
        "packages": [],
    }
    for name, asset in lock["assets"].items():
        if asset["kind"] == "environment":
            document["packages"] = _packages(asset)
        else:
            document["assets"][name] = _asset(asset, document)
    for path in sorted((bundle / "data").rglob("*")):
        inside = path.relative_to(bundle).as_posix()
        if path.is_file() and not inside.startswith("data/envs/"):
            kind = MADE if inside in document[MADE] else "files"
            document[kind][inside] = _sha256(path.read_bytes())
            if kind == MADE and inside.endswith(".parquet"):
                document["values"][inside] = _values(path)
    text = _text(document)
    assert "127.0.0.1" not in text.replace(web, "")
    return text.replace(web, "http://web")


def without_library_bytes(text: str) -> str:
    """A recording without what other versions of pyarrow and zlib may write otherwise."""
    document = json.loads(text)
    del document[MADE], document[MADE_WITH]
    return _text(document)


def made_with(text: str) -> Json:
    """The versions that decided the bytes of a recording."""
    versions: Json = json.loads(text)[MADE_WITH]
    return versions


def _asset(asset: Json, document: Json) -> Json:
    """An asset of the lock. Digest and size of what a library wrote go to their own part."""
    asset.pop("made_with", None)
    for file in asset["files"]:
        if file["path"].endswith(".parquet") and file.get("made_by") not in (None, "download"):
            document[MADE][file["path"]] = ""
            del file["sha256"], file["size"]
    return asset


def _packages(asset: Json) -> list[str]:
    """`name version manager` of the packages but those that stand in for what Airlift needs."""
    airlift = ("python", "pip", "click", *KEPT_VERSIONS)
    return sorted(
        " ".join(
            (
                package["name"],
                package["version"] if package["name"] in KEPT_VERSIONS else "(version)",
                package["manager"],
            )
        )
        for package in asset["environment"]["packages"]
        if package["name"] in airlift
    )


def _values(path: Path) -> Json:
    """Names, types and rows of a parquet file."""
    table = pq.read_table(path)
    about = (table.schema.metadata or {}).get(b"huggingface")
    rows = [json.dumps(_plain(row), ensure_ascii=False) for row in table.to_pylist()]
    return {
        "columns": [f"{field.name}: {field.type}" for field in table.schema],
        **({"features": json.loads(about)} if about else {}),
        "rows": rows,
    }


def _plain(value: Any) -> Any:
    """A value as JSON; an image by its pixels, because zlib decides the bytes of a PNG."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return _pixels(value) if value.startswith(b"\x89PNG") else value.hex()
    return value if isinstance(value, int | float | str | None) else repr(value)


def _pixels(data: bytes) -> str:
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    return f"{image.mode} {image.size} {_sha256(image.tobytes())[:16]}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _text(document: Json) -> str:
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
