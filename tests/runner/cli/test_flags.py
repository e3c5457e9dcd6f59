"""One set of flags for all commands: -q, --bundle and where it comes from; and typos."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runner.cli import main
from stage.bundle.bundle import Bundle
from tests.runner.conftest import RUN
from tests.runner.folders import run_folder
from tests.stage.bundles import make_bundle
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
    with open(home / "run.yaml", "a") as file:  # the folder of that name is of another manifest
        file.write("manifest: other.yaml\n")
    (home / "other.yaml").write_text(f"name: {Bundle.open(bundle).lock.name}\n")
    (home / "bundle").unlink()
    make_bundle(home / "bundle", big=False)
    said = call("submit", "run.yaml", PATH="").stderr
    assert "--bundle older;" in said and "runner submit run.yaml --to CLUSTER" in said
    shutil.rmtree(home / "bundle")
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


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("check run.yaml --jsn", 2, None),  # the option was mistyped, so it is no JSON
        ("check run.yaml --json --procesess 2", 2, "No such option"),
        ("check run.yaml --json --bundle nowhere", 2, "no such folder"),
        ("status nowhere --json", 2, "nowhere"),
        ("exec --bundle bundle no-such-program --json", 2, None),  # the option is the program's
    ],
)
def test_an_error_under_json_is_one_document_with_the_exit_code(
    home: Path, command: str, code: int, said: str | None
) -> None:
    done = call(*command.split())
    assert done.exit_code == code, done.output
    if said is None:
        assert done.stdout == "" and "error: " in done.stderr
        return
    document = json.loads(done.stdout)
    assert "findings" in document or "\nerror: " in f"\n{done.stderr}"
    assert document["exit_code"] == code
    text = json.dumps(document)
    assert said in text and '"remedy"' in text


def test_quiet_leaves_errors_only(home: Path) -> None:
    done = call("check", "run.yaml", "-q")
    assert (done.exit_code, done.output) == (0, "")
    assert call("check", "nofile.yaml", "-q").stderr.startswith("error: nofile.yaml")
    run_folder(home / "output" / "made", steps=3)
    assert call("report", "output/made", "--quiet").output == ""


def test_status_without_any_run_says_what_to_do(home: Path) -> None:
    done = call("status")
    assert done.exit_code == 2 and "output: no run is below this folder" in done.stderr


CHECK = "check run.yaml --bundle bundle --set"


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("chek run.yaml", "runner check`"),
        ("check rum.yaml --bundle bundle", "Did you mean run.yaml?"),
        ("check run.yaml --bundle bundel", "Did you mean bundle?"),
        ("check run.yaml --bundel bundle", "--bundle"),
        (f"{CHECK} task=masked_lm", "Did you mean `masked-lm`?"),
        (f"{CHECK} optimizer.name=adanw", "Did you mean `adamw`?"),
        (f"{CHECK} engine.name=depspeed", "Did you mean `deepspeed`?"),
        (f"{CHECK} engine.offload=cup", "Did you mean `cpu`?"),
        (f"{CHECK} schedule.name=cosin", "Did you mean `cosine`?"),
        (f"{CHECK} precision=bf61", "Did you mean `bf16`?"),
        (f"{CHECK} batch.micro=atuo", "Did you mean `auto`?"),
        (f"{CHECK} compile=ture", "Did you mean `true`?"),
        (f"{CHECK} model.init=scrach", "Did you mean `scratch`?"),
        (f"{CHECK} model.asset=tiny-brt", "Did you mean `tiny-bert`?"),
        (f"{CHECK} dataset.text=txt", "Did you mean `text`?"),
        (f"{CHECK} dataset.train=trian", "Did you mean `train`?"),
        (f"{CHECK} dataset.config=chapter", "Did you mean `chapters`?"),
        (f"{CHECK} dataset.limit.tran=3", "Did you mean `train`?"),
        (f"{CHECK} engine.config=dss.json", "ds.json?"),
        ("bench run.yaml --bundle bundle --strategies zreo2", "Did you mean `zero2`?"),
        ("init maskd-lm", "Did you mean `masked-lm`?"),
        ("exec --bundle bundle -- pyhton x.py", "Did you mean `python`?"),
        ("status mad", "Did you mean output/made?"),
        ("logs output/mad", "Did you mean output/made?"),
        ("check manifest.yaml --bundle bundle", "this is a manifest, not a run file"),
    ],
)
def test_a_typing_error_is_answered_with_the_nearest_name_that_exists(
    home: Path, command: str, meant: str
) -> None:
    run_folder(home / "output" / "made", steps=3)
    (home / "ds.json").write_text("{}")
    (home / "manifest.yaml").write_text("format: 1\nassets:\n  m: {model: acme/tiny}\n")
    done = call(*command.split())
    assert done.exit_code == 2 and meant in done.stderr, done.stderr
