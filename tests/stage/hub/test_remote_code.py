"""Code of a model: refused with its name and origin; with `allow_code` pinned, and it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from stage.bundle.bundle import Bundle
from stage.files import sha256_of_bytes
from stage.hub.models import made_local, references, relative_imports
from stage.sandbox import OFFLINE
from tests.remedies.obeyed import obeys
from tests.support.servers.hubs import TestHub

CONFIGURATION = b"""
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny-of-nobody-else"

    def __init__(self, width=3, **kwargs):
        self.width = width
        super().__init__(**kwargs)
"""
MODELING = b"""
import torch
from transformers import PreTrainedModel

from .configuration_tiny import TinyConfig
from .layers_tiny import Layer


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = Layer(config.width)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
"""
LAYERS = b"""
import torch


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x
"""
CODE = {
    "configuration_tiny.py": CONFIGURATION,
    "modeling_tiny.py": MODELING,
    "layers_tiny.py": LAYERS,
}


def weights() -> bytes:
    import torch
    from safetensors.torch import save

    return save({"layer.weight": torch.tensor([1.0, 2.0, 3.0])}, metadata={"format": "pt"})


def config(prefix: str = "") -> bytes:
    auto_map = {
        "AutoConfig": f"{prefix}configuration_tiny.TinyConfig",
        "AutoModel": f"{prefix}modeling_tiny.TinyModel",
    }
    return (
        json.dumps(
            {"model_type": "tiny-of-nobody-else", "width": 3, "auto_map": auto_map}, indent=2
        ).encode()
        + b"\n"
    )


def manifest(kind: str = "model", **more: Any) -> None:
    asset = {kind: "acme/tiny", **more}
    Path("m.yaml").write_text(json.dumps({"format": 1, "name": "m", "assets": {"tiny": asset}}))


LOADS = """
import sys
from stage.sandbox import close_network
assert close_network() is None
from transformers import AutoModel
import torch
try:
    AutoModel.from_pretrained(sys.argv[1])
except ValueError as error:
    from runner.exec.last_words import advice
    print(advice(error), file=sys.stderr)
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__name__ == "TinyModel", model
print()
print(model(torch.ones(3)).tolist())
"""


def loaded(folder: Path, modules: Path) -> str:
    """The model's output in a process with no network and an empty cache."""
    caches = {"HF_HOME": str(modules), "HF_MODULES_CACHE": str(modules / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(folder)],
        env={**os.environ, **OFFLINE, **caches},
        stdin=subprocess.DEVNULL,  # transformers asks there whether it may run the code
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "`allow_code: true`" in done.stderr and "pass trust_remote_code=True" in done.stderr
    return done.stdout.strip().splitlines()[-1]  # above it is the question of transformers


@obeys(
    "runner/exec/last_words.py", "the model has code of its own: `allow_code: true` in the manifest"
)
def test_own_code_is_refused_by_name_then_travels_pinned_and_loads(
    hub: TestHub, stage: Callable[..., Result], tmp_path: Path
) -> None:
    commit = hub.commit(
        "models",
        "acme/tiny",
        {
            **CODE,
            "config.json": config(),
            "model.safetensors": weights(),
            "train.py": b"x",
            "README.md": b"",
        },
    )
    manifest()
    said = stage("fetch", "m.yaml", "-o", "b", code=3).output
    assert (
        "config.json names the class configuration_tiny.TinyConfig (AutoConfig) (and 1 more" in said
    )
    assert (
        "Python code of acme/tiny" in said
        and commit in said
        and "`allow_code: true`" in said
        and "m.yaml:1" in said
    )
    manifest(allow_code=True)
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert f"of acme/tiny@{commit[:12]}" in said and "layers_tiny.py" in said
    asset = Bundle.open(Path("b")).asset("tiny")
    (code,) = asset.code
    assert (code.repository, code.commit) == ("acme/tiny", commit) and not asset.made_from
    assert sorted(code.files) == [f"data/models/tiny/{name}" for name in sorted(CODE)]
    assert {o.path: o.reason for o in asset.left_out}["train.py"] == "code of the repository"
    assert all(file.upstream for file in asset.files)
    assert loaded(Path("b/data/models/tiny"), tmp_path / "hf") == "[1.0, 2.0, 3.0]"
    assert "runs when it is loaded" in stage("show", "b").output


def test_code_of_another_repository_comes_along_and_loads(
    hub: TestHub, stage: Callable[..., Result], tmp_path: Path
) -> None:
    elsewhere = hub.commit(
        "models", "other/tiny-code", {**CODE, "README.md": b"---\nlicense: mit\n---\n"}
    )
    original = config("other/tiny-code--")
    hub.commit("models", "acme/tiny", {"config.json": original, "model.safetensors": weights()})
    manifest()
    said = stage("lock", "m.yaml", code=3).output
    assert (
        "of another repository, other/tiny-code" in said
        and "huggingface.co/other/tiny-code" in said
    )
    manifest(allow_code=True)
    stage("fetch", "m.yaml", "-o", "b")
    hub.commit("models", "other/tiny-code", dict.fromkeys(CODE, b"raise SystemExit"))
    asset = Bundle.open(Path("b")).asset("tiny")
    (code,) = asset.code
    assert (code.repository, code.commit, code.licence) == ("other/tiny-code", elsewhere, "mit")
    (made_from,) = asset.made_from
    assert (
        made_from.origin == "config.json"
        and made_from.sha256 == sha256_of_bytes(original)
        and made_from.upstream
    )
    there = Path("b/data/models/tiny/config.json").read_bytes()
    assert there == config() and {f.origin for f in asset.files if f.made_by} == {"config.json"}
    assert loaded(Path("b/data/models/tiny"), tmp_path / "hf") == "[1.0, 2.0, 3.0]"
    hub.configure("models", "other/tiny-code", gated="manual")
    stage("fetch", "m.yaml", "-o", "c", code=2)


def test_a_licence_policy_holds_for_code_too(hub: TestHub, stage: Callable[..., Result]) -> None:
    hub.commit(
        "models", "other/tiny-code", {**CODE, "README.md": b"---\nlicense: cc-by-nc-4.0\n---\n"}
    )
    files = {"config.json": config("other/tiny-code--"), "README.md": b"---\nlicense: mit\n---\n"}
    hub.commit("models", "acme/tiny", {**files, "model.safetensors": weights()})
    Path("m.yaml").write_text(
        "format: 1\npolicy: {licences: [mit]}\n"
        "assets: {tiny: {model: acme/tiny, allow_code: true}}\n"
    )
    assert "`tiny`: code of other/tiny-code: cc-by-nc-4.0" in stage("lock", "m.yaml", code=3).output


def test_tokenizers_and_modules_with_code(hub: TestHub, stage: Callable[..., Result]) -> None:
    tokenizer = {"auto_map": {"AutoTokenizer": ["tok.Slow", None]}, "tokenizer_class": "Slow"}
    files = {
        "config.json": b'{"auto_map": {"AutoModel": "modeling_tiny.TinyModel"}}',
        "tokenizer_config.json": json.dumps(tokenizer).encode(),
        "vocab.txt": b"a\n",
        "tok.py": b"class Slow: pass",
        **CODE,
    }
    hub.commit("models", "acme/tiny", files)
    manifest("tokenizer")
    assert "names the class tok.Slow (AutoTokenizer)" in stage("lock", "m.yaml", code=3).output
    manifest("tokenizer", allow_code=True)
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert "made of code, which is not run here" in said
    assert sorted(p.name for p in Path("b/data").rglob("*.py")) == ["tok.py"]
    modules = [
        {"path": "", "type": "custom_st.Transformer"},
        {"path": "1_P", "type": "sentence_transformers.models.Pooling"},
    ]
    modules += [{"path": "", "type": "pylate.models.Dense"}]
    st_files = {
        "modules.json": json.dumps(modules).encode(),
        "config.json": b"{}",
        "model.safetensors": weights(),
    }
    hub.commit("models", "acme/tiny", {**st_files, "custom_st.py": b"class Transformer: pass"})
    manifest()
    said = stage("lock", "m.yaml", code=3).output
    assert "modules.json names the class custom_st.Transformer" in said and "more" not in said


@pytest.mark.parametrize("path", ["evil.py", "pytorch_model.bin"])
def test_a_lock_cannot_bring_what_the_manifest_does_not_let_in(
    hub: TestHub, stage: Callable[..., Result], path: str
) -> None:
    hub.commit(
        "models", "acme/tiny", {"config.json": b"{}", "model.safetensors": weights(), path: b"x"}
    )
    manifest()
    stage("lock", "m.yaml")
    lock = json.loads(Path("m.lock").read_text())
    file = {
        "path": f"data/models/tiny/{path}",
        "size": 1,
        "sha256": sha256_of_bytes(b"x"),
        "origin": path,
    }
    lock["assets"]["tiny"]["files"].append(file)
    Path("m.lock").write_text(json.dumps(lock))
    said = stage("fetch", "m.yaml", "-o", "b", code=3).output
    assert path in said and "--update tiny" in said and not Path("b").exists()


FAULTS: dict[str, tuple[dict[str, bytes], dict[str, bytes], str]] = {
    "a module that is not there": (
        {},
        {"modeling_tiny.py": MODELING},
        "which has no `configuration_tiny.py`",
    ),
    "more Python than anybody wrote": (
        {},
        {**CODE, "layers_tiny.py": b"x = 1\n" * 800_000},
        "layers_tiny.py` of other/tiny-code has 4.8 MB",
    ),
    "no Python": (
        {},
        {**CODE, "layers_tiny.py": b"class:"},
        "`layers_tiny.py` of other/tiny-code: not Python",
    ),
    "two different files for one place": (
        {
            "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": "layers_tiny.T"}}',
            "layers_tiny.py": b"T = 1",
        },
        CODE,
        "are different files",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_code_that_cannot_be_fetched_is_reported(
    hub: TestHub, stage: Callable[..., Result], name: str
) -> None:
    own, other, said = FAULTS[name]
    hub.commit("models", "other/tiny-code", other)
    files = {"config.json": config("other/tiny-code--"), "model.safetensors": weights(), **own}
    hub.commit("models", "acme/tiny", files)
    manifest(allow_code=True)
    assert said in stage("lock", "m.yaml", code=2).output


@pytest.mark.parametrize(
    ("path", "document", "named"),
    [
        (
            "config.json",
            {"auto_map": {"AutoModel": "o/r--m.C"}},
            [("AutoModel", "o/r", "m.py", "C", "m.py")],
        ),
        (
            "0_T/config.json",
            {"auto_map": {"AutoModel": "m.C"}},
            [("AutoModel", None, "0_T/m.py", "C", "0_T/m.py")],
        ),
        (
            "0_T/config.json",
            {"auto_map": {"AutoModel": "o/r--m.C"}},
            [("AutoModel", "o/r", "m.py", "C", "0_T/m.py")],
        ),
        (
            "tokenizer_config.json",
            {"auto_map": ["t.A", None]},
            [("AutoTokenizer", None, "t.py", "A", "t.py")],
        ),
        (
            "config.json",
            {"custom_pipelines": {"x": {"impl": "p.P", "pt": ["A"]}}},
            [("a pipeline", None, "p.py", "P", "p.py")],
        ),
        (
            "processor_config.json",
            {"image_processor": {"auto_map": {"AutoImageProcessor": "i.I"}}},
            [("AutoImageProcessor", None, "i.py", "I", "i.py")],
        ),
        (
            "modules.json",
            [7, {"type": "sentence_transformers.models.Pooling"}, {"type": "a.b.T"}],
            [("a module of sentence-transformers", None, "a.b.py", "T", "a.b.py")],
        ),
        ("config.json", {"auto_map": {"AutoModel": 7, "X": "no class", "Y": None}}, []),
        ("config.json", "text", []),
    ],
)
def test_where_a_config_names_code(
    path: str, document: Any, named: list[tuple[str, str | None, str, str, str]]
) -> None:
    found = references(path, json.dumps(document).encode())
    assert [(r.role, r.repository, r.path, r.name, r.target) for r in found] == named
    assert references("config.json", b"{") == [] and references("config.json", b"[" * 10**6) == []


def test_what_a_module_imports_from_beside_it() -> None:
    source = b"""
import torch
from .a import x
from . import b, c as d
try:
    from .e.f import g
except ImportError:
    from ..up import h
"""
    assert relative_imports(source) == {"a", "b", "c", "e/f"}


def test_a_config_is_made_local_byte_for_byte() -> None:
    text = (
        b'{"a":  "x--y.z", "auto_map": {"AutoModel" : "o/r--m.C", "B": ["o\\/r--t.T", null]}, '
        b'"t": "a--b.c d"}\r\n'
    )
    assert (
        made_local("config.json", text)
        == b'{"a":  "x--y.z", "auto_map": {"AutoModel" : "m.C", "B": ["t.T", null]}, '
        b'"t": "a--b.c d"}\r\n'
    )


def test_the_child_that_loads_has_no_network() -> None:
    """Without this, the tests above would prove nothing."""
    code = (
        "from stage.sandbox import close_network; assert close_network() is None; "
        "import socket; socket.create_connection(('127.0.0.1', 9))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert "PermissionError" in done.stderr
