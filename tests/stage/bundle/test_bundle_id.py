"""The bundle id proves every byte of the payload, and `stage verify` says what it does not prove.

A user changes files and writes the tag manifest again, as any user with write access can.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stage.bundle import verifier
from stage.bundle.bundle import LOCK, REQUEST, VERIFIER, verify
from stage.bundle.verifier import VerificationReport
from stage.carry.patch import patch_damage
from stage.errors import DamageError
from stage.files import sha256_of_bytes
from stage.progress import Reporter
from tests.stage.bundles import BIG, reseal
from tests.support.staging import run_here

TEMPLATE = Path(verifier.__file__)
IN_THE_BIG_FILE = 40 * 2**20


def copied(bundle: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-r", "--sparse=always", bundle, tmp_path / "copy"], check=True)
    return tmp_path / "copy"


def id_of(bundle: Path) -> str:
    return sha256_of_bytes((bundle / LOCK).read_bytes())


def forge(root: Path) -> Path:
    """Flips a byte of the large file; the tag manifest, which has no line of it, still agrees."""
    with open(root / BIG, "r+b") as file:
        file.seek(IN_THE_BIG_FILE)
        file.write(b"\x01")
    return root


def problems(report: VerificationReport) -> set[tuple[str, str]]:
    return {(finding.path, finding.problem) for finding in report.findings}


def standalone(bundle: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(TEMPLATE), *options, str(bundle)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_changed_file_is_damage_although_the_tag_manifest_agrees(
    sound: Path, tmp_path: Path
) -> None:
    copy = forge(copied(sound, tmp_path))
    report = verify(copy)
    assert report.bundle_id == id_of(sound)
    assert problems(report) == {(BIG, "mismatched")}
    code, said = standalone(copy, "--json")
    assert code == 1
    assert json.loads(said)["findings"] == [finding.to_json() for finding in report.findings]


def test_another_bundle_is_not_read_and_not_called_sound(sound: Path, tmp_path: Path) -> None:
    wanted = "ab" * 32
    said = run_here("verify", sound, "--id", wanted, code=1)
    ids = f"expected bundle id {wanted}, found bundle id {id_of(sound)}"
    assert f"`stage.lock`: mismatched: {ids}" in said.stdout
    assert "another bundle" in said.stderr and "stage patch" not in said.stderr
    read: list[int] = []
    report = verify(sound, bundle_id=wanted, progress=read.append)
    assert sum(read) == 0 and problems(report) == {(LOCK, "mismatched")}
    code, told = standalone(sound, "--id", wanted)
    assert code == 1 and "another bundle" in told


def test_a_verifier_that_lies_is_said_to_be_none_of_ours(sound: Path, tmp_path: Path) -> None:
    copy = copied(sound, tmp_path)
    (copy / VERIFIER).write_text("print('sound: every byte is as it was fetched')\n")
    reseal(copy, VERIFIER)
    said = run_here("verify", copy, "-q", code=0).stderr
    assert "does not know its stage-verify.py" in said and "do not run it" in said
    assert run_here("verify", sound, "-q", code=0).stderr == ""


def test_a_forged_origin_makes_no_patch(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    damaged = copied(sound, tmp_path / "damaged")
    with open(damaged / BIG, "r+b") as file:
        file.seek(IN_THE_BIG_FILE)
        file.write(b"\x02")
    report = verify(damaged)
    origin = forge(copied(sound, tmp_path))
    with pytest.raises(DamageError, match="damaged here too"):
        patch_damage(origin, report, tmp_path / "patch", Reporter(quiet=True))
    (origin / REQUEST).write_bytes(b"# edited")
    with pytest.raises(DamageError, match=f"{REQUEST}.* damaged here too"):
        patch_damage(origin, report, tmp_path / "patch", Reporter(quiet=True))
