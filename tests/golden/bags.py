"""Finished bundles for the golden of verdicts, written by hand after the description of the format.

They depend on no code of the product but the number of the lock's format, so that the same damages
hit the same bytes whatever writes and verifies bundles. `stage-verify.py` in them is a stand-in.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stage.bundle.verifier import LOCK_FORMAT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REQUEST = b"format: 1\nname: made\nassets:\n  bert:\n    model: acme/bert\n"
VERIFIER = b"#!/usr/bin/env python3\nprint('a stand-in')\n"
BAG_INFO = """\
Airlift-Host: laptop
Bagging-Date: 2026-01-02
External-Identifier: sha256:{id}
Payload-Oxum: {size}.{count}
"""


def tiny() -> dict[str, bytes]:
    """The smallest contents that can be damaged in all ways."""
    return {"data/files/notes/a": b"1", "data/files/notes/b": b"2"}


def small() -> dict[str, bytes]:
    """Each kind of asset; some files of equal size, one empty, one name in another script."""
    noise = random.Random(2)
    header = b'{"weight":{"dtype":"U8","shape":[20000],"data_offsets":[0,20000]}}'
    return {
        "data/models/bert/config.json": b'{"model_type": "bert"}\n',
        "data/models/bert/vocab.txt": b'{"equal in size": 000}\n',
        "data/models/bert/model.safetensors": struct.pack("<Q", len(header))
        + header
        + noise.randbytes(20_000),
        "data/models/bert/1_Pooling/config.json": b"{}",
        "data/datasets/lines/plain/train-00000-of-00002.parquet": noise.randbytes(5000),
        "data/datasets/lines/plain/train-00001-of-00002.parquet": noise.randbytes(5000),
        "data/files/notes/empty": b"",
        "data/files/notes/a b/größe  ü.txt": b"\n\n",
    }


def many() -> dict[str, bytes]:
    """A hundred and fifty small files more, of a few sizes, in fifteen folders."""
    noise = random.Random(3)
    return small() | {
        f"data/files/notes/{n % 15:03d}/{n:05d}.txt": noise.randbytes(noise.randrange(1, 40))
        for n in range(150)
    }


def write_bag(root: Path, files: Mapping[str, bytes]) -> Path:
    """Writes a finished bundle with these payload files."""
    lock = _json(
        {"format": LOCK_FORMAT, "name": "made", "assets": dict(_assets(files))},
    )
    texts = {
        "bagit.txt": b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n",
        "bag-info.txt": BAG_INFO.format(
            id=sha256(lock), size=sum(map(len, files.values())), count=len(files)
        ).encode(),
        "manifest-sha256.txt": manifest(files),
        "stage.lock": lock,
        "stage.yaml": REQUEST,
        "stage-verify.py": VERIFIER,
    }
    texts["tagmanifest-sha256.txt"] = manifest(texts)
    for path, data in {**files, **texts}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{sha256(files[path])}  {path}\n" for path in sorted(files)).encode()


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _assets(files: Mapping[str, bytes]) -> dict[str, Any]:
    hub = {
        "type": "hub",
        "repository": "acme/bert",
        "requested_revision": "main",
        "commit": COMMIT,
    }
    bert, lines, notes = (
        [_row(path, files[path], hub=folder != "files") for path in sorted(files)
         if path.startswith(f"data/{folder}/")]
        for folder in ("models", "datasets", "files")
    )  # fmt: skip
    common: dict[str, Any] = {"left_out": [], "licence": None}
    split = {
        "rows": 7,
        "schema": [{"name": "text", "type": "string"}],
        "shards": [row["path"] for row in lines],
    }
    assets: dict[str, Any] = {
        "bert": {
            **common,
            "kind": "model",
            "licence": "mit",
            "request": {"model": "acme/bert"},
            "source": hub,
            "files": bert,
        },
        "lines": {
            **common,
            "kind": "dataset",
            "request": {"dataset": "a/l"},
            "source": hub,
            "files": lines,
            "configs": {"plain": {"train": split}},
        },
        "notes": {
            **common,
            "kind": "files",
            "request": {"path": "n"},
            "source": {"type": "path", "path": "n"},
            "files": notes,
        },
    }
    return {name: asset for name, asset in assets.items() if asset["files"]}


def _row(path: str, data: bytes, hub: bool) -> dict[str, Any]:
    row = {
        "path": path,
        "origin": path.rpartition("/")[2],
        "size": len(data),
        "sha256": sha256(data),
    }
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {**row, "upstream": {"git-sha1": git}} if hub else row
