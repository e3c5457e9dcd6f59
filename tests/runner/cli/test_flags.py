"""One set of flags for all commands: -q, --bundle and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runner.cli import main
from tests.runner.conftest import RUN
from tests.runner.folders import run_folder
from tests.support.environ import kept_environment


@pytest.fixture
def home(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `bundle` and `run.yaml`; it is the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "bundle").symlink_to(bundle)
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in RUN.items())
    (tmp_path / "run.yaml").write_text(text)
    return tmp_path


def call(*words: str, **environ: str | None) -> Result:
    with kept_environment():
        return CliRunner().invoke(main, words, prog_name="runner", env=environ)


def test_the_only_bundle_here_is_found_and_the_choice_is_printed(home: Path) -> None:
    done = call("submit", "run.yaml", "--print")
    assert done.exit_code == 0, done.stderr
    assert done.stderr == "bundle: ./bundle (no --bundle; it is the only bundle here)\n"
    assert f"--bundle {home}/bundle" in done.stdout
    assert call("submit", "run.yaml", "--print", "-q").stderr == ""
    assert call("submit", "run.yaml", "--print", "--bundle", "bundle").stderr == ""


def test_a_second_bundle_makes_the_choice_yours(home: Path, bundle: Path) -> None:
    (home / "older").symlink_to(bundle)
    done = call("check", "run.yaml")
    assert done.exit_code == 2 and "the bundles here are bundle, older" in done.stderr
    assert "--bundle" in done.stderr and "export AIRLIFT_BUNDLE=" in done.stderr
    (home / "bundle").unlink()
    assert "older" in call("check", "run.yaml").stderr, "another name is never taken by itself"
    (home / "older").unlink()
    assert "there is no ./bundle here" in call("check", "run.yaml").stderr


def test_airlift_bundle_stands_for_bundle(home: Path, bundle: Path) -> None:
    (home / "older").symlink_to(bundle)
    done = call("submit", "run.yaml", "--dry-run", AIRLIFT_BUNDLE=str(home / "older"))
    assert done.exit_code == 0 and "older (as AIRLIFT_BUNDLE says)" in done.stderr
    assert f"--bundle {home}/older" in done.stdout
    given = call("submit", "run.yaml", "--dry-run", "--bundle", "bundle", AIRLIFT_BUNDLE="nowhere")
    assert f"--bundle {home}/bundle" in given.stdout, "the command line counts first"


def test_quiet_leaves_errors_only(home: Path) -> None:
    done = call("check", "run.yaml", "-q")
    assert (done.exit_code, done.output) == (0, "")
    assert call("check", "nofile.yaml", "-q").stderr.startswith("error: nofile.yaml")


CHECK = "check run.yaml --bundle bundle --set"


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("check rum.yaml --bundle bundle", "Did you mean run.yaml?"),
        ("check run.yaml --bundle bundel", "Did you mean bundle?"),
        (f"{CHECK} task=masked_lm", "Did you mean `masked-lm`?"),
        (f"{CHECK} batch.micro=atuo", "Did you mean `auto`?"),
        (f"{CHECK} compile=ture", "Did you mean `true`?"),
        (f"{CHECK} model.asset=tiny-brt", "Did you mean `tiny-bert`?"),
        (f"{CHECK} dataset.text=txt", "Did you mean `text`?"),
        (f"{CHECK} dataset.limit.tran=3", "Did you mean `train`?"),
        (f"{CHECK} engine.config=dss.json", "ds.json?"),
        ("bench run.yaml --bundle bundle --strategies zreo2", "Did you mean `zero2`?"),
        ("init maskd-lm", "Did you mean `masked-lm`?"),
        ("exec --bundle bundle -- pyhton x.py", "Did you mean `python`?"),
        ("logs output/mad", "Did you mean output/made?"),
        ("status", "output: no run is below this folder"),
    ],
)
def test_a_typing_error_is_answered_with_the_nearest_name_that_exists(
    home: Path, command: str, meant: str
) -> None:
    if command != "status":
        run_folder(home / "output" / "made", steps=3)
    (home / "ds.json").write_text("{}")
    done = call(*command.split())
    assert done.exit_code == 2 and meant in done.stderr, done.stderr
