"""A bundle's environment -> a prefix on the cluster, by one of four routes. No network.

    image      unpack the image (`bootstrap.sh`): the default, and the only one that needs no Python
    packages   link the same packages again with the asset's py-rattler: the same tree digest
    conda      this cluster's conda, mamba or micromamba from the asset's channels; then the wheels
    venv       the asset's uv, on a Python of this cluster: the pip half only

Each file that a route reads is compared with `stage.lock` first. A failure leaves no files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from stage.bundle.bundle import Bundle
from stage.environment.compat.needs import Needs
from stage.environment.image import image, relocate
from stage.environment.spec.packages import LOCK_NAME, LockedPackages, read_packages
from stage.errors import DamageError, IncompleteError, StageError, UsageError
from stage.lock.model import LockedAsset, LockedFile
from stage.util.digests import hash_file
from stage.util.files import human_count
from stage.util.threads import together
from stage.verify.advice import remedy_for_damage

CONDAS = ("micromamba", "mamba", "conda")
Command = list[str | Path]

_UV_SETTINGS = {
    "UV_NO_CONFIG": "1",
    "UV_OFFLINE": "1",
    "UV_NO_CACHE": "1",
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_LINK_MODE": "copy",
}
# An environment has its own.
_OF_MODULES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH")
_TO_LINK = ("bootstrap.sh", "env.json", LOCK_NAME, "wheels/")
_FOR_UV = (*_TO_LINK, "requirements.lock", "tools/uv-")
_READ = {  # the asset's files that a route reads
    "image": ("bootstrap.sh", "image.tar.gz"),
    "packages": (*_TO_LINK, "channel/", "tools/py_rattler-", "tools/installer-"),
    "conda": (*_FOR_UV, "channel/"),
    "venv": _FOR_UV,
}


@dataclass(frozen=True)
class Creation:
    """One environment to create: its asset, its prefix, and a function that prints a line."""

    folder: Path
    asset: LockedAsset
    prefix: Path
    say: Callable[[str], None]

    def find(self, start: str) -> Path:
        """The only file of the asset whose path begins with `start`."""
        (file,) = (path for path in self._paths() if path.startswith(start))
        return self.folder / file

    def packages(self) -> LockedPackages:
        """The packages of the asset's lock."""
        assert self.asset.environment is not None
        lock = self.folder / LOCK_NAME
        return read_packages(lock.read_bytes(), str(lock), self.asset.environment.platform)

    def wheels(self) -> list[Path]:
        """All wheels of the environment: published, built on the laptop, airlift's own."""
        return [self.folder / path for path in self._paths() if path.startswith("wheels/")]

    def facts(self) -> Mapping[str, object]:
        """The contents of `env.json`."""
        facts: Mapping[str, object] = json.loads((self.folder / relocate.ENV).read_bytes())
        return facts

    def _paths(self) -> list[str]:
        return [file.path.removeprefix(f"{self.asset.folder}/") for file in self.asset.files]


def create(root: Path, name: str, prefix: Path, route: str, say: Callable[[str], None]) -> None:
    """Creates the environment `name` of the bundle at `prefix`.

    Raises:
        UsageError: no such environment; a prefix that cannot be used; no conda or no Python where
            the route needs one.
        DamageError: a file of the bundle differs from the fetched one, or the tree digest does.
        IncompleteError: the disk is full, or a tool failed; run it again.
    """
    asset = find_environment(root, name)
    creation = Creation((root / asset.folder).absolute(), asset, prefix.absolute(), say)
    check_files(root, asset, _READ[route])
    routes = {"packages": _from_packages, "conda": _by_conda, "venv": _as_venv}
    routes.get(route, _bootstrap)(creation)


def find_environment(root: Path, name: str) -> LockedAsset:
    """The environment `name` of the bundle at `root`.

    Raises:
        UsageError: there is none of that name.
    """
    bundle = Bundle.open(root)
    asset = bundle.asset(name)
    if asset.environment is None:
        there = ", ".join(n for n, a in bundle.lock.assets.items() if a.environment) or "none"
        raise UsageError(
            f"{root}: `{name}` is no environment, but a {asset.kind}.",
            f"Environments in it: {there}.",
        )
    return asset


def check_files(root: Path, asset: LockedAsset, read: tuple[str, ...]) -> None:
    """Compares the files that will be read with the lock.

    Args:
        read: the starts of their paths in the asset's folder.

    Raises:
        DamageError: one is missing or differs.
    """

    def problem(file: LockedFile) -> str | None:
        path = root / file.path
        if not path.is_file():
            return f"{file.path} is missing"
        is_same = hash_file(path).sha256 == file.sha256
        return None if is_same else f"{file.path} is not the file that was fetched"

    files = [f for f in asset.files if f.path.removeprefix(f"{asset.folder}/").startswith(read)]
    problems = [found for found in together(problem, files, min(8, os.cpu_count() or 1)) if found]
    if problems:
        more = f" ({len(problems) - 1} more such files)" if len(problems) > 1 else ""
        raise DamageError(
            f"{root}: {problems[0]}{more}. Nothing was created.",
            remedy_for_damage(root),
        )


def _bootstrap(creation: Creation, *options: str) -> None:
    """Runs `bootstrap.sh`; raises its message, remedy and exit code."""
    command: Command = ["/bin/sh", creation.folder / "bootstrap.sh", *options, creation.prefix]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        message, _, remedy = done.stderr.strip().partition("\n  -> ")
        code = done.returncode if done.returncode in (1, 2, 5) else 5
        raise StageError(message, remedy, exit_code=code)


def _from_packages(creation: Creation) -> None:
    _bootstrap(creation, "--place")
    locked, facts = creation.packages(), creation.facts()
    with _beside(creation.prefix) as (part, workshop):
        for tool in ("tools/py_rattler-", "tools/installer-"):
            with zipfile.ZipFile(creation.find(tool)) as wheel:
                wheel.extractall(workshop / "libraries")
        wheels = creation.wheels()
        creation.say(
            f"linking {human_count(len(locked.conda), 'conda package')} and "
            f"{human_count(len(wheels), 'wheel')}"
        )
        image.lay_out(
            part,
            conda={creation.folder / package.path: package.url for package in locked.conda},
            wheels=wheels,
            platform=locked.platform,
            libraries=[workshop / "libraries"],
        )
        assert creation.asset.environment is not None
        described = image.describe_tree(
            part,
            platform=locked.platform,
            python=locked.python,
            needs={key: None if facts[key] is None else str(facts[key]) for key in Needs().facts()},
            virtual_packages=creation.asset.environment.virtual_packages,
            lock_sha256=str(facts["lock_sha256"]),
        )
        if described.tree != creation.asset.environment.tree:
            raise DamageError(
                f"{creation.prefix}: the packages give tree {described.tree[:16]}, on the laptop "
                f"they gave {str(creation.asset.environment.tree)[:16]}. Nothing was created.",
                "Use --route image, and report this with both versions of airlift.",
            )
        creation.say("relocating, checking, compiling")
        command: Command = [part / "bin/python", "-I", "-S", "-B", part / ".airlift/relocate.py"]
        _run([*command, part, creation.prefix, described.tree], "relocation")
    _done(creation, f"tree {described.tree}")


def _by_conda(creation: Creation) -> None:
    conda = next((found for name in CONDAS if (found := shutil.which(name))), None)
    if conda is None:
        raise UsageError(
            f"No {', '.join(CONDAS[:-1])} or {CONDAS[-1]} is on PATH.",
            "Load its module, or use --route image.",
        )
    creation.say(f"conda packages by {conda} (the first of {', '.join(CONDAS)} on PATH)")
    _bootstrap(creation, "--place")
    locked = creation.packages()
    with _beside(creation.prefix) as (_, workshop), _or_nothing(creation.prefix):
        explicit = workshop / "explicit.txt"
        lines = [_explicit(creation.folder / package.path) for package in locked.conda]
        explicit.write_text("".join(["@EXPLICIT\n", *lines]), encoding="utf-8")
        caches = {"CONDA_PKGS_DIRS": str(workshop / "packages"), "MAMBA_NO_BANNER": "1"}
        create = [conda, "create", "--yes", "--offline"]
        _run([*create, "--prefix", creation.prefix, "--file", explicit], conda, **caches)
        _install_wheels(creation, workshop, creation.prefix / "bin/python")
    _done(creation, "made by conda: no tree digest is promised")


def _explicit(package: Path) -> str:
    """A line of an explicit list. conda reads only md5 there; the sha256 was compared before."""
    md5 = hashlib.md5(package.read_bytes(), usedforsecurity=False)
    return f"file://{quote(str(package), safe='/!+=~,@')}#{md5.hexdigest()}\n"


def _as_venv(creation: Creation) -> None:
    locked = creation.packages()
    minor = ".".join(locked.python.split(".")[:2])
    python = shutil.which(f"python{minor}")
    if python is None:
        raise UsageError(
            f"No python{minor} is on PATH, and the wheels are for Python {minor}.",
            f"Load the module that has it (module load python/{minor}), or use --route image.",
        )
    others = [package.name for package in locked.conda if package.name != "python"]
    not_in_it = human_count(len(others), "conda package")
    not_in_it += f" ({', '.join(sorted(others))})" if others else ""
    creation.say(
        f"a venv of {python}: {human_count(len(creation.wheels()), 'wheel')}; "
        f"not in it: {not_in_it}"
    )
    _bootstrap(creation, "--place")
    with _beside(creation.prefix) as (_, workshop), _or_nothing(creation.prefix):
        uv = _uv(creation, workshop)
        venv: Command = [uv, "venv", "--quiet", "--no-project", "--python", python, creation.prefix]
        _run(venv, "uv", **_UV_SETTINGS)
        _install_wheels(creation, workshop, creation.prefix / "bin/python")
        check: Command = [uv, "pip", "check", "--python", creation.prefix / "bin/python"]
        environment = _environment(_UV_SETTINGS)
        done = subprocess.run(check, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            creation.say("missing, because conda would provide it:")
            lines = (line for line in done.stderr.splitlines() if " requires " in line)
            creation.say("\n".join(lines))
    _done(creation, "a venv: no tree digest is promised")


def _install_wheels(creation: Creation, workshop: Path, python: Path) -> None:
    """Installs all wheels, each by its digest, without an index."""
    uv, folder = _uv(creation, workshop), creation.folder
    command: Command = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        "--no-index",
        "--no-deps",
    ]
    command += ["--find-links", folder / "wheels", "--require-hashes", "--no-build"]
    command += ["--break-system-packages", "--requirement", folder / "requirements.lock"]
    _run(command, "uv", **_UV_SETTINGS)


def _uv(creation: Creation, workshop: Path) -> Path:
    target = workshop / "uv"
    if not target.exists():
        with zipfile.ZipFile(creation.find("tools/uv-")) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(".data/scripts/uv"))
            target.write_bytes(wheel.read(member))
        target.chmod(0o755)
    return target


@contextmanager
def _beside(prefix: Path) -> Iterator[tuple[Path, Path]]:
    """Two paths beside PREFIX, on its disk: the unfinished environment, and a working folder."""
    part = prefix.with_name(f"{prefix.name}.part.{os.getpid()}")
    prefix.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix.name}.work.", dir=prefix.parent) as workshop:
        try:
            yield part, Path(workshop)
        except OSError as error:
            raise IncompleteError(
                f"{prefix}: not created: {error}.", "Check for a full disk or a quota."
            ) from None
        finally:
            for left in (part, part.with_name(f"{part.name}.cache")):
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _or_nothing(prefix: Path) -> Iterator[None]:
    """Removes a prefix that another tool could not fill."""
    try:
        yield
    except BaseException:
        shutil.rmtree(prefix, ignore_errors=True)
        raise


def _run(command: Command, what: str, **settings: str) -> None:
    done = subprocess.run(
        command, env=_environment(settings), capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        kind = DamageError if what == "relocation" and done.returncode == 1 else IncompleteError
        raise kind(
            f"{what} stopped: {' / '.join(output.splitlines()[-4:])}. Nothing was created.",
            "Use --route image if it happens again.",
        )


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's variables, without those of modules, uv, conda and pip."""
    tools = ("UV_", "CONDA_", "PIP_")
    kept = {k: v for k, v in os.environ.items() if k not in _OF_MODULES and not k.startswith(tools)}
    return {**kept, **settings}


def _done(creation: Creation, how: str) -> None:
    creation.say(f"{creation.asset.name}: {creation.prefix} is made; {how}")
    script = creation.prefix / "activate"
    creation.say(f"use it: . '{script if script.exists() else creation.prefix / 'bin/activate'}'")
