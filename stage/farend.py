"""The other end of a push: what lies in the folder there, what can verify a bundle there, and what that says.

Asked by small shell scripts, so that the other end needs nothing of ours.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage import bundle as layout
from stage.bundle import Bundle
from stage.errors import IncompleteError, UsageError
from stage.remote import Place
from stage.verify import verify

VERIFIER = "stage-verify.py"


@dataclass(frozen=True)
class Facts:
    """What the probe found at the target.

    Attributes:
        state: of the folder: `absent`, `empty`, `begun` or `finished`.
        lock_sha256: of the lock there; None: there is none, or nothing that could tell.
        name: of the bundle there, as its lock has it; None where that cannot be read.
        verifier: what to verify with: `stage`, `stage-verify.py` or `sha256sum`.
    """

    state: str
    lock_sha256: str | None
    name: str | None
    verifier: str

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    def has(self, bundle: Bundle) -> bool:
        return self.lock_sha256 == bundle.id

    def in_words(self) -> str:
        return {"finished": "a bundle is there", "begun": "part of a bundle is there"}.get(self.state, "nothing there")


# The names are `Facts.state`s; `other` is somebody's folder that we must not write into.
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
if [ -f "$d/{lock}" ]; then echo "end_of_lock=$(tail -c 2000 "$d/{lock}" 2>/dev/null | tail -n 2)"; fi
if command -v rsync >/dev/null 2>&1; then echo rsync=yes; fi
if stage --version >/dev/null 2>&1; then echo stage=yes; fi
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then echo python=yes; fi
echo end=yes
"""


def probe(place: Place, root: Path) -> Facts:
    """Looks at the target before anything is sent.

    Raises:
        UsageError: a file or somebody's folder is there; no rsync, or nothing that could verify.
        IncompleteError: no connection, or no shell.
    """
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
    verifier = _verifier(place, answers, (root / VERIFIER).is_file())
    return Facts(state, answers.get("lock"), _name(answers.get("end_of_lock", "")), verifier)


def _name(end_of_lock: str) -> str | None:
    """The bundle's name: the last key of a lock, since they are sorted, on a line of its own."""
    try:
        name = json.loads(f"{{{end_of_lock}}}")["name"]
    except (ValueError, KeyError):
        return None
    return name if isinstance(name, str) else None


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


def not_to_append_to(place: Place) -> frozenset[str]:
    """The files there that must not be written into, relative to the folder: they are to be replaced.

    A file with several names (a store's, a `cp -al` snapshot's) would change under all of them; one that is read-only
    cannot be opened to append.

    Raises:
        IncompleteError, UsageError: it cannot be told.
    """
    said = place.run(
        f"cd {shlex.quote(place.folder)} && find . -type f \\( -links +1 -o ! -perm -200 \\) -print0",
        f"{place.target}: cannot tell which files there have other names (hard links)",
    )
    return frozenset(name.removeprefix("./") for name in said.split("\0") if name)


def verified_there(place: Place, facts: Facts, bundle: Bundle) -> dict[str, Any]:
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
    findings += [(p, "extra", "nothing of that name", "a file") for p in sorted(present - {*digests, *layout.SEAL})]
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
