"""Small real environments for tests: a lock, and the bundle that is made from it.

Nothing is downloaded. The conda packages come from `tests.support.environment.channel`. The wheels
are made from this installation.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lib.conda.channel import File, Package, write_package
from stage.environment.image.image import write_wheel
from stage.environment.spec.environment_yml import EnvironmentSpec, content_hash
from stage.environment.spec.profile import Profile
from stage.installation import DISTRIBUTION
from tests.support.environment.pypi import tar_of
from tests.support.once import once

CONDA = ("python", "pip", "openmpi", "links", "scripted", "greeter")
WHEELS = ("click",)
MANIFEST = """\
format: 1
name: small
assets:
  small-env:
    environment: environment.yml
    profile: cluster.yml
"""
PROFILE = 'format: 1\nname: test\nplatform: linux-64\nglibc: "2.28"\n'


LITTER = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
"""What an installer adds to a dist-info folder."""


def wheel_of_installed(name: str, folder: Path) -> Path:
    """Makes a wheel in `folder` from a distribution that is installed here, without its scripts."""
    distribution = metadata.distribution(name)
    project = distribution.metadata["Name"].replace("-", "_")
    stem = f"{project}-{distribution.version}"
    files = {
        file.as_posix(): file.read_binary()
        for file in distribution.files or []
        if file.parts[0] != ".." and "__pycache__" not in file.parts and file.name not in LITTER
    }
    info = next(path.split("/")[0] for path in files if path.endswith(".dist-info/METADATA"))
    tags = [
        line.removeprefix("Tag: ")
        for line in (distribution.read_text("WHEEL") or "").splitlines()
        if "Tag: " in line and "py2-" not in line
    ]
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-{tags[0]}.whl"
    write_wheel(wheel, files, f"{info}/RECORD")
    return wheel


def sdist(folder: Path, tag: str) -> Path:
    """A source distribution. Its build needs no package, and makes a wheel of the given tag."""
    files = {
        "pyproject.toml": "[build-system]\nrequires = []\n"
        'build-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "made"\nversion = "1.0"\n',
        "backend.py": _BACKEND.format(tag=tag),
        "PKG-INFO": "Metadata-Version: 2.1\nName: made\nVersion: 1.0\n",
    }
    path = folder / "made-1.0.tar.gz"
    path.write_bytes(tar_of("made-1.0", files))
    return path


def stand_ins(channel: Path) -> list[str]:
    """Makes empty packages of the requirements that this test does not use; returns their names."""
    names: list[str] = []
    for text in metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(text)
        if requirement.marker is None and requirement.name not in WHEELS:
            name = canonicalize_name(requirement.name)
            version = metadata.version(name)
            write_package(
                channel,
                Package(name=name, version=version, payload={f"share/{name}": File(b"stand-in\n")}),
            )
            names.append(name)
    return names


def lock_text(
    channel: Path, conda: list[str], pip: list[Path], content_hash: str = "0" * 64
) -> bytes:
    """A `conda-lock.yml` with the files of a channel and wheels or sdists, as file:// addresses."""
    entries = []
    for path in sorted(channel.glob("*/*.conda")):
        name, version, _ = path.name.removesuffix(".conda").rsplit("-", 2)
        if name in conda and not (name == "greeter" and version != "1.1"):
            entries.append(_entry(name, version, "conda", path))
    for path in pip:
        name, version = path.name.removesuffix(".tar.gz").split("-")[:2]
        entries.append(_entry(canonicalize_name(name), version, "pip", path))
    metadata = {
        "content_hash": {"linux-64": content_hash},
        "channels": [],
        "platforms": ["linux-64"],
        "sources": [],
    }
    return yaml.safe_dump(
        {"version": 1, "metadata": metadata, "package": entries}, sort_keys=False
    ).encode()


def _entry(name: str, version: str, manager: str, path: Path) -> dict[str, object]:
    return {
        "name": name,
        "version": version,
        "manager": manager,
        "platform": "linux-64",
        "dependencies": {},
        "url": path.resolve().as_uri(),
        "hash": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "category": "main",
        "optional": False,
    }


_BACKEND = """
import os, time, zipfile

def build_wheel(folder, settings=None, metadata=None):
    if "{tag}" == "broken":
        raise SystemExit("this sdist cannot be built")
    if "{tag}" == "none-at-all":
        return "made-1.0-{tag}.whl"
    if "{tag}" == "two-of-them":
        open(os.path.join(folder, "made-1.0-py3-none-any.whl"), "wb").close()
    name = "made-1.0-{tag}.whl"
    date = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))[:6]
    files = {{
        "made.py": repr(sorted({{"a", "b", "c", "d"}}, key=hash)),
        "made-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: made\\nVersion: 1.0\\n",
        "made-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {tag}\\n",
    }}
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(zipfile.ZipInfo(path, date), text)
        lines = "".join(f"{{p}},,\\n" for p in files)
        wheel.writestr(zipfile.ZipInfo("made-1.0.dist-info/RECORD", date), lines)
    return name
"""


@dataclass(frozen=True)
class EnvironmentLaptop:
    """A folder with a manifest of a small environment, and its lock."""

    folder: Path
    channel: Path

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    @property
    def asset(self) -> Path:
        return self.bundle / "data/envs/small-env"

    def lock(self, conda: list[str], pip: list[Path]) -> None:
        from stage.environment.image.image import own_requirements  # needs the extra `laptop`

        spec = EnvironmentSpec.load(self.folder / "environment.yml")
        asked = content_hash(spec, Profile.load(self.folder / "cluster.yml"), own_requirements())
        (self.folder / "conda-lock.yml").write_bytes(lock_text(self.channel, conda, pip, asked))

    def stage(self, *arguments: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stage", *map(str, arguments)],
            cwd=self.folder,
            env={
                **os.environ,
                "UV_NO_INDEX": "1",
                "HF_ENDPOINT": "http://127.0.0.1:9",
                **settings,
            },
            capture_output=True,
            text=True,
            timeout=300,
        )


def new_laptop(folder: Path, channel: Path) -> EnvironmentLaptop:
    """A laptop without a lock yet."""
    folder.mkdir()
    (folder / "small.yaml").write_text(MANIFEST)
    (folder / "cluster.yml").write_text(PROFILE)
    (folder / "environment.yml").write_text(
        f"channels: [{channel.as_uri()}]\ndependencies: [python]\n"
    )
    return EnvironmentLaptop(folder, channel)


@pytest.fixture(scope="session")
def environment_laptop(
    conda_channel: Path, tmp_path_factory: pytest.TempPathFactory
) -> EnvironmentLaptop:
    """A laptop with the fetched small environment, made once per test run. Read-only for tests."""

    def make(folder: Path) -> None:
        channel = folder / "conda-channel"
        shutil.copytree(conda_channel, channel)
        laptop = new_laptop(folder / "laptop", channel)
        conda = [*CONDA, *stand_ins(channel)]
        laptop.lock(conda, [wheel_of_installed("click", folder), sdist(folder, "py3-none-any")])
        done = laptop.stage("fetch", "small.yaml", "-o", "bundle")
        assert done.returncode == 0, done.stderr

    folder = once(tmp_path_factory, "environments", make)
    return EnvironmentLaptop(folder / "laptop", folder / "conda-channel")


def alone(kind: str) -> list[str]:
    """The first words of a command with its own network (`n`) or mounts (`m`), as root or not."""
    return ["/usr/bin/unshare", f"-{kind}" if os.geteuid() == 0 else f"-r{kind}"]


def bootstrap(
    asset: Path, *arguments: Path | str, shell: str = "sh", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Runs `sh bootstrap.sh ...` with an empty environment, on a machine without network."""
    command = [
        "/usr/bin/unshare",
        "-n",
        *f"/usr/bin/{shell}".split(),
        str(asset / "bootstrap.sh"),
        *map(str, arguments),
    ]
    return subprocess.run(command, env=settings, capture_output=True, text=True, cwd=asset)


def run(prefix: Path, program: str, *arguments: str) -> str:
    """The output of a program of the environment, started with empty variables."""
    done = subprocess.run(
        [prefix / "bin" / program, *arguments], env={}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tree_of(prefix: Path) -> str:
    """The tree digest that a created environment states (it was proven during creation)."""
    return hashlib.sha256((prefix / ".airlift/tree.txt").read_bytes()).hexdigest()
