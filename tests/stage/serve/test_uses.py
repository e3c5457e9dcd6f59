"""Each way in which scripts read repositories gives the same values with the Hub and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.servers.hubs import TestHub
from tests.support.staging import model_files, safetensors

LANGUAGES = ("de", "en", "fr")
USES = {
    "a file of a model": 'bytes_of(hf_hub_download("acme/net", "model.safetensors"))',
    "a model at a tag": 'bytes_of(hf_hub_download("acme/net", "model.safetensors", revision="v1"))',
    "a model on a branch with a slash": (
        'bytes_of(hf_hub_download("acme/net", "model.safetensors", revision="fix/one"))'
    ),
    "a dataset": 'rows_of(load_dataset("acme/words", "en"))',
    "a dataset at a tag": 'rows_of(load_dataset("acme/words", "en", revision="v1"))',
    "three configs": '[rows_of(load_dataset("acme/words", name)) for name in ("de", "en", "fr")]',
    "one split": 'rows_of({"test": load_dataset("acme/words", "fr", split="test")})',
    "a raw file": ('bytes_of(hf_hub_download("acme/words", "labels.json", repo_type="dataset"))'),
    "data_files": ('rows_of(load_dataset("acme/words", data_files={"x": "more/*.csv"}))'),
    "data_dir": 'rows_of(load_dataset("acme/words", data_dir="data/de"))',
    "hf://": ('rows_of(load_dataset("csv", data_files="hf://datasets/acme/words/more/a.csv"))'),
    "a file system": ('HfFileSystem().cat_file("datasets/acme/words/labels.json").decode()'),
    "a snapshot of a dataset": (
        'folder_of(snapshot_download("acme/words", repo_type="dataset", revision="v1"))'
    ),
    # The folder is a cache: files that others asked for are there too, as on the laptop.
    "a part of a snapshot": (
        'folder_of(snapshot_download("acme/net", allow_patterns=["*.json"]), ".json")'
    ),
    "streaming": ('list(load_dataset("acme/words", "de", split="train", streaming=True))'),
}
SCRIPT = """
import hashlib, json, os, sys
from datasets import disable_progress_bars, load_dataset
from huggingface_hub import HfFileSystem, hf_hub_download, snapshot_download

disable_progress_bars()
def bytes_of(path):
    return hashlib.sha256(open(path, "rb").read()).hexdigest()
def rows_of(splits):
    return {name: list(rows) for name, rows in splits.items()}
def folder_of(root, suffix=""):
    found = {}
    for folder, _, names in os.walk(root):
        for name in (name for name in names if name.endswith(suffix)):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = bytes_of(path)
    return dict(sorted(found.items()))
USES = json.loads(sys.argv[1])
print(json.dumps({name: eval(use) for name, use in USES.items()}))
"""


def words(version: str) -> dict[str, bytes]:
    """A dataset with three configs, raw files beside them, and other rows in each version."""
    card = ["---", "configs:"]
    files = {"labels.json": json.dumps({"a": version}).encode(), "notes.txt": b"nobody reads it"}
    for language in LANGUAGES:
        card += [f"- config_name: {language}", "  data_files:"]
        for split, count in (("train", 4), ("test", 2)):
            path = f"data/{language}/{split}.jsonl"
            card += [f"  - split: {split}", f"    path: {path}"]
            rows = [{"text": f"{language} {split} {version} {n}"} for n in range(count)]
            files[path] = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    for name in "ab":
        files[f"more/{name}.csv"] = f"word,n\n{name} {version},1\n".encode()
    return {"README.md": "\n".join([*card, "---", "# Words\n"]).encode(), **files}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        for number, where in enumerate(({"tag": "v1"}, {"ref": "refs/heads/fix/one"}, {})):
            files = {**model_files(10_000), "model.safetensors": safetensors(9_000 + 100 * number)}
            hub.commit("models", "acme/net", files, **where)
        hub.commit("datasets", "acme/words", words("old"), tag="v1")
        hub.commit("datasets", "acme/words", words("new"))
        yield hub


class Laptop:
    """A user's folder, and the commands that they run in it."""

    def __init__(self, folder: Path, hub: TestHub) -> None:
        self.folder, self.hub = folder, hub
        (folder / "script.py").write_text(SCRIPT)

    def run(self, module: str, *words: str, endpoint: str | None = None) -> Any:
        environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            "HOME": str(self.folder),
            "HF_ENDPOINT": endpoint or self.hub.endpoint,
        }
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def command(self, uses: dict[str, str]) -> list[str]:
        return ["--", sys.executable, "script.py", json.dumps(uses)]


def traced_and_fetched(laptop: Laptop, uses: dict[str, str]) -> Any:
    """What the script printed under `stage trace`; the bundle is there then."""
    traced = laptop.run("stage", "trace", "-o", "my.yaml", *laptop.command(uses))
    assert traced.returncode == 0, traced.stderr + traced.stdout
    fetched = laptop.run("stage", "fetch", "my.yaml", "-o", "bundle", "--no-offline-check")
    assert fetched.returncode == 0, fetched.stderr + (laptop.folder / "my.yaml").read_text()
    return json.loads(next(line for line in traced.stdout.splitlines() if line[:1] == "{"))


def under_exec(laptop: Laptop, uses: dict[str, str]) -> Any:
    nowhere = "http://127.0.0.1:9"
    done = laptop.run(
        "runner", "exec", "--bundle", "bundle", *laptop.command(uses), endpoint=nowhere
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_script_of_all_uses_reads_the_same_without_the_hub(hub: TestHub, tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, hub)
    expected = traced_and_fetched(laptop, USES)
    assert under_exec(laptop, USES) == expected
    text = (tmp_path / "my.yaml").read_text()
    assets = yaml.safe_load(text)["assets"].values()
    of_words = [a["revision"] for a in assets if a.get("dataset") == "acme/words"]
    assert sorted(of_words) == ["main", "v1"], text
    of_net = [a["revision"] for a in assets if a.get("model") == "acme/net"]
    assert sorted(of_net) == ["fix/one", "main", "v1"], text
    assert "notes.txt" not in text.split("revision: main")[0] and "pytorch_model" not in text
