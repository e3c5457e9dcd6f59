"""Patches with false records, and reports that ask for too much."""

from __future__ import annotations

import json
import os
import shutil
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stage.bundle.bundle import (
    BAG_INFO,
    BAGIT,
    LOCK,
    MANIFEST,
    TAG_MANIFEST,
    manifest_text,
    parse_manifest,
)
from stage.bundle.bundle import PATCH_PLAN as PLAN
from stage.bundle.verifier import Finding, VerificationReport
from stage.carry.patch import patch_damage
from stage.files import sha256_of_bytes
from stage.progress import Reporter
from tests.stage.hostile.runner import Case, Place

Prepare = Callable[[Place], list[str]]
CONFIG = "data/models/bert/config.json"


def report_of(root: Path, *findings: Finding) -> VerificationReport:
    bundle_id = sha256_of_bytes((root / LOCK).read_bytes())
    return VerificationReport(root, "full", bundle_id, 1, 1, findings, None, (), None, None)


def applied(change: Callable[[Path], object]) -> Prepare:
    """`stage apply` of a patch for two damaged files, after `change` edited the patch's folder."""

    def prepare(place: Place) -> list[str]:
        root = place.bundle()
        damaged = [CONFIG, "data/models/bert/vocab.txt"]
        findings = [Finding(path, "mismatched", "x", "y") for path in damaged]
        patch = place.folder / "patch"
        with Reporter(quiet=True) as reporter:
            patch_damage(root, report_of(root, *findings), patch, reporter)
        for path in damaged:
            with open(root / path, "r+b") as file:
                file.write(b"#")
        change(patch)
        return ["apply", "bundle", "patch"]

    return prepare


def plan(edit: Callable[[dict[str, Any]], object]) -> Prepare:
    """An edited plan that the tag manifest agrees with."""
    return applied(lambda patch: edit_plan(patch, edit))


def edit_plan(patch: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((patch / PLAN).read_bytes())
    edit(document)
    seal(patch, json.dumps(document).encode())


def seal(patch: Path, text: bytes) -> None:
    (patch / PLAN).write_bytes(text)
    names = (BAGIT, BAG_INFO, MANIFEST, PLAN)
    digests = {name: sha256_of_bytes((patch / name).read_bytes()) for name in names}
    (patch / TAG_MANIFEST).write_bytes(manifest_text(digests))


def content(patch: Path) -> Path:
    return patch / "data" / CONFIG


def with_lock(old: bytes, new: bytes) -> Prepare:
    """The lock in the patch is edited; its manifests agree with it."""

    def change(patch: Path) -> None:
        lock = patch / "data" / LOCK
        lock.write_bytes(lock.read_bytes().replace(old, new))
        tags = patch / "data" / TAG_MANIFEST
        edit_manifest(tags, patch / "data", LOCK)
        edit_manifest(patch / MANIFEST, patch, f"data/{LOCK}", f"data/{TAG_MANIFEST}")
        seal(patch, (patch / PLAN).read_bytes())

    return applied(change)


def edit_manifest(manifest: Path, root: Path, *paths: str) -> None:
    listed = parse_manifest(manifest.read_bytes())
    listed |= {path: sha256_of_bytes((root / path).read_bytes()) for path in paths}
    manifest.write_bytes(manifest_text(listed))


def instead(make: Callable[[Path], object]) -> Prepare:
    def change(patch: Path) -> None:
        target = content(patch)
        target.unlink()
        make(target)

    return applied(change)


def reported(text: bytes | Callable[[Path], bytes]) -> Prepare:
    """`stage patch --report` of an invented report."""

    def prepare(place: Place) -> list[str]:
        root = place.bundle()
        place.write("report.json", text if isinstance(text, bytes) else text(root))
        return ["patch", "bundle", "--report", "report.json", "-o", "patch"]

    return prepare


def finding(**changes: Any) -> Prepare:
    """A report with one finding."""
    found = {"path": CONFIG, "problem": "mismatched", "expected": "x", "found": "y", **changes}
    return reported(lambda root: as_report(root, [found]))


def as_report(root: Path, findings: list[Any], **changes: Any) -> bytes:
    return json.dumps({**report_of(root).to_json(), "findings": findings, **changes}).encode()


def _apply_through_a_link(place: Place) -> list[str]:
    arguments = applied(lambda _: None)(place)
    shutil.move(place.folder / "bundle/data/models", place.folder / "elsewhere")
    (place.folder / "bundle/data/models").symlink_to("../../elsewhere")
    return arguments


DAMAGED, NO_PATCH, NO_REPORT = ("damaged",), ("not a patch",), ("not a verification report",)

CASES = [
    Case(
        "a bundle in place of the patch",
        2,
        ("other: a bundle, not a patch", "stage apply bundle PATCH"),
        lambda place: [
            "apply",
            "bundle",
            shutil.copytree(place.bundle(), place.folder / "other").name,
        ],
    ),
    Case(
        "the patch first",
        2,
        ("patch is a patch, and bundle is a bundle", "stage apply bundle patch"),
        lambda place: [applied(lambda _: None)(place)[0], "patch", "bundle"],
    ),
    Case(
        "since the same bundle",
        2,
        ("bundle/stage.lock: this is the lock of the same bundle",),
        lambda place: [
            "patch",
            place.bundle().name,
            "--since",
            "bundle/stage.lock",
            "-o",
            "patch",
        ],
    ),
    Case("plan no JSON", 2, NO_PATCH, applied(lambda patch: seal(patch, b"{"))),
    Case("plan a list", 2, NO_PATCH, applied(lambda patch: seal(patch, b"[]"))),
    Case("plan nested", 2, NO_PATCH, applied(lambda patch: seal(patch, b"[" * 100_000))),
    Case(
        "plan UTF-16",
        2,
        NO_PATCH,
        applied(lambda patch: seal(patch, '{"format": 1}'.encode("utf-16"))),
    ),
    Case("plan not sealed", 1, DAMAGED, applied(lambda patch: (patch / PLAN).write_bytes(b"{}"))),
    Case("plan of a newer format", 2, ("format 2",), plan(lambda d: d.update(format=2))),
    Case("plan of format true", 2, ("format True",), plan(lambda d: d.update(format=True))),
    Case("base too short", 2, NO_PATCH, plan(lambda d: d.update(base="0" * 63))),
    Case("no base", 2, NO_PATCH, plan(lambda d: d.pop("base"))),
    Case(
        "lock of ..",
        3,
        ("`..`",),
        with_lock(CONFIG.encode(), b"data/models/bert/../../../precious"),
    ),
    Case(
        "lock of absolute paths", 3, ("precious",), with_lock(CONFIG.encode(), b"/precious/config")
    ),
    Case("lock no JSON", 2, ("not a lock",), with_lock(b"{", b"[")),
    Case(
        "lock of another bundle",
        1,
        DAMAGED,
        applied(lambda patch: (patch / "data" / LOCK).write_bytes(b"{}")),
    ),
    Case("lock of another size", 1, DAMAGED, with_lock(b'"size": 2', b'"size": 3')),
    Case(
        "key twice",
        2,
        NO_PATCH,
        applied(
            lambda patch: seal(
                patch,
                (patch / PLAN).read_bytes().replace(b'"format"', b'"base": "x", "format"', 1),
            )
        ),
    ),
    Case("content cut", 1, DAMAGED, applied(lambda patch: os.truncate(content(patch), 5))),
    Case(
        "content longer",
        1,
        DAMAGED,
        applied(lambda patch: content(patch).write_bytes(bytes(10**5))),
    ),
    Case(
        "content of other bytes",
        1,
        DAMAGED,
        applied(lambda patch: content(patch).write_bytes(bytes(content(patch).stat().st_size))),
    ),
    Case("content missing", 1, DAMAGED, applied(lambda patch: content(patch).unlink())),
    Case("content a pipe", 1, DAMAGED, instead(os.mkfifo), how="process"),
    Case(
        "content a link to a device",
        1,
        DAMAGED,
        instead(lambda path: path.symlink_to("/dev/zero")),
        how="process",
    ),
    Case(
        "plan a pipe",
        1,
        DAMAGED,
        applied(lambda patch: [(patch / PLAN).unlink(), os.mkfifo(patch / PLAN)]),
        how="process",
    ),
    Case("through a link out of the bundle", 3, ("a link or file stands",), _apply_through_a_link),
    Case(
        "neither report nor old lock",
        2,
        ("one of --report and --since",),
        lambda place: ["patch", str(place.bundle()), "-o", "patch"],
    ),
    Case("report no JSON", 2, NO_REPORT, reported(b"\x80\x02.")),
    Case(
        "report in UTF-16",
        2,
        ("not UTF-8 text (UTF-16)", "iconv -f UTF-16 -t UTF-8 report.json"),
        reported(lambda root: as_report(root, []).decode().encode("utf-16")),
    ),
    Case("report cut", 2, ("the file was cut",), reported(lambda root: as_report(root, [])[:-9])),
    Case(
        "report with a byte order mark",
        2,
        ("nothing that a patch can repair",),
        reported(lambda root: BOM_UTF8 + as_report(root, [])),
    ),
    Case("report nested", 2, NO_REPORT, reported(b"[" * 100_000)),
    Case(
        "report of a newer format",
        2,
        ("format 2",),
        reported(lambda root: as_report(root, [], format=2)),
    ),
    Case(
        "report of another bundle",
        2,
        ("another bundle",),
        reported(lambda r: as_report(r, [], bundle_id="0" * 64)),
    ),
    Case(
        "report of nothing",
        2,
        ("nothing that a patch can repair",),
        reported(lambda root: as_report(root, [])),
    ),
    Case("finding of ..", 2, ("nothing that a patch can repair",), finding(path="../precious")),
    Case(
        "finding of escape sequences",
        2,
        ("nothing that a patch can repair",),
        finding(path="\x1b[2J"),
    ),
    Case("finding of what does not load", 2, ("does not load",), finding(problem="unloadable")),
    Case("finding unknown", 2, NO_REPORT, finding(problem="evil")),
    Case("finding a number", 2, NO_REPORT, reported(lambda root: as_report(root, [5]))),
    Case(
        "finding twice is one",
        0,
        ("1 file",),
        reported(
            lambda root: as_report(
                root, [{"path": CONFIG, "problem": "mismatched", "expected": "x", "found": "y"}] * 2
            )
        ),
    ),
]
