"""Scripts that nobody here wrote: traced, staged from tiny twins, run without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib.real_scripts import table
from scripts.lib.real_scripts.__main__ import CACHE
from scripts.lib.real_scripts.environment import make
from scripts.lib.real_scripts.road import Result, Road
from scripts.lib.real_scripts.scripts import Script, read
from scripts.lib.real_scripts.sources import MIRRORS, NoSource, Sources
from scripts.lib.real_scripts.tiny_models import MODELS
from scripts.lib.real_scripts.twins import DATA, DATASETS

LIST = read()
SEEN_IN_PART = {
    "cv_example": "two of its three epochs seen on two ranks, then a time limit of this trial"
}
OWN = Script(
    name="own",
    repository="nobody/own",
    commit="0" * 40,
    folder="",
    command="own.py",
    launcher="torchrun",
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
    result = Road(OWN, LIST, tmp_path, Path(sys.executable)).walk(OwnSources(tmp_path))
    assert result.works, f"{result.step} ended with {result.status}\n{result.last_words}"
    assert not result.asked_for_more
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
        result = Road(script, LIST, tmp_path, make(CACHE, LIST.packages)).walk(Sources(CACHE))
    except NoSource as error:
        pytest.skip(f"{script.repository} cannot be had here: {error}")
    assert result.is_as_listed, f"{result.step}: {result.status}\n{result.last_words}"


def test_the_list_names_only_twins_and_packages_that_there_are() -> None:
    names = [script.name for script in LIST.scripts]
    assert len(names) == len(set(names))
    packages = {requirement.partition("==")[0] for requirement in LIST.packages}
    for script in LIST.scripts:
        models = {name for name in script.models if not name.startswith("timm/")}
        assert models <= set(MODELS) and set(script.datasets) <= set(DATASETS), script.name
        assert set(script.packages) <= packages and len(script.commit) == 40, script.name
        assert not script.data or script.data in DATA


def test_the_page_has_a_row_for_each_script_of_the_list() -> None:
    lines = table.PAGE.read_text(encoding="utf-8").splitlines()
    for script in LIST.scripts:
        (row,) = (line for line in lines if f"/blob/{script.commit}/{script.path})" in line)
        seen = f"no: {script.in_the_way}" if script.in_the_way else "yes, on two ranks"
        assert row.endswith(f"| {SEEN_IN_PART.get(script.name, seen)} |"), script.name


def test_a_recorded_row_replaces_the_old_one_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\n{table.END}\nafter\n")
    first, second = LIST.scripts[:2]
    table.record([Result(first, "exec", 1, ""), Result(second, "done", 0, "")], page)
    table.record([Result(first, "done", 0, "")], page)
    text = page.read_text()
    assert text.count("| yes, on two ranks |") == 2 and "ends in" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")


def test_a_commit_that_a_mirror_lacks_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = tmp_path / "some" / "one"
    subprocess.run(["git", "init", "-q", "--bare", mirror], check=True)
    monkeypatch.setenv(MIRRORS, str(tmp_path))
    with pytest.raises(NoSource, match="has no commit"):
        Sources(tmp_path).export("some/one", "1" * 40, "", tmp_path / "out")
