"""A bundle served to the real, unmodified clients."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.demo.repositories import DATASET, dataset_files
from scripts.lib.hub.loopback_hub import LoopbackHub
from stage.bundle.bundle import Bundle
from stage.serve import hub_api
from stage.serve.catalogue import Catalogue, card_of
from stage.serve.hub_api import FileBody, Request, entry
from stage.serve.server import BundleServer
from tests.support.clients import answer_of, run_client
from tests.support.serving import serving_here
from tests.support.staging import fetch_bundle
from tests.support.training.models import tiny_model_files

MODEL = "acme/tiny-bert"
MANIFEST = f"""\
format: 1
name: served
assets:
  bert: {{model: {MODEL}}}
  reference: {{dataset: {DATASET}, config: chapters, splits: [train]}}
  prompts: {{path: prompts.csv, convert: csv}}
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle from a Hub: a model, one split of a dataset, and a table converted to parquet."""
    laptop = tmp_path_factory.mktemp("laptop")
    (laptop / "served.yaml").write_text(MANIFEST)
    (laptop / "prompts.csv").write_text("User,Prompt\nann,draw a cat\nbob,a dog\n")
    files = {
        **tiny_model_files(tmp_path_factory.mktemp("bert"), "bert"),
        "pytorch_model.bin": b"pickle",
    }
    with LoopbackHub(laptop / "hub") as source:
        source.repositories.commit("models", MODEL, files)
        source.repositories.commit("datasets", DATASET, dataset_files())
        return fetch_bundle(laptop, "served", source.endpoint)


@pytest.fixture(scope="module")
def served(bundle: Path) -> Iterator[str]:
    """The address of `stage serve`, started as a user starts it."""
    command = [sys.executable, "-m", "stage", "serve", str(bundle), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"at (http://\S+),", first := process.stdout.readline())
            assert match, first
            yield match[1]
        finally:
            process.terminate()


def test_a_script_with_hub_names_runs_unchanged(served: str, bundle: Path, tmp_path: Path) -> None:
    script = f"""
import json
from datasets import load_dataset
from transformers import AutoModelForMaskedLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("{MODEL}")
model = AutoModelForMaskedLM.from_pretrained("{MODEL}", use_safetensors=True)
rows = load_dataset("{DATASET}", "chapters")
prompts = load_dataset("bundle/prompts", split="train")
lengths = {{k: len(v) for k, v in rows.items()}}
print(json.dumps([len(tokenizer), model.num_parameters(), lengths, prompts[1]]))
"""
    found = answer_of(run_client(script, served, tmp_path))
    lock = Bundle.open(bundle).lock
    assert found[0] == 1024 and found[1] > 100_000
    assert found[2] == {"train": lock.assets["reference"].configs["chapters"]["train"].rows}
    assert found[3] == {"User": "bob", "Prompt": "a dog"}


def test_missing_files_are_an_error_for_the_client_and_one_line_for_the_user(
    bundle: Path, tmp_path: Path
) -> None:
    script = f"""
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.errors import RevisionNotFoundError
for wrong, names in (
    (RepositoryNotFoundError, ("acme/other", "config.json", None)),
    (RepositoryNotFoundError, ("acme/other", "config.json", None)),
    (EntryNotFoundError, ("{MODEL}", "pytorch_model.bin", None)),
    (RevisionNotFoundError, ("{MODEL}", "config.json", "v9")),
):
    try:
        hf_hub_download(names[0], names[1], revision=names[2])
    except wrong:
        continue
    raise SystemExit(f"{{names}}: not refused")
"""
    with serving_here(bundle) as here:
        done = run_client(script, here.address, tmp_path)
        assert done.returncode == 0, done.stderr
    said = "\n".join([*here.said, ""])
    lines = entry("models", "acme/other")
    assert said.count(f"asked for, not here: model acme/other: not in this bundle; {lines}") == 1
    assert "pytorch_model.bin is not in this bundle: left out, " in said
    sha = (Bundle.open(bundle).lock.assets["bert"].source.commit or "")[:12]
    assert f"{MODEL}: revision v9 is not in this bundle; it has main ({sha})" in said
    assert f"  tiny-bert-v9:\n    model: {MODEL}\n    revision: v9\n" in said


def ask(address: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers), timeout=30
        ) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_files_come_whole_in_part_or_not_at_all(served: str, bundle: Path) -> None:
    data = (bundle / "data/models/bert/model.safetensors").read_bytes()
    url = f"{served}/{MODEL}/resolve/main/model.safetensors"
    assert ask(url)[2] == data
    status, headers, body = ask(url, Range="bytes=100-199")
    assert (status, headers["Content-Range"], body) == (
        206,
        f"bytes 100-199/{len(data)}",
        data[100:200],
    )
    assert ask(url, Range=f"bytes={len(data) - 5}-")[2] == data[-5:]
    assert ask(url, Range="bytes=-5")[2] == data[-5:]
    assert ask(url, Range="bytes=7-3")[0] == 200
    status, headers, _ = ask(url, Range=f"bytes={len(data)}-")
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(data)}")


def test_a_damaged_bundle_is_not_served(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", bundle, copy], check=True)
    config = copy / "data/models/bert/config.json"
    with serving_here(copy) as here:
        config.write_bytes(config.read_bytes() + b" ")  # while it is served
        status, _, body = ask(f"{here.address}/{MODEL}/resolve/main/config.json")
        assert status == 410 and b"stage verify" in body
    command = [sys.executable, "-m", "stage", "serve", str(copy), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "config.json" in done.stderr and "stage verify" in done.stderr


def test_what_is_put_into_the_bundle_while_it_is_served_is_not_followed(
    bundle: Path, tmp_path: Path
) -> None:
    """A link would send a file of the serving user; a pipe would be waited for without an end."""
    served = tmp_path / "served"
    shutil.copytree(bundle, served)
    (tmp_path / "secret").mkdir()
    models = served / "data/models/bert"
    with serving_here(served) as here:
        for name in ("config.json", "model.safetensors"):
            shutil.copy(models / name, tmp_path / "secret" / name)
            (models / name).unlink()
        (models / "config.json").symlink_to(tmp_path / "secret/config.json")
        os.mkfifo(models / "model.safetensors")
        for name in ("config.json", "model.safetensors"):
            status, _, body = ask(f"{here.address}/{MODEL}/resolve/main/{name}")
            assert status == 500 and b"stage verify" in body, name
        shutil.rmtree(models)
        models.symlink_to(tmp_path / "secret")
        assert ask(f"{here.address}/{MODEL}/resolve/main/config.json")[0] == 500


PLACES = ["/", "/api/models/", f"/{MODEL}/resolve/main/", "/datasets/"]


@pytest.fixture(scope="module")
def catalogue(bundle: Path) -> Catalogue:
    return Catalogue.of(Bundle.open(bundle))


@given(st.text("abz/.%\\0 -_", max_size=40), st.sampled_from(PLACES))
def test_no_address_leads_out_of_the_bundle(
    catalogue: Catalogue, bundle: Path, path: str, start: str
) -> None:
    answer = hub_api.answer(Request("GET", start + path), catalogue)
    if isinstance(answer.body, FileBody):
        assert (
            answer.body.path.is_relative_to(bundle / "data") and ".." not in answer.body.path.parts
        )


def test_a_card_names_just_what_travelled() -> None:
    published = """---
license: cc0-1.0
configs:
- config_name: a
  default: true
  data_files: [{split: train, path: a/train-*}, {split: test, path: a/test-*}]
- config_name: b
  data_files: b/*
dataset_info:
- config_name: a
  features: [{name: text, dtype: string}]
  splits: [{name: train, num_examples: 3}, {name: test, num_examples: 1}]
  download_size: 7
- config_name: b
  splits: [{name: train, num_examples: 3}]
---
# Words
"""
    card = card_of(published, {"a": {"train": ["a/train-0.parquet"]}}).decode()
    assert card.endswith("---\n# Words\n")
    import yaml

    assert yaml.safe_load(card.split("---\n")[1]) == {
        "license": "cc0-1.0",
        "configs": [
            {
                "default": True,
                "config_name": "a",
                "data_files": [{"split": "train", "path": ["a/train-0.parquet"]}],
            }
        ],
        "dataset_info": [
            {
                "config_name": "a",
                "features": [{"name": "text", "dtype": "string"}],
                "splits": [{"name": "train", "num_examples": 3}],
            }
        ],
    }


@pytest.mark.parametrize(
    "text", ["", "# no front matter\n", "---\n: broken [\n---\nwords\n", "---\n- a list\n---\n"]
)
def test_any_card_will_do(text: str) -> None:
    card = card_of(text, {"default": {"train": ["x.parquet"]}}).decode()
    assert card.startswith("---\nconfigs:\n") and "x.parquet" in card


@pytest.mark.parametrize("host", ["", "192.0.2.1"])
def test_an_empty_host_does_not_listen_on_every_address(bundle: Path, host: str) -> None:
    command = [sys.executable, "-m", "stage", "serve", str(bundle), "--port", "0", "--host", host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--host" in done.stderr and "127.0.0.1" in done.stderr


def test_on_every_address_the_printed_one_is_of_use_elsewhere(catalogue: Catalogue) -> None:
    with BundleServer(catalogue, "0.0.0.0", 0, print) as server:
        assert server.address == f"http://{socket.gethostname()}:{server.server_address[1]}"
