"""Lays packages into one folder, as an environment whose files say a placeholder where its prefix will be.

A process of its own (`python -m stage.environment.link`), for py-rattler may crash an interpreter that ends in the
usual way (pyo3-async-runtimes#40): this one ends by `os._exit`. In: a JSON request on stdin; out: a JSON answer on
stdout. Nothing of the target is run, so a macOS laptop lays out linux-64. On the cluster the same code runs from the
wheels that travel in the asset (`stage.environment.create`), and the same folder comes out.

conda packages by py-rattler -> wheels by `installer` -> without what only this machine knows (dates, paths, bytecode).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import traceback
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile
from installer.utils import parse_entrypoints
from rattler import RepoDataRecord, Subdir
from rattler import install as link_packages
from rattler.exceptions import InstallerError, LinkError, TransactionError

from stage.environment import shebang
from stage.environment.shebang import Shebang

_VOLATILE = ("package_tarball_full_path", "extracted_package_dir", "link", "requested_specs")


class Refused(Exception):
    """The packages cannot be laid into one folder."""


@dataclass
class Linking:
    """One environment being laid out.

    Attributes:
        root: the folder, new.
        cache: where packages are unpacked meanwhile, on the same disk.
        placeholder: what its files say for the prefix.
        platform: conda's name, `linux-64`.
        conda: the file of every conda package -> its address, which is what the environment shall remember.
        wheels: files, in the order in which they are laid down.
        notes: what a person should know of it.
        conda_files: what conda packages brought.
    """

    root: Path
    cache: Path
    placeholder: str
    platform: str
    conda: Mapping[str, str]
    wheels: list[str]
    notes: list[str] = field(default_factory=list)
    conda_files: set[str] = field(default_factory=set)
    site_packages: str = ""

    def run(self) -> dict[str, Any]:
        """Lays everything out.

        Raises:
            Refused: two packages want the same file, a link leads out of the environment, this disk ignores case.
        """
        records = asyncio.run(self._link_conda())
        indexes = {name: self._canonical_record(record) for name, record in records.items()}
        python = next(index for index in indexes.values() if index["name"] == "python")
        minor = ".".join(python["version"].split(".")[:2])
        self.site_packages = python.get("python_site_packages_path") or f"lib/python{minor}/site-packages"
        (self.root / "CACHEDIR.TAG").unlink(missing_ok=True)
        (self.root / "conda-meta/history").write_bytes(b"")
        self._install_wheels(f"python{minor}")
        self._start_scripts_of_wheels()
        self._drop_bytecode()
        self._settle_files()
        return {"indexes": indexes, "notes": self.notes, "site_packages": self.site_packages}

    async def _link_conda(self) -> dict[str, RepoDataRecord]:
        records = {Path(path).name: await RepoDataRecord.from_package_archive(Path(path)) for path in self.conda}
        try:
            await link_packages(
                list(records.values()),
                self.root,
                cache_dir=self.cache,
                platform=Subdir(self.platform),
                show_progress=False,
                execute_link_scripts=False,
                alternative_target_prefix=self.placeholder,
            )
        except (InstallerError, LinkError, TransactionError) as error:
            if "longer than the placeholder" in str(error) and (short := self._with_too_little_room()):
                raise Refused(
                    f"{', '.join(short)}: built with room for a shorter prefix than the {len(self.placeholder)} bytes"
                    " that an environment needs"
                ) from None
            raise
        return records

    def _with_too_little_room(self) -> list[str]:
        """The conda packages in whose programs the placeholder does not fit: py-rattler does not say which."""
        found = []
        for paths in sorted(self.cache.glob("*/info/paths.json")):
            entries = json.loads(paths.read_text(encoding="utf-8"))["paths"]
            binaries = [entry for entry in entries if entry.get("file_mode") == "binary"]
            has = (len(entry.get("prefix_placeholder") or self.placeholder) for entry in binaries)
            if any(length < len(self.placeholder) for length in has):
                found.append(paths.parents[1].name)
        return found

    def _canonical_record(self, record: RepoDataRecord) -> dict[str, Any]:
        """Rewrites what `conda-meta` says of a package without this machine; returns the package's own `index.json`."""
        file = record.file_name
        stem = file.removesuffix(".conda").removesuffix(".tar.bz2")
        path = self.root / "conda-meta" / f"{stem}.json"
        meta = json.loads(path.read_text(encoding="utf-8"))
        extracted = Path(meta["extracted_package_dir"])
        index: dict[str, Any] = json.loads((extracted / "info/index.json").read_text(encoding="utf-8"))
        self._check_laid_out(meta, file)
        for entry in meta["paths_data"]["paths"]:
            if entry.get("prefix_placeholder"):
                self._restore_python_shebang(entry, extracted)
            if entry.get("prefix_placeholder") or entry["path_type"] == "unix_python_entry_point":
                for key in ("sha256", "sha256_in_prefix", "size_in_bytes"):  # they depend on the prefix
                    entry.pop(key, None)
        url = next(url for path, url in self.conda.items() if Path(path).name == file)
        for key in _VOLATILE:
            meta.pop(key, None)
        meta["url"], meta["channel"] = url, url.rsplit("/", 2)[0]
        meta["files"] = sorted(f for f in meta["files"] if not _is_bytecode(f))
        meta["paths_data"]["paths"] = sorted(
            (entry for entry in meta["paths_data"]["paths"] if not _is_bytecode(entry["_path"])),
            key=lambda entry: str(entry["_path"]),
        )
        _replace(path, (json.dumps(meta, indent=1, sort_keys=True) + "\n").encode())
        return index

    def _check_laid_out(self, meta: Mapping[str, Any], file: str) -> None:
        for name in meta["files"]:
            if name in self.conda_files:
                self.notes.append(f"{file}: {name} comes from another conda package too")
            self.conda_files.add(name)
            if not os.path.lexists(self.root / name):
                raise Refused(f"{file}: {name} did not arrive. Does this disk ignore case? Set TMPDIR elsewhere")
            if re.fullmatch(r"bin/\..*-post-link\.sh", name):
                self.notes.append(f"{file}: its post-link script is not run ({name})")

    def _restore_python_shebang(self, entry: Mapping[str, Any], extracted: Path) -> None:
        """A script of the environment's python says so itself, instead of taking the first python on PATH.

        py-rattler writes a start of its own, by its version, where the prefix would make the line too long for the
        kernel: `#!/usr/bin/env python` in some, a call from sh in others.
        """
        original = _unpacked(extracted, entry["_path"])
        if entry.get("file_mode") != "text" or original.is_symlink():
            return
        found = shebang.read(original.read_bytes())
        if not found or found.prefix != entry["prefix_placeholder"].encode():
            return
        target = self.root / entry["_path"]
        self._start(target, found, shebang.without_start(target.read_bytes()))

    def _start_scripts_of_wheels(self) -> None:
        """`installer` sees to the commands it makes itself; a wheel's own scripts get their path on the first line."""
        for path in sorted((self.root / "bin").glob("*")):
            if f"bin/{path.name}" in self.conda_files or path.is_symlink() or not path.is_file():
                continue
            content = path.read_bytes()
            found = shebang.read(content)
            if found and found.prefix == self.placeholder.encode():
                self._start(path, found, shebang.without_start(content))

    def _start(self, target: Path, found: Shebang, code: bytes) -> None:
        start, reason = shebang.start(replace(found, prefix=self.placeholder.encode()), code)
        if reason:
            name = target.relative_to(self.root).as_posix()
            self.notes.append(
                f"{name}: {reason}, so the path of its python stays on its first line: where that is longer than"
                f" {shebang.LONGEST} bytes, only Linux 5.1 or newer starts it"
            )
        _replace(target, start + code)

    def _install_wheels(self, python: str) -> None:
        root = self.root
        owners: dict[str, tuple[str, int]] = {}
        for wheel in self.wheels:
            self._check_overlaps(Path(wheel), owners)
            name = Path(wheel).name.split("-")[0]
            destination = SchemeDictionaryDestination(
                {
                    "purelib": str(root / self.site_packages),
                    "platlib": str(root / self.site_packages),
                    "scripts": str(root / "bin"),
                    "data": str(root),
                    "headers": str(root / "include" / python / name),
                },
                interpreter=f"{self.placeholder}/bin/{python}",
                script_kind="posix",
                bytecode_optimization_levels=[],
                overwrite_existing=True,
            )
            with WheelFile.open(Path(wheel)) as source:
                install(source=source, destination=destination, additional_metadata={"INSTALLER": b"airlift\n"})

    def _check_overlaps(self, wheel: Path, owners: dict[str, tuple[str, int]]) -> None:
        """pip lets the last of two wheels win without a word. Here the last by name wins, and it is said."""
        with zipfile.ZipFile(wheel) as archive:
            files = {_installed_as(e.filename, self.site_packages): e.CRC for e in archive.infolist() if not e.is_dir()}
            for entry in archive.namelist():
                if entry.endswith(".dist-info/entry_points.txt") and entry.count("/") == 1:
                    text = archive.read(entry).decode()
                    files |= {f"bin/{script}": 0 for script, _, _, _ in parse_entrypoints(text)}
        for file, crc in files.items():
            if file in self.conda_files:
                raise Refused(f"{wheel.name}: would overwrite {file}, which a conda package brought")
            if file in owners and (owners[file][1] != crc or file.startswith("bin/")):
                self.notes.append(f"{file} is in {owners[file][0]} and in {wheel.name}: the latter's is there")
            owners[file] = (wheel.name, crc)

    def _drop_bytecode(self) -> None:
        """Compiled where it will be used, by `relocate.py`; what was compiled elsewhere has other dates and paths."""
        for folder, _, files in os.walk(self.root):
            for name in files:
                if _is_bytecode(f"{Path(folder).name}/{name}"):
                    Path(folder, name).unlink()
            if Path(folder).name == "__pycache__" and not any(Path(folder).iterdir()):
                Path(folder).rmdir()

    def _settle_files(self) -> None:
        """One mode or the other; links stay inside; RECORDs promise nothing that depends on the prefix."""
        placeholder = self.placeholder.encode()
        for folder, folders, files in os.walk(self.root):
            for name in [*files, *(n for n in folders if Path(folder, n).is_symlink())]:
                path = Path(folder, name)
                relative = path.relative_to(self.root).as_posix()
                if "\n" in relative or "\r" in relative:
                    raise Refused(f"{relative!a}: a line break in a file's name")
                if path.is_symlink():
                    _check_link(relative, str(path.readlink()))
                    continue
                if not path.is_file():
                    raise Refused(f"{relative}: neither a file nor a link")
                if path.stat().st_nlink > 1:  # of a package's own, or with the cache
                    _replace(path, path.read_bytes())
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        for record in (self.root / self.site_packages).glob("*.dist-info/RECORD"):
            _settle_record(self.root, record, placeholder)


def _settle_record(root: Path, record: Path, placeholder: bytes) -> None:
    site_packages = record.parent.parent.relative_to(root)

    def settled(line: re.Match[str]) -> str:
        script = os.path.normpath(site_packages / line[1])
        # conda-forge's pip names a script that its recipe removed; what lies outside is another on every machine.
        if script.startswith("../") or not (root / script).is_file():
            return line[0]
        return f"{line[1]},," if placeholder in (root / script).read_bytes() else line[0]

    text = record.read_text(encoding="utf-8")
    new = re.sub(r"^((?:\.\./)+bin/[^,\n]+),sha256=[^,\n]*,\d+$", settled, text, flags=re.MULTILINE)
    if new != text:
        _replace(record, new.encode())


def _unpacked(extracted: Path, name: str) -> Path:
    """Where an unpacked package has a file: `noarch: python` ones keep them in folders of no Python's version."""
    neutral = re.sub(r"^lib/[^/]+/site-packages/", "site-packages/", re.sub(r"^bin/", "python-scripts/", name))
    return extracted / (name if os.path.lexists(extracted / name) else neutral)


def _installed_as(name: str, site_packages: str) -> str:
    """Where a wheel's member goes."""
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return f"{site_packages}/{name}"
    scheme, _, rest = rest.partition("/")
    folders = {"purelib": f"{site_packages}/", "platlib": f"{site_packages}/", "scripts": "bin/", "data": ""}
    return f"{folders.get(scheme, f'{scheme}/{first}/')}{rest}"


def _check_link(relative: str, target: str) -> None:
    inside = os.path.normpath(Path(relative).parent / target)
    if target.startswith("/") or inside.split("/")[0] == "..":
        raise Refused(f"{relative}: a link that leads out of the environment, to {target}")


def _is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and Path(path).parent.name == "__pycache__"


def _replace(path: Path, content: bytes) -> None:
    """Never in place: the file may be the unpacked package's own."""
    mode = path.stat().st_mode & 0o777
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode | 0o644)


def main() -> NoReturn:
    """Reads the request, answers, and is gone."""
    code = 1
    try:
        request = json.load(sys.stdin)
        linking = Linking(Path(request.pop("root")), Path(request.pop("cache")), **request)
        try:
            answer = linking.run()
        except Refused as error:
            answer = {"refused": str(error)}
        sys.stdout.write(json.dumps(answer))
        sys.stdout.flush()
        code = 0
    finally:
        if code:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
