"""Writes the files of an environment's asset, from its lock and packages.

    image.tar.gz                the environment, with a placeholder for its prefix
    env.json                    its description
    bootstrap.sh                creates the environment; it needs nothing installed
    env-check.sh env-probe.sh   check whether a node can run it; they need nothing installed
    node-local.sh               copies it to a node's local disk before the ranks start

The bytes depend only on the lock and on airlift's version: the same folder gives the same image on
any machine, sorted, without dates and owners, hard links as files. The compressor matters too. The
output of zlib differs between the builds in Pythons; libdeflate's (`deflate`) does not. gzip files
may have several members, so all cores compress members of 8 MiB. `gzip -d` reads them as one file.

Each environment holds a wheel of airlift, made from the running installation: sorted, without
dates, and without compression. An editable installation works too: the files come from the folder
that Python imports.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from stage.environment.check.check import Needs
from stage.environment.image import relocate
from stage.environment.spec.conda_lock import EnvironmentLock
from stage.environment.spec.profile import MACHINES
from stage.errors import IncompleteError, UsageError
from stage.files import hash_file
from stage.installation import DISTRIBUTION, TEMPLATES, install_command
from stage.sandbox import ask_child, last_words
from stage.version import __version__

PACKAGES = ("runner", "stage")
_TAG = "py3-none-any"
_FROM_METADATA = ("METADATA", "entry_points.txt", "top_level.txt")


def airlift_wheel(folder: Path) -> Path:
    """Writes `airlift_hpc-<version>-py3-none-any.whl` into `folder`.

    Raises:
        UsageError: airlift is not installed here, or its metadata is of another version than its
            code.
    """
    distribution = _distribution()
    texts = {name: distribution.read_text(name) for name in _FROM_METADATA}
    texts["METADATA"] = texts["METADATA"] or distribution.read_text("PKG-INFO")
    info = {name: text.encode() for name, text in texts.items() if text}
    return pure_wheel(folder, DISTRIBUTION, __version__, dict(_package_files()), info)


def pure_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, bytes], info: Mapping[str, bytes]
) -> Path:
    """Writes the wheel of a package for any platform.

    Args:
        folder: made where it is missing.
        files: path in the wheel -> content.
        info: the same in the dist-info folder, without WHEEL and RECORD.
    """
    stem = f"{name.replace('-', '_')}-{version}"
    generator = f"Wheel-Version: 1.0\nGenerator: {DISTRIBUTION} ({__version__})\n"
    kind = f"{generator}Root-Is-Purelib: true\nTag: {_TAG}\n".encode()
    inside = {f"{stem}.dist-info/{key}": text for key, text in {**info, "WHEEL": kind}.items()}
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-{_TAG}.whl"
    write_wheel(wheel, {**files, **inside}, f"{stem}.dist-info/RECORD")
    return wheel


def write_wheel(wheel: Path | BytesIO, files: Mapping[str, bytes], record: str) -> None:
    """Writes a wheel: the files in sorted order, then their RECORD."""
    lines: list[str] = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            encoded = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest())
            digest = encoded.rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(files[name])}\n")
            archive.writestr(zipfile.ZipInfo(name), files[name])  # of 1980
        archive.writestr(zipfile.ZipInfo(record), "".join([*lines, f"{record},,\n"]))


def check_holds_airlift(lock: EnvironmentLock, where: str) -> None:
    """Checks that a lock has the requirements of airlift, before anything is downloaded.

    Without them `stage` does not start on the cluster.

    Raises:
        UsageError: with the requirements to add.
    """
    packages = {str(canonicalize_name(p.name)): p.version for p in lock.packages}
    packages |= lock.provides
    if unmet := unmet_requirements(packages, lock.python):
        raise UsageError(
            f"{where}: `stage` and `runner` will be in the environment, and the lock does not meet "
            f"their requirements: {', '.join(unmet)}.",
            "stage env lock adds them; with another tool, add them to the pip section and lock "
            "again.",
        )


def own_requirements() -> tuple[str, ...]:
    """The requirements of airlift without extras, from its metadata; sorted.

    Raises:
        UsageError: this airlift is not installed, so it has no metadata.
    """
    stated = _distribution().requires or []
    return tuple(sorted(r for r in stated if "extra" not in str(Requirement(r).marker or "")))


def unmet_requirements(versions: Mapping[str, str], python: str) -> list[str]:
    """The requirements of airlift that a lock does not meet, in pip's notation.

    Args:
        versions: normalised name of every locked package -> its version.
        python: version of the environment's interpreter, `3.10.13`.
    """
    target: dict[str, Any] = {
        **{key: str(value) for key, value in default_environment().items()},
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "sys_platform": "linux",
    }
    stated = map(Requirement, own_requirements())
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in stated
        if requirement.marker is None or requirement.marker.evaluate(target)
        if not _is_met(requirement, versions.get(canonicalize_name(requirement.name), ""))
    ]


def _is_met(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _distribution() -> metadata.Distribution:
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise UsageError(
            "airlift is not installed here (it runs from a folder), so no wheel of it can be "
            "made for the environment.",
            install_command(),
        ) from None
    if distribution.version != __version__:
        raise UsageError(
            f"airlift is installed as version {distribution.version}, and its code is version "
            f"{__version__}.",
            f"Install it again: {install_command()}",
        )
    return distribution


def _package_files() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        spec = find_spec(package)  # `stage` must not import `runner`
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(
                f"airlift's package `{package}` is not here.",
                f"Install it again: {install_command()}",
            )
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root.parent)
            if path.is_file() and not any(_is_litter(part) for part in relative.parts):
                yield relative.as_posix(), path.read_bytes()


def _is_litter(name: str) -> bool:
    """Whether an interpreter or an editor left this file in a source folder."""
    return name == "__pycache__" or name.startswith(".") or name.endswith(("~", ".orig", ".rej"))


_CREATE = ["hdiutil", "create", "-quiet", "-type", "SPARSE", "-size", "200g", "-volname", "airlift"]


@contextmanager
def folder_that_keeps_case(beside: Path) -> Iterator[Path]:
    """A temporary folder in `beside`; else in TMPDIR; else, on a Mac, in a disk image.

    Raises:
        UsageError: names that differ in case are one on each of these disks.
    """
    for parent in (beside, Path(tempfile.gettempdir())):
        if not ignores_case(parent):
            with tempfile.TemporaryDirectory(dir=parent, prefix="airlift-root-") as name:
                yield Path(name)
            return
    with tempfile.TemporaryDirectory(prefix="airlift-disk-") as name:
        file, mount = Path(name, "disk.sparseimage"), Path(name, "mount")
        mount.mkdir()
        try:
            subprocess.run([*_CREATE, "-fs", "Case-sensitive APFS", file], check=True)
            attach = ["hdiutil", "attach", "-quiet", "-nobrowse", "-mountpoint"]
            subprocess.run([*attach, mount, file], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UsageError(
                f"{beside}: this disk ignores case, and so does {parent}; an environment has names "
                f"that differ in nothing else. No other disk could be made: {error}.",
                "TMPDIR=FOLDER, a folder on a disk that does not, then the same command again.",
            ) from None
        try:
            yield mount
        finally:
            subprocess.run(["hdiutil", "detach", "-quiet", "-force", mount], check=False)


def ignores_case(folder: Path) -> bool:
    """Whether names that differ only in case, or the form of accents, are one on this disk.

    Raises:
        OSError: nothing can be written there.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="airlift-probe-") as name:
        Path(name, "Probe-\u00c9").touch()
        others = ("pROBE-\u00c9", "Probe-E\u0301")
        return any(Path(name, other).exists() for other in others)


FORMAT = 1
# conda-build makes packages for a prefix of 255 bytes (`prefix_length`); in binaries a text in its
# place may be shorter, not longer.
PLACEHOLDER = ("/airlift-environment-prefix" + "_placeholder" * 20)[:200]
LONGEST_PREFIX = len(PLACEHOLDER)  # bytes: the space in binaries
DATE = 1_700_000_000  # mtime of each file; modules compiled on the cluster record it
_MEMBER = 8 << 20  # bytes: large beside gzip's window of 32 KiB, so members cost no compression
_LEVEL = 4  # 6 is a third slower and 3 % smaller
_DISK_BLOCK = 4096  # bytes: the default of ext4 and XFS


def lay_out(
    root: Path,
    *,
    conda: Iterable[Path],
    wheels: list[Path],
    platform: str,
    python: str = "",
) -> dict[str, Any]:
    """Links packages into `root`, a new folder, with the child process `link`.

    Args:
        python: version of the site's Python; empty: it is among the conda packages.

    Returns:
        The result of `Linking.run`.

    Raises:
        UsageError: the packages cannot be in one folder.
        IncompleteError: py-rattler or installer failed, with its message.
    """
    cache = root.with_name(f"{root.name}.cache")
    request = {
        "root": str(root),
        "cache": str(cache),
        "placeholder": PLACEHOLDER,
        "platform": platform,
        "python": python,
        "conda": sorted(map(str, conda)),
        "wheels": [str(path) for path in sorted(wheels, key=lambda wheel: wheel.name)],
    }
    answer, done = ask_child("stage.environment.image.link", json.dumps(request))
    if not isinstance(answer, dict):
        raise IncompleteError(
            f"{root}: the packages could not be linked: {last_words(done)}",
            "Check for a full disk.",
        )
    if refused := answer.get("refused"):
        raise UsageError(
            f"The packages cannot be one environment: {refused}.",
            "Leave one of them out and lock again.",
        )
    return answer


def describe_tree(root: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a linked folder: adds `activate`, and `.airlift/` with its digests and relocations.

    Args:
        known: what is known about the environment: `platform`, `python`, `virtual_packages`,
            `lock_sha256`, and the needs that `env-check.sh` reads.

    Returns:
        The contents of `env.json`: `known`, and

        - tree: the tree digest;
        - placeholder: the text in the files that stands for the prefix; a prefix may not be longer;
        - files: number of files and links, without compiled modules;
        - modules: number of them that are compiled on the cluster, each to one more file;
        - size: bytes on disk, compiled modules included.
    """
    activate = (TEMPLATES / "activate.sh").read_text(encoding="utf-8")
    (root / "activate").write_text(activate.replace("@PREFIX@", PLACEHOLDER), encoding="utf-8")
    (root / "activate").chmod(0o644)
    relocations, placeholder = _relocations(root), PLACEHOLDER.encode()
    lines = relocate.tree_lines(str(root), relocations, placeholder, placeholder)
    sizes = {path: (root / path).lstat().st_size for path in relocate.walk(str(root))}
    is_module = re.compile(r"lib/python.*\.py", re.DOTALL).fullmatch
    modules = [size for path, size in sizes.items() if is_module(path)]
    facts = {
        **known,
        "format": FORMAT,
        "tree": relocate.digest_of(lines),
        "placeholder": PLACEHOLDER,
        "files": len(sizes),
        "modules": len(modules),
        "size": sum(map(_on_disk, [*sizes.values(), *modules])),
    }
    kept = root / relocate.BOOKKEEPING
    kept.mkdir()
    (kept / relocate.TREE).write_bytes(b"".join(lines))
    text = json.dumps(relocations, sort_keys=True) + "\n"
    (kept / relocate.RELOCATIONS).write_text(text, encoding="utf-8")
    (kept / relocate.ENV).write_bytes(to_json(facts))
    (kept / "relocate.py").write_bytes(Path(relocate.__file__).read_bytes())
    for path in kept.iterdir():
        path.chmod(0o644)
    return facts


def to_json(facts: Mapping[str, Any]) -> bytes:
    """The text of `env.json`."""
    return (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode()


def _on_disk(size: int) -> int:
    return -(-size // _DISK_BLOCK) * _DISK_BLOCK


def _relocations(root: Path) -> dict[str, Any]:
    """Path -> kind of the file and the regions with the placeholder.

    A file is binary if it has a NUL: conda-build's own rule.
    """
    placeholder = PLACEHOLDER.encode()
    relocations: dict[str, Any] = {}
    for relative in sorted(relocate.walk(str(root))):
        path = root / relative
        if path.is_symlink() or placeholder not in (content := path.read_bytes()):
            continue
        kind = "binary" if b"\0" in content else "text"
        regions = relocate.find_regions(content, placeholder, is_binary=kind == "binary")
        relocations[relative] = {"kind": kind, "at": regions}
    return relocations


def pack(root: Path, image: Path) -> None:
    """Writes a folder as one `tar.gz`."""
    with (
        open(image, "wb") as target,
        _Members(target) as members,
        tarfile.open(fileobj=members, mode="w|", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name, path in sorted(
            (path.relative_to(root).as_posix(), path) for path in root.rglob("*")
        ):
            entry = _tar_entry(path, name)
            if entry.isreg():
                with open(path, "rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)


def _tar_entry(path: Path, name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mtime = DATE
    status = path.lstat()
    if path.is_symlink():
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
    elif path.is_dir():
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    else:
        entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
    return entry


class _Members(io.RawIOBase):
    """Writes gzip members of 8 MiB each, compressed in several threads."""

    def __init__(self, target: io.BufferedWriter) -> None:
        import deflate

        self._compress: Callable[[bytes, int], bytearray] = deflate.gzip_compress
        self._target = target
        self._buffer = bytearray()
        self._at_once = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._at_once)
        self._waiting: deque[Future[bytearray]] = deque()

    def write(self, data: Any) -> int:
        self._buffer += data
        while len(self._buffer) >= _MEMBER:
            self._submit(bytes(self._buffer[:_MEMBER]))
            del self._buffer[:_MEMBER]
        return len(data)

    def close(self) -> None:
        if not self.closed:
            if self._buffer:
                self._submit(bytes(self._buffer))
            while self._waiting:
                self._target.write(self._waiting.popleft().result())
            self._pool.shutdown()
        super().close()

    def _submit(self, data: bytes) -> None:
        self._waiting.append(self._pool.submit(self._compress, data, _LEVEL))
        if len(self._waiting) > 2 * self._at_once:  # memory: what is compressed and not written
            self._target.write(self._waiting.popleft().result())


SCRIPTS = ("env-check.sh", "env-probe.sh", "node-local.sh")
IMAGE, ENV, BOOTSTRAP = "image.tar.gz", "env.json", "bootstrap.sh"
FILES = (IMAGE, ENV, BOOTSTRAP, *SCRIPTS)


def assemble(
    asset: str,
    lock: EnvironmentLock,
    lock_sha256: str,
    files: Mapping[str, Path],
    virtual_packages: Mapping[str, str],
    out: Path,
    check: Callable[[Path], None],
) -> tuple[dict[str, Any], list[str]]:
    """Writes `FILES`.

    Args:
        files: URL of each package -> its file; of an sdist, the wheel built from it.
        out: a folder.
        check: called with the folder of the finished environment, which it does not change.

    Returns:
        The contents of `env.json`, and notes for the user.

    Raises:
        UsageError: the packages cannot be one environment, or no disk here keeps their names apart.
        IncompleteError: py-rattler or installer failed.
    """
    wheels = [files[package.url] for package in lock.of("pip")]
    conda = [files[package.url] for package in lock.of("conda")]
    with folder_that_keeps_case(out) as work:
        root = work / "root"
        if not any(canonicalize_name(package.name) == DISTRIBUTION for package in lock.of("pip")):
            wheels.append(airlift_wheel(work / "own"))
        site_python = lock.provides.get("python", "")
        answer = lay_out(
            root, conda=conda, wheels=wheels, platform=lock.platform, python=site_python
        )
        facts = describe_tree(
            root,
            {
                "platform": lock.platform,
                "python": lock.python,
                "virtual_packages": dict(virtual_packages),
                "lock_sha256": lock_sha256,
                **({"provides": dict(lock.provides)} if lock.provides else {}),
                **Needs.of(lock.packages, MACHINES[lock.platform]).facts(),
            },
        )
        pack(root, out / IMAGE)
        check(root)
    (out / ENV).write_bytes(to_json(facts))
    text = bootstrap(asset, facts, hash_file(out / IMAGE).sha256)
    (out / BOOTSTRAP).write_text(text, encoding="utf-8")
    for name in SCRIPTS:
        (out / name).write_bytes((TEMPLATES / name).read_bytes())
    return facts, answer["notes"]


def bootstrap(asset: str, facts: Mapping[str, Any], image_sha256: str) -> str:
    """The text of `bootstrap.sh`: the template with the values of one environment."""
    text = (TEMPLATES / BOOTSTRAP).read_text(encoding="utf-8")
    for key, value in {
        "ASSET": asset,
        "IMAGE_SHA256": image_sha256,
        "TREE": facts["tree"],
        "LONGEST_PREFIX": str(LONGEST_PREFIX),
        "SIZE_KIB": str(facts["size"] // 1024),
        "FILES": str(facts["files"] + facts["modules"]),
        "GLIBC": facts["glibc"] or "",
        "MACHINE": MACHINES[facts["platform"]],
        "PROVIDES": " ".join(f"{n}=={v}" for n, v in facts.get("provides", {}).items()),
    }.items():
        text = text.replace(f"@{key}@", value)
    return text
