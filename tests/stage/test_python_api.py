"""The public Python API: `stage` and `runner`, as scripts and type checkers see them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError

import stage
from tests.stage.bundles import make_bundle
from tests.support.staging import Laptop

ROOT = Path(__file__).parents[2]


def in_a_new_process(code: str, *arguments: object, folder: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "AIRLIFT_STORE": "none"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def laptop_without_a_hub(folder: Path) -> None:
    """A manifest of local files only, and a run file."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bert", "vocab_size": 5}')
    (folder / "lines.csv").write_text("text\nhello\nworld\n")
    (folder / "manifest.yaml").write_text(
        "format: 1\nname: api\nassets:\n  bert: {path: model}\n"
        "  lines: {path: lines.csv, convert: csv}\n"
    )
    (folder / "run.yaml").write_text(
        "format: 1\ntask: masked-lm\nmodel: {asset: bert, init: scratch}\n"
        "dataset: {asset: lines, train: train, text: text}\nsteps: 2\n"
    )


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/reference/python-api.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    laptop_without_a_hub(tmp_path)
    printed = in_a_new_process(example, folder=tmp_path)
    assert "bert files bundle/data/files/bert" in printed
    assert "lines dataset bundle/data/datasets/lines" in printed
    assert printed.endswith("bundle/data/files/bert\n")


def test_resolve_gives_the_lock_that_fetch_follows_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRLIFT_STORE", "none")
    laptop_without_a_hub(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    manifest = stage.Manifest.load(tmp_path / "manifest.yaml")
    lock = stage.resolve(manifest, quiet=True)
    assert list(lock.assets) == ["bert", "lines"]
    plan = stage.fetch(manifest, tmp_path / "bundle", dry_run=True, quiet=True)
    assert plan.dry_run and plan.bundle_id is None
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(stage.StageError, match="--locked"):
        stage.resolve(manifest, locked=True, quiet=True)


def test_another_bundle_is_a_finding_and_a_wrong_argument_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    made = make_bundle(root, big=False)
    assert stage.verify(root, "fast", bundle_id=f"sha256:{made.id}").ok
    assert stage.verify(root, "fast", bundle_id="0" * 64).is_another
    for wrong in ({"level": "ful"}, {"bundle_id": "1234"}):
        with pytest.raises(stage.StageError) as caught:
            stage.verify(root, **wrong)  # type: ignore[arg-type]
        assert caught.value.exit_code == 2
    with pytest.raises(stage.StageError, match="no such folder"):
        stage.verify(tmp_path / "none")


def test_a_fetch_leaves_the_huggingface_hub_of_a_notebook_alone(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is one for the whole process: a notebook deletes and uploads with it."""
    theirs, telemetry = get_session(), constants.HF_HUB_DISABLE_TELEMETRY
    monkeypatch.chdir(laptop.folder)
    endpoint = laptop.hub.endpoint
    stage.fetch("tiny.yaml", "bundle", endpoint=endpoint, offline_check=False, quiet=True)
    assert get_session() is theirs and telemetry == constants.HF_HUB_DISABLE_TELEMETRY
    with pytest.raises(HfHubHTTPError):  # this Hub deletes nothing
        HfApi(endpoint, token="hf_tester").delete_repo("acme/other")
    assert not laptop.hub.requests("delete", method="GET")
