"""The public Python API: `stage` and `runner`, as scripts and type checkers see them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runner
import stage
from tests.stage.bundles import make_bundle

ROOT = Path(__file__).parents[2]
# Libraries that are slow to import, and the core of stage itself.
HEAVY = {"pyarrow", "huggingface_hub", "urllib3", "yaml", "click", "torch", "transformers"}


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


@pytest.mark.parametrize("package", ["stage", "runner"])
def test_an_import_loads_nothing_heavy_and_is_fast(package: str) -> None:
    code = f"""
import json, sys, time
before = set(sys.modules)
began = time.process_time()
import {package}
took = time.process_time() - began
print(json.dumps([took, sorted(set(sys.modules) - before)]))
"""
    took, modules = json.loads(in_a_new_process(code))
    assert took < 0.1
    assert not HEAVY & set(modules)
    assert {name for name in modules if name.split(".")[0] in ("stage", "runner")} <= {
        package,
        f"{package}.version",
    }


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("api") / "bundle"
    make_bundle(root, big=False)
    return root


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


def test_every_public_name_is_there(bundle: Path) -> None:
    for package in (stage, runner):
        assert set(package.__all__) <= set(dir(package))
        for name in package.__all__:
            assert getattr(package, name) is getattr(package, name)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            package.nonsense  # noqa: B018
    exec("from stage import *; from runner import *", {})


def test_damage_is_a_finding_and_a_wrong_argument_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    made = make_bundle(root, big=False)
    weights = root / "data/models/bert/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert stage.verify(root, "fast").ok
    for level in ("full", "deep"):
        report = stage.verify(root, level, quiet=True)
        assert [finding.problem for finding in report.findings] == ["mismatched"]
    assert stage.verify(root, "fast", bundle_id=f"sha256:{made.id}").ok
    assert stage.verify(root, "fast", bundle_id="0" * 64).is_another
    for wrong in ({"level": "ful"}, {"bundle_id": "1234"}):
        with pytest.raises(stage.StageError) as caught:
            stage.verify(root, **wrong)  # type: ignore[arg-type]
        assert caught.value.exit_code == 2
    with pytest.raises(stage.StageError, match="no such folder"):
        stage.verify(tmp_path / "none")
