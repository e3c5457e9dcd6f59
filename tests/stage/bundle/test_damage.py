"""What `stage verify` prints about a damage. (tests/golden/verdicts.py has a thousand.)"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stage.bundle import bundle as layout
from stage.bundle.verifier import VerificationReport
from stage.bundle.verify import verify
from stage.digests import sha256_of_bytes
from tests.stage.bundles import BIG, BIG_SIZE, contents
from tests.stage.damages import DAMAGES, NEED_BIG, Damage, files

SEED = int(os.environ.get("AIRLIFT_DAMAGE_SEED") or 20_260_203)
BY_COMMAND = 13  # of the damages that tests/golden/verdicts.py makes by the hundred
Damaged = Callable[[Damage, random.Random], tuple[Path, set[str]]]


@pytest.fixture
def damaged_at_random(sound: Path, small: Path, tmp_path: Path) -> Iterator[Damaged]:
    """Copies a bundle and damages it: (damage, chance) -> (the copy, paths with a finding)."""

    def damaged(damage: Damage, chance: random.Random) -> tuple[Path, set[str]]:
        original = sound if damage in NEED_BIG or chance.random() < 0.2 else small
        root = tmp_path / "bundle"
        subprocess.run(["cp", "-r", "--sparse=always", original, root], check=True)
        return root, damage(root, chance)

    yield damaged
    shutil.rmtree(tmp_path, ignore_errors=True)


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


@pytest.mark.parametrize("index", range(BY_COMMAND))
def test_the_command_tells_of_a_damage_and_ends_with_1(
    damaged_at_random: Damaged, index: int
) -> None:
    chance = random.Random(f"{SEED}-{index}")
    damage = chance.choice(DAMAGES)
    print(f"seed {SEED}-{index}: {damage.__name__} (AIRLIFT_DAMAGE_SEED={SEED})")
    root, damaged = damaged_at_random(damage, chance)
    done = stage("verify", root, "-q")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert [path for path in damaged if f"`{path}`: " in done.stdout], done.stdout
    assert done.stderr.startswith(f"error: {root}: ") and "\n  -> " in done.stderr


def test_one_damaged_tag_file_is_one_finding_whichever_it_is(copy: Path) -> None:
    """No damage to a record makes the payload look damaged."""
    beside = {path for path in files(copy) if not path.startswith("data/")}
    for name in beside:
        before = (copy / name).read_bytes()
        for position in range(0, len(before), max(1, len(before) // 12)):
            flipped = bytearray(before)
            flipped[position] ^= 1 << (position % 8)
            (copy / name).write_bytes(flipped)
            found = named(verify(copy, "fast"))
            if name == layout.TAG_MANIFEST:  # a wrong digest in it is a finding on that file
                assert found and found <= beside, f"byte {position} of {name}"
            else:
                assert found == {name}, f"byte {position} of {name}"
        (copy / name).write_bytes(before)
    assert verify(copy, "fast").ok


@pytest.mark.parametrize("how", ["rsync -a", "cp -r", "cp -a", "tar", "chmod", "touch"])
def test_an_undamaged_copy_is_sound(sound: Path, tmp_path: Path, how: str) -> None:
    copy = tmp_path / "copied"
    if how == "tar":
        copy.mkdir()
        subprocess.run(f"tar -C '{sound}' -cf - . | tar -C '{copy}' -xf -", shell=True, check=True)
    elif how.startswith("rsync"):
        subprocess.run([*how.split(), f"{sound}/", copy], check=True)
    else:
        subprocess.run(
            [*(how.split() if how.startswith("cp") else ["cp", "-r"]), sound, copy], check=True
        )
    for path in copy.rglob("*"):
        if how == "chmod" and path.is_file():
            path.chmod(0o444)
        elif how == "touch":
            os.utime(path, (0, 0))
    report = verify(copy)
    assert report.findings == ()
    assert (report.files, report.size) == (
        len(contents()) + 1,
        sum(map(len, contents().values())) + BIG_SIZE,
    )
    assert report.bundle_id == sha256_of_bytes((sound / layout.LOCK).read_bytes())


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
        "bundle_id": sha256_of_bytes((copy / layout.LOCK).read_bytes()),
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


HOSTILE = [
    b"not utf-8 \xff\xfe",
    b"new\nline",
    b"\x1b[2J\x1b[31mred",
    b"tab\t",
    b"\xc2\x85",
    "‮txt.exe".encode(),
]


@pytest.mark.parametrize("locale", ["C.UTF-8", "C", "without UTF-8"])
def test_names_that_are_no_text_do_not_break_what_is_printed(
    copy: Path, tmp_path: Path, locale: str
) -> None:
    for name in HOSTILE:
        with open(os.path.join(os.fsencode(copy / "data"), name), "wb"):  # noqa: PTH118
            pass
    (copy / "ünï").touch()
    # Python's own switches make `C` what `de_DE.ISO-8859-1` would be, if it were installed here.
    without = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} if locale == "without UTF-8" else {}
    environment = {**os.environ, "LC_ALL": "C" if without else locale, **without}
    done = stage("verify", copy, "--report", tmp_path / "r.json", env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == len(HOSTILE) + 1, done.stdout
    assert "\x1b" not in done.stdout and "\\x1b[2J" in done.stdout and "\\udcff" in done.stdout
    assert len(json.loads((tmp_path / "r.json").read_text())["findings"]) == len(HOSTILE) + 1
    document = json.loads(stage("verify", copy, "--json", env=environment).stdout)
    assert len(document["findings"]) == len(HOSTILE) + 1


def test_a_reader_that_goes_away_does_not_turn_damage_into_success(copy: Path) -> None:
    for number in range(3000):
        (copy / f"data/extra-{number}").touch()
    script = (
        f"'{sys.executable}' -m stage verify --fast '{copy}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode not in (0, 127) and "Traceback" not in done.stderr


def test_what_is_no_bundle_is_said_to_be_none(tmp_path: Path, sound: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "gone", "no such folder"),
        (tmp_path / "file", "not a bundle: it is a file"),
        (tmp_path / "empty", "not a bundle: it has neither bagit.txt nor stage.lock"),
        (sound.parent, f"not a bundle|Did you mean {sound}?"),
        (sound / "data", "not a bundle"),
    ):
        done = stage("verify", path)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(f"error: {path}: ")
        assert [part for part in said.split("|") if part not in done.stderr] == []


def test_without_a_lock_the_payload_manifest_says_what_to_read(copy: Path) -> None:
    """Damage of the payload is found although the lock cannot be believed."""
    (copy / layout.LOCK).write_bytes(b"{}")
    with open(copy / BIG, "r+b") as file:
        file.write(b"x")
    paths = {finding.path for finding in verify(copy, jobs=2).findings}
    assert {layout.LOCK, BIG} <= paths


def test_verify_changes_nothing(sound: Path) -> None:
    def state() -> dict[str, tuple[int, int, int]]:
        return {
            str(p): (p.lstat().st_mtime_ns, p.lstat().st_ctime_ns, p.lstat().st_ino)
            for p in [sound, *sound.rglob("*")]
        }

    before = state()
    assert stage("verify", sound).returncode == 0
    assert state() == before


@pytest.mark.parametrize("jobs", [1, 16])
def test_the_findings_do_not_depend_on_the_number_of_threads(copy: Path, jobs: int) -> None:
    for name in ("config.json", "vocab.txt", "1_Pooling/config.json"):
        path = copy / "data/models/bert" / name
        path.write_bytes(b"#" * path.stat().st_size)
    read: list[int] = []
    report = verify(copy, jobs=jobs, progress=read.append)
    assert len(report.findings) == 3 and sum(read) == report.size
    assert report == verify(copy, jobs=3)
