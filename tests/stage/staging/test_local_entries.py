"""`stage init PATH...`: what is on this machine becomes a manifest that fetches as it stands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from stage.bundle.bundle import Bundle
from stage.bundle.load_test import lacking
from stage.lock.manifest import Manifest
from stage.lock.model import LockedAsset, LockedFile, Source
from tests.support.staging import model_files, run_here

ROWS = "text,label\na film,good\nanother,bad\n"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing here needs a Hub
    return tmp_path


def write(files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize(
    ("files", "name", "convert", "rows"),
    [
        ({"lines.csv": ROWS}, "./lines.csv", "csv", 2),
        ({"lines.csv": ROWS}, "lines.csv", "csv", 2),  # it was asked for on the Hub
        ({"my data.v2.csv": ROWS}, "my data.v2.csv", "csv", 2),
        ({"semi.csv": ROWS.replace(",", ";")}, "semi.csv", "csv", 2),
        ({"t.tsv": ROWS.replace(",", "\t")}, "t.tsv", "csv", 2),
        ({"rows.jsonl": '{"text": "a"}\n{"text": "b"}\n'}, "rows.jsonl", "jsonl", 2),
        ({"rows.json": '[{"text": "a"}]'}, "rows.json", "json", 1),
        ({"book.txt": "one\ntwo\n"}, "book.txt", "text", 2),
        ({"texts/a.txt": "one\n", "texts/b.txt": "two\n"}, "texts", "text", 2),
        ({"texts/a.txt": "one\n", "texts/README.md": "# It\n"}, "texts/", "text", 1),
        ({"t/train.csv": ROWS, "t/test.csv": ROWS, "t/notes.txt": "x"}, "t", "csv", 4),
        ({f"pets/{kind}/1.png": PNG for kind in ("cat", "dog")}, "./pets", "imagefolder", 2),
    ],
)
def test_a_path_becomes_a_manifest_that_fetches_as_it_stands(
    files: dict[str, str | bytes], name: str, convert: str, rows: int
) -> None:
    """It printed `lines: {path: ./lines.csv}`, which is no manifest, and no `convert`."""
    write(files)
    done = run_here("init", name)
    assert f"`convert: {convert}`" in done.stdout and "next: stage fetch" in done.stdout
    run_here("fetch", "manifest.yaml", "-o", "bundle")
    (asset,) = Bundle.open(Path("bundle")).lock.assets.values()
    splits = asset.configs["default"].values()
    assert asset.kind == "dataset" and sum(split.rows or 0 for split in splits) == rows


def test_rows_that_a_library_saved_are_a_dataset_not_its_descriptions(here: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    write({"saved/dataset_info.json": "{}", "saved/state.json": "{}"})
    with ipc.new_stream(str(here / "saved/data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert "`convert: arrow`" in run_here("init", "saved").stdout


@pytest.mark.parametrize("left", [(), ("model.safetensors",), ("tokenizer.json", "vocab.txt")])
def test_a_folder_with_a_model_is_taken_as_it_is(left: tuple[str, ...]) -> None:
    write({f"my-bert/{name}": data for name, data in model_files(100).items() if name not in left})
    assert "my-bert: on this machine: a model\n" in run_here("init", "my-bert").stdout
    request = Manifest.load("manifest.yaml").requests["my-bert"]
    assert request.path == "my-bert" and request.convert is None  # type: ignore[union-attr]


def test_paths_are_relative_to_the_manifest_and_a_link_on_the_way_does_not_mislead(
    here: Path,
) -> None:
    write({"lines.csv": ROWS, "elsewhere/deep/x": ""})
    (here / "linked").symlink_to(here / "elsewhere/deep")
    (here / "manifests").mkdir()
    for manifest in ("manifests/a.yaml", "linked/a.yaml", "b.yaml"):
        run_here("init", "lines.csv", "-o", manifest)
        run_here("lock", manifest)
    assert 'path: "../lines.csv"' in Path("manifests/a.yaml").read_text()


def test_the_folder_one_is_in_gets_a_bundle_beside_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"mine/a.csv": ROWS})
    monkeypatch.chdir(here / "mine")
    said = run_here("init", ".").stdout
    command = said.partition("next: stage ")[2].split()
    assert command[:4] == ["fetch", "manifest.yaml", "-o", str(here / "mine-bundle")]
    run_here(*command[:4])


@pytest.mark.parametrize("name", ["./nothing.csv", "nothing.csv", "./empty"])
def test_a_path_with_nothing_in_it_is_not_asked_for_on_the_hub(here: Path, name: str) -> None:
    (here / "empty").mkdir()
    done = run_here("init", name, code=2)
    assert "no such file" in done.stderr or "no file to take" in done.stderr
    assert not Path("manifest.yaml").exists()


def test_fetch_says_what_a_model_lacks_for_a_training(here: Path) -> None:
    """Exit 0 and "everything that could be checked loads"; the refusal came on the cluster."""
    config = json.dumps({"model_type": "gpt2", "vocab_size": 5})
    write({"mine/config.json": config, "mine/pytorch_model.bin": "a pickle"})
    run_here("init", "mine")
    done = run_here("fetch", "manifest.yaml", "-o", "bundle")
    assert "mine: no weights, *.safetensors (pytorch_model.bin is a pickle" in done.stderr
    assert "`model.init: scratch`" in done.stderr and "mine: no tokenizer" in done.stderr
    assert "put its files beside config.json" in done.stderr
    assert "loads without network; see above for what is not there" in done.stderr


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("config.json model.safetensors tokenizer.json", []),
        ("config.json model.safetensors preprocessor_config.json", []),
        ("config.json model.safetensors", ["tokenizer"]),
        ("config.json tokenizer.model", ["weights"]),
        ("config.json", ["weights", "tokenizer"]),
        ("adapter_config.json adapter_model.safetensors", []),
        ("a.csv", []),
    ],
)
def test_only_what_a_training_needs_is_missed(names: str, words: list[str]) -> None:
    files = tuple(LockedFile(f"data/files/mine/{n}", 1, None, None, n) for n in names.split())
    asset = LockedAsset("mine", "files", {"path": "mine"}, Source("path", "mine"), files)
    found = lacking(asset)
    assert len(found) == len(words)
    assert all(f"no {word}" in line for word, line in zip(words, found, strict=True))
    assert lacking(replace(asset, request={"path": "mine", "exclude": ["x"]})) == []
