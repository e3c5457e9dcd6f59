"""What the tests of patches share."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

from stage.bundle.bundle import finish_bundle, verify
from stage.bundle.receipt import read_report
from stage.carry.patch import patch_damage
from stage.files import hash_file
from stage.lock.model import LockedAsset, LockedFile, Lockfile, Source
from stage.progress import Reporter
from tests.stage.bundles import BIG

MIB = 2**20
QUIET = Reporter(quiet=True)


def stage(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stage", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def state(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def patch_for(sound: Path, copy: Path, folder: Path) -> Path:
    """A patch for the damage of `copy`."""
    (folder / "r.json").write_text(json.dumps(verify(copy).to_json()))
    patch_damage(sound, read_report(folder / "r.json"), folder / "patch", QUIET)
    return folder / "patch"


def new_version(old: Path, root: Path, *, big: bool = True) -> Path:
    """A bundle with files of `old` renamed, swapped, shared, changed, dropped, added."""
    root.mkdir()
    moves = {
        "data/models/bert/model.safetensors": "data/models/bert/renamed.safetensors",
        "data/models/bert/config.json": "data/models/bert/vocab.txt",  # swapped
        "data/models/bert/vocab.txt": "data/models/bert/config.json",
        "data/models/bert/1_Pooling/config.json": "data/models/bert/1_Pooling/config.json",
    }
    if big:
        moves[BIG] = "data/files/big/moved/sparse.bin"
    for source, target in moves.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(old / source, root / target)
    shutil.copyfile(
        old / "data/models/bert/1_Pooling/config.json", root / "data/models/bert/shared.json"
    )
    noise = random.Random(5).randbytes(70 * MIB if big else 70_000)
    (root / "data/files/big").mkdir(parents=True, exist_ok=True)
    for name in ("new.bin", "twin.bin"):
        (root / "data/files/big" / name).write_bytes(noise)
    (root / "data/files/big/empty").touch()
    assets = []
    for name, kind in (("bert", "model"), ("big", "files")):
        folder = root / "data" / ("models" if kind == "model" else "files") / name
        files = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            digests = hash_file(path)
            relative = path.relative_to(root).as_posix()
            files.append(LockedFile(relative, digests.size, digests.sha256, None, path.name))
        assets.append(LockedAsset(name, kind, {"path": "x"}, Source("path", "x"), tuple(files)))
    finish_bundle(
        root,
        Lockfile("made", {asset.name: asset for asset in assets}),
        b"format: 1\n",
        [("Airlift-Host", "new")],
    )
    return root
