"""What `stage verify` prints about a damage. (tests/golden/verdicts.py has 300.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stage.bundle.bundle import LOCK, TAG_FILES, TAG_MANIFEST, verify
from stage.bundle.verifier import VerificationReport, suggest_fixes
from stage.files import sha256_of_bytes
from tests.stage.bundles import BIG, BIG_SIZE, contents


def stage(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stage", *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=120,
        **options,  # type: ignore[call-overload]
    )


def named(report: VerificationReport) -> set[str]:
    return {finding.path for finding in report.findings}


def test_fast_looks_at_names_and_sizes_alone(copy: Path) -> None:
    with open(copy / BIG, "r+b") as file:
        file.write(b"x")
    done = stage("verify", "--fast", copy)
    assert done.returncode == 0 and "names and sizes are right (bytes not read)" in done.stdout
    assert named(verify(copy)) == {BIG}
    os.truncate(copy / BIG, BIG_SIZE - 1)
    (copy / "data/files/notes/empty").unlink()
    (copy / "data/x").touch()
    assert named(verify(copy, "fast")) == {BIG, "data/files/notes/empty", "data/x"}
    assert stage("verify", "--fast", copy).returncode == 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_json_is_one_document_and_the_report_the_same(
    copy: Path, tmp_path: Path, is_damaged: bool
) -> None:
    if is_damaged:
        os.truncate(copy / "data/models/bert/model.safetensors", 5)
    report = tmp_path / "report.json"
    done = stage("verify", copy, "--json", "--report", report)
    assert done.returncode == (1 if is_damaged else 0) and done.stderr == ""
    document = json.loads(done.stdout)
    assert json.loads(report.read_text()) == document
    findings = document.pop("findings")
    assert document == {
        "format": 1,
        "bundle": str(copy),
        "bundle_id": sha256_of_bytes((copy / LOCK).read_bytes()),
        "level": "full",
        "ok": not is_damaged,
        "files": 9,
        "bytes": document["bytes"],
        "proof": {
            "payload": "bundle id",
            "unproven": ["bag-info.txt", "stage-verify.py", "stage.yaml"],
        },
    }
    assert findings == (
        [
            {
                "path": "data/models/bert/model.safetensors",
                "problem": "mismatched",
                "expected": f"{len(contents()['data/models/bert/model.safetensors'])} bytes",
                "found": "5 bytes",
                "code": "mismatched",
            }
        ]
        if is_damaged
        else []
    )


def test_a_report_that_could_not_be_written_is_refused_before_reading(
    copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(copy / "data")
    (copy / BIG).unlink()  # so that reading would end with 1
    for report, said in (
        (copy / "report.json", "inside the bundle"),
        (copy / "data" / "report.json", "inside the bundle"),
        (tmp_path / "link" / "report.json", "inside the bundle"),
        (tmp_path / "no" / "report.json", "there is no folder"),
        (tmp_path, "is a folder"),
    ):
        done = stage("verify", copy, "--report", report)
        assert done.returncode == 2 and said in done.stderr and "\n  -> " in done.stderr
        assert done.stdout == ""
    assert not (copy / "report.json").exists()


def test_a_reader_that_goes_away_does_not_turn_damage_into_success(copy: Path) -> None:
    for number in range(3000):
        (copy / f"data/extra-{number}").touch()
    script = (
        f"'{sys.executable}' -m stage verify --fast '{copy}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode not in (0, 127) and "Traceback" not in done.stderr


def test_without_a_lock_the_payload_manifest_says_what_to_read(copy: Path) -> None:
    """Damage of the payload is found although the lock cannot be believed."""
    (copy / LOCK).write_bytes(b"{}")
    with open(copy / BIG, "r+b") as file:
        file.write(b"x")
    paths = {finding.path for finding in verify(copy, jobs=2).findings}
    assert {LOCK, BIG} <= paths


def test_line_ends_of_windows_are_told_apart(small: Path, small_copy: Path) -> None:
    """A transfer in text mode changed them: one payload file, and all beside the payload."""
    texts = ["data/models/bert/vocab.txt", TAG_MANIFEST, *TAG_FILES]
    for path in texts:
        text = (small_copy / path).read_bytes()
        (small_copy / path).write_bytes(text.replace(b"\n", b"\r\n"))
    report = verify(small_copy)
    assert {f.path: f.code for f in report.findings} == dict.fromkeys(texts, "line-ends")
    assert report.bundle_id == verify(small, "fast").bundle_id and report.unproven == ()


def test_where_only_tag_files_are_lost_the_patch_is_named(small_copy: Path) -> None:
    (small_copy / TAG_MANIFEST).unlink()
    unfinished, patch = suggest_fixes(verify(small_copy))
    assert "copy it again" in unfinished and "stage patch BUNDLE --report FILE" in patch
    (small_copy / "data/models/bert/vocab.txt").unlink()
    assert suggest_fixes(verify(small_copy)) == [unfinished]
