"""The bundle id proves every byte of the payload, and `stage verify` says what it does not prove.

A user changes files and writes the tag manifest again, as any user with write access can.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.bundle import bundle as layout
from stage.bundle.bundle import manifest_text, parse_manifest, write_blocks
from stage.errors import DamageError
from stage.lock.read import read_lock
from stage.transfer.make_patch import patch_damage
from stage.util.digests import hash_file, sha256_of_bytes
from stage.util.progress import Reporter
from stage.verify.receipt import Receipt, find, record
from stage.verify.report import BY_ID, BY_LISTS, VerificationReport, read_report
from stage.verify.verify import verify
from tests.stage.bundles import BIG, make_bundle

TEMPLATE = Path(layout.__file__).parents[1] / "verify" / "standalone.py"
IN_THE_BIG_FILE = 40 * 2**20


@pytest.fixture(scope="module", params=[1, 2], ids=["format 1", "format 2"])
def any_format(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound bundle of either format. Treat it as read-only."""
    return make_bundle(tmp_path_factory.mktemp("sound") / "bundle", format=request.param).root


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("first") / "bundle", format=1).root


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("second") / "bundle", format=2).root


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def copied(bundle: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-r", "--sparse=always", bundle, folder / "copy"], check=True)
    return folder / "copy"


def id_of(bundle: Path) -> str:
    return sha256_of_bytes((bundle / layout.LOCK).read_bytes())


def reseal(root: Path) -> None:
    """Writes the tag manifest of the files that are there now."""
    recorded = parse_manifest((root / layout.TAG_MANIFEST).read_bytes())
    digests = {path: sha256_of_bytes((root / path).read_bytes()) for path in recorded}
    (root / layout.TAG_MANIFEST).write_bytes(manifest_text(digests))


def forge(root: Path) -> Path:
    """Flips a byte of the large file, and adapts the block list and the tag manifest to it."""
    with open(root / BIG, "r+b") as file:
        file.seek(IN_THE_BIG_FILE)
        file.write(b"\x01")
    locked = next(
        file
        for file in read_lock((root / layout.LOCK).read_bytes(), "lock").files
        if file.path == BIG
    )
    write_blocks(root, str(locked.sha256), hash_file(root / BIG).blocks)
    reseal(root)
    return root


def problems(report: VerificationReport) -> set[tuple[str, str]]:
    return {(finding.path, finding.problem) for finding in report.findings}


def stage(*arguments: object, code: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stage", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def standalone(bundle: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(TEMPLATE), *options, str(bundle)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_large_file_changed_with_its_block_list_is_damage(second: Path, folder: Path) -> None:
    copy = forge(copied(second, folder))
    blocks = next(f"blocks/{path.name}" for path in (copy / "blocks").iterdir())
    report = verify(copy)
    assert report.bundle_id == id_of(second)
    assert problems(report) == {(BIG, "mismatched"), (blocks, "mismatched")}
    code, said = standalone(copy, "--json")
    assert code == 1
    assert json.loads(said)["findings"] == [finding.to_json() for finding in report.findings]


def test_under_format_1_it_is_damage_for_whoever_names_the_id(first: Path, folder: Path) -> None:
    """The block lists cannot prove it; a line says so."""
    copy = forge(copied(first, folder))
    wanted = id_of(first)
    said = stage("verify", copy, code=0).stdout
    assert (
        "proven against their block lists alone" in said
        and f"stage verify --id {wanted} {copy}" in said
    )
    assert verify(copy).proof == BY_LISTS
    report = verify(copy, bundle_id=wanted)
    assert problems(report) == {(BIG, "mismatched")} and report.proof == BY_ID
    said = stage("verify", copy, "--id", wanted, code=1).stdout
    assert f"`{BIG}`: mismatched" in said
    code, said = standalone(copy)
    assert code == 0 and "proven against their block lists alone" in said
    code, said = standalone(copy, "--json", "--id", wanted)
    assert code == 1 and json.loads(said)["findings"] == [
        finding.to_json() for finding in report.findings
    ]


def test_what_was_proven_is_said_and_is_in_the_report(any_format: Path, folder: Path) -> None:
    is_first = b'"format": 1' in (any_format / layout.LOCK).read_bytes()
    unproven = ["bag-info.txt", "stage-verify.py", "stage.yaml"]
    size = verify(any_format, "fast").size
    for options, proof in (
        ((), BY_LISTS if is_first else BY_ID),
        (("--id", id_of(any_format)), BY_ID),
    ):
        said = stage("verify", any_format, *options, "--report", folder / "r.json", code=0).stdout
        assert json.loads((folder / "r.json").read_text())["proof"] == {
            "payload": proof,
            "unproven": unproven,
        }
        assert read_report(folder / "r.json").proof == proof
        assert ("proven against the bundle id" in said) == (proof == BY_ID)
        assert standalone(any_format, *options) == (0, said.replace("68.4 MB", f"{size} bytes"))
    fast = json.loads(stage("verify", any_format, "--fast", "--json", code=0).stdout)
    assert fast["proof"]["payload"] is None


def test_another_bundle_is_not_read_and_not_called_sound(any_format: Path, folder: Path) -> None:
    wanted = "ab" * 32
    said = stage("verify", any_format, "--id", wanted, code=1)
    ids = f"expected bundle id {wanted}, found bundle id {id_of(any_format)}"
    assert f"`stage.lock`: mismatched: {ids}" in said.stdout
    assert "another bundle" in said.stderr and "stage patch" not in said.stderr
    read: list[int] = []
    report = verify(any_format, bundle_id=wanted, progress=read.append)
    assert sum(read) == 0 and problems(report) == {(layout.LOCK, "mismatched")}
    code, told = standalone(any_format, "--id", wanted)
    assert code == 1 and "another bundle" in told


def test_a_wrong_id_takes_no_receipt_away(second: Path, folder: Path) -> None:
    state = {"XDG_STATE_HOME": str(folder)}
    stage("verify", second, code=0, **state)
    assert isinstance(find(folder / "airlift", second), Receipt)
    stage("verify", second, "--id", "ab" * 32, code=1, **state)
    assert isinstance(find(folder / "airlift", second), Receipt)


def test_the_id_may_be_given_as_the_lock(second: Path, folder: Path) -> None:
    shutil.copy(second / layout.LOCK, folder / "x.lock")
    assert (
        "proven against the bundle id"
        in stage("verify", second, "--id", folder / "x.lock", code=0).stdout
    )
    assert "proven" in stage("verify", second, "--id", f"sha256:{id_of(second)}", code=0).stdout
    for wrong in ("ab" * 6, folder / "none.lock", folder):
        assert (
            f"--id {wrong}: neither an id" in stage("verify", second, "--id", wrong, code=2).stderr
        )
    assert "not a lock" in stage("verify", second, "--id", second / layout.BAGIT, code=2).stderr


def test_a_lock_that_is_damaged_is_damage_and_no_other_bundle(second: Path, folder: Path) -> None:
    copy = copied(second, folder)
    text = (copy / layout.LOCK).read_bytes()
    (copy / layout.LOCK).write_bytes(text.replace(b"acme", b"acmf"))
    (copy / BIG).unlink()
    said = stage("verify", copy, "--id", id_of(second), code=1)
    assert "stage patch" in said.stderr and "another bundle" not in said.stderr
    assert f"`{BIG}`: missing" in said.stdout


@pytest.mark.parametrize("path", [layout.REQUEST, layout.BAG_INFO, layout.VERIFIER])
def test_what_the_id_does_not_cover_is_named(second: Path, folder: Path, path: str) -> None:
    """Only a signature proves it; the report does not call it proven."""
    copy = copied(second, folder)
    (copy / path).write_bytes((copy / path).read_bytes().replace(b"e", b"a", 1))
    reseal(copy)
    said = stage("verify", copy, "--id", id_of(second), code=0)
    assert "(which does not cover " in said.stdout and path in said.stdout
    assert (layout.VERIFIER in said.stderr) == (path == layout.VERIFIER)


def test_a_verifier_that_lies_is_said_to_be_none_of_ours(second: Path, folder: Path) -> None:
    copy = copied(second, folder)
    (copy / layout.VERIFIER).write_text("print('sound: every byte is as it was fetched')\n")
    reseal(copy)
    said = stage("verify", copy, "-q", code=0).stderr
    assert "none that this version of airlift knows" in said and "do not run it" in said
    assert stage("verify", second, "-q", code=0).stderr == ""


def test_the_verifier_of_this_version_is_known() -> None:
    assert layout.is_known_verifier(layout.verifier_text())
    assert not layout.is_known_verifier(b"")


def test_a_forged_origin_makes_no_patch(second: Path, folder: Path) -> None:
    (folder / "damaged").mkdir()
    damaged = copied(second, folder / "damaged")
    with open(damaged / BIG, "r+b") as file:
        file.seek(IN_THE_BIG_FILE)
        file.write(b"\x02")
    report = verify(damaged)
    origin = forge(copied(second, folder))
    with pytest.raises(DamageError, match="damaged here too"):
        patch_damage(origin, report, folder / "patch", Reporter(quiet=True))


def test_a_bundle_of_format_1_becomes_one_of_format_2_by_a_patch_without_payload(
    first: Path, second: Path, folder: Path
) -> None:
    copy = copied(first, folder)
    stage("patch", second, "--since", first / layout.LOCK, "-o", folder / "p", code=0)
    assert sum(path.stat().st_size for path in (folder / "p").rglob("*") if path.is_file()) < 2**17
    stage("apply", copy, folder / "p", code=0)
    report = verify(copy, bundle_id=id_of(second))
    assert report.ok and report.proof == BY_ID


def test_a_receipt_says_what_was_proven(any_format: Path, folder: Path) -> None:
    is_first = b'"format": 1' in (any_format / layout.LOCK).read_bytes()
    assert record(folder, verify(any_format)) is None
    receipt = find(folder, any_format)
    assert isinstance(receipt, Receipt) and receipt.proof == (BY_LISTS if is_first else BY_ID)
    path = next((folder / "receipts").iterdir())
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "proof"}
    path.write_text(json.dumps(older))
    receipt = find(folder, any_format)
    assert isinstance(receipt, Receipt) and receipt.proof is None
