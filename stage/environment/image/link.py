"""Links packages into one folder: an environment with a placeholder in place of its prefix.

It is a child process (`python -m stage.environment.image.link`): a JSON request on stdin, a JSON
answer on stdout. No program of the target is run, so a macOS laptop links a linux-64 environment.

py-rattler links conda packages, then `installer` the wheels; then everything that depends on this
machine is removed (dates, paths, bytecode). An environment on a site's Python has wheels only.

Scripts get a start for a path of any length. Kernels before 5.1 cut a first line after 127 bytes,
and an environment's prefix may be longer. So sh starts the script with Python, to which the lines
for sh are a string. Python gets `-s`: packages in `~/.local` would be imported before those of the
environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile
from rattler import RepoDataRecord, Subdir
from rattler import install as link_packages

from stage.environment.image import site_path
from stage.sandbox import run_and_exit

LONGEST = 127
"""Bytes of a first line that any kernel reads."""

_PYTHON = re.compile(
    rb"#![ \t]*(?P<prefix>/\S*)/bin/(?P<python>python[0-9.]*)(?P<options>[ \t][^\n]*)?\n"
)
# py-rattler writes one line, `trampoline` two.
_TRAMPOLINE = re.compile(
    rb"#!/bin/sh\n'''exec' \"?(?P<prefix>/[^\s\"]*)/bin/(?P<python>python[0-9.]*)\"?"
    rb"(?P<options>[^\n\"]*)\"\$0\" \"\$@\"(?: #'''|\n' ''')\n"
)
_START = re.compile(rb"#![^\n]*\n('''exec' [^\n]*(#'''|\n' ''')\n)?")
NO_USER_SITE = b"-s"
_FUTURE = re.compile(rb"^from[ \t]+__future__[ \t]+import\b", re.MULTILINE)


@dataclass(frozen=True)
class Shebang:
    """`#!PREFIX/bin/PYTHON OPTIONS`."""

    prefix: bytes
    python: bytes
    options: bytes = b""


def read_shebang(script: bytes) -> Shebang | None:
    """The start of a script, if it names the path of a python: a first line, or a call from sh."""
    found = _PYTHON.match(script) or _TRAMPOLINE.match(script)
    if found is None:
        return None
    return Shebang(found["prefix"], found["python"], (found["options"] or b"").strip())


def without_shebang(script: bytes) -> bytes:
    """The script without its start."""
    return _START.sub(b"", script, count=1)


def script_start(shebang: Shebang, code: bytes) -> tuple[bytes, str]:
    """The start for `code`, and why it is the plain path; "" for a start that any kernel runs."""
    interpreter = shebang.prefix + b"/bin/" + shebang.python
    if reason := _must_stay_first(code):
        return b"#!" + interpreter + b" " + _as_one_word(shebang.options) + b"\n", reason
    return trampoline(interpreter, b" ".join(filter(None, (NO_USER_SITE, shebang.options)))), ""


def _as_one_word(options: bytes) -> bytes:
    """`-s` and the options: the kernel passes all text after the path as one argument."""
    if not options or options.startswith(b"--"):  # a long option cannot be combined
        return options or NO_USER_SITE
    return NO_USER_SITE + options[1:].replace(b" -", b"")


def trampoline(interpreter: bytes, options: bytes = b"") -> bytes:
    """First lines of a Python script with a path of any length: sh runs them, Python skips them."""
    options = b" " + options if options else b""
    return b"#!/bin/sh\n'''exec' \"" + interpreter + b'"' + options + b" \"$0\" \"$@\"\n' '''\n"


def _must_stay_first(code: bytes) -> str:
    if _FUTURE.search(code):
        # A syntax error after two strings: the lines for sh, and a docstring.
        return "it has a `from __future__ import`"
    try:
        code.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"  # Python reads an encoding only in the first two lines
    return ""


NAMESPACE = '__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n'


class CannotLink(Exception):
    """The packages cannot be in one folder."""


@dataclass
class Linking:
    """One environment that is being linked.

    Attributes:
        root: the folder, new.
        cache: the folder for unpacked packages, on the same disk.
        placeholder: the text in the files that stands for the prefix.
        platform: conda's name, `linux-64`.
        conda: file of each conda package.
        wheels: files, in the order of installation.
        python: version of the site's Python, `3.11.9`; empty: it is among the conda packages.
        notes: messages for the user.
    """

    root: Path
    cache: Path
    placeholder: str
    platform: str
    conda: list[str]
    wheels: list[str]
    python: str = ""
    notes: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Links and installs all packages.

        Raises:
            CannotLink: a package is another one than its name says, or a link leads out of the
                environment.
        """
        python = {"version": self.python} if self.python else self._link_all_of_conda()
        minor = ".".join(python["version"].split(".")[:2])
        default = f"lib/python{minor}/site-packages"
        site_packages = self.root / (python.get("python_site_packages_path") or default)
        for wheel in self.wheels:
            self._install(Path(wheel), site_packages, f"python{minor}")
        if self.python:
            self._add_for_site(site_packages)
        self._start_scripts()
        self._drop_bytecode()
        self._normalize_files()
        for record in site_packages.glob("*.dist-info/RECORD"):
            _normalize_record(self.root, record, self.placeholder.encode())
        return {"notes": self.notes}

    def _link_all_of_conda(self) -> dict[str, Any]:
        """Links the conda packages; returns the record of `python`."""
        asyncio.run(self._link_conda())
        records = sorted((self.root / "conda-meta").glob("*.json"))
        metas = [self._take_record(path) for path in records]
        (self.root / "CACHEDIR.TAG").unlink(missing_ok=True)
        (self.root / "conda-meta/history").write_bytes(b"")  # `conda activate` looks for it
        return next(meta for meta in metas if meta["name"] == "python")

    def _add_for_site(self, site_packages: Path) -> None:
        """Adds what keeps the site's old packages from being imported in place of these."""
        (site_packages / "_airlift_site.py").write_bytes(Path(site_path.__file__).read_bytes())
        # The site's own starts the site's Python.
        torchrun = self.root / "bin/torchrun"
        python = f"{self.placeholder}/bin/python3"
        torchrun.write_text(f"#!/bin/sh\nexec '{python}' -s -m torch.distributed.run \"$@\"\n")
        torchrun.chmod(0o755)
        # A regular package anywhere on sys.path wins over a namespace package before it.
        for folder in _namespaces(site_packages):
            (folder / "__init__.py").write_text(NAMESPACE)

    async def _link_conda(self) -> None:
        await link_packages(
            [await RepoDataRecord.from_package_archive(Path(path)) for path in self.conda],
            self.root,
            cache_dir=self.cache,
            platform=Subdir(self.platform),
            show_progress=False,
            execute_link_scripts=False,
            alternative_target_prefix=self.placeholder,
        )

    def _take_record(self, path: Path) -> dict[str, Any]:
        """Reads and deletes a `conda-meta` record, which has this machine's paths and dates."""
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        file = meta["fn"]
        if file.rsplit("-", 2)[:2] != [meta["name"], meta["version"]]:
            raise CannotLink(f"{file}: inside it is {meta['name']} {meta['version']}")
        for name in meta["files"]:
            if re.fullmatch(r"bin/\..*-post-link\.sh", name):
                self.notes.append(f"{file}: its post-link script is not run ({name})")
        path.unlink()
        return meta

    def _start_scripts(self) -> None:
        """Gives scripts the same start, whether a wheel, `installer` or py-rattler wrote them."""
        for path in sorted((self.root / "bin").glob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            content = path.read_bytes()
            found = read_shebang(content)
            if found is None or found.prefix != self.placeholder.encode():
                continue
            code = without_shebang(content)
            start, reason = script_start(found, code)
            if reason:
                self.notes.append(
                    f"bin/{path.name}: {reason}, so the path of its python stays on its first "
                    f"line: where that is longer than {LONGEST} bytes, only Linux 5.1 or "
                    "newer starts it"
                )
            _replace(path, start + code)

    def _install(self, wheel: Path, site_packages: Path, python: str) -> None:
        destination = SchemeDictionaryDestination(
            {
                "purelib": str(site_packages),
                "platlib": str(site_packages),
                "scripts": str(self.root / "bin"),
                "data": str(self.root),
                "headers": str(self.root / "include" / python / wheel.name.split("-")[0]),
            },
            interpreter=f"{self.placeholder}/bin/{'python3' if self.python else python}",
            script_kind="posix",
            bytecode_optimization_levels=[],
            overwrite_existing=True,
        )
        with WheelFile.open(wheel) as source:
            metadata = {"INSTALLER": b"airlift\n"}
            install(source=source, destination=destination, additional_metadata=metadata)

    def _drop_bytecode(self) -> None:
        """Deletes compiled modules, which have paths and dates; `relocate.py` compiles again."""
        for folder, _, files in os.walk(self.root):
            if Path(folder).name == "__pycache__":
                for name in (name for name in files if name.endswith(".pyc")):
                    Path(folder, name).unlink()
                if not any(Path(folder).iterdir()):
                    Path(folder).rmdir()

    def _normalize_files(self) -> None:
        """Sets modes to 755 or 644, and refuses links to the outside."""
        for folder, folders, files in os.walk(self.root):
            for name in [*files, *(n for n in folders if Path(folder, n).is_symlink())]:
                path = Path(folder, name)
                relative = path.relative_to(self.root).as_posix()
                if "\n" in relative or "\r" in relative:
                    raise CannotLink(f"{relative!a}: a line break in a file's name")
                if path.is_symlink():
                    _check_link(relative, str(path.readlink()))
                    continue
                if not path.is_file():
                    raise CannotLink(f"{relative}: neither a file nor a link")
                if path.stat().st_nlink > 1:  # with another file of the package, or the cache
                    _replace(path, path.read_bytes())
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _namespaces(folder: Path) -> Iterator[Path]:
    """The folders below with modules and without an `__init__.py`."""
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        named = inner.name.isidentifier() and not (inner / "__init__.py").exists()
        if named and any(path.suffix in (".py", ".so") for path in inner.rglob("*")):
            yield inner
            yield from _namespaces(inner)


def _normalize_record(root: Path, record: Path, placeholder: bytes) -> None:
    """Removes the digests of scripts that depend on the prefix."""
    site_packages = record.parent.parent.relative_to(root)

    def normalized(line: re.Match[str]) -> str:
        script = os.path.normpath(site_packages / line[1])
        # conda-forge's pip names a script that its recipe removed. Files outside differ per
        # machine.
        if script.startswith("../") or not (root / script).is_file():
            return line[0]
        return f"{line[1]},," if placeholder in (root / script).read_bytes() else line[0]

    text = record.read_text(encoding="utf-8")
    line = re.compile(r"^((?:\.\./)+bin/[^,\n]+),sha256=[^,\n]*,\d+$", re.MULTILINE)
    if (new := line.sub(normalized, text)) != text:
        _replace(record, new.encode())


def _check_link(relative: str, target: str) -> None:
    inside = os.path.normpath(Path(relative).parent / target)
    if target.startswith("/") or inside.split("/")[0] == "..":
        raise CannotLink(f"{relative}: a link that leads out of the environment, to {target}")


def _replace(path: Path, content: bytes) -> None:
    """Writes a new file: the old one may be a hard link to the unpacked package."""
    mode = path.stat().st_mode & 0o777
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode | 0o644)


def main() -> None:
    """Reads the request and prints the answer."""
    request = json.load(sys.stdin)
    linking = Linking(Path(request.pop("root")), Path(request.pop("cache")), **request)
    try:
        answer = linking.run()
    except CannotLink as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    run_and_exit(main)
