"""airlift travels in every environment: as a wheel of what is running, the same bytes each time."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from stage import __version__
from stage.environment.image.image import airlift_wheel, check_holds_airlift
from stage.errors import UsageError
from tests.remedies.obeyed import in_it, obeys
from tests.stage.environment.spec.test_conda_lock import lock, package


def test_made_twice_it_is_the_same_bytes_and_holds_every_file_of_both_packages(
    tmp_path: Path,
) -> None:
    first, second = airlift_wheel(tmp_path / "1"), airlift_wheel(tmp_path / "2")
    assert first.read_bytes() == second.read_bytes()
    assert first.name == f"airlift_hpc-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(first) as wheel:
        inside = set(wheel.namelist())
    assert {
        "stage/cli/__init__.py",
        "runner/cli/__init__.py",
        "stage/templates/bootstrap.sh",
        "stage/templates/activate.sh",
    } <= inside
    assert not any("__pycache__" in name for name in inside)


@obeys("stage/environment/image/image.py", "stage env lock adds them; with another tool")
def test_a_lock_without_what_airlift_needs_is_told_what_to_add() -> None:
    bare = replace(lock(), packages=(package("python", version="3.11.7"),))
    with pytest.raises(UsageError, match="does not meet their requirements") as told:
        check_holds_airlift(bare, "lock")
    lines = in_it(told.value.message, r"(?<=requirements: ).*(?=\.$)").split(", ")
    names = [Requirement(line).name for line in lines]
    added = (package(name, version=metadata.version(name)) for name in names)
    check_holds_airlift(replace(bare, packages=(*bare.packages, *added)), "lock")
