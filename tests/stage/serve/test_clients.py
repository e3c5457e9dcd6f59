"""The clients of the last three years get from `stage serve` what they get from a Hub."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stage.bundle.bundle import Bundle
from tests.support.clients import answer_of, client_python, run_client
from tests.support.servers.hubs import TestHub
from tests.support.serving import Served, fetched, serving_here
from tests.support.staging import dataset_files, model_files

MODEL, OLD, LINES = "acme/tiny-bert", "old/tiny-bert", "acme/lines"
ASSETS = f"""\
  tiny: {{model: {OLD}, include: ["*"]}}
  lines: {{dataset: {LINES}}}
"""
PARQUET = "plain/validation-00000-of-00001.parquet"
CALLS = (Path(__file__).parent / "calls.py").read_text()
# With the datasets and transformers of their days.
_NUMPY_1 = ("numpy<2", "pyarrow<18")
OLD_CLIENTS = {
    "0.26": ("huggingface_hub==0.26.*", "datasets==3.1.*", "transformers==4.46.*", *_NUMPY_1),
    "0.36": ("huggingface_hub==0.36.*", "datasets==4.*", "transformers==4.57.*"),
    "1": ("huggingface_hub>=1,<2", "datasets>=4", "transformers>=5"),
}
OLDEST = ("huggingface_hub==0.23.*",)
OLDEST_WITH_LIBRARIES = (*OLDEST, "datasets==2.19.*", "transformers==4.41.*", *_NUMPY_1)
CLIENTS = [
    "0.23",
    *(pytest.param(name, marks=pytest.mark.slow) for name in OLD_CLIENTS),
    "newest",
]


def python_of(client: str) -> Path | str:
    if client == "newest":
        return sys.executable
    return client_python(*(OLDEST if client == "0.23" else OLD_CLIENTS[client]))


def fill(hub: TestHub) -> None:
    files = {path: data for path, data in model_files(20_000).items() if path[-4:] != ".bin"}
    hub.commit("models", MODEL, {**files, "a/b/c.txt": b"deep\n"})
    hub.configure("models", OLD, moved_to=MODEL)
    hub.commit("datasets", LINES, dataset_files())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        fill(hub)
        bundle = fetched(tmp_path_factory.mktemp("laptop"), hub, ASSETS)
    with serving_here(bundle) as served:
        yield served


def commit_of(served: Served, asset: str = "tiny") -> str:
    return Bundle.open(served.bundle).lock.assets[asset].source.commit or ""


def hub_answers(client: str) -> dict[str, Any]:
    """What a Hub answers to each call: recorded from an implementation that is not ours."""
    answers: dict[str, Any] = json.loads((Path(__file__).parent / "answers.json").read_text())
    validation = dataset_files()[PARQUET]  # its bytes are those of this pyarrow
    answers["download of a dataset's file"] = hashlib.sha256(validation).hexdigest()[:16]
    answers["cat of a dataset's file"] = len(validation)
    if client in ("0.23", "0.26", "0.36"):
        for call in ("tree of no folder", "download of no file"):
            answers[call] = "raises EntryNotFoundError"
        answers["whoami"] = "raises HTTPError"
    if client == "0.23":
        answers["auth_check"] = "raises AttributeError"
        answers["model_info expanded"] = "raises TypeError"
    return answers


def calls(client: str, endpoint: str, commit: str, home: Path) -> dict[str, Any]:
    arguments = [MODEL, OLD, LINES, commit]
    script = CALLS.replace("sys.argv[1:5]", repr(arguments))
    found: dict[str, Any] = answer_of(run_client(python_of(client), script, endpoint, home))
    assert len(found) > 60
    return found


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_from_a_bundle_what_it_gets_from_a_hub(
    served: Served, tmp_path: Path, client: str
) -> None:
    here = calls(client, served.address, commit_of(served), tmp_path)
    there = {**hub_answers(client), "dataset_info": commit_of(served, "lines")}
    different = {
        name: {"bundle": here[name], "hub": there[name]}
        for name in here
        if here[name] != there[name]
    }
    assert different == {}


LOADS = f"""
import json
from datasets import load_dataset
from transformers import AutoConfig
rows = {{split: len(found) for split, found in load_dataset("{LINES}", "plain").items()}}
streamed = next(iter(load_dataset("{LINES}", "plain", split="train", streaming=True)))
print(json.dumps([rows, sorted(streamed), AutoConfig.from_pretrained("{OLD}").model_type]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("client", ["0.23", *OLD_CLIENTS])
def test_datasets_and_transformers_of_their_days_load_by_name(
    served: Served, tmp_path: Path, client: str
) -> None:
    with_libraries = OLDEST_WITH_LIBRARIES if client == "0.23" else OLD_CLIENTS[client]
    python = client_python(*with_libraries)
    found = answer_of(run_client(python, LOADS, served.address, tmp_path))
    assert found == [{"train": 4000, "validation": 2000}, ["text"], "bert"]
    if client != "1":  # huggingface_hub 1 and later take no dataset without its owner
        short = LOADS.replace(f'"{LINES}"', '"lines"').replace(f'"{OLD}"', '"tiny-bert"')
        assert answer_of(run_client(python, short, served.address, tmp_path / "short")) == found


def test_a_client_reaches_it_over_ipv6(served: Served, tmp_path: Path) -> None:
    if not Path("/proc/net/if_inet6").exists() or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    script = f"""
import json
from huggingface_hub import HfApi, hf_hub_download
text = open(hf_hub_download("{MODEL}", "vocab.txt")).read()
print(json.dumps([HfApi().model_info("{MODEL}").id, text]))
"""
    with serving_here(served.bundle, "::1") as here:
        assert here.address.startswith("http://[::1]:")
        found = answer_of(run_client(sys.executable, script, here.address, tmp_path))
    assert found == [MODEL, model_files()["vocab.txt"].decode()]


def test_many_clients_at_once_get_every_byte(served: Served) -> None:
    expected = model_files(20_000)["model.safetensors"]
    failed: list[object] = []
    start = threading.Barrier(100)

    def work(number: int) -> None:
        start.wait()
        try:
            url = f"{served.address}/{MODEL}/resolve/main/model.safetensors"
            asked = urllib.request.Request(url, headers={"Range": f"bytes={number}-"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert answer.read() == expected[number:]
        except (OSError, AssertionError) as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_list_of_models_fits_its_filters(served: Served) -> None:
    def ids(query: str) -> str:
        command = ["curl", "-sg", f"{served.address}/api/models{query}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert MODEL in ids("?filter=license:apache-2.0")
    assert ids("?filter=license:mit") == "[]"
    assert ids("?filter=license:apache-2.0&filter=fill-mask") == "[]"
    assert ids("?author=nobody") == "[]" and ids("?limit=0") == "[]"
    assert '"siblings"' in ids("?full=true") and '"siblings"' not in ids("")
