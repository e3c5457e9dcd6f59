"""The base model of an adapter is added once, pinned, with its reason; not with `base: false`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.bundle.bundle import Bundle
from stage.fetch.base_models import server_of, unanswered_bases
from stage.hub.models import base_of
from stage.lock.model import Base, LockedAsset, LockedFile, Source
from stage.lock.read import read_lock
from stage.lock.write import Lockfile
from stage.verify.load_test import run_load_test
from tests.stage.locks import COMMIT
from tests.stage.serve.test_serve import serving
from tests.support.servers.hubs import TestHub
from tests.support.staging import safetensors
from tests.support.training.models import tiny_model_files

BASE = {
    "README.md": b"---\nlicense: mit\n---\n",
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": safetensors(1000),
}


def adapter(base: object = "acme/tiny-base", **more: Any) -> dict[str, bytes]:
    config = {"peft_type": "LORA", "base_model_name_or_path": base, **more}
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": safetensors(100),
    }


def manifest(policy: Any = None, **assets: Any) -> None:
    more = {"policy": policy} if policy else {}
    Path("m.yaml").write_text(json.dumps({"format": 1, "name": "m", **more, "assets": assets}))


def locked() -> dict[str, LockedAsset]:
    return dict(read_lock(Path("m.lock").read_bytes(), "m.lock").assets)


LORA = {"model": "acme/lora"}


def test_the_base_comes_along_pinned_and_loads(hub: TestHub, stage: Callable[..., Result]) -> None:
    old = hub.commit("models", "acme/tiny-base", BASE, tag="v1")
    hub.commit("models", "acme/tiny-base", {**BASE, "config.json": b'{"model_type": "bart"}'})
    hub.commit("models", "acme/lora", adapter(revision="v1"))
    manifest(lora=LORA)
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert "tiny-base: added because `lora` is an adapter of it" in said and "base: false" in said
    assert "everything that could be checked loads" in said and "not in this bundle" not in said
    base = Bundle.open(Path("b")).asset("tiny-base")
    assert (base.source.commit, base.source.requested_revision, base.base_of) == (
        old,
        "v1",
        ("lora",),
    )
    assert base.request == {"model": "acme/tiny-base", "revision": "v1"} and base.licence == "mit"
    assert Path("b/data/models/tiny-base/config.json").read_bytes() == BASE["config.json"]
    assert Bundle.open(Path("b")).asset("lora").base == Base("acme/tiny-base", "v1")
    assert "base of" in stage("show", "b").output
    stage("verify", "b", "--deep")
    before = Path("m.lock").read_bytes()
    stage("fetch", "m.yaml", "-o", "b", "--locked")
    stage("fetch", "m.yaml", "-o", "again")
    assert (
        Path("m.lock").read_bytes() == before
        and Bundle.open(Path("again")).id == Bundle.open(Path("b")).id
    )


def test_the_base_stays_pinned_until_it_is_asked_to_move(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    first = hub.commit("models", "acme/tiny-base", BASE)
    hub.commit("models", "acme/lora", adapter())
    manifest(lora=LORA)
    stage("lock", "m.yaml")
    second = hub.commit("models", "acme/tiny-base", {**BASE, "x.json": b"{}"})
    hub.commit("models", "acme/lora", {**adapter(), "x.json": b"{}"})
    stage("lock", "m.yaml")
    stage("lock", "m.yaml", "--update", "lora")
    assert locked()["tiny-base"].source.commit == first
    stage("lock", "m.yaml", "--update", "tiny-base")
    assert locked()["tiny-base"].source.commit == second and locked()["tiny-base"].base_of == (
        "lora",
    )


def test_an_asset_of_the_manifest_is_not_fetched_twice(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    hub.commit("models", "acme/tiny-base", BASE)
    hub.configure("models", "acme/old-name", moved_to="acme/tiny-base")
    hub.commit("models", "acme/lora", adapter("acme/old-name"))
    manifest(lora=LORA, own={"model": "acme/old-name", "exclude": ["*.md"]})
    said = stage("lock", "m.yaml").output
    assert "lora: its base model acme/old-name is `own` of the manifest" in said
    assert set(locked()) == {"lora", "own"}
    manifest(lora=LORA)
    stage("fetch", "m.yaml", "-o", "b", "--locked", code=2)
    stage("fetch", "m.yaml", "-o", "b")
    assert set(locked()) == {"lora", "old-name"} and locked()["old-name"].aliases == (
        "acme/old-name",
    )
    manifest(lora=LORA, own={"model": "acme/tiny-base"})
    stage("fetch", "m.yaml", "-o", "b", "--no-offline-check", "--update", "own")
    assert set(locked()) == {"lora", "own"}


def test_two_adapters_share_a_base_and_take_it_along_when_they_go(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    hub.commit("models", "acme/tiny-base", BASE)
    hub.commit("models", "acme/lora", adapter())
    hub.commit("models", "acme/other", adapter())
    other = {"model": "acme/other"}
    manifest(lora=LORA, other=other)
    stage("fetch", "m.yaml", "-o", "b")
    assert locked()["tiny-base"].base_of == ("lora", "other") and len(locked()) == 3
    manifest(other=other)
    stage("fetch", "m.yaml", "-o", "b")
    assert locked()["tiny-base"].base_of == ("other",)
    manifest(other={**other, "base": False})
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert set(locked()) == {"other"} and not Path("b/data/models/tiny-base").exists()
    assert "base model acme/tiny-base is not in this bundle" in said
    assert locked()["other"].request["base"] is False
    stage("verify", "b")
    assert "its base model is left out (`base: false` in the manifest)" in stage("show", "b").output


@pytest.mark.parametrize("own", [True, False])
def test_a_base_that_adapters_know_by_several_names_comes_once(
    hub: TestHub, stage: Callable[..., Result], own: bool
) -> None:
    hub.commit("models", "acme/tiny-base", BASE)
    names = ("acme/tiny-base", "acme/old-name", "acme/older-name")
    for number, name in enumerate(names):
        hub.commit("models", f"acme/lora{number}", adapter(name))
        if number:
            hub.configure("models", name, moved_to="acme/tiny-base")
    loras = {f"lora{number}": {"model": f"acme/lora{number}"} for number in range(3)}
    manifest(**loras, **({"mine": {"model": "acme/tiny-base"}} if own else {}))
    stage("fetch", "m.yaml", "-o", "b")
    (base,) = (asset for asset in locked().values() if asset.source.location == "acme/tiny-base")
    assert base.name == ("mine" if own else "tiny-base") and base.names == set(names)
    assert base.base_of == (() if own else ("lora0", "lora1", "lora2"))
    before = Path("m.lock").read_bytes()
    stage("fetch", "m.yaml", "-o", "b", "--locked")
    assert Path("m.lock").read_bytes() == before
    stage("fetch", "m.yaml", "-o", "b", "--update")
    assert Path("m.lock").read_bytes() == before
    stage("verify", "b", "--deep")


def test_a_name_that_is_taken_is_not_taken_again(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    hub.commit("models", "acme/tiny-base", BASE)
    hub.commit("models", "acme/lora", adapter())
    hub.commit("models", "acme/lora2", adapter(revision="refs/pr/1"))
    hub.commit("models", "acme/tiny-base", {**BASE, "x.json": b"{}"}, ref="refs/pr/1")
    Path("notes").mkdir()
    Path("notes/x").write_text("x")
    manifest(lora=LORA, lora2={"model": "acme/lora2"}, **{"Tiny-Base": {"path": "notes"}})
    stage("lock", "m.yaml")
    revisions = {
        name: asset.source.requested_revision for name, asset in locked().items() if asset.base_of
    }
    assert revisions == {"acme-tiny-base": "main", "lora2-base": "refs/pr/1"}


def test_a_base_that_is_not_to_be_had_stops_the_fetch_and_can_be_done_without(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    hub.commit("models", "acme/lora", adapter("acme/nowhere"))
    manifest(lora=LORA)
    said = stage("lock", "m.yaml", code=2).output
    assert "`lora`: its base model" in said and "acme/nowhere" in said and "`base: false`" in said
    manifest(lora={**LORA, "base": False})
    stage("lock", "m.yaml")
    hub.commit("models", "acme/lora", adapter("acme/pickled"))
    hub.commit("models", "acme/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    manifest(lora=LORA)
    said = stage("lock", "m.yaml", code=3).output
    assert "its base model: its weights are pickles" in said and "m.yaml:1" in said
    hub.commit("models", "acme/lora", adapter())
    hub.commit("models", "acme/tiny-base", BASE)
    hub.commit(
        "models", "acme/lora", {**adapter(), "README.md": b"---\nlicense: apache-2.0\n---\n"}
    )
    manifest(lora=LORA, policy={"licences": ["apache-2.0"]})
    assert "`tiny-base`: mit" in stage("lock", "m.yaml", code=3).output


def test_a_base_on_its_authors_disk_is_said(hub: TestHub, stage: Callable[..., Result]) -> None:
    hub.commit("models", "acme/lora", adapter("/home/me/llama"))
    manifest(lora=LORA)
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert "/home/me/llama" in said and "add that model" in said and set(locked()) == {"lora"}


def test_an_adapter_without_the_base_its_lock_promises_does_not_load(tmp_path: Path) -> None:
    folder = tmp_path / "data/models/lora"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(adapter()["adapter_config.json"])
    hub = Source("hub", "acme/lora", "main", COMMIT)
    file = LockedFile(
        "data/models/lora/adapter_config.json", 1, "0" * 64, None, "adapter_config.json"
    )
    asset = LockedAsset("lora", "model", {}, hub, (file,), base=Base("acme/tiny-base", "main"))
    (finding,) = run_load_test(tmp_path, Lockfile("x", {"lora": asset})).findings
    assert "its base model acme/tiny-base" in str(finding)
    report = run_load_test(tmp_path, Lockfile("x", {"lora": replace(asset, base=None)}))
    assert not report.findings and "acme/tiny-base is not in this bundle" in report.unchecked[0]
    weightless = LockedAsset("b", "model", {}, replace(hub, location="acme/tiny-base"), ())
    report = run_load_test(tmp_path, Lockfile("x", {"lora": asset, "b": weightless}))
    assert not report.findings and "no weights" in report.unchecked[0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"base_model_name_or_path": "org/m"}, (Base("org/m", "main"), None)),
        ({"base_model_name_or_path": "gpt2", "revision": "v1"}, (Base("gpt2", "v1"), None)),
        ({"base_model_name_or_path": "org/m", "revision": None}, (Base("org/m", "main"), None)),
        ({"base_model_name_or_path": "./m"}, (None, "./m")),
        ({"base_model_name_or_path": "/data/m"}, (None, "/data/m")),
        ({"base_model_name_or_path": "a/b/c"}, (None, "a/b/c")),
        ({"base_model_name_or_path": "../m"}, (None, "../m")),
        ({"base_model_name_or_path": "C:\\m"}, (None, "C:\\m")),
        ({"base_model_name_or_path": ""}, (None, None)),
        ({"base_model_name_or_path": None}, (None, None)),
        ([], (None, None)),
    ],
)
def test_what_an_adapter_says_of_its_base(config: Any, expected: Any) -> None:
    assert base_of(json.dumps(config).encode()) == expected


@settings(max_examples=40)
@given(st.binary() | st.text().map(str.encode))
def test_any_adapter_config_is_read_or_passed_over(text: bytes) -> None:
    base_of(text)


def test_a_tokenizer_is_no_base() -> None:
    hub = Source("hub", "acme/m", "main", COMMIT)
    tokenizer = LockedAsset("t", "tokenizer", {}, hub, ())
    assert server_of(Base("acme/m", "main"), [tokenizer]) is None
    lora = LockedAsset(
        "l", "model", {}, replace(hub, location="acme/l"), (), base=Base("acme/m", "main")
    )
    assert unanswered_bases(Lockfile("x", {"t": tokenizer, "l": lora}), ["t", "l"]) == ["l"]
    left = LockedAsset("m", "model", {}, hub, (), base_of=("gone",))
    assert unanswered_bases(Lockfile("x", {"m": left}), []) == ["m"]


LOADS = """
import json, torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained("acme/lora")
print(json.dumps(model(torch.arange(5)[None]).logits[0, -1, :8].tolist()))
"""


@pytest.mark.slow
def test_an_adapter_loads_by_name_from_a_served_bundle(
    hub: TestHub, stage: Callable[..., Result], tmp_path: Path
) -> None:
    """The script that made the adapter runs unchanged, though its base has changed on the Hub."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    hub.commit("models", "acme/tiny-base", tiny_model_files(tmp_path / "base", "gpt2"))
    hub.configure("models", "acme/old-name", moved_to="acme/tiny-base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain.name_or_path = plain.config._name_or_path = "acme/old-name"
    adapted = get_peft_model(
        plain, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=True)
    )
    expected = adapted(torch.arange(5)[None]).logits[0, -1, :8].tolist()
    adapted.peft_config["default"].base_model_name_or_path = "acme/old-name"
    adapted.save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    hub.commit(
        "models",
        "acme/lora",
        {path.name: path.read_bytes() for path in (tmp_path / "lora").iterdir()},
    )
    manifest(lora=LORA)
    stage("fetch", "m.yaml", "-o", "b")
    kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    with serving(Path("b")) as (address, _):
        environment = {**kept, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": address}
        done = subprocess.run(
            [sys.executable, "-c", LOADS], env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(expected, abs=1e-5)
