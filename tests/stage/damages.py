"""Ways to damage a bundle, each at random, for the golden of verdicts.

A damage is a function of a bundle's folder and a source of chance. Some edits keep a part of the
records consistent. Nothing here is code of the product.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], None]
BAG_INFO, LOCK = "bag-info.txt", "stage.lock"
MANIFEST, TAG_MANIFEST = "manifest-sha256.txt", "tagmanifest-sha256.txt"


def files(root: Path) -> list[str]:
    """Every file of a bundle, with the index."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def payload(root: Path) -> list[str]:
    return [path for path in files(root) if path.startswith("data/")]


def folders(root: Path) -> list[str]:
    """Every folder of a bundle with a file at any depth below it."""
    return sorted({parent for path in files(root) for parent in _parents(path)})


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def flip_a_bit(root: Path, chance: random.Random) -> None:
    _flip(
        root,
        chance.choice([path for path in files(root) if (root / path).stat().st_size]),
        chance,
    )


def _flip(root: Path, path: str, chance: random.Random) -> None:
    with open(root / path, "r+b") as file:
        position = chance.randrange((root / path).stat().st_size)
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def truncate(root: Path, chance: random.Random) -> None:
    path = chance.choice([path for path in files(root) if (root / path).stat().st_size])
    os.truncate(root / path, chance.choice([0, chance.randrange((root / path).stat().st_size)]))


def grow(root: Path, chance: random.Random) -> None:
    path = chance.choice(files(root))
    with open(root / path, "ab") as file:
        file.write(chance.choice([b"\n", b"\0", b" ", chance.randbytes(1000)]))


def delete(root: Path, chance: random.Random) -> None:
    path = chance.choice(files(root))
    (root / path).unlink()


def add_a_file(root: Path, chance: random.Random) -> None:
    folder = chance.choice(
        ["", "data/new/deep/", "blocks/", "other/", *(f"{folder}/" for folder in folders(root))]
    )
    name = chance.choice(
        [".DS_Store", "x.py", "model.safetensors.partial", "._config.json", "a" * 64, "notes~", "ü"]
    )
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / folder / name).write_bytes(chance.choice([b"", b"\n", b"data"]))


def rename(root: Path, chance: random.Random) -> None:
    path = chance.choice(files(root))
    beside = (root / path).with_name("moved").relative_to(root).as_posix()
    target = chance.choice([path + ".bak", beside, path.upper()])
    (root / target).parent.mkdir(parents=True, exist_ok=True)
    (root / path).rename(root / target)


def swap_two_of_equal_size(root: Path, chance: random.Random) -> None:
    by_size: dict[int, list[str]] = {}
    for path in payload(root):
        by_size.setdefault((root / path).stat().st_size, []).append(path)
    one, other = chance.sample(
        chance.choice([many for many in by_size.values() if len(many) > 1]), 2
    )
    assert (root / one).read_bytes() != (root / other).read_bytes()
    _swap(root, one, other)


def _swap(root: Path, one: str, other: str) -> None:
    (root / one).rename(root / "aside")
    (root / other).rename(root / one)
    (root / "aside").rename(root / other)


def link_in_place_of_a_file(root: Path, chance: random.Random) -> None:
    """Replaces a file by a link, even to equal bytes, outside the bundle or inside it."""
    path = chance.choice(files(root))
    kept = root / ".." / chance.choice(["outside", root.name + "/inside"])
    shutil.move(root / path, kept)
    (root / path).symlink_to(
        chance.choice([kept.resolve(), Path(os.path.relpath(kept, (root / path).parent))])
    )


def link_in_place_of_a_folder(root: Path, chance: random.Random) -> None:
    folder = chance.choice(folders(root))
    shutil.move(root / folder, root.parent / "outside")
    (root / folder).symlink_to((root.parent / "outside").resolve(), target_is_directory=True)


def edit_the_lock(root: Path, chance: random.Random) -> None:
    """Changes the lock only."""
    _write_lock(root, _edited_lock(root, chance))


def edit_the_lock_and_the_index(root: Path, chance: random.Random) -> None:
    """Changes the lock and its line in the tag manifest; `bag-info.txt` or the payload differs."""
    _write_lock(root, _edited_lock(root, chance))
    _reseal(root, LOCK)


def edit_lock_manifest_bag_info_and_index(root: Path, chance: random.Random) -> None:
    """All records agree with one another but not with the payload; the finding is the payload."""
    document = _read_lock(root)
    asset = chance.choice([asset for asset in document["assets"].values() if asset["files"]])
    file = chance.choice(asset["files"])
    edit = chance.choice(["digest", "size"])
    if edit == "digest":
        file["sha256"] = chance.randbytes(32).hex()
    else:
        file["size"] += 1
    _write_lock(root, document)
    rows = [row for each in document["assets"].values() for row in each["files"]]
    digests = {row["path"]: row["sha256"] for row in rows}
    (root / MANIFEST).write_bytes(_manifest_text(digests))
    oxum = f"{sum(row['size'] for row in rows)}.{len(rows)}"
    text = (root / BAG_INFO).read_text()
    text = re.sub("sha256:.*", f"sha256:{_sha256((root / LOCK).read_bytes())}", text)
    (root / BAG_INFO).write_text(re.sub("Oxum: .*", f"Oxum: {oxum}", text))
    _reseal(root, LOCK, MANIFEST, BAG_INFO)


def edit_a_file_and_the_payload_manifest(root: Path, chance: random.Random) -> None:
    """An edit by a user who knows BagIt: payload and both manifests agree; the lock does not."""
    small = [path for path in payload(root) if 0 < (root / path).stat().st_size < 10**6]
    path = chance.choice(small)
    _flip(root, path, chance)
    lines = _read_manifest(root / MANIFEST)
    lines[path] = _sha256((root / path).read_bytes())
    (root / MANIFEST).write_bytes(_manifest_text(lines))
    _reseal(root, MANIFEST)


def edit_the_payload_manifest_and_the_index(root: Path, chance: random.Random) -> None:
    lines = _read_manifest(root / MANIFEST)
    path = chance.choice(sorted(lines))
    if chance.random() < 0.5:
        del lines[path]
    else:
        lines[path] = chance.randbytes(32).hex()
    (root / MANIFEST).write_bytes(_manifest_text(lines))
    _reseal(root, MANIFEST)


def _read_lock(root: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((root / LOCK).read_bytes())
    return document


def _write_lock(root: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    (root / LOCK).write_text(text, encoding="utf-8")


def _edited_lock(root: Path, chance: random.Random) -> dict[str, Any]:
    document = _read_lock(root)
    _, asset = chance.choice(
        sorted((n, a) for n, a in document["assets"].items() if len(a["files"]) > 1)
    )
    file = chance.choice(asset["files"])
    match chance.choice(["size", "digest", "name", "licence", "path", "drop", "unknown"]):
        case "size":
            file["size"] += chance.choice([-1, 1]) if file["size"] else 1
        case "digest":
            file["sha256"] = chance.randbytes(32).hex()
        case "name":
            document["name"] = "renamed"
        case "licence":
            asset["licence"] = "none of your business"
        case "path":
            other = f"{file['path']}x"
            splits = [
                split for config in asset.get("configs", {}).values() for split in config.values()
            ]
            for split in splits:
                split["shards"] = [
                    other if shard == file["path"] else shard for shard in split["shards"]
                ]
            file["path"] = other
        case "drop":
            asset["files"].remove(file)
            asset.get("configs", {}).clear()
        case "unknown":
            document["remark"] = "added by hand"
    return document


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest_text(digests: Mapping[str, str]) -> bytes:
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests)).encode()


def _read_manifest(path: Path) -> dict[str, str]:
    lines = (line.split("  ", 1) for line in path.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in lines}


def _reseal(root: Path, *names: str) -> None:
    """Makes the tag manifest agree with the current tag files."""
    path = root / TAG_MANIFEST
    digests = _read_manifest(path)
    digests |= {name: _sha256((root / name).read_bytes()) for name in names}
    path.write_bytes(_manifest_text(digests))


DAMAGES: tuple[Damage, ...] = (
    flip_a_bit,
    truncate,
    grow,
    delete,
    add_a_file,
    rename,
    swap_two_of_equal_size,
    link_in_place_of_a_file,
    link_in_place_of_a_folder,
    edit_the_lock,
    edit_the_lock_and_the_index,
    edit_lock_manifest_bag_info_and_index,
    edit_a_file_and_the_payload_manifest,
    edit_the_payload_manifest_and_the_index,
)
