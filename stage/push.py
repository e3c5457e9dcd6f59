"""`stage push`: a finished bundle to another machine or disk, by rsync over ssh, and proof at the other end.

Three transfers over one connection. First what is missing or cut short there, appended and checked (an interrupted
push goes on inside a file); then what rsync's own quick look (size and time) finds different; the tag manifest last,
so that a bundle there is unfinished until all of it has come. Then the other end verifies every byte. What it finds
damaged although it looks right is sent once more with rsync's checksums, and verified again: a bit flip leaves size
and time as they were, and only `-c` on its own repairs that.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage import bundle as layout
from stage.bundle import Bundle
from stage.disk import human_count
from stage.errors import DamageError, IncompleteError, UsageError
from stage.progress import Reporter
from stage.remote import Place, Target, connected
from stage.rsync import LAST, Transfer, require_rsync
from stage.verify import verify

VERIFIER = "stage-verify.py"


@dataclass(frozen=True)
class PushOutcome:
    """What a push did.

    Attributes:
        verified_with: `stage`, `stage-verify.py` or `sha256sum`.
        repaired: files that had to be sent again although they looked right.
        report: the last report of the other end, as `stage verify --json` prints it.
    """

    target: Target
    bundle_id: str
    verified_with: str
    repaired: int
    report: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "target": str(self.target),
            "bundle_id": self.bundle_id,
            "verified_with": self.verified_with,
            "repaired": self.repaired,
            "report": self.report,
        }


def push(root: Path, target: Target, *, ssh: str, delete: bool, reporter: Reporter, quiet: bool) -> PushOutcome:
    """Brings a bundle to its target and has it verified there.

    Args:
        ssh: the command that rsync and we connect with.
        delete: remove files at the target that the bundle does not have.

    Returns:
        The outcome; its report's `ok` says whether the other end found every byte right.

    Raises:
        UsageError: no finished bundle; the target is a folder of something else; no rsync here or there.
        DamageError: this bundle is damaged already.
        IncompleteError: the connection or the disk there ended it; run again.
    """
    bundle = Bundle.open(root)
    here = verify(root, "fast")
    if not here.ok:
        raise DamageError(
            f"{root}: not pushed: {human_count(len(here.findings), 'finding')}, the first: {here.findings[0]}.",
            f"stage verify {root}",
        )
    _refuse_itself(root, target)
    require_rsync()
    with connected(target, ssh) as place:
        facts = _probe(place, root)
        reporter.note(f"{target}: {facts.in_words()}; to verify there: {facts.verifier}")
        transfer = Transfer(place, root, delete=delete, quiet=quiet)
        place.run(f"mkdir -p {shlex.quote(place.folder)}", f"{target}: cannot make the folder")
        if facts.is_finished and not facts.has(bundle):
            place.run(f"rm -f {place.inside(layout.TAG_MANIFEST)} {place.inside(layout.SIGNATURE)}", f"{target}")
        transfer.append()
        transfer.update()
        transfer.finish()
        reporter.note(f"{target}: all of it is sent; reading every byte there, which takes its time")
        report = _verified(place, facts, bundle)
        ours = {*(file.path for file in bundle.lock.files), *layout.tag_paths(bundle.lock), *LAST}
        damaged = [f["path"] for f in report["findings"] if f["path"] in ours and (root / f["path"]).is_file()]
        if damaged:
            reporter.warn(f"{target}: {human_count(len(damaged), 'file')} not as sent; sending again with checksums")
            transfer.repair(damaged)
            report = _verified(place, facts, bundle)
    return PushOutcome(target, bundle.id, facts.verifier, len(damaged), report)


@dataclass(frozen=True)
class _Facts:
    """What the probe found at the target: the state of the folder, and the verifier to use."""

    state: str
    lock_sha256: str | None
    verifier: str

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    def has(self, bundle: Bundle) -> bool:
        return self.lock_sha256 == bundle.id

    def in_words(self) -> str:
        return {"finished": "a bundle is there", "begun": "part of a bundle is there"}.get(self.state, "nothing there")


# The names are `_Facts.state`s; `other` is somebody's folder that we must not write into.
_PROBE = """
d={folder}
if [ ! -e "$d" ]; then echo state=absent
elif [ ! -d "$d" ]; then echo state=file
elif [ -z "$(ls -A "$d")" ]; then echo state=empty
elif [ -f "$d/{tags}" ]; then echo state=finished
elif [ -f "$d/{bagit}" ] || [ -f "$d/{info}" ]; then echo state=begun
else echo state=other; fi
if command -v sha256sum >/dev/null 2>&1; then echo sha256sum=yes; fi
if [ -f "$d/{lock}" ]; then echo "lock=$(sha256sum "$d/{lock}" 2>/dev/null | cut -c1-64)"; fi
if command -v rsync >/dev/null 2>&1; then echo rsync=yes; fi
if stage --version >/dev/null 2>&1; then echo stage=yes; fi
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then echo python=yes; fi
echo end=yes
"""


def _probe(place: Place, root: Path) -> _Facts:
    script = _PROBE.format(
        folder=shlex.quote(place.folder),
        tags=layout.TAG_MANIFEST,
        bagit=layout.BAGIT,
        info=layout.BAG_INFO,
        lock=layout.LOCK,
    )
    said = place.run(script, f"{place.target}: cannot look there")
    answers = dict(line.partition("=")[::2] for line in said.splitlines() if "=" in line)
    state = answers.get("state", "")
    if "end" not in answers or not state:
        raise IncompleteError(f"{place.target}: its shell does not answer as a shell does.", "Is it a login node?")
    if state in ("file", "other"):
        what = "a file" if state == "file" else "a folder with other things in it"
        raise UsageError(f"{place.target}: is {what}, not a bundle.", f"Give a new folder: {place.target}/bundle")
    if "rsync" not in answers:
        raise UsageError(
            f"{place.target}: there is no rsync there.", "Load or install it there, or carry the folder another way."
        )
    return _Facts(state, answers.get("lock"), _verifier(place, answers, (root / VERIFIER).is_file()))


def _verifier(place: Place, answers: dict[str, str], has_verifier: bool) -> str:
    if place.target.host is None or "stage" in answers:
        return "stage"
    if "python" in answers and has_verifier:
        return VERIFIER
    if "sha256sum" in answers:
        return "sha256sum"
    raise UsageError(
        f"{place.target}: nothing there can verify a bundle: no `stage`, no python3, no sha256sum.",
        "Make one of them available there to shells that are no login shells (as `ssh HOST command -v python3` finds).",
    )


def _refuse_itself(root: Path, target: Target) -> None:
    if target.host is not None:
        return
    here, there = root.resolve(), Path(target.folder).resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(f"{target}: lies inside {root}, or the other way round.", "Give another folder.")


def _verified(place: Place, facts: _Facts, bundle: Bundle) -> dict[str, Any]:
    """The report of the other end.

    Raises:
        IncompleteError: its verifier could not finish.
    """
    if place.target.host is None:
        return verify(Path(place.target.folder)).to_json()
    if facts.verifier == "sha256sum":
        return _verified_by_coreutils(place, bundle)
    program = "stage verify" if facts.verifier == "stage" else f"python3 {place.inside(VERIFIER)}"
    done = place.ask(f"{program} --json {shlex.quote(place.folder)}")
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = None
    if done.returncode not in (0, 1) or not isinstance(report, dict) or not isinstance(report.get("findings"), list):
        raise IncompleteError(
            f"{place.target}: all is sent, but `{facts.verifier}` there could not verify it "
            f"(exit code {done.returncode}).",
            f"Look there yourself: {program} {place.folder}",
        )
    return report


def _verified_by_coreutils(place: Place, bundle: Bundle) -> dict[str, Any]:
    """What `sha256sum -c` of both manifests and a listing say, as a report."""
    checks = " ; ".join(f"LC_ALL=C sha256sum -c {name} 2>/dev/null" for name in (layout.TAG_MANIFEST, layout.MANIFEST))
    said = place.run(
        f"cd {shlex.quote(place.folder)} || exit 1\n{checks}\necho {_LISTING}\nfind . ! -type d",
        f"{place.target}: sha256sum could not run",
    )
    checked, _, listing = said.partition(f"{_LISTING}\n")
    verdicts = dict(line.rpartition(": ")[::2] for line in checked.splitlines())
    present = {line.removeprefix("./") for line in listing.splitlines()}
    digests = layout.parse_manifest((bundle.root / layout.TAG_MANIFEST).read_bytes())
    digests |= {file.path: file.sha256 or "" for file in bundle.lock.files}
    findings = []
    for path, digest in sorted(digests.items()):
        if path not in present:
            findings.append((path, "missing", f"sha256 {digest}", "nothing"))
        elif verdicts.get(path) != "OK":
            findings.append((path, "mismatched", f"sha256 {digest}", "another, or it cannot be read"))
    findings += [(p, "extra", "nothing of that name", "a file") for p in sorted(present - {*digests, *LAST})]
    return {
        "format": 1,
        "bundle": place.folder,
        "bundle_id": bundle.id,
        "level": "full",
        "ok": not findings,
        "files": len(bundle.lock.files),
        "bytes": bundle.lock.size,
        "findings": [dict(zip(("path", "problem", "expected", "found"), finding, strict=True)) for finding in findings],
    }


_LISTING = "--stage-push-listing--"
