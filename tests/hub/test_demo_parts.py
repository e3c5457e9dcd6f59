"""The files that scripts/demo serves, and its effect on its folder."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib.demo.demo import MARKER, DemoError, prepare_folder
from scripts.lib.demo.repositories import dataset_files, model_folder, paragraphs

ROOT = Path(__file__).resolve().parents[2]


def test_the_dataset_is_english_and_no_paragraph_is_in_both_splits() -> None:
    splits = {name: [text for _, text in rows] for name, rows in paragraphs().items()}
    assert not set(splits["train"]) & set(splits["validation"])
    assert len(splits["train"]) > 500 and len(splits["validation"]) > 50
    assert any("Elizabeth" in text for text in splits["validation"])


def test_the_dataset_repository_is_parquet_with_a_card() -> None:
    import pyarrow.parquet as pq

    files = dataset_files()
    card = files.pop("README.md")
    assert isinstance(card, bytes) and b"config_name: chapters" in card
    rows = {
        path: pq.read_table(io.BytesIO(data)).num_rows
        for path, data in files.items()
        if isinstance(data, bytes)
    }
    assert sum(rows.values()) == sum(map(len, paragraphs().values()))
    assert list(rows) == sorted(rows) and len(rows) == 3


def test_the_model_repository_is_complete() -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in model_folder().iterdir()
    }


def test_a_folder_that_is_not_a_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    thesis = tmp_path / "cluster" / "thesis.tex"
    thesis.write_text("years of work")
    with pytest.raises(DemoError, match="left alone"):
        prepare_folder(tmp_path)
    assert thesis.read_text() == "years of work"
    with pytest.raises(DemoError, match="is a file"):
        prepare_folder(thesis)


def test_an_earlier_demo_is_emptied_and_nothing_beside_it(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "out")
    (tmp_path / "out" / "laptop" / "old").write_text("x")
    (tmp_path / "out" / "notes").write_text("mine")
    prepare_folder(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        MARKER,
        "notes",
        "hub",
        "laptop",
        "cluster",
    }
    assert list((tmp_path / "out" / "laptop").iterdir()) == []


def test_a_folder_without_repositories_is_no_hub(tmp_path: Path) -> None:
    """`ROOT/acme/bert` instead of `ROOT/models/acme/bert`: else each answer would be a 404."""
    (tmp_path / "acme" / "bert").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "scripts.lib.hub.loopback_hub", tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert (
        done.returncode == 2
        and "has no folder models/<org>/<name> or datasets/<org>/<name>" in done.stderr
    )


INTERRUPTED = """
import sys
from pathlib import Path
from scripts.lib.demo.demo import Shell
Shell().run(sys.executable, "-c", sys.argv[1], cwd=Path())
"""
SAVES = """
import sys, time
try:
    print("training", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)  # longer than subprocess.run waits before it kills
    print("saved", flush=True)
    sys.exit(5)
"""


def test_ctrl_c_lets_the_run_save_its_checkpoint() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, SAVES],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as demo:
        assert demo.stdout is not None
        while demo.stdout.readline() != "training\n":
            assert demo.poll() is None
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.stdout.read() == "saved\n"
