"""`stage env lock` with a conda channel in a folder, real solvers, and an index on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib.conda.channel import index as index_channel
from scripts.lib.conda.channel import write_package
from stage.environment.solve.conda import write_lookalike
from tests.remedies.obeyed import in_it, obeys
from tests.stage.environment.solve.conftest import A800, Desk
from tests.support.environment.channel import greeter
from tests.support.environment.laptop import MANIFEST
from tests.support.environment.pypi import wheel


def test_the_lock_has_every_package_of_both_halves_with_its_digest(first: Desk) -> None:
    import hashlib
    from urllib.parse import unquote, urlsplit

    lock = first.lock
    assert {p.name for p in lock.of("conda")} == {"python", "pip", "greeter", "cudatoolkit"}
    assert first.versions["cudatoolkit"] == "12.4.1", "the newest that the profile's driver takes"
    assert {"tool", "lib", "click", "pyyaml"} <= {p.name for p in lock.of("pip")}, (
        "airlift's own are among them"
    )
    assert "greeter" not in {p.name for p in lock.of("pip")}, "conda provides it"
    for package in lock.of("conda"):
        path = Path(unquote(urlsplit(package.url).path))
        assert hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256
    (tool,) = [p for p in lock.of("pip") if p.name == "tool"]
    assert tool.sha256 == first.index.sha256("tool-1.0-py3-none-any.whl")


def test_conda_locks_own_reader_takes_the_lock(first: Desk) -> None:
    """In a process of its own: conda-lock patches what it imports."""
    code = (
        "import sys, json, pathlib; from conda_lock.lockfile import parse_conda_lock_file as parse;"
        "lock = parse(pathlib.Path(sys.argv[1]));"
        "print(json.dumps([[p.manager, p.name, p.version, p.url, p.hash.sha256] for p in "
        "lock.package]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, first.lock_path], capture_output=True, text=True, check=True
    )
    ours = [[p.manager, p.name, p.version, p.url, p.sha256] for p in first.lock.packages]
    assert sorted(json.loads(done.stdout)) == sorted(ours)


def test_locking_again_is_the_same_bytes_though_newer_releases_came(desk: Desk) -> None:
    before = desk.lock_path.read_bytes()
    desk.index.add(wheel("tool", "2.0"), wheel("lib", "2.0"))
    assert "still matches" in desk.locked()
    text = (desk.folder / "environment.yml").read_text()
    (desk.folder / "environment.yml").write_text(f"# a comment is no change\n{text}")
    assert "still matches" in desk.locked()
    assert desk.lock_path.read_bytes() == before


def test_two_requirements_on_one_package_both_hold(desk: Desk) -> None:
    """The channel has greeter 1.0 and 1.1; conda holds `>=1.0` and `<1.1` together."""
    desk.write(conda=("greeter>=1.0", "greeter<1.1"))
    desk.locked("--update", "greeter")
    assert desk.versions["greeter"] == "1.0"
    before = desk.lock_path.read_bytes()
    assert "unchanged" in desk.locked() and desk.lock_path.read_bytes() == before


@obeys("stage/environment/solve/conda.py", "Keep one of them.")
def test_what_cannot_be_joined_is_refused_before_the_solve(desk: Desk) -> None:
    desk.write(conda=("greeter=1.0=*_a", "greeter=1.0=*_b"))
    said = desk.refused(2, "--update", "greeter")
    assert "environment.yml:8: `greeter` and `greeter=1.0=*_a` and `greeter=1.0=*_b`" in said
    desk.write(conda=("greeter=1.0",))
    desk.locked("--update", "greeter")


@obeys("stage/environment/solve/conda.py", "Ask for python={} or newer.")
@pytest.mark.parametrize("old", ["python=3.8", "python<3.10", "python==3.9.18"])
def test_a_python_that_is_too_old_is_refused_before_the_solve(desk: Desk, old: str) -> None:
    text = (desk.folder / "environment.yml").read_text()
    unreachable = text.replace(desk.channel.as_uri(), "http://127.0.0.1:9/none")
    (desk.folder / "environment.yml").write_text(unreachable.replace("python=3.11", f"'{old}'"))
    said = desk.refused(2)
    assert f"environment.yml:4: `{old}`: airlift, which is in every environment, needs 3.10" in said
    newer = in_it(said, r"python=3\.1\d").replace("3.10", "3.11")  # this channel's
    (desk.folder / "environment.yml").write_text(text.replace("python=3.11", newer))
    desk.locked()


def test_update_moves_one_and_leaves_the_rest(pip_desk: Desk) -> None:
    pip_desk.index.add(wheel("tool", "2.0", requires=["lib"]), wheel("lib", "2.0"))
    assert "lib 1.0 -> 2.0" in pip_desk.locked("--update", "lib")
    assert (pip_desk.versions["lib"], pip_desk.versions["tool"]) == ("2.0", "1.0")
    assert "Did you mean `tool`?" in pip_desk.refused(2, "--update", "toool")
    pip_desk.lock_path.unlink()
    assert "there is no lock yet, so nothing to update" in pip_desk.refused(2, "--update", "tool")


def test_a_changed_spec_keeps_what_was_locked(desk: Desk) -> None:
    """A new requirement moves only what must move; an updated conda package moves alone."""
    write_package(desk.channel, greeter("1.2"))
    index_channel(desk.channel)
    desk.index.add(wheel("tool", "2.0"), wheel("lib", "2.0"), wheel("new", "3.0"))
    desk.write("new")
    desk.locked()
    assert {name: desk.versions[name] for name in ("greeter", "tool", "lib", "new")} == {
        "greeter": "1.1", "tool": "1.0", "lib": "1.0", "new": "3.0",
    }  # fmt: skip
    said = desk.locked("--update", "greeter")
    assert "greeter 1.1 -> 1.2" in said and desk.versions["tool"] == "1.0"


def test_what_airlift_itself_requires_is_named_where_it_conflicts(pip_desk: Desk) -> None:
    pip_desk.write("PyYAML<6")
    words = pip_desk.refused(2)
    assert "airlift, which is in every environment, requires PyYAML>=6. Loosen or drop" in words
    assert "`PyYAML<6` (environment.yml:10)" in words


def test_an_unpinned_torch_is_the_newest_that_the_driver_runs_and_the_reason_is_printed(
    pip_desk: Desk,
) -> None:
    """Also where another package requires it; a pinned one is refused, with what fits."""
    for version, cuda in (("2.8.0", "12.8.90"), ("2.10.0", "12.8.90"), ("2.14.1", "13.0.96")):
        runtime = "nvidia-cuda-runtime" if cuda.startswith("13") else "nvidia-cuda-runtime-cu12"
        pip_desk.index.add(
            wheel("torch", version, requires=[f"{runtime}=={cuda}"]), wheel(runtime, cuda)
        )
    pip_desk.index.add(wheel("trainer", "1", requires=["torch>=2.1"]))
    for line in ("torch", "trainer"):
        pip_desk.write(line)
        pip_desk.lock_path.unlink(missing_ok=True)
        said = pip_desk.locked()
        assert pip_desk.versions["torch"] == "2.10.0", line
        assert (
            "torch 2.10.0: the newest that runs on a800 (torch<2.11); not 2.14.1: CUDA 13.0" in said
        )
    pip_desk.write("torch==2.14.1")
    words = pip_desk.refused(2)
    assert "would not run on a800" in words and "torch 2.10 from PyPI" in words


def test_ones_own_conda_is_taken_and_what_was_locked_is_pinned_there(desk: Desk) -> None:
    """Without a conda here: a program logs its calls and passes them to py-rattler."""
    real = write_lookalike(desk.folder)
    (desk.folder / "bin").mkdir()
    program = desk.folder / "bin" / "mamba"
    program.write_text(f'#!/bin/sh\necho "$*" >> {desk.folder}/calls\nexec {real} "$@"\n')
    program.chmod(0o755)
    desk.write(conda=("openmpi",))
    said = desk.locked(PATH=f"{desk.folder}/bin:/usr/bin:/bin")
    assert f"solved by {program}, on your PATH" in said
    (call,) = [
        line
        for line in (desk.folder / "calls").read_text().splitlines()
        if line.startswith("create")
    ]
    assert "greeter 1.1 pyh0000000_0" in call and "openmpi" in call
    assert desk.versions["openmpi"] == "5.0.6" and desk.versions["greeter"] == "1.1"
    assert "no such program" in desk.refused(2, "--conda", "no-such-conda")


def test_a_manifest_has_its_environment_locked_first_and_a_stale_lock_is_told(
    desk: Desk,
) -> None:
    def stage(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stage", *arguments], cwd=desk.folder,
            capture_output=True, text=True, timeout=120,
            env=desk.environment(), check=False,
        )  # fmt: skip

    (desk.folder / "small.yaml").write_text(MANIFEST)
    (desk.folder / "cluster.yml").write_text(A800)
    ours = desk.lock_path.read_bytes()
    desk.lock_path.unlink()
    done = stage("lock", "small.yaml")
    assert done.returncode == 0 and "conda-lock.yml: written" in done.stderr, done.stderr
    assert desk.lock_path.read_bytes() == ours
    desk.write(conda=("openmpi",))
    refused = stage("lock", "small.yaml")
    assert (
        refused.returncode == 2 and "changed since conda-lock.yml was written" in refused.stderr
    ), refused.stderr


@obeys("stage/environment/solve/conda.py", "Write name, name=1.2 or name>=1,<2.")
def test_a_requirement_that_is_none_is_refused_in_words(desk: Desk) -> None:
    text = (desk.folder / "environment.yml").read_text()
    for wrong in ("python=>=3.10", "python=>>3"):
        (desk.folder / "environment.yml").write_text(text.replace("python=3.11", f"'{wrong}'"))
        said = desk.refused(2)
        assert f"environment.yml:4: `{wrong}`: Invalid" in said
    written = in_it(said, "name>=1").replace("name", "python").replace("1", "3.11")
    (desk.folder / "environment.yml").write_text(text.replace("python=3.11", written))
    desk.locked()
