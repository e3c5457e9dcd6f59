"""The run files and manifests of the examples belong together, and are understood."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from stage.lock.manifest import Manifest

ROOT = Path(__file__).parents[3]
MANIFEST_OF = {
    "bert-large-deepspeed": "bert-large-wikitext2",
    "bert-conll2003": "bert-classification",
    "bert-mrpc": "bert-classification",
    "cifar10-ddp": "cifar10",
    "demo": "demo",
    "gpt2-large-fsdp": "gpt2-wikitext2",
    "gpt2-xl-fsdp-offload": "gpt2-wikitext2",
    "neural-chat-qlora": "neural-chat-qlora",
}
RUNS = sorted((ROOT / "runs").glob("*.yaml"))


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_a_run_file_names_assets_that_its_manifest_fetches(run: Path) -> None:
    manifest = Manifest.load(ROOT / "manifests" / f"{MANIFEST_OF[run.stem]}.yaml")
    written = yaml.safe_load(run.read_text())
    assert {written["model"]["asset"], written["dataset"]["asset"]} <= set(manifest.requests)
