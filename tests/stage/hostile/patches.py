"""Patches with false records, and reports that ask for too much."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stage.bundle import bundle as layout
from stage.bundle.bundle import manifest_text
from stage.transfer.make_patch import patch_damage
from stage.transfer.patch import PLAN
from stage.util.digests import sha256_of_bytes
from stage.util.progress import Reporter
from stage.verify.report import Finding, VerificationReport
from tests.stage.bundles import BIG, BIG_SIZE
from tests.stage.hostile.runner import Case, Place

INCOMPLETE = json.dumps(
    {
        "format": 1,
        "name": "m",
        "assets": {
            "x": {
                "kind": "files",
                "request": {},
                "licence": None,
                "left_out": [],
                "source": {"type": "path", "path": "x"},
                "files": [{"path": "data/files/x/a", "size": 1, "sha256": None, "origin": "a"}],
            }
        },
    }
).encode()
Prepare = Callable[[Place], list[str]]
CONFIG = "data/models/bert/config.json"
SHARD = "data/datasets/lines/plain/train-0000%d-of-00002.parquet"


def report_of(root: Path, *findings: Finding) -> VerificationReport:
    return VerificationReport(
        root, "full", sha256_of_bytes((root / layout.LOCK).read_bytes()), 1, 1, findings
    )


def applied(
    change: Callable[[Path], object], *, volume_size: int | None = None, big: bool = False
) -> Prepare:
    """`stage apply` of a patch for two damaged files, after `change` edited the patch's folder."""

    def prepare(place: Place) -> list[str]:
        root = place.bundle(big=big)
        damaged = [CONFIG, "data/models/bert/vocab.txt", *([BIG] if big else [])]
        if volume_size is not None:  # the first file fills the first volume
            damaged = ["data/models/bert/model.safetensors", *(SHARD % number for number in (0, 1))]
        findings = [
            Finding(path, "mismatched", "x", "y", ((0, 1),) if path == BIG else ())
            for path in damaged
        ]
        patch = place.folder / "patch"
        with Reporter(quiet=True) as reporter:
            patch_damage(root, report_of(root, *findings), patch, volume_size, reporter)
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
    names = (layout.BAGIT, layout.BAG_INFO, layout.MANIFEST, PLAN)
    digests = {name: sha256_of_bytes((patch / name).read_bytes()) for name in names}
    (patch / layout.TAG_MANIFEST).write_bytes(manifest_text(digests))


def first(mapping: dict[str, Any]) -> Any:
    return mapping[next(iter(mapping))]


def piece(patch: Path) -> Path:
    return next(path for path in sorted((patch / "data").iterdir()) if path.stat().st_size < 10**4)


def instead(make: Callable[[Path], object]) -> Prepare:
    def change(patch: Path) -> None:
        target = piece(patch)
        target.unlink()
        make(target)

    return applied(change)


def with_file(path: str, data: bytes, tags: bool = False) -> Callable[[dict[str, Any]], object]:
    """The plan carries one more file, with a path of its own choice."""

    def edit(document: dict[str, Any]) -> None:
        digest = sha256_of_bytes(data)
        document["contents"][digest] = {"size": 0, "pieces": []}
        document["tags"][path] = digest

    return edit


def volumes(change: Callable[[list[Path]], object]) -> Prepare:
    """A patch in volumes, some of them changed."""
    return applied(lambda patch: change(sorted(patch.iterdir())), volume_size=210_000)


def mixed(parts: list[Path]) -> None:
    """Volumes of two patches, in one folder."""
    edit_plan(parts[0], lambda document: document.update(base="0" * 64, target="0" * 64))


def reported(text: bytes | Callable[[Path], bytes], *, big: bool = False) -> Prepare:
    """`stage patch --report` of an invented report."""

    def prepare(place: Place) -> list[str]:
        root = place.bundle(big=big)
        place.write("report.json", text if isinstance(text, bytes) else text(root))
        return ["patch", "bundle", "--report", "report.json", "-o", "patch"]

    return prepare


def finding(**changes: Any) -> Prepare:
    """A report with one finding: the file with blocks unless stated otherwise."""
    found = {"path": BIG, "problem": "mismatched", "expected": "x", "found": "y", **changes}
    return reported(lambda root: as_report(root, [found]), big=changes.get("path", BIG) == BIG)


def as_report(root: Path, findings: list[Any], **changes: Any) -> bytes:
    return json.dumps({**report_of(root).to_json(), "findings": findings, **changes}).encode()


def _pipe_for_a_report(place: Place) -> list[str]:
    place.bundle()
    os.mkfifo(place.folder / "report.json")
    return ["patch", "bundle", "--report", "report.json", "-o", "patch"]


def _sparse_report(place: Place) -> list[str]:
    place.bundle()
    os.truncate(place.write("report.json", b"{"), 10**11)
    return ["patch", "bundle", "--report", "report.json", "-o", "patch"]


def since(make: Callable[[Path], object]) -> Prepare:
    """`stage patch --since` of a file that is no lock."""

    def prepare(place: Place) -> list[str]:
        place.bundle()
        make(place.folder / "old.lock")
        return ["patch", "bundle", "--since", "old.lock", "-o", "patch"]

    return prepare


def _apply_through_a_link(place: Place) -> list[str]:
    arguments = applied(lambda _: None)(place)
    shutil.move(place.folder / "bundle/data/models", place.folder / "elsewhere")
    (place.folder / "bundle/data/models").symlink_to("../../elsewhere")
    return arguments


DAMAGED, NO_PATCH, NO_REPORT = ("damaged",), ("not a patch",), ("not a verification report",)

CASES = [
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
    Case(
        "plan for another bundle",
        2,
        ("another bundle",),
        plan(lambda d: d.update(base="0" * 64, target="0" * 64)),
    ),
    Case("plan of an unknown kind", 2, NO_PATCH, plan(lambda d: d.update(kind="delete"))),
    Case("base too short", 2, NO_PATCH, plan(lambda d: d.update(base="0" * 63))),
    Case("repairs ..", 3, ("`..`",), plan(lambda d: d["repair"].append("data/../../precious"))),
    Case("repairs absolute", 3, ("absolute",), plan(lambda d: d["repair"].append("/etc/passwd"))),
    Case("repairs a tag file", 2, NO_PATCH, plan(lambda d: d["repair"].append("stage.lock"))),
    Case(
        "repairs what is not there",
        2,
        ("does not have",),
        plan(lambda d: d["repair"].append("data/files/x")),
    ),
    Case("repairs twice", 2, NO_PATCH, plan(lambda d: d["repair"].append(d["repair"][0]))),
    Case("repairs a number", 2, NO_PATCH, plan(lambda d: d["repair"].append(5))),
    Case("tag ..", 3, ("`..`",), plan(with_file("../precious", b""))),
    Case("tag of the payload", 2, NO_PATCH, plan(with_file("data/x", b""))),
    Case("tag that no bundle has", 2, ("no bundle has",), plan(with_file("evil.sh", b""))),
    Case(
        "tag with no content",
        2,
        NO_PATCH,
        plan(lambda d: d["tags"].update({"bagit.txt": "0" * 64})),
    ),
    Case(
        "piece negative",
        2,
        NO_PATCH,
        plan(lambda d: first(d["contents"])["pieces"][0].__setitem__(0, -1)),
    ),
    Case(
        "piece behind its end",
        2,
        NO_PATCH,
        plan(lambda d: first(d["contents"])["pieces"][0].__setitem__(1, 10**6)),
    ),
    Case(
        "piece twice",
        2,
        NO_PATCH,
        plan(lambda d: first(d["contents"])["pieces"].append(first(d["contents"])["pieces"][0])),
    ),
    Case("piece in no volume", 2, NO_PATCH, plan(lambda d: d["pieces"].clear())),
    Case("size of 2^70", 2, NO_PATCH, plan(lambda d: first(d["contents"]).update(size=2**70))),
    Case(
        "size of another file",
        2,
        ("contradicts",),
        plan(lambda d: first(d["contents"]).update(size=10**6)),
    ),
    Case("volumes beyond number", 2, NO_PATCH, plan(lambda d: d.update(volumes=10**18))),
    Case("volume 5 of 1", 2, NO_PATCH, plan(lambda d: d.update(volume=5))),
    Case("volume 0", 2, NO_PATCH, plan(lambda d: d.update(volume=0))),
    Case(
        "key twice",
        2,
        NO_PATCH,
        applied(
            lambda patch: seal(
                patch,
                (patch / PLAN).read_bytes().replace(b'"format"', b'"kind": "update", "format"', 1),
            )
        ),
    ),
    Case("piece cut", 1, DAMAGED, applied(lambda patch: os.truncate(piece(patch), 5))),
    Case("piece longer", 1, DAMAGED, applied(lambda patch: piece(patch).write_bytes(bytes(10**5)))),
    Case(
        "piece of other bytes",
        1,
        DAMAGED,
        applied(lambda patch: piece(patch).write_bytes(bytes(piece(patch).stat().st_size))),
    ),
    Case("piece missing", 1, DAMAGED, applied(lambda patch: piece(patch).unlink())),
    Case("piece a pipe", 1, DAMAGED, instead(os.mkfifo), how="process"),
    Case(
        "piece a link to a device",
        1,
        DAMAGED,
        instead(lambda path: path.symlink_to("/dev/zero")),
        how="process",
    ),
    Case(
        "block of other bytes",
        1,
        DAMAGED,
        applied(
            lambda patch: max(
                (patch / "data").iterdir(), key=lambda p: p.stat().st_size
            ).write_bytes(bytes(2**24 - 1)),
            big=True,
        ),
    ),
    Case(
        "plan a pipe",
        1,
        DAMAGED,
        applied(lambda patch: [(patch / PLAN).unlink(), os.mkfifo(patch / PLAN)]),
        how="process",
    ),
    Case(
        "volume missing", 5, ("still missing: 2",), volumes(lambda parts: shutil.rmtree(parts[1]))
    ),
    Case("volumes of two patches", 2, ("another patch",), volumes(mixed)),
    Case(
        "a volume twice in place of another",
        5,
        ("still missing",),
        volumes(lambda parts: [shutil.rmtree(parts[1]), shutil.copytree(parts[0], parts[1])]),
    ),
    Case(
        "a volume damaged",
        1,
        DAMAGED,
        volumes(lambda parts: piece(parts[1]).write_bytes(bytes(5000))),
    ),
    Case("through a link out of the bundle", 3, ("a link or file stands",), _apply_through_a_link),
    Case(
        "old lock no JSON", 2, ("old.lock", "not JSON"), since(lambda path: path.write_bytes(b"{"))
    ),
    Case("old lock a pipe", 2, ("old.lock", "pipe"), since(os.mkfifo), how="process"),
    Case(
        "old lock of no bundle",
        2,
        ("incomplete",),
        since(lambda path: path.write_bytes(INCOMPLETE)),
    ),
    Case("report no JSON", 2, NO_REPORT, reported(b"\x80\x02.")),
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
    Case("report a pipe", 2, ("pipe",), _pipe_for_a_report, how="process"),
    Case("report of 100 GB", 2, ("larger",), _sparse_report, how="process"),
    Case("finding of ..", 2, ("nothing that a patch can repair",), finding(path="../precious")),
    Case(
        "finding of escape sequences",
        2,
        ("nothing that a patch can repair",),
        finding(path="\x1b[2J"),
    ),
    Case("finding unknown", 2, NO_REPORT, finding(problem="evil")),
    Case("finding a number", 2, NO_REPORT, reported(lambda root: as_report(root, [5]))),
    Case(
        "finding twice is one",
        0,
        ("1 piece",),
        reported(
            lambda root: as_report(
                root, [{"path": CONFIG, "problem": "mismatched", "expected": "x", "found": "y"}] * 2
            )
        ),
    ),
    Case("range negative", 2, NO_REPORT, finding(ranges=[[-1, 5]])),
    Case("range backwards", 2, NO_REPORT, finding(ranges=[[5, 1]])),
    Case("range of three", 2, NO_REPORT, finding(ranges=[[1, 2, 3]])),
    Case("range of fractions", 2, NO_REPORT, finding(ranges=[[0.0, 1.5]])),
    Case("range of texts", 2, NO_REPORT, finding(ranges="ab")),
    Case("range behind the end", 2, ("up to",), finding(ranges=[[0, BIG_SIZE + 1]])),
    Case("range of 2^70", 2, NO_REPORT, finding(ranges=[[0, 2**70]])),
    Case(
        "ranges that overlap are joined",
        0,
        ("2 pieces",),
        finding(ranges=[[0, 2**24], [5, 2**24 + 1], [7, 9]]),
    ),
]
