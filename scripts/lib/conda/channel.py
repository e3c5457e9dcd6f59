"""Makes a conda channel in a folder: packages of files, wheels and this Python, then the index.

`Package` and its payload -> `write_package` -> `<channel>/<subdir>/*.conda` -> `index`. The demo
and the tests solve, download and install from it, without access to another channel. The same
input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from conda_package_streaming.create import conda_builder

PLACEHOLDER = ("/opt/" + "placehold_" * 26)[:255]
"""The prefix that packages here were "built" for; 255 bytes, as in conda-build."""

BUILT_AT = 1700000000
"""Seconds since 1970, for every date inside a package."""

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)

# py-rattler's runtime may crash while the interpreter shuts down, so the process ends by os._exit.
_INDEX = """\
import asyncio, os, sys
from rattler.index import index_fs
asyncio.run(index_fs(sys.argv[1], write_zst=False, write_shards=False))
os._exit(0)
"""


@dataclass(frozen=True)
class File:
    """One payload file, or a symbolic link where `link` says to what."""

    content: bytes = b""
    executable: bool = False
    link: str | None = None


@dataclass(frozen=True, kw_only=True)
class Package:
    """One conda package.

    Attributes:
        payload: path -> file. For `python=True` paths begin with `site-packages/`.
        python: a `noarch: python` package.
        entry_points: `name = module:function`, for `python=True`.
        extra: further fields of index.json.
    """

    name: str
    version: str
    payload: Mapping[str, File]
    build: str = "0"
    depends: tuple[str, ...] = ()
    constrains: tuple[str, ...] = ()
    platform: str = "linux-64"
    python: bool = False
    entry_points: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def subdir(self) -> str:
        return "noarch" if self.python else self.platform

    @property
    def stem(self) -> str:
        return f"{self.name}-{self.version}-{self.build}"

    def index_json(self) -> dict[str, Any]:
        """The fields for the solver."""
        number = self.build.rpartition("_")[2]
        return {
            "name": self.name,
            "version": self.version,
            "build": self.build,
            "build_number": int(number) if number.isdigit() else 0,
            "depends": list(self.depends),
            "constrains": list(self.constrains),
            "subdir": self.subdir,
            "timestamp": BUILT_AT * 1000,
            "license": "LicenseRef-test",
            **({"noarch": "python"} if self.python else {}),
            **self.extra,
        }


def write_package(channel: Path, package: Package) -> Path:
    """Writes `<channel>/<subdir>/<name>-<version>-<build>.conda` and returns its path."""
    folder = channel / package.subdir
    folder.mkdir(parents=True, exist_ok=True)
    documents: dict[str, Any] = {
        "info/about.json": {"summary": f"{package.name}, repackaged"},
        "info/index.json": package.index_json(),
        "info/paths.json": {"paths": _paths(package.payload), "paths_version": 1},
    }
    if package.python:
        link = {"type": "python", "entry_points": list(package.entry_points)}
        documents["info/link.json"] = {"noarch": link, "package_metadata_version": 1}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        with conda_builder(package.stem, temporary, compression_level=3) as tar:
            for name, document in documents.items():
                _add(
                    tar, name, File(json.dumps(document, indent=1, sort_keys=True).encode() + b"\n")
                )
            _add(
                tar,
                "info/files",
                File("".join(f"{path}\n" for path in sorted(package.payload)).encode()),
            )
            for path, file in sorted(package.payload.items()):
                _add(tar, path, file)
        return _without_dates(Path(temporary) / f"{package.stem}.conda", folder)


def index(channel: Path) -> None:
    """Writes the channel's repodata.json files."""
    (channel / "noarch").mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-c", _INDEX, str(channel)],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    for repodata in channel.glob("*/repodata.json"):
        document = json.loads(repodata.read_bytes())
        for record in document["packages.conda"].values():
            record.pop("indexed_timestamp", None)  # the clock's
        repodata.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def package_from_wheel(wheel: Path) -> Package:
    """A pure Python wheel, such as pip's, as a `noarch: python` package."""
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        payload = {
            f"site-packages/{name}": File(archive.read(name))
            for name in archive.namelist()
            if not name.endswith(("/", f"{info}/RECORD"))
        }
        payload[f"site-packages/{info}/INSTALLER"] = File(b"conda\n")
        about = PathDistribution(zipfile.Path(archive, f"{info}/"))
        metadata = about.metadata
        scripts = about.entry_points.select(group="console_scripts")
    return Package(
        name=metadata["Name"].lower().replace("_", "-").replace(".", "-"),
        version=metadata["Version"],
        build="pyhd8ed1ab_0",
        depends=("python >=3.9",),
        payload=payload,
        python=True,
        entry_points=tuple(f"{one.name} = {one.value}" for one in scripts),
    )


def _paths(payload: Mapping[str, File]) -> list[dict[str, Any]]:
    """paths.json: each file with its digest, and whether it has the prefix as text or binary."""
    rows = []
    for path, file in sorted(payload.items()):
        row: dict[str, Any] = {
            "_path": path,
            "path_type": "hardlink" if file.link is None else "softlink",
            "sha256": hashlib.sha256(file.content).hexdigest(),
            "size_in_bytes": len(file.content),
        }
        if PLACEHOLDER.encode() in file.content:
            row["prefix_placeholder"] = PLACEHOLDER
            row["file_mode"] = "binary" if b"\0" in file.content else "text"
        rows.append(row)
    return rows


def _add(tar: tarfile.TarFile, path: str, file: File) -> None:
    member = tarfile.TarInfo(path)
    member.mtime, member.mode = BUILT_AT, 0o755 if file.executable else 0o644
    if file.link is not None:
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, file.link, 0o777
        tar.addfile(member)
    else:
        member.size = len(file.content)
        tar.addfile(member, io.BytesIO(file.content))


def _without_dates(built: Path, folder: Path) -> Path:
    """The same package with a constant date for metadata.json, where conda_builder writes today."""
    target = folder / built.name
    with (
        zipfile.ZipFile(built) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as redated,
    ):
        for item in source.infolist():
            redated.writestr(zipfile.ZipInfo(item.filename, _ZIP_DATE), source.read(item))
    return target
