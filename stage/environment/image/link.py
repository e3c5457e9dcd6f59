"""Links packages into one folder: an environment with a placeholder in place of its prefix.

It is a child process (`python -m stage.environment.image.link`): a JSON request on stdin, a JSON
answer on stdout. py-rattler may crash an interpreter that ends in the usual way
(pyo3-async-runtimes#40), so it ends by `os._exit`. No program of the target is run, so a macOS
laptop links a linux-64 environment.

py-rattler links conda packages, then `installer` the wheels; then everything that depends on this
machine is removed (dates, paths, bytecode).
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
from installer.utils import Scheme, parse_entrypoints
from rattler import RepoDataRecord, Subdir
from rattler import install as link_packages
from rattler.exceptions import InstallerError, LinkError, TransactionError

from stage.environment.image import case_folding, shebang
from stage.environment.image.relocate import ignores_case, walk
from stage.environment.image.shebang import Shebang
from stage.files import human_count
from stage.paths import collisions

_VOLATILE = ("package_tarball_full_path", "extracted_package_dir", "link", "requested_specs")


class Refused(Exception):
    """The packages cannot be in one folder."""


@dataclass
class Linking:
    """One environment that is being linked.

    Attributes:
        root: the folder, new.
        cache: the folder for unpacked packages, on the same disk.
        placeholder: the text in the files that stands for the prefix.
        platform: conda's name, `linux-64`.
        conda: file of each conda package -> its URL, which the environment records.
        wheels: files, in the order of installation.
        notes: messages for the user.
        conda_files: names in the environment of the files that conda packages brought.
        aside: name in the environment -> its other path in the folder, on a disk that ignores case.
        originals: with such names: the repacked file of each conda package -> its original.
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
    aside: Mapping[str, str] = field(default_factory=dict)
    originals: dict[str, str] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Links and installs all packages.

        Raises:
            Refused: two packages have the same file, or a link leads out of the environment.
        """
        self._find_collisions()
        records = asyncio.run(self._link_conda())
        indexes = [self._canonical_record(record) for record in records]
        python = next(index for index in indexes if index["name"] == "python")
        minor = ".".join(python["version"].split(".")[:2])
        self.site_packages = _site_packages(python)
        (self.root / "CACHEDIR.TAG").unlink(missing_ok=True)
        (self.root / "conda-meta/history").write_bytes(b"")
        self._install_wheels(f"python{minor}")
        self._start_scripts()
        self._drop_bytecode()
        self._normalize_files()
        return {
            "notes": self.notes,
            "twins": len(collisions(case_folding.real_name(path) for path in walk(str(self.root)))),
        }

    def _find_collisions(self) -> None:
        """Finds names that are one on this disk, before anything is linked."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        if not ignores_case(str(self.root.parent)):
            return
        packages = [case_folding.CondaPackage.read(Path(file)) for file in self.conda]
        python = next(package.index for package in packages if package.index["name"] == "python")
        site_packages = _site_packages(python)
        names = {name for p in packages for name in p.installed(site_packages).values()}
        names |= {f"bin/{command}" for p in packages for command in p.entry_points or ()}
        for wheel in self.wheels:
            names |= _files_of_wheel(Path(wheel), site_packages).keys()
        if not (pairs := collisions(names)):
            return
        first, second = pairs[0]
        self.aside = case_folding.paths_aside(names)
        self.notes.append(
            f"this disk ignores case, so {first} and {second} would be one file: "
            f"{human_count(len(self.aside), 'such file')} get another name here; the image has the "
            "true names"
        )
        folder = self.cache.with_name(f"{self.cache.name}.aside")
        for package in packages:
            renamed = str(package.renamed(self.aside, folder, site_packages))
            self.originals[renamed] = str(package.file)

    async def _link_conda(self) -> list[RepoDataRecord]:
        files = self.originals or self.conda
        records = [await RepoDataRecord.from_package_archive(Path(path)) for path in files]
        try:
            await link_packages(
                records,
                self.root,
                cache_dir=self.cache,
                platform=Subdir(self.platform),
                show_progress=False,
                execute_link_scripts=False,
                alternative_target_prefix=self.placeholder,
            )
        except (InstallerError, LinkError, TransactionError) as error:
            if "longer than the placeholder" not in str(error):
                raise
            if not (short := self._with_short_placeholder()):
                raise
            raise Refused(
                f"{', '.join(short)}: built with space for a shorter prefix than the "
                f"{len(self.placeholder)} bytes that an environment needs"
            ) from None
        return records

    def _with_short_placeholder(self) -> list[str]:
        """The conda packages without space for the prefix; py-rattler does not name them."""
        found = []
        for paths in sorted(self.cache.glob("*/info/paths.json")):
            entries = json.loads(paths.read_text(encoding="utf-8"))["paths"]
            binaries = [entry for entry in entries if entry.get("file_mode") == "binary"]
            has = (len(entry.get("prefix_placeholder") or self.placeholder) for entry in binaries)
            if any(length < len(self.placeholder) for length in has):
                found.append(paths.parents[1].name)
        return found

    def _canonical_record(self, record: RepoDataRecord) -> dict[str, Any]:
        """Removes this machine's data from a `conda-meta` record; returns the `index.json`."""
        file = record.file_name
        stem = file.removesuffix(".conda").removesuffix(".tar.bz2")
        path = self.root / "conda-meta" / f"{stem}.json"
        meta = json.loads(path.read_text(encoding="utf-8"))
        extracted = Path(meta["extracted_package_dir"])
        index: dict[str, Any] = json.loads((extracted / "info/index.json").read_bytes())
        if stem.rsplit("-", 2)[:2] != [index["name"], index["version"]]:
            raise Refused(f"{file}: inside it is {index['name']} {index['version']}")
        self._check_linked(meta, file)
        for entry in meta["paths_data"]["paths"]:
            if entry.get("prefix_placeholder"):
                self._restore_python_shebang(entry, extracted)
            if entry.get("prefix_placeholder") or entry["path_type"] == "unix_python_entry_point":
                # They depend on the prefix.
                for key in ("sha256", "sha256_in_prefix", "size_in_bytes"):
                    entry.pop(key, None)
        package, url = next(item for item in self.conda.items() if Path(item[0]).name == file)
        for key in _VOLATILE:
            meta.pop(key, None)
        if self.aside:
            meta |= case_folding.digests(Path(package))  # the original, not the repacked one
            meta["files"] = [case_folding.real_name(name) for name in meta["files"]]
            for entry in meta["paths_data"]["paths"]:
                entry["_path"] = case_folding.real_name(entry["_path"])
        meta["url"], meta["channel"] = url, url.rsplit("/", 2)[0]
        meta["files"] = sorted(f for f in meta["files"] if not _is_bytecode(f))
        meta["paths_data"]["paths"] = sorted(
            (entry for entry in meta["paths_data"]["paths"] if not _is_bytecode(entry["_path"])),
            key=lambda entry: str(entry["_path"]),
        )
        _replace(path, (json.dumps(meta, indent=1, sort_keys=True) + "\n").encode())
        return index

    def _check_linked(self, meta: Mapping[str, Any], file: str) -> None:
        for path in meta["files"]:
            name = case_folding.real_name(path)
            if name in self.conda_files:
                self.notes.append(f"{file}: {name} comes from another conda package too")
            self.conda_files.add(name)
            if not os.path.lexists(self.root / path):
                raise Refused(f"{file}: {name} was not written")
            if re.fullmatch(r"bin/\..*-post-link\.sh", name):
                self.notes.append(f"{file}: its post-link script is not run ({name})")

    def _restore_python_shebang(self, entry: Mapping[str, Any], extracted: Path) -> None:
        """Makes a script name the environment's python, instead of the first python on PATH.

        Where the prefix makes the first line too long for the kernel, py-rattler writes another
        start: `#!/usr/bin/env python` in some versions, a call from sh in others.
        """
        original = _unpacked(extracted, entry["_path"])
        if entry.get("file_mode") != "text" or original.is_symlink():
            return
        found = shebang.read(original.read_bytes())
        if not found or found.prefix != entry["prefix_placeholder"].encode():
            return
        target = self.root / entry["_path"]
        self._start(target, found, shebang.without_start(target.read_bytes()))

    def _start_scripts(self) -> None:
        """Gives scripts the same start, whether a wheel, `installer` or py-rattler wrote them."""
        for path in sorted((self.root / "bin").glob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            content = path.read_bytes()
            found = shebang.read(content)
            is_ours = found is not None and found.options.startswith(shebang.NO_USER_SITE)
            if found and not is_ours and found.prefix == self.placeholder.encode():
                self._start(path, found, shebang.without_start(content))

    def _start(self, target: Path, found: Shebang, code: bytes) -> None:
        start, reason = shebang.start(replace(found, prefix=self.placeholder.encode()), code)
        if reason:
            name = case_folding.real_name(target.relative_to(self.root).as_posix())
            self.notes.append(
                f"{name}: {reason}, so the path of its python stays on its first line: where "
                f"that is longer than {shebang.LONGEST} bytes, only Linux 5.1 or newer starts it"
            )
        _replace(target, start + code)

    def _install_wheels(self, python: str) -> None:
        root = self.root
        owners: dict[str, tuple[str, int]] = {}
        for wheel in self.wheels:
            self._check_overlaps(Path(wheel), owners)
            name = Path(wheel).name.split("-")[0]
            destination = _Destination(
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
            destination.root, destination.aside = root, self.aside
            with WheelFile.open(Path(wheel)) as source:
                install(
                    source=source,
                    destination=destination,
                    additional_metadata={"INSTALLER": b"airlift\n"},
                )

    def _check_overlaps(self, wheel: Path, owners: dict[str, tuple[str, int]]) -> None:
        """Notes a file of two wheels: the wheel that is last by name wins. pip prints nothing then.

        Raises:
            Refused: a conda package has the file.
        """
        for file, crc in _files_of_wheel(wheel, self.site_packages).items():
            if file in self.conda_files:
                raise Refused(f"{wheel.name}: would overwrite {file} of a conda package")
            if file in owners and (owners[file][1] != crc or file.startswith("bin/")):
                self.notes.append(
                    f"{file} is in {owners[file][0]} and in {wheel.name}: the latter's is there"
                )
            owners[file] = (wheel.name, crc)

    def _drop_bytecode(self) -> None:
        """Deletes compiled modules, which have paths and dates; `relocate.py` compiles again."""
        for folder, _, files in os.walk(self.root):
            for name in files:
                if _is_bytecode(f"{Path(folder).name}/{name}"):
                    Path(folder, name).unlink()
            if Path(folder).name == "__pycache__" and not any(Path(folder).iterdir()):
                Path(folder).rmdir()

    def _normalize_files(self) -> None:
        """Sets modes to 755 or 644, refuses links to the outside, and normalizes RECORDs."""
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
                if path.stat().st_nlink > 1:  # with another file of the package, or the cache
                    _replace(path, path.read_bytes())
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        for record in (self.root / self.site_packages).glob("*.dist-info/RECORD"):
            _normalize_record(self.root, record, placeholder, self.aside)


def _normalize_record(
    root: Path, record: Path, placeholder: bytes, aside: Mapping[str, str]
) -> None:
    """Removes the digests of scripts that depend on the prefix."""
    site_packages = record.parent.parent.relative_to(root)

    def normalized(line: re.Match[str]) -> str:
        script = os.path.normpath(site_packages / line[1])
        script = aside.get(script, script)
        # conda-forge's pip names a script that its recipe removed. Files outside differ per
        # machine.
        if script.startswith("../") or not (root / script).is_file():
            return line[0]
        return f"{line[1]},," if placeholder in (root / script).read_bytes() else line[0]

    text = record.read_text(encoding="utf-8")
    line = re.compile(r"^((?:\.\./)+bin/[^,\n]+),sha256=[^,\n]*,\d+$", re.MULTILINE)
    if (new := line.sub(normalized, text)) != text:
        _replace(record, new.encode())


def _unpacked(extracted: Path, name: str) -> Path:
    """Path of a file in an unpacked package; `noarch: python` ones have folders of other names."""
    if os.path.lexists(extracted / name):
        return extracted / name
    name = re.sub(r"^bin/", "python-scripts/", name)
    return extracted / re.sub(r"^lib/[^/]+/site-packages/", "site-packages/", name)


class _Destination(SchemeDictionaryDestination):
    """The destination of the files of a wheel.

    Attributes:
        root: folder of the environment.
        aside: as in `Linking`.
    """

    root: Path
    aside: Mapping[str, str]

    def _path_with_destdir(self, scheme: Scheme, path: str) -> Path:
        target = super()._path_with_destdir(scheme, path)
        name = os.path.relpath(target, self.root)
        return self.root / self.aside[name] if name in self.aside else target


def _site_packages(python: Mapping[str, Any]) -> str:
    """The site-packages folder of a Python, from its package's `index.json`."""
    minor = ".".join(python["version"].split(".")[:2])
    return python.get("python_site_packages_path") or f"lib/python{minor}/site-packages"


def _files_of_wheel(wheel: Path, site_packages: str) -> dict[str, int]:
    """The files that a wheel installs -> their CRC-32; 0: a generated command."""
    with zipfile.ZipFile(wheel) as archive:
        members = [entry for entry in archive.infolist() if not entry.is_dir()]
        files = {_installed_as(entry.filename, site_packages): entry.CRC for entry in members}
        for entry in archive.namelist():
            if entry.endswith(".dist-info/entry_points.txt") and entry.count("/") == 1:
                text = archive.read(entry).decode()
                files |= {f"bin/{script}": 0 for script, _, _, _ in parse_entrypoints(text)}
    return files


def _installed_as(name: str, site_packages: str) -> str:
    """The path in the environment of a wheel's member."""
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return f"{site_packages}/{name}"
    scheme, _, rest = rest.partition("/")
    folders = {"scripts": "bin/", "data": ""}
    folders |= dict.fromkeys(("purelib", "platlib"), f"{site_packages}/")
    return f"{folders.get(scheme, f'{scheme}/{first}/')}{rest}"


def _check_link(relative: str, target: str) -> None:
    inside = os.path.normpath(Path(relative).parent / target)
    if target.startswith("/") or inside.split("/")[0] == "..":
        raise Refused(f"{relative}: a link that leads out of the environment, to {target}")


def _is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and Path(path).parent.name == "__pycache__"


def _replace(path: Path, content: bytes) -> None:
    """Writes a new file: the old one may be a hard link to the unpacked package."""
    mode = path.stat().st_mode & 0o777
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode | 0o644)


def main() -> NoReturn:
    """Reads the request, prints the answer, and ends the process."""
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
