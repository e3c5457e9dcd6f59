"""Scripts that nobody here wrote: traced, staged from tiny twins, run without a network."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from scripts.lib.real_scripts.environment import CACHE, make
from scripts.lib.real_scripts.road import Road
from scripts.lib.real_scripts.scripts import Script, read
from scripts.lib.real_scripts.sources import NoSource, Sources

LIST = read()
OWN = Script(
    name="own",
    repository="nobody/own",
    commit="0" * 40,
    folder="",
    command="own.py",
    models=("google-bert/bert-base-cased",),
    datasets=("nyu-mll/glue",),
    leaves="seen-*",
)
OWN_CODE = """
import torch.distributed as dist
from datasets import load_dataset
from transformers import AutoModel, AutoTokenizer

dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
model = AutoModel.from_pretrained("bert-base-cased")
rows = load_dataset("nyu-mll/glue", "mrpc")["train"]
model(**tokenizer(rows[dist.get_rank()]["sentence1"], return_tensors="pt"))
open(f"seen-{dist.get_rank()}-of-{dist.get_world_size()}", "x").close()
dist.destroy_process_group()
"""


class OwnSources(Sources):
    """The script above, from no repository."""

    def export(self, repository: str, commit: str, folder: str, target: Path) -> Path:
        target.mkdir()
        (target / "own.py").write_text(OWN_CODE)
        return target


def needs_a_wall() -> None:
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs unshare and ip")


@pytest.mark.slow
def test_a_script_with_an_old_name_of_a_model_goes_the_whole_road(tmp_path: Path) -> None:
    """Slow: a minute. It needs neither packages nor repositories of others."""
    needs_a_wall()
    words = Road(OWN, LIST, tmp_path, Path(sys.executable)).walk(OwnSources(tmp_path))
    assert "not in this bundle" not in words
    assert {path.name for path in (tmp_path / "node").glob("seen-*")} == {
        "seen-0-of-2",
        "seen-1-of-2",
    }


@pytest.mark.slow
@pytest.mark.parametrize("script", LIST.scripts, ids=lambda script: str(script.name))
def test_a_real_script_runs_unchanged(script: Script, tmp_path: Path) -> None:
    """Slow: a minute per script, and packages and repositories from the internet."""
    needs_a_wall()
    try:
        Road(script, LIST, tmp_path, make(LIST.packages)).walk(Sources(CACHE))
    except NoSource as error:
        pytest.skip(f"{script.repository} cannot be had here: {error}")
