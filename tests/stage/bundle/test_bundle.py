"""The layout on disk: other tools read its texts, the index is last, assets are found by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stage.bundle.bundle import MANIFEST, TAG_FILES, TAG_MANIFEST, Bundle, bag_info_text
from stage.files import sha256_of_bytes
from stage.paths import problem_with_path
from tests.stage.bundles import make_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("made") / "bundle")


def test_a_finished_bundle_is_a_bag_and_its_id_is_the_digest_of_its_lock(bundle: Bundle) -> None:
    assert bundle.id == sha256_of_bytes((bundle.root / "stage.lock").read_bytes()) == bundle.lock.id
    checked = subprocess.run(
        ["sha256sum", "-c", "--strict", MANIFEST], cwd=bundle.root, capture_output=True
    )
    assert checked.returncode == 0 and checked.stdout.count(b": OK") == len(bundle.lock.files)
    checked = subprocess.run(
        ["sha256sum", "-c", "--strict", TAG_MANIFEST], cwd=bundle.root, capture_output=True
    )
    assert checked.returncode == 0 and checked.stdout.count(b": OK") == len(TAG_FILES)
    bagged = subprocess.run(
        [sys.executable, "-m", "bagit", "--validate", bundle.root], capture_output=True, text=True
    )
    assert bagged.returncode == 0, bagged.stderr


def test_the_index_is_written_last(tmp_path: Path) -> None:
    """The ctime of each file."""
    root = make_bundle(tmp_path / "bundle").root
    times = {path: path.stat().st_ctime_ns for path in root.rglob("*") if path.is_file()}
    assert times[root / TAG_MANIFEST] == max(times.values())


def test_bag_info_holds_no_line_that_a_fact_could_smuggle_in(bundle: Bundle) -> None:
    text = bag_info_text(bundle.lock, [("Airlift-Host", "a\nPayload-Oxum: 0.0\r\n\tb")]).decode()
    assert text.splitlines() == [
        "Airlift-Host: a Payload-Oxum: 0.0 b",
        f"External-Identifier: sha256:{bundle.id}",
        f"Payload-Oxum: {bundle.lock.size}.{len(bundle.lock.files)}",
    ]


def test_an_interrupted_write_leaves_the_old_text(bundle: Bundle, tmp_path: Path) -> None:
    """A writer killed between its bytes and its rename: nothing is lost, no partial file used."""
    script = (
        "import os, sys; from pathlib import Path; from stage import files as disk\n"
        "Path.replace = lambda *a: os._exit(9)\n"
        "disk.write_atomically(Path(sys.argv[1]), b'new')\n"
    )
    target = tmp_path / "stage.lock"
    target.write_bytes(b"old")
    assert subprocess.run([sys.executable, "-c", script, target]).returncode == 9
    assert target.read_bytes() == b"old"
    left = [path.name for path in tmp_path.iterdir() if path != target]
    assert len(left) == 1 and problem_with_path(left[0]) is not None
