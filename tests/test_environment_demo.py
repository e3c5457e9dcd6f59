"""The parts of `scripts/demo --environment` and `scripts/bench env` without network and cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from scripts.lib.demo import environment_demo
from scripts.lib.demo.demo import DemoError
from scripts.lib.demo.environment_demo import Shown, check_space, run_file
from scripts.lib.demo.environment_materials import Wheels, environment_yml, pip_requirements
from stage.environment.spec.environment_yml import EnvironmentSpec

ROOT = Path(__file__).resolve().parents[1]
SHIM = ROOT / "scripts/lib/bench/slow_metadata.c"


@pytest.mark.parametrize("slurm", [True, False])
def test_the_run_file_is_one_that_the_runner_reads(tmp_path: Path, slurm: bool) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(run_file((ROOT / "runs/demo.yaml").read_text(), slurm=slurm))
    config = RunConfig.load(path)
    assert config.environment is not None and config.environment.asset == environment_demo.ASSET
    assert config.slurm.nodes == (2 if slurm else 1)


def test_the_environment_is_made_of_that_folder_of_wheels_alone(tmp_path: Path) -> None:
    wanted = pip_requirements()
    path = tmp_path / "environment.yml"
    path.write_text(environment_yml("file:///channel", tmp_path / "wheels", wanted))
    spec = EnvironmentSpec.load(path)
    assert spec.pip.no_index and [
        Path(link.removeprefix("file://")) for link in spec.pip.find_links
    ] == [tmp_path / "wheels"]
    assert {"torch", "deepspeed", "transformers", "click"} <= {
        r.name for r in spec.pip.requirements
    }
    assert spec.channels == ("file:///channel",)


def test_wheels_are_downloaded_once_for_the_same_wishes(tmp_path: Path) -> None:
    wheels, asked = Wheels(tmp_path / "wheels"), []

    def run(*command: str) -> None:
        asked.append(command[-1])
        (wheels.folder / "a.whl").write_bytes(b"wheel")

    for wish in ("torch>=2.6", "torch>=2.6", "torch>=2.7"):
        wheels.fill((wish,), run, lambda text: None)
    assert asked == ["torch>=2.6", "torch>=2.7"]


def test_a_download_that_failed_is_not_taken_for_an_earlier_one(tmp_path: Path) -> None:
    wheels = Wheels(tmp_path / "wheels")

    def fail(*command: str) -> None:
        raise DemoError("pip failed")

    with pytest.raises(DemoError):
        wheels.fill(("torch",), fail, lambda text: None)
    assert not wheels.stamp.exists()


def test_a_disk_that_would_be_full_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_demo, "NEEDED", {"here": 1, "there": 1})
    check_space(tmp_path)
    monkeypatch.setattr(environment_demo, "NEEDED", {"here": 2**60, "there": 2**60})
    with pytest.raises(DemoError, match="are needed, and"):
        check_space(tmp_path)


def test_a_failed_check_stands_out() -> None:
    shown = Shown()
    shown.that("one", True)
    shown.that("two", False)
    assert shown.summary() == "yes  one\nNO   two"


def test_the_slow_folder_counts_what_is_asked_below_it_and_nothing_else(tmp_path: Path) -> None:
    shim, slow, counts = tmp_path / "shim.so", tmp_path / "slow", tmp_path / "counts"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", shim, SHIM, "-ldl"], check=True
    )
    slow.mkdir()
    (slow / "file").write_text("x")
    code = (
        "import os, sys\n"
        "os.stat(sys.argv[1] + '/file')\n"
        "open(sys.argv[1] + '/file').close(); os.listdir(sys.argv[1]); "
        "os.access(sys.argv[1] + '/file', os.R_OK)\n"
        "os.stat('/'); open('/dev/null').close()\n"
    )
    for below, expected in ((slow, 4), (tmp_path / "elsewhere", 0)):
        settings = {
            "LD_PRELOAD": str(shim),
            "BENCH_PREFIX": str(below),
            "BENCH_COUNTS": str(counts),
        }
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, str(slow)], env=settings, check=True
        )
        assert int(counts.read_text()) == expected
