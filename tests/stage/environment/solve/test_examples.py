"""The shipped environment files are valid, and lock for the clusters that they name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lib.conda.example_locks import EXAMPLES, STAND_IN, Example, expected_hash, make_lock
from stage.environment.compat.check import verdicts
from stage.environment.compat.needs import Needs
from stage.environment.image.assemble import check_holds_airlift
from stage.environment.spec.conda_lock import EnvironmentLock
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.packages import read_packages
from stage.environment.spec.profile import Profile
from stage.util.progress import Reporter

ENVS = Path(__file__).resolve().parents[4] / "envs"
CPU_INDEX = "      - --extra-index-url https://download.pytorch.org/whl/cpu\n"


@pytest.mark.parametrize("name", ["bert-large", "qlora", "demo-cpu"])
def test_a_shipped_environment_is_read(name: str) -> None:
    spec = EnvironmentSpec.load(ENVS / f"{name}.yml")
    assert spec.name == name
    assert spec.channels == ("conda-forge",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile"),
    [("bert-large", "v100"), ("bert-large", "a800"), ("qlora", "h200"), ("demo-cpu", "cpu")],
)
def test_a_shipped_environment_locks_for_its_cluster(
    conda_channel: Path, tmp_path: Path, name: str, profile: str
) -> None:
    """With wheels from the real index, and the tests' channel, with one Python, for conda-forge."""
    text = (
        (ENVS / f"{name}.yml").read_text().replace("[conda-forge]", f"[{conda_channel.as_uri()}]")
    )
    (tmp_path / f"{name}.yml").write_text(
        re.sub(r"- python.*", "- python", text).replace(CPU_INDEX, "")
    )
    node = ENVS / "profiles" / f"{profile}.yml"
    command = [sys.executable, "-m", "stage", "env", "lock", f"{name}.yml", "--profile", str(node)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lock = EnvironmentLock.load(tmp_path / f"{name}.conda-lock.yml")
    needs = Needs.of(lock.packages)
    assert needs.torch is not None
    assert not [verdict for verdict in verdicts(needs, Profile.load(node)) if verdict.refused]
    assert {"transformers", "deepspeed", "datasets", "click", "pyarrow"} <= {
        package.name for package in lock.packages
    }


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda example: example.lock_path.name.partition(".conda")[0]
)
def test_a_shipped_lock_is_of_the_example_as_it_is_and_runs_on_its_cluster(
    example: Example, tmp_path: Path
) -> None:
    lock = EnvironmentLock.load(example.lock_path)
    changed = "the example, its profile or airlift's requirements changed"
    remedy = f"{changed}: python -m scripts.lib.conda.example_locks"
    assert lock.content_hash == expected_hash(example, tmp_path), remedy
    assert lock.to_yaml() == example.lock_path.read_bytes(), "edited by hand"
    assert not [
        verdict
        for verdict in verdicts(Needs.of(lock.packages), example.load_profile())
        if verdict.refused
    ]
    locked = read_packages(example.lock_path.read_bytes(), str(example.lock_path), "linux-64")
    check_holds_airlift(locked, str(example.lock_path))
    versions = {package.name: package.version for package in locked.packages}
    for requirement in map(
        Requirement, (r.text for r in EnvironmentSpec.load(example.spec_path).pip.requirements)
    ):
        assert requirement.specifier.contains(
            versions[canonicalize_name(requirement.name)], prereleases=True
        )


def test_a_shipped_lock_names_pypi_and_the_stand_in_and_nothing_of_the_machine_it_was_made_on() -> (
    None
):
    for example in EXAMPLES:
        for package in EnvironmentLock.load(example.lock_path).packages:
            places = {"pip": "https://files.pythonhosted.org/packages/", "conda": f"{STAND_IN}/"}
            assert package.url.startswith(places[package.manager]), package.url


@pytest.mark.slow
def test_a_shipped_lock_made_again_is_the_same_bytes(tmp_path: Path) -> None:
    example = next(example for example in EXAMPLES if example.name == "demo-cpu")
    with Reporter(quiet=True) as reporter:
        again = make_lock(example, EnvironmentLock.load(example.lock_path), tmp_path, reporter)
    assert again.to_yaml() == example.lock_path.read_bytes()


@pytest.mark.slow
def test_conda_locks_own_reader_takes_the_shipped_locks() -> None:
    """In a process of its own: conda-lock patches what it imports."""
    code = (
        "import sys, pathlib; from conda_lock.lockfile import parse_conda_lock_file as parse;"
        "print([len(parse(pathlib.Path(path)).package) for path in sys.argv[1:]])"
    )
    paths = [example.lock_path for example in EXAMPLES]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([len(EnvironmentLock.load(path).packages) for path in paths])


@pytest.mark.slow
def test_locked_from_a_real_channel_a_shipped_lock_keeps_its_pip_half(
    conda_channel: Path, tmp_path: Path
) -> None:
    """As envs/locks/README.md says, with the tests' channel for conda-forge."""
    example = next(example for example in EXAMPLES if example.name == "qlora")
    lock = tmp_path / "qlora.conda-lock.yml"
    (tmp_path / "qlora.yml").write_text(example.stand_in_text(conda_channel.as_uri()))
    shutil.copy(example.lock_path, lock)
    profile = str(example.load_profile().path)
    command = [sys.executable, "-m", "stage", "env", "lock", "qlora.yml", "--profile", profile]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = EnvironmentLock.load(example.lock_path), EnvironmentLock.load(lock)
    assert after.of("pip") == before.of("pip")
    assert {
        package.url.partition("/linux-64/")[0]
        for package in after.of("conda")
        if package.name == "python"
    } == {conda_channel.as_uri()}
