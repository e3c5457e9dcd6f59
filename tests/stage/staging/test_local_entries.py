"""`stage init PATH...`: what is on this machine becomes a manifest that fetches as it stands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from stage.bundle.bundle import Bundle
from tests.support.staging import run_here

ROWS = "text,label\na film,good\nanother,bad\n"
PNG = b"\x89PNG\r\n\x1a\n ... IEND"


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


def test_a_dry_run_sees_another_encoding_and_names_the_command_where_it_is_printed() -> None:
    """It passed; and the command of the fetch had the file's bare name."""
    write({"far/letters.csv": "номер,дата\nодин,два\n".encode("cp1251"), "m/x": ""})
    run_here("init", "far/letters.csv", "-o", "m/m.yaml")
    said = run_here("fetch", "m/m.yaml", "-o", "b", "--dry-run", code=2).stderr
    command = re.search("iconv .*", said)
    assert command and "line 1 is not UTF-8" in said
    subprocess.run(["sh", "-c", command[0]], check=True)
    assert Path("far/utf8-letters.csv").read_text("utf-8").startswith("номер,дата")


def test_paths_are_relative_to_the_manifest_and_a_link_on_the_way_does_not_mislead(
    here: Path,
) -> None:
    write({"lines.csv": ROWS, "elsewhere/deep/x": ""})
    (here / "linked").symlink_to(here / "elsewhere/deep")
    for manifest in ("manifests/a.yaml", "linked/a.yaml", "b.yaml"):
        run_here("init", "lines.csv", "-o", manifest)
        run_here("lock", manifest)
    text = Path("manifests/a.yaml").read_text()
    assert 'path: "../lines.csv"' in text and "stage fetch manifests/a.yaml" in text
    assert 'path: "../../lines.csv"' in Path("linked/a.yaml").read_text()


@pytest.mark.parametrize(
    "name", ["./nothing.csv", "nothing.csv", "./empty", "no/nothing.csv", "nothing.cvs", "nothing/"]
)
def test_a_path_with_nothing_in_it_is_not_asked_for_on_the_hub(here: Path, name: str) -> None:
    (here / "empty").mkdir()
    done = run_here("init", name, code=2)
    assert "no such file" in done.stderr or "no file to take" in done.stderr
    assert not Path("manifest.yaml").exists()
