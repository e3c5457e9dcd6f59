"""Files that would stop the first job on the cluster stop the fetch on the laptop, by name."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from stage.bundle.bundle import finish_bundle
from stage.cli import main
from stage.files import hash_file
from stage.lock.model import Column, LockedAsset, LockedFile, LockedSplit, Lockfile, Source
from stage.staging.load_test import run_load_test
from tests.stage.locks import COMMIT

TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"},
    "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [],
}


def shard(*names: str) -> bytes:
    entries = {
        n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(len(names))


def sound(*, tokenizer: bool = False) -> dict[str, bytes]:
    """A model in two shards, without what takes seconds to load unless asked for."""
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    more = {
        "tokenizer.json": json.dumps(TOKENIZER).encode(),
        "tokenizer_config.json": (
            b'{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}'
        ),
    }
    return {
        "config.json": b'{"model_type": "bert"}',
        "model-00001-of-00002.safetensors": shard("a"),
        "model-00002-of-00002.safetensors": shard("b"),
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        **(more if tokenizer else {}),
    }


def bundle(root: Path, files: dict[str, bytes], rows: int = 2) -> Lockfile:
    """A finished bundle of a model and a dataset of two rows, whatever is in them."""
    shards = "data/datasets/lines/default/train-00000-of-00001.parquet"
    paths = {f"data/models/bert/{name}": data for name, data in files.items()}
    for path, data in paths.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    (root / shards).parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["x", "y"]}), root / shards)

    def entry(path: str) -> LockedFile:
        digests = hash_file(root / path)
        return LockedFile(path, digests.size, digests.sha256, None, path.rpartition("/")[2])

    hub = Source("hub", "acme/bert", "main", COMMIT)
    split = LockedSplit((shards,), rows, (Column("text", "string"),))
    lock = Lockfile(
        "made",
        {
            "bert": LockedAsset(
                "bert", "model", {}, hub, tuple(entry(path) for path in sorted(paths))
            ),
            "lines": LockedAsset(
                "lines", "dataset", {}, hub, (entry(shards),), configs={"default": {"train": split}}
            ),
        },
    )
    finish_bundle(root, lock, b"format: 1\n", [])
    return lock


def test_a_sound_bundle_loads(tmp_path: Path) -> None:
    report = run_load_test(tmp_path / "b", bundle(tmp_path / "b", sound(tokenizer=True)))
    assert (report.findings, report.unchecked) == ((), ())


def changed(files: dict[str, bytes | None], *, tokenizer: bool = False) -> dict[str, bytes]:
    """The sound model with some files replaced, or None: left out."""
    merged = {**sound(tokenizer=tokenizer), **files}
    return {name: data for name, data in merged.items() if data is not None}


FAULTS: dict[str, tuple[Callable[[], dict[str, bytes]], str, str]] = {
    "config is no JSON": (lambda: changed({"config.json": b"{"}), "config.json", "JSON"),
    "config is a list": (lambda: changed({"config.json": b"[]"}), "config.json", "a mapping"),
    "config is nested without end": (
        lambda: changed({"config.json": b"[" * 10**6}),
        "config.json",
        "JSON",
    ),
    "no config": (lambda: changed({"config.json": None}), "config.json", "a config"),
    "a shard is missing": (
        lambda: changed({"model-00002-of-00002.safetensors": None}),
        "model.safetensors.index.json",
        "model-00002-of-00002.safetensors, which is not here",
    ),
    "the index is missing": (
        lambda: changed({"model.safetensors.index.json": None}),
        "model.safetensors.index.json",
        "an index",
    ),
    "the index maps nothing": (
        lambda: changed({"model.safetensors.index.json": b'{"weight_map": []}'}),
        "model.safetensors.index.json",
        "no `weight_map`",
    ),
    "a tensor is missing": (
        lambda: changed({"model-00002-of-00002.safetensors": shard("c")}),
        "model.safetensors.index.json",
        "b (model-00002",
    ),
    "a shard is cut": (
        lambda: changed({"model-00001-of-00002.safetensors": shard("a")[:-1]}),
        "model-00001-of-00002.safetensors model.safetensors.index.json",
        "the file has 0",
    ),
    "a header of 1 GB": (
        lambda: changed(
            {"model-00001-of-00002.safetensors": struct.pack("<Q", 10**9) + b"{" * 100}
        ),
        "model-00001-of-00002.safetensors model.safetensors.index.json",
        "1000000000 bytes",
    ),
    "tokenizer is torn": (
        lambda: changed({"tokenizer.json": b'{"version": "1.0"'}, tokenizer=True),
        "tokenizer.json",
        "JSON",
    ),
    "tokenizer is none": (
        lambda: changed({"tokenizer.json": b'{"version": "1.0"}'}, tokenizer=True),
        "bert",
        "tokenizer",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_will_not_load_is_found_and_named(tmp_path: Path, fault: str) -> None:
    files, where, said = FAULTS[fault]
    lock = bundle(tmp_path / "b", files())
    report = run_load_test(tmp_path / "b", lock)
    found = [(f.path.rpartition("/")[2], f.problem) for f in report.findings]
    assert found == [(name, "unloadable") for name in where.split()], report
    assert said in str(report.findings[0])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"adapter_config.json": b'{"base_model_name_or_path": "acme/gone"}'},
            "bert: its base model acme/gone is not in this bundle",
        ),
        (
            {
                "adapter_config.json": b'{"base_model_name_or_path": "acme/bert"}',
                "model-00001-of-00002.safetensors": None,
                "model-00002-of-00002.safetensors": None,
                "model.safetensors.index.json": None,
            },
            "bert: its base model bert has no weights in this bundle",
        ),
        (
            {
                "config.json": b'{"vision_tower": "org/clip", "_name_or_path": "a/b", "x": '
                b'{"text_model_name": "org/bert", "tokenizer": "acme/bert"}}'
            },
            "bert: its config.json names other repositories (vision_tower: org/clip, "
            "text_model_name: org/bert), which are not in this bundle: if its code loads them, add "
            "each to the manifest",
        ),
    ],
)
def test_what_could_not_be_tried_is_said(
    tmp_path: Path, files: dict[str, bytes | None], said: str
) -> None:
    report = run_load_test(tmp_path / "b", bundle(tmp_path / "b", changed(files)))
    assert (report.findings, report.unchecked) == ((), (said,))


def test_rows_and_columns_are_those_locked(tmp_path: Path) -> None:
    lock = bundle(tmp_path / "b", sound(), rows=3)
    assert "3 rows" in str(run_load_test(tmp_path / "b", lock).findings[0])
    pq.write_table(
        pa.table({"other": ["x", "y"]}),
        tmp_path / "b/data/datasets/lines/default/train-00000-of-00001.parquet",
    )
    assert any("columns" in str(f) for f in run_load_test(tmp_path / "b", lock).findings)


IN_PLACE_OF_TRANSFORMERS = {
    # the text of a module -> what is found, or was not checked
    "raise ImportError('none here')": "transformers is not installed",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "comes to its end.*-11",
    "import socket; socket.socket(socket.AF_INET)": "Permission denied",
}


@pytest.mark.parametrize("text", IN_PLACE_OF_TRANSFORMERS, ids=["none", "dies", "asks the network"])
def test_what_the_child_that_loads_meets_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "transformers.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    report = run_load_test(tmp_path / "b", bundle(tmp_path / "b", sound(tokenizer=True)))
    found = report.unchecked if "ImportError" in text else report.findings
    assert any(re.search(IN_PLACE_OF_TRANSFORMERS[text], str(one)) for one in found), report
    assert bool(report.findings) == ("ImportError" not in text)


def test_verify_deep_on_the_cluster(tmp_path: Path) -> None:
    def run(root: Path, *options: str) -> Any:
        return CliRunner().invoke(main, ["verify", str(root), *options])

    bundle(tmp_path / "good", sound())
    done = run(tmp_path / "good", "--deep", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["level"] == "deep"
    bundle(tmp_path / "bad", changed({"config.json": b"{"}))
    assert run(tmp_path / "bad").exit_code == 0
    done = run(tmp_path / "bad", "--deep")
    assert done.exit_code == 1 and "config.json`: unloadable" in done.stdout
    (tmp_path / "good/data/models/bert/config.json").write_bytes(b'{"model_type": "bart"}')
    done = run(tmp_path / "good", "--deep")
    assert (
        done.exit_code == 1
        and "mismatched" in done.stdout
        and "not checked: loading" in done.stderr
    )
    assert run(tmp_path / "good", "--deep", "--fast").exit_code == 2
