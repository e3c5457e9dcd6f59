"""A lock on a site's own torch: what the site provides is not in it, and goes with the rest."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stage.environment.image.image import own_requirements
from stage.environment.spec.conda_lock import EnvironmentLock
from stage.errors import UsageError
from tests.support.environment.pypi import Index, serve_index, wheel
from tests.support.staging import run_as

NODE = 'format: 1\nname: node\nplatform: linux-64\nglibc: "2.28"\nprovides:\n'
SITE = {"python": "3.11.2", "torch": "2.7.1+rocm6.3", "numpy": "1.26.4"}
COMPILED = "cp311-cp311-manylinux_2_28_x86_64"


@dataclass
class Desk:
    """A folder with `environment.yml` and `node.yml`, and an index."""

    folder: Path
    index: Index

    def lock(self, *pip: str, conda: str = "python=3.11", **site: str) -> EnvironmentLock:
        done = self.run(*pip, conda=conda, **site)
        assert done.returncode == 0, done.stderr
        return EnvironmentLock.load(self.folder / "conda-lock.yml")

    def refused(self, *pip: str, conda: str = "python=3.11", **site: str) -> str:
        done = self.run(*pip, conda=conda, **site)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert not (self.folder / "conda-lock.yml").exists()
        return " ".join(done.stderr.split())

    def run(self, *pip: str, conda: str, **site: str) -> subprocess.CompletedProcess[str]:
        lines = "".join(f'  {name}: "{version}"\n' for name, version in {**SITE, **site}.items())
        (self.folder / "node.yml").write_text(NODE + lines)
        listed = "".join(f"    - {line}\n" for line in (f"--index-url {self.index.url}", *pip))
        text = f"dependencies:\n  - {conda}\n  - pip\n  - pip:\n{listed}"
        (self.folder / "environment.yml").write_text(text)
        (self.folder / "conda-lock.yml").unlink(missing_ok=True)
        environ = {
            "HOME": str(self.folder),
            "PATH": "/usr/bin:/bin",
            "PIP_CONFIG_FILE": "/dev/null",
        }
        words = ["env", "lock", "environment.yml", "--profile", "node.yml"]
        return run_as(words, self.folder, environ)


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with serve_index() as index:
        index.add_stand_ins(own_requirements())
        index.add(
            wheel("numpy", "2.3.0", tag=COMPILED),
            wheel("nvidia-cuda-runtime-cu12", "12.6"),
            wheel("torch", "2.8.0", requires=["nvidia-cuda-runtime-cu12"], tag=COMPILED),
            wheel("torchvision", "0.22.1", requires=["torch==2.7.1", "numpy"], tag=COMPILED),
            wheel("trainer", "1.0", requires=["torch>=2", "numpy>=1.17", "pyarrow>=20"]),
            wheel("pyarrow", "25.0.1", tag=COMPILED), wheel("pyarrow", "26.0.0", tag=COMPILED),
            wheel("pandas", "3.0.6", requires=["numpy>=1.26"], tag=COMPILED),
            wheel("pandas", "3.1.1", requires=["numpy>=2.0.2"], tag=COMPILED),
        )  # fmt: skip
        yield index


@pytest.fixture
def desk(tmp_path: Path, index: Index) -> Desk:
    return Desk(tmp_path, index)


def test_what_the_site_provides_is_not_locked_and_decides_the_rest(desk: Desk) -> None:
    lock = desk.lock("trainer", "pandas", "torch")
    versions = {package.name: package.version for package in lock.packages}
    assert not lock.of("conda") and lock.python == "3.11.2" and lock.provides == SITE
    assert not {"torch", "numpy", "nvidia-cuda-runtime-cu12", "python"} & versions.keys()
    assert (versions["trainer"], versions["pandas"]) == ("1.0", "3.0.6")
    assert versions["pyarrow"] == "25.0.1"  # 26 refuses numpy 1 when it is imported
    first = (desk.folder / "conda-lock.yml").read_bytes()
    assert EnvironmentLock.parse(first, "x") == lock and lock.to_yaml() == first
    desk.lock("trainer", "pandas", "torch")
    assert (desk.folder / "conda-lock.yml").read_bytes() == first
    assert desk.lock("trainer", numpy="2.1.0").content_hash != lock.content_hash


@pytest.mark.parametrize(
    ("torch", "asked"),
    [
        ("2.7.1+rocm6.3", "torch==2.7.1"),
        ("2.7.0a0+7c8ec84dab.nv25.03", "torch>=2.7.0a0"),
        ("2.8.0.dev20250601+rocm6.4", "torch"),
        ("2.7.0a0+git-1234", "torch"),
    ],
)
def test_versions_as_vendors_write_them(desk: Desk, torch: str, asked: str) -> None:
    lock = desk.lock("trainer", asked, torch=torch)
    assert lock.provides["torch"] == torch and "trainer" in {p.name for p in lock.packages}


def test_a_requirement_that_the_site_does_not_meet_names_both_lines(desk: Desk) -> None:
    said = desk.refused("numpy>=2", "torch>=2.8", conda="python=3.12")
    assert "environment.yml:2: `python=3.12`, and the site has python 3.11.2 (node.yml:6)" in said
    assert "environment.yml:6: `numpy>=2`, and the site has numpy 1.26.4 (node.yml:8)" in said
    assert "environment.yml:7: `torch>=2.8`, and the site has torch 2.7.1+rocm6.3" in said
    assert "print the profile again" in said


def test_conda_packages_and_what_is_compiled_for_another_torch_are_refused(desk: Desk) -> None:
    said = desk.refused("trainer", conda="openmpi")
    assert "environment.yml:2: `openmpi` is a conda package" in said
    said = desk.refused("trainer", "torchvision")
    assert "environment.yml:7: `torchvision` 0.22.1 is compiled for PyPI's torch, not for" in said
    lock = desk.lock("trainer", "torchvision", torchvision="0.22.1")
    assert "torchvision" not in {package.name for package in lock.packages}


def test_a_lock_whose_words_would_be_commands_of_a_shell_is_refused(desk: Desk) -> None:
    desk.lock("trainer")
    text = (desk.folder / "conda-lock.yml").read_text()
    known = next(line for line in text.splitlines() if "provides:" in line)
    for words in ("torch==2", "python==3.11 torch==2;rm", "python torch"):
        with pytest.raises(UsageError, match="is not NAME==VERSION"):
            EnvironmentLock.parse(text.replace(known, f"    provides: {words}").encode(), "x")


@pytest.mark.parametrize("asked", ["python=3.11.9", "python>=3.10,<3.13"])
def test_a_python_is_compared_by_its_first_two_numbers(desk: Desk, asked: str) -> None:
    assert desk.lock("trainer", conda=asked).python == "3.11.2"
