"""The inputs of `scripts/demo --environment`: a channel, a folder of wheels, `environment.yml`.

The pip half of envs/demo-cpu.yml -> wheels from the user's index, kept below output/ for the next
run; the running Python -> a channel. So the demo needs PyPI, but not conda-forge or PyTorch's
index.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from scripts.lib.conda.channel import index, package_from_wheel, write_package
from scripts.lib.conda.python import bundled_wheels, python_package
from stage.digests import sha256_of_bytes
from stage.environment.image.own_wheel import own_requirements
from stage.environment.spec.pip_section import SDISTS
from stage.files import human_count, human_size

ROOT = Path(__file__).resolve().parents[3]
CONSTRAINTS = ROOT / "envs" / "constraints.txt"
EXAMPLE = ROOT / "envs" / "demo-cpu.yml"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CONDA_FORGE = "conda-forge"
ANSWER_S = 10.0


class MaterialError(Exception):
    """The environment cannot be made here; the message gives the reason."""


@dataclass(frozen=True)
class Wheels:
    """A folder of wheels and a few sdists, filled once for the same requirements."""

    folder: Path

    @property
    def stamp(self) -> Path:
        return self.folder / "made-from.txt"

    def fill(
        self, wanted: tuple[str, ...], run: Callable[..., None], say: Callable[[str], None]
    ) -> None:
        """Downloads the wheels, unless an earlier run did; prints which.

        Args:
            wanted: requirements.
            run: prints and runs a command.
        """
        inputs = (*wanted, sys.version, sha256_of_bytes(CONSTRAINTS.read_bytes()))
        stamp = "".join(f"{line}\n" for line in inputs)
        if self.stamp.is_file() and self.stamp.read_text() == stamp:
            say(f"wheels: those of an earlier run, in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            command = ["python", "-m", "pip", "download", "-qq", "--dest", str(self.folder)]
            command += ["--only-binary", ":all:", "--no-binary", ",".join(SDISTS)]
            command += ["--constraint", str(CONSTRAINTS)]
            run(*command, *cpu_index(say), *wanted)
            self.stamp.write_text(stamp)
        files = [path for path in self.folder.iterdir() if path != self.stamp]
        size = human_size(sum(path.stat().st_size for path in files))
        say(f"{human_count(len(files), 'file')}, {size}, kept for the next run in {self.folder}")
        if any(path.name.startswith("nvidia_") for path in files):
            say("torch is a build for CUDA, the only one of this index: larger, as good on CPUs")


def cpu_index(say: Callable[[str], None]) -> tuple[str, ...]:
    """pip's option for torch's builds without CUDA, where their index answers."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=ANSWER_S):
            return ("--extra-index-url", CPU_INDEX)
    except (urllib.error.URLError, OSError) as error:
        say(f"{CPU_INDEX} does not answer ({error}): torch comes from pip's configured index")
        return ()


def pip_requirements() -> tuple[str, ...]:
    """The requirements of the example's pip section, without options, and those of airlift."""
    dependencies = yaml.safe_load(EXAMPLE.read_text())["dependencies"]
    section = next(entry["pip"] for entry in dependencies if isinstance(entry, dict))
    return (*(line for line in section if not line.startswith("-")), *own_requirements())


def make_channel(folder: Path, say: Callable[[str], None]) -> str:
    """Makes the channel with Python; returns its URL for `environment.yml`.

    Raises:
        MaterialError: this Python cannot be repackaged, and conda-forge cannot be reached.
    """
    try:
        python = python_package()
    except ValueError as error:
        if not _answers("https://conda.anaconda.org/conda-forge/noarch/repodata.json.zst"):
            raise MaterialError(
                f"{error}. Run this with another Python (of python.org, pyenv, uv or Debian), or "
                "where conda-forge can be reached"
            ) from None
        say(f"Python comes from {CONDA_FORGE}: {error}")
        return CONDA_FORGE
    packages = [python, *map(package_from_wheel, bundled_wheels())]
    for package in packages:
        write_package(folder, package)
    index(folder)
    say(f"a conda channel in {folder}: {', '.join(f'{p.name} {p.version}' for p in packages)}")
    return folder.as_uri()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_S):
            return True
    except (urllib.error.URLError, OSError):
        return False


def environment_yml(channel: str, wheels: Path, wanted: tuple[str, ...]) -> str:
    """`environment.yml`: Python from the channel, all other packages from the folder of wheels."""
    pip = ["--no-index", f"--find-links {wheels}", *wanted]
    document = {
        "name": "demo",
        "channels": [channel],
        "dependencies": [f"python={sysconfig.get_python_version()}", "pip", {"pip": pip}],
    }
    return yaml.safe_dump(document, sort_keys=False, width=1000)
