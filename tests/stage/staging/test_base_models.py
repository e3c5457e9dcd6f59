"""An adapter needs its base model in the manifest, unless that says `base: false`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.bundle.bundle import Bundle
from stage.hub.models import base_of
from stage.lock.model import Base, LockedAsset, read_lock
from tests.support.servers.hubs import TestHub
from tests.support.staging import safetensors

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


def manifest(**assets: Any) -> None:
    Path("m.yaml").write_text(json.dumps({"format": 1, "name": "m", "assets": assets}))


def locked() -> dict[str, LockedAsset]:
    return dict(read_lock(Path("m.lock").read_bytes(), "m.lock").assets)


LORA = {"model": "acme/lora"}


def added(said: str) -> str:
    """The lines of a remedy that go into the manifest."""
    lines = said.partition("write it as here):\n")[2].partition("     Or leave it out")[0]
    return textwrap.indent(textwrap.dedent(lines), "  ")


def test_an_adapter_without_its_base_is_refused_with_the_lines_that_add_it(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    old = hub.commit("models", "acme/tiny-base", BASE, tag="v1")
    hub.commit("models", "acme/tiny-base", {**BASE, "config.json": b'{"model_type": "bart"}'})
    hub.commit("models", "acme/lora", adapter(revision="v1"))
    Path("m.yaml").write_text("format: 1\nname: m\nassets:\n  lora:\n    model: acme/lora\n")
    said = stage("lock", "m.yaml", code=2).output
    assert "m.yaml:4: `lora` is an adapter of acme/tiny-base" in said and "`base: false`" in said
    assert not Path("m.lock").exists()
    with open("m.yaml", "a") as file:
        file.write(added(said))
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert "everything that could be checked loads" in said and "not in this bundle" not in said
    base = Bundle.open(Path("b")).asset("tiny-base")
    assert (base.source.commit, base.source.requested_revision) == (old, "v1")
    assert Path("b/data/models/tiny-base/config.json").read_bytes() == BASE["config.json"]
    assert Bundle.open(Path("b")).asset("lora").base == Base("acme/tiny-base", "v1")
    assert "adapter  of acme/tiny-base (v1)" in stage("show", "b").output
    stage("verify", "b", "--deep")
    stage("fetch", "m.yaml", "-o", "b", "--locked")
    manifest(lora=LORA)
    assert "acme/tiny-base" in stage("fetch", "m.yaml", "-o", "b", code=2).output


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
