#!/usr/bin/env python3
"""Verifies bundles: the one author of their format, of each rule of a verdict, and of the journal.

It travels in each bundle as `stage-verify.py`, needs Python 3.6, and never a network:

    python3 -I bundle/stage-verify.py [--fast] [--id ID] [--json] [--report FILE] [--failed FILE]

`stage verify` and all of airlift import it. Findings and exit codes are the same: 0 sound, 1 damage
found, 2 not a bundle or one of a newer format, 3 unsafe path in the lock, 5 could not finish. `-I`
keeps PYTHONPATH and the current folder out; as a script this file also drops them itself, before it
imports anything. If a bundle is not signed, who replaced this file can make it print anything.

Parts: the format; findings and remedies; the rules, which read nothing; files and folders; the
journal; the command. Types are comments, because Python 2 reads as far as its own refusal.
"""

# ruff: noqa: E402
import sys


def report_fault(kind, error, trace):
    # type: (Type[BaseException], BaseException, Optional[TracebackType]) -> None
    """An unforeseen fault (no memory, no process) ends with 5: it is not damage."""
    try:
        sys.stderr.write("error: could not verify: %s: %s\n" % (kind.__name__, error))
        sys.stderr.write("  -> Run it again, with more memory (ulimit -v) or --jobs 1.\n")
    finally:
        sys.exit(5)


if __name__ == "__main__":
    if sys.version_info < (3, 6):
        sys.stderr.write(
            "error: needs Python 3.6 or newer, this is %d.%d.\n" % sys.version_info[:2]
        )
        sys.stderr.write("  -> module load python, or /usr/libexec/platform-python (RHEL 8), or:\n")
        sys.stderr.write("     cd BUNDLE && sha256sum -c manifest-sha256.txt\n")
        sys.exit(2)
    # A `json.py` beside this file would be imported in place of Python's own, and could print
    # "sound". `encodings` is imported before anything else: it is where Python's modules are.
    home = sys.modules["encodings"].__path__[0].rpartition("/")[0]
    prefixes = (home, sys.exec_prefix, sys.base_exec_prefix)
    dynamic = [entry for entry in sys.path if entry.endswith("/lib-dynload")]
    sys.path[:] = [home] + [entry for entry in dynamic if entry.startswith(prefixes)]
    sys.excepthook = report_fault

import errno
import hashlib
import json
import mmap
import os
import re
import resource
import signal
import stat
import time
import unicodedata
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType  # noqa: F401
    from typing import (  # noqa: F401
        Any,
        Callable,
        Dict,
        Iterable,
        Iterator,
        List,
        Mapping,
        Optional,
        Sequence,
        Set,
        Tuple,
        Type,
    )

    Entry = Tuple[Optional[int], Optional[str]]  # size and sha256, as far as they are known
    Row = Tuple[str, int, Optional[str]]  # path, size, sha256
    Send = Callable[[List[Any]], None]
    Count = Optional[Callable[[int], object]]
    Say = Optional[Callable[[str], object]]

# --- The format -----------------------------------------------------------------------------------

BAGIT, BAG_INFO = "bagit.txt", "bag-info.txt"
MANIFEST, TAG_MANIFEST = "manifest-sha256.txt", "tagmanifest-sha256.txt"
SIGNATURE = TAG_MANIFEST + ".sig"
REQUEST, LOCK, VERIFIER = "stage.yaml", "stage.lock", "stage-verify.py"
PAYLOAD = "data"
FETCH_PARTIAL = "fetch.partial"  # during `stage fetch`: payload paths that it may have written
PATCH_PLAN = "patch.json"  # a folder with it is a patch
BAGIT_TEXT = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
SEAL = (TAG_MANIFEST, SIGNATURE)  # with it a bundle is finished: written last, removed first
TAG_FILES = (BAG_INFO, BAGIT, MANIFEST, LOCK, REQUEST, VERIFIER)
REQUIRED = frozenset(TAG_FILES + SEAL) - {SIGNATURE, VERIFIER}
COVERED = (BAGIT, MANIFEST, LOCK)  # by the bundle id
LOCK_FORMAT = 1
SMALL_TEXT, MAX_TEXT = 2**20, 2**31  # bytes of files beside the payload
UTF_8 = ("utf-8", "surrogateescape")  # names on the disk, in every locale

PARTIAL_SUFFIX = ".partial"
MAX_COMPONENT_BYTES = 255  # NAME_MAX on every file system our users meet
MAX_PATH_BYTES = 1024  # PATH_MAX is 4096 (1024 on macOS), with the folder of the bundle
ORDINARY = re.compile(r"(?:[\w+=@-][\w.+=@-]*/)*[\w+=@-][\w.+=@-]*\Z", re.ASCII)
# BagIt (RFC 8493, 2.1.3) wants `%` encoded in manifests, and `sha256sum -c` does not decode that.
PATH_RULES = (
    (r"\A\Z", "it is empty"),
    (r"\A/", "it is absolute"),
    (r"\\", "it has a backslash"),
    (r"%", "it has a `%%`"),
    (r"//|/\Z", "it has an empty component"),
    (r"(?:\A|/)(\.\.?)(?=/|\Z)", "it has the component `%s`"),
    (r"(?:\A|/)\s|\s(?:/|\Z)", "a component begins or ends with a space"),
    (r"(\.partial)(?=/|\Z)", "`%s` is the ending of unfinished files"),
)
# Cc: control characters; Cs: lone surrogates (not UTF-8); Zl, Zp: line ends to some readers.
HIDDEN = ("Cc", "Cs", "Zl", "Zp")
# Unicode's embeddings, overrides and isolates (UAX 9) change the direction of what follows.
TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def is_hidden(char, categories=HIDDEN):  # type: (str, Tuple[str, ...]) -> bool
    """Whether a character rewrites a terminal or turns the direction of what follows."""
    return unicodedata.category(char) in categories or unicodedata.bidirectional(char) in TURNS


def escaped(text, categories=HIDDEN):  # type: (str, Tuple[str, ...]) -> str
    """Text whose hidden characters are written out."""
    hidden = [char for char in set(text) if is_hidden(char, categories)]
    return text.translate({ord(char): ascii(char)[1:-1] for char in hidden})


def printable(path):  # type: (str) -> str
    """A path for a terminal: quoted, with hidden characters written out."""
    return "`%s`" % escaped(path)


def problem_with_path(path):  # type: (str) -> Optional[str]
    """Why `path` may not be in a bundle; None if it may.

    A path that may means the same file on ext4, Lustre and APFS, fits on a line of a manifest, and
    never leaves the bundle: it is relative, POSIX-style and normal.
    """
    if ORDINARY.match(path) and len(path) <= MAX_COMPONENT_BYTES and PARTIAL_SUFFIX not in path:
        return None
    hidden = [char for char in path if is_hidden(char)]
    if hidden:
        return "it has the control character U+%04X" % ord(hidden[0])
    for pattern, problem in PATH_RULES:
        match = re.search(pattern, path)
        if match is not None:
            return problem % match.groups()
    if len(path.encode()) > MAX_PATH_BYTES:
        return "it is longer than %d bytes" % MAX_PATH_BYTES
    longest = max(path.split("/"), key=lambda part: len(part.encode()))
    is_long = len(longest.encode()) > MAX_COMPONENT_BYTES
    problem = "`%s...` is longer than %d bytes" % (longest[:40], MAX_COMPONENT_BYTES)
    return problem if is_long else None


def folded(path):  # type: (str) -> str
    """A path on a disk that ignores case and normalises (APFS, NTFS): equal ones are one file."""
    if ORDINARY.match(path):
        lower = path.lower()
        return path if path == lower else lower  # of most, one text in memory is enough
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def collisions(paths):  # type: (Iterable[str]) -> List[Tuple[str, str]]
    """Pairs of paths that cannot exist together.

    These are paths listed twice, paths or folders that differ only in case or Unicode
    normalisation, and a file where another path needs a folder.
    """
    files, folders, seen = {}, {}, {}  # type: Dict[str, str], Dict[str, str], Dict[str, str]
    pairs = []
    for path in sorted(paths):
        key = folded(path)
        if key in files:
            pairs.append((files[key], path))
        files.setdefault(key, path)
        end = path.rfind("/")
        while end > 0 and path[:end] not in folders:
            folders[path[:end]] = path
            end = path.rfind("/", 0, end)
    for folder in sorted(folders):
        key = folded(folder)
        if key in files:
            pairs.append((files[key], folders[folder]))
        elif seen.setdefault(key, folder) != folder:
            pairs.append((seen[key] + "/", folders[folder]))
    return pairs


def sha256_of(data):  # type: (bytes) -> str
    return hashlib.sha256(data).hexdigest()


def is_sha256(value):  # type: (object) -> bool
    return isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")


def manifest_text(digests):  # type: (Mapping[str, str]) -> bytes
    """A BagIt manifest (RFC 8493, 2.1.3), as `sha256sum -c` reads it too."""
    return "".join("%s  %s\n" % (digests[path], path) for path in sorted(digests)).encode(*UTF_8)


def parse_manifest(data):  # type: (bytes) -> Dict[str, str]
    """Path -> sha256 of the valid lines of a manifest. `verify` reports the others."""
    lines = (line.partition("  ") for line in data.decode("utf-8", "replace").split("\n"))
    return {path: digest for digest, separator, path in lines if separator and len(digest) == 64}


def with_unix_lines(data):  # type: (bytes) -> bytes
    """A text as it was before a transfer in text mode gave it the line ends of Windows."""
    return data.replace(b"\r\n", b"\n")


class CannotVerify(Exception):
    """The bundle could not be examined."""

    def __init__(self, message, remedy, exit_code):  # type: (str, str, int) -> None
        super(CannotVerify, self).__init__(message)
        self.message, self.remedy, self.exit_code = message, remedy, exit_code


# A payload file as the canonical text of a lock has it: with its path, sha256 and size. A large
# lock consists of such rows. Read as JSON they would take ten times the memory, and to write them
# again, which shows that the text is canonical, twice the time (100,000 files: 1.6 s, not 0.8 s).
_PLAIN = r'[^"\\\x00-\x1f]*'
_TEXT = '"' + _PLAIN + r'(?:\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]))' + _PLAIN + ')*"'
_ROW = r'    \{\n(?:     "made_by": TEXT,\n)?     "origin": TEXT,\n     "path": (TEXT),\n'
_ROW += r'     "sha256": "([0-9a-f]{64})",\n     "size": (0|[1-9][0-9]{0,18})(?:,\n'
_ROW += r'     "upstream": \{\n      "(?:lfs-sha256|git-sha1)": TEXT\n     \})?\n    \}(?=,?\n)'
ROW = re.compile(_ROW.replace("TEXT", _TEXT).encode())
_TAKEN = "<row>"
_NOT_A_LOCK = "Make it again with `stage lock`, or take it from the bundle's origin."


class Lock(object):
    """What a verification needs of a lock. Fields that say nothing about bytes are not checked.

    Attributes:
        files: path -> (size, sha256 or None).
        is_canonical: it has the one text that its content can have.
        id: sha256 of that text: the bundle id.

    Raises:
        CannotVerify: not a lock, one of a newer format, or a path that may not be in a bundle.
    """

    def __init__(self, data, where=LOCK):  # type: (bytes, str) -> None
        self.files, self.where = {}, where  # type: Dict[str, Entry], str
        try:
            data.decode()  # all of it is UTF-8
            rows = []  # type: List[Row]
            document = self._without_rows(data, rows)
            if document is None:
                rows, document = [], json.loads(data.decode())
            # `_without_rows` leaves rows only if the text is canonical: each row has the form of
            # `ROW`, and the rest was written again. So it is not written again here.
            self.is_canonical = bool(rows) or _canonical(document) == data
            self.id = sha256_of(data if self.is_canonical else _canonical(document))
            self._take(document, iter(rows))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            problem = "%s: not JSON, or not a lock: a field is not what it should be." % where
            raise CannotVerify(problem, _NOT_A_LOCK, 2)
        for pair in collisions(self.files)[:1]:
            problem = "%s and %s would be the same file on a disk that ignores case or normalises"
            self._refuse(problem % tuple(map(printable, pair)))
        self.is_complete = None not in [digest for _, digest in self.files.values()]
        self.size = sum(size or 0 for size, _ in self.files.values())

    def _without_rows(self, data, rows):  # type: (bytes, List[Row]) -> Any
        """The document with `_TAKEN` for each row, if its text is canonical; else None."""

        def take(match):  # type: (Any) -> bytes
            path, digest, size = match.group(1).decode(), match.group(2).decode(), match.group(3)
            rows.append((json.loads(path) if "\\" in path else path[1:-1], int(size), digest))
            return taken

        taken = b'    "%s"' % _TAKEN.encode()
        rest = b"" if _TAKEN.encode() in data else ROW.sub(take, data)
        if not rows:
            return None
        document = json.loads(rest.decode())
        files = [row for asset in document["assets"].values() for row in asset["files"]]
        is_usual = files.count(_TAKEN) == len(rows) and _canonical(document) == rest
        return document if is_usual else None

    def _take(self, document, rows):  # type: (Any, Iterator[Row]) -> None
        if type(document["format"]) is not int or document["format"] != LOCK_FORMAT:
            values = (self.where, document["format"], LOCK_FORMAT)
            newer = "%s: format %r; this version of airlift reads format %d." % values
            raise CannotVerify(newer, "Use a newer airlift, or that bundle's " + VERIFIER, 2)
        if not isinstance(document["name"], str):
            raise ValueError("name")
        for name, asset in document["assets"].items():
            before = ""
            for row in asset["files"]:
                path, size, digest = (
                    next(rows) if row == _TAKEN else (row["path"], row["size"], row["sha256"])
                )
                problem = problem_with_path(path)
                parts = path.split("/", 3)  # data/KIND/ASSET/FILE
                if problem is None and (parts[0] != PAYLOAD or parts[2:3] != [name]):
                    problem = "it is outside its asset"
                if path in self.files:
                    problem = "it is there twice, the same file"
                if problem is not None:
                    self._refuse("%s may not be in a bundle: %s" % (printable(path), problem))
                is_right = type(size) is int and 0 <= size < 2**63
                if not is_right or not (digest is None or is_sha256(digest)):
                    raise ValueError(path)
                self.files[path] = (size, digest)
                self.is_canonical &= before < path
                before = path

    def _refuse(self, problem):  # type: (str) -> None
        raise CannotVerify("%s: the path %s." % (self.where, problem), _NOT_A_LOCK, 3)


def _canonical(document):  # type: (Any) -> bytes
    options = {"indent": 1, "sort_keys": True, "ensure_ascii": False, "allow_nan": False}  # type: Any
    return (json.dumps(document, **options) + "\n").encode()


# --- Findings and remedies ------------------------------------------------------------------------

# Codes that a report has as another problem. Each other code is a problem: `missing`, `extra`,
# `mismatched` (size or bytes), `unsafe` (a link or special file), `unreadable`, `invalid` (not the
# text it has to be), `unloadable` (`--deep`: as fetched, but no loader takes it).
PROBLEM_OF = {
    "closed": "unreadable",  # only a right to read is missing: nothing is known of the bytes
    "unfinished": "missing",
    "begun": "extra",  # the record of an unfinished fetch
    "another": "mismatched",  # another bundle than the one that was asked for
    "line-ends": "mismatched",
    "replaced": "unsafe",  # a link or special file in place of a file of the bundle
}
PROBLEMS = ("missing", "extra", "mismatched", "unsafe", "unreadable", "invalid", "unloadable")
LEVELS = ("fast", "full", "deep")
BY_ID = "bundle id"  # what a payload that was read is compared with
TO_CARRY = "missing mismatched unreadable invalid line-ends replaced"
Remedy = NamedTuple("Remedy", [("codes", str), ("text", str), ("alone", bool)])
Remedy.__doc__ = """What repairs findings with one of these codes, with `{...}` to be filled in.

`alone`: no other advice helps before this one is followed."""

UNFINISHED = Remedy(
    "unfinished begun",
    "This bundle is unfinished: run `stage fetch` again where it was made, or copy it again: "
    "the copy had not ended.",
    alone=True,
)
BY_PATCH = Remedy(
    TO_CARRY,
    "If the machine with a sound bundle reaches this one by ssh, there: stage push BUNDLE "
    "me@HOST:FOLDER. Else: {first}Carry {file} there: stage patch BUNDLE --report {name} -o "
    "PATCH. Bring PATCH back. Here: stage apply {root} PATCH.",
    alone=False,
)
REMEDIES = (
    UNFINISHED,
    Remedy(
        "another",
        "This is another bundle than the one asked for; its payload was not read. Give the right "
        "folder, or copy the right bundle. If it was fetched again since, `stage show` where it "
        "was made prints its id now.",
        alone=True,
    ),
    Remedy(
        "unloadable",
        "Every byte is as it was fetched, so another copy does not help. Where the bundle was "
        "made, fetch another revision; or correct the file at its source, then: stage fetch "
        "MANIFEST -o BUNDLE --update ASSET",
        alone=True,
    ),
    Remedy(
        "line-ends",
        "Its text files have the line ends of Windows: the transfer was in text mode (ASCII), or "
        "git changed them. Copy the bundle again, in binary mode.",
        alone=False,
    ),
    Remedy(
        "closed",
        "No right to read: chmod -R u+rX {root} (its owner can); then verify again.",
        alone=False,
    ),
    BY_PATCH,
    Remedy(
        TO_CARRY,
        "Other ways: copy again with rsync -c (--failed LIST writes the paths for rsync "
        "--files-from=LIST), or `stage fetch` where it was made.",
        alone=False,
    ),
    Remedy(
        "extra unsafe replaced",
        "{sound}Extra files are not part of the bundle: move them out of the folder.",
        alone=False,
    ),
)


class Finding(
    NamedTuple("Finding", [("path", str), ("code", str), ("expected", str), ("actual", str)])
):
    """One thing that is not as it should be: path in the bundle, code, and words for a person."""

    __slots__ = ()

    @property
    def problem(self):  # type: () -> str
        """One of `PROBLEMS`."""
        return PROBLEM_OF.get(self.code, self.code)

    def __str__(self):  # type: () -> str
        values = (printable(self.path), self.problem, self.expected, self.actual)
        return escaped("%s: %s: expected %s, found %s" % values, ("Cc", "Cs"))

    def to_json(self):  # type: () -> Dict[str, str]
        values = (self.path, self.problem, self.expected, self.actual, self.code)
        return dict(zip(("path", "problem", "expected", "found", "code"), values))


Stamp = NamedTuple("Stamp", [("digest", str), ("contents", str), ("since", float)])
Stamp.__doc__ = """The payload as it was read: digests over the sorted `line_of` all files, and over
these without the ctimes, which a new hard link moves too; and when the first was read."""


class VerificationReport(
    NamedTuple(
        "VerificationReport",
        [
            ("root", Path),
            ("level", str),
            ("bundle_id", "Optional[str]"),
            ("files", int),
            ("size", int),
            ("findings", "Tuple[Finding, ...]"),
            ("proof", "Optional[str]"),
            ("unproven", "Tuple[str, ...]"),
            ("seal", "Optional[str]"),
            ("stamp", "Optional[Stamp]"),
        ],
    )
):
    """The scope and the findings of a verification. `ok`: there are none.

    Attributes:
        level: `fast`, `full` or `deep`.
        files, size: of the whole bundle, as the lock counts them; size in bytes.
        proof: what the payload was compared with, `BY_ID`; None: with nothing.
        unproven: sound files beside the payload that the bundle id does not cover: only the tag
            manifest vouches for them, and a signature for that.
        seal: sha256 of the tag manifest; None if it is missing. Not in the JSON.
        stamp: of the payload files; None unless a journal was kept, all are sound, and none was
            changed just before it was read. Not in the JSON.
    """

    __slots__ = ()

    @property
    def ok(self):  # type: () -> bool
        """Whether the bundle is as it was made, as far as this level looks."""
        return not self.findings

    @property
    def codes(self):  # type: () -> Set[str]
        """The codes of the findings."""
        return {finding.code for finding in self.findings}

    @property
    def is_another(self):  # type: () -> bool
        """Whether it is another bundle than the one that was asked for by its id."""
        return "another" in self.codes

    @property
    def exit_code(self):  # type: () -> int
        """0 sound, 1 damage, 5 only rights to read are missing."""
        return 0 if self.ok else 5 if self.codes == {"closed"} else 1

    @property
    def to_carry(self):  # type: () -> List[str]
        """The paths of the files that another copy repairs."""
        return [finding.path for finding in self.findings if finding.code in TO_CARRY.split()]

    def to_json(self):  # type: () -> Dict[str, Any]
        """The report as `--json` and `--report` write it (format 1)."""
        return {
            "format": 1,
            "bundle": str(self.root),
            "bundle_id": self.bundle_id,
            "level": self.level,
            "ok": self.ok,
            "files": self.files,
            "bytes": self.size,
            "findings": [finding.to_json() for finding in self.findings],
            "proof": {"payload": self.proof, "unproven": list(self.unproven)},
        }


def suggest_fixes(report, written=None, command="stage verify"):
    # type: (VerificationReport, Optional[Path], str) -> List[str]
    """What repairs the damage, a line each.

    Args:
        written: the file of the report; None: there is none.
        command: what verifies here.
    """
    values = {"root": quote(str(report.root)), "file": quote(str(written or "FILE"))}
    values["name"] = quote(written.name if written else "FILE")
    first = "Write a report: %s %s --report FILE. " % (command, values["root"])
    values["first"] = "" if written else first
    is_all_extra = report.codes <= {"extra", "unsafe"}
    values["sound"] = "Nothing of the bundle is damaged. " if is_all_extra else ""
    has_payload = any(finding.path.startswith(PAYLOAD + "/") for finding in report.findings)
    chosen = [one for one in REMEDIES if report.codes.intersection(one.codes.split())]
    by_patch = {"unfinished"}.union(TO_CARRY.split())
    is_unfinished = "unfinished" in report.codes and report.codes <= by_patch
    if is_unfinished and report.files and not has_payload:
        chosen = [UNFINISHED, BY_PATCH]  # only files beside the payload were not copied
    elif chosen and chosen[0].alone:
        chosen = chosen[:1]
    return [one.text.format(**values) for one in chosen]


HOW = {
    "fast": "names and sizes are right (bytes not read)",
    "full": "every byte is as it was fetched",
    "deep": "every byte is as it was fetched, and everything that could be checked loads",
}


def describe_sound(report, count, size, is_signed=False):
    # type: (VerificationReport, str, str, bool) -> List[str]
    """What was proven of a sound bundle, a line each.

    Args:
        count, size: of its files, in words.
        is_signed: a good signature covers every file.
    """
    beside = "" if is_signed else ", ".join(report.unproven)
    but = " (which does not cover %s)" % beside if beside else ""
    proof = "every byte of %s/ proven against the bundle id%s" % (PAYLOAD, but)
    values = (report.root, count, size, HOW[report.level])
    lines = ["%s: sound: %s, %s, %s" % values, "bundle id %s" % report.bundle_id]
    return lines + ([proof] if report.proof else [])


# --- The rules: they read nothing -----------------------------------------------------------------

# Errors that say nothing about a file: no memory, descriptors or processes; a lost file server.
_NO_MEANS = "ENOMEM EMFILE ENFILE EAGAIN ENOBUFS ESTALE ETIMEDOUT ENOTCONN ESHUTDOWN ECONNRESET"
NO_MEANS = frozenset(getattr(errno, name, -1) for name in (_NO_MEANS + " EHOSTDOWN").split())


class Findings(object):
    """Collects findings; only the first on a path is kept, so that one fault is reported once."""

    def __init__(self):  # type: () -> None
        self.by_path = {}  # type: Dict[str, Finding]

    def add(self, path, code, expected, actual):  # type: (str, str, str, str) -> None
        self.by_path.setdefault(path, Finding(path, code, expected, actual))

    def add_error(self, path, expected, number):  # type: (str, str, Optional[int]) -> None
        """Notes that the system did not give a file. Raises an error that says nothing of it."""
        if number in NO_MEANS:
            raise OSError(number, os.strerror(number or 0), path)
        code = "closed" if number == errno.EACCES else "unreadable"
        self.add(path, code, expected, os.strerror(number or 0))


def judge_tags(texts, findings):  # type: (Mapping[str, bytes], Findings) -> Dict[str, bytes]
    """The files beside the payload that the tag manifest confirms, or does not speak of."""
    if TAG_MANIFEST not in texts:
        actual = "nothing: the bundle is unfinished"
        findings.add(TAG_MANIFEST, "unfinished", "the file that ends a bundle", actual)
        return {path: texts[path] for path in TAG_FILES if path in texts}
    plain = with_unix_lines(texts[TAG_MANIFEST])
    recorded = parse_manifest(plain)
    uncovered = [path for path in TAG_FILES if path in texts and path not in recorded]
    sound = {path: texts[path] for path in uncovered}
    for path in [path for path in TAG_FILES if path in recorded]:
        actual = sha256_of(texts[path]) if path in texts else ""
        if not actual:
            findings.add(path, "missing", "sha256 " + recorded[path], "nothing")
        elif actual == recorded[path]:
            sound[path] = texts[path]
        else:
            expected = "sha256 %s (recorded in %s)" % (recorded[path], TAG_MANIFEST)
            text, code = with_unix_lines(texts[path]), "mismatched"
            if sha256_of(text) == recorded[path]:
                sound[path], code = text, "line-ends"
            findings.add(path, code, expected, "sha256 " + actual)
    is_exact = plain == manifest_text(recorded)
    if is_exact and plain != texts[TAG_MANIFEST]:
        findings.add(TAG_MANIFEST, "line-ends", "lines that end in \\n", "those of Windows")
    if not is_exact or uncovered or set(recorded) - set(TAG_FILES):
        detail = "no sound line for " + uncovered[0] if uncovered else "something else"
        expected = "one `<sha256>  <path>` line for each tag file, sorted"
        findings.add(TAG_MANIFEST, "invalid", expected, detail)
    return sound


def judge_lock(tags, where, findings):
    # type: (Mapping[str, bytes], str, Findings) -> Optional[Lock]
    """The lock; None if it is missing or cannot be believed.

    Raises:
        CannotVerify: the tag manifest is sound, and the lock cannot be read.
    """
    if LOCK not in tags:
        findings.add(LOCK, "missing", "the lock", "nothing")
        return None
    try:
        lock = Lock(tags[LOCK], where)
    except CannotVerify:
        if TAG_MANIFEST not in findings.by_path:
            raise
        findings.add(LOCK, "invalid", "a lock", "something that cannot be read as one")
        return None
    if not lock.is_complete or not lock.is_canonical:
        expected = "a complete lock in its one true text"
        findings.add(LOCK, "invalid", expected, "an edited or unfinished one")
    manifest = hashlib.sha256()  # of the whole text, which would take much memory
    for path in sorted(lock.files):
        manifest.update(("%s  %s\n" % (lock.files[path][1], path)).encode(*UTF_8))
    implied = {BAGIT: sha256_of(BAGIT_TEXT), MANIFEST: manifest.hexdigest()}
    for path in implied:
        is_known = path in tags and (lock.is_complete or path != MANIFEST)
        if is_known and sha256_of(tags[path]) != implied[path]:
            findings.add(path, "invalid", "the text that %s implies" % LOCK, "another")
    lines = tags.get(BAG_INFO, b"").decode("utf-8", "replace").splitlines()
    oxum = "%d.%d" % (lock.size, len(lock.files))
    for line in ("Payload-Oxum: " + oxum, "External-Identifier: sha256:" + lock.id):
        label = line.partition(":")[0].lower()
        if BAG_INFO in tags and [one for one in lines if one.lower().startswith(label)] != [line]:
            findings.add(BAG_INFO, "invalid", "one line `%s`" % line, "none such, or others")
    return lock


def judge_names(entries, expected, knows_payload, findings):
    # type: (Set[str], Mapping[str, Entry], bool, Findings) -> None
    """Finds extra and missing files among `entries`, the paths of the regular files.

    Args:
        knows_payload: whether something says which payload there has to be.
    """
    by_path = findings.by_path
    for path in entries.difference(expected, TAG_FILES, SEAL):
        if knows_payload or not path.startswith(PAYLOAD + "/"):
            code = "begun" if path == FETCH_PARTIAL else "extra"
            findings.add(path, code, "nothing of that name", "a file")
    for path in REQUIRED.union(expected) - entries:
        above = [by_path.get(path[: slash.start()]) for slash in re.finditer("/", path)]
        unreadable = [one for one in above if one and one.problem == "unreadable"]
        if path in by_path and by_path[path].code == "unsafe":
            by_path[path] = by_path[path]._replace(code="replaced")
        elif unreadable:
            findings.add(path, unreadable[0].code, "a file", unreadable[0].actual)
        else:
            findings.add(path, "missing", "a file", "nothing")


def judge_file(path, expected, size, digest, error, findings, is_windows=False):
    # type: (str, Entry, int, Optional[str], Optional[int], Findings, bool) -> None
    """Notes what is wrong with a payload file.

    Args:
        size, digest: as they are; digest None: not read.
        error: the number of the system's error; 0: none.
        is_windows: only its line ends are wrong.
    """
    wanted = size if expected[0] is None else expected[0]
    if error:
        findings.add_error(path, "sha256 %s" % expected[1], error)
    elif is_windows:
        actual = "%d bytes, with the line ends of Windows" % size
        findings.add(path, "line-ends", "%d bytes" % wanted, actual)
    elif digest is None and size != wanted:
        findings.add(path, "mismatched", "%d bytes" % wanted, "%d bytes" % size)
    elif size != wanted:
        findings.add(path, "mismatched", "%d bytes" % wanted, "%d bytes when read" % size)
    elif digest not in (None, expected[1]):
        findings.add(path, "mismatched", "sha256 %s" % expected[1], "sha256 %s" % digest)


# --- Files and folders ----------------------------------------------------------------------------


def check_is_bundle(root):  # type: (Path) -> None
    """Raises CannotVerify for no such folder, or one without any of a bundle's files."""
    problem, remedy = "", "Give the folder that `stage fetch -o` wrote."
    if not root.exists():
        problem = "no such folder"
    elif not root.is_dir():
        problem, remedy = "not a bundle: it is a file", "Give the bundle's folder."
    elif (root / PATCH_PLAN).is_file() and not (root / LOCK).exists():
        problem = "a patch, not a bundle"
        remedy = "Put it in place: stage apply BUNDLE %s" % quote(str(root))
    elif not any((root / name).exists() for name in (BAGIT, LOCK, TAG_MANIFEST, FETCH_PARTIAL)):
        inside = sorted(str(path.parent) for path in root.glob("*/" + LOCK))
        problem = "not a bundle: it has neither %s nor %s" % (BAGIT, LOCK)
        remedy = "Did you mean %s?" % inside[0] if inside else remedy
    if problem:
        raise CannotVerify("%s: %s." % (root, problem), remedy, 2)


def scan(root, findings):  # type: (bytes, Findings) -> Set[str]
    """The paths of all regular files. Links and special files are findings.

    No file is opened or asked for its `stat`, which is slow on a network disk.
    """
    entries, folders = set(), [b""]
    while folders:
        folder = folders.pop()
        try:
            inside = list(os.scandir(os.path.join(root, folder)))
        except OSError as error:
            if not folder:  # nothing can be said of this bundle
                raise
            expected = "a folder that can be listed"
            findings.add_error(folder.decode(*UTF_8), expected, error.errno)
            continue
        for entry in inside:
            path = os.path.join(folder, entry.name)
            try:
                if entry.is_file(follow_symlinks=False):
                    entries.add(path.decode(*UTF_8))
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                else:
                    mode = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
                    kind = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}.get(mode, "a device")
                    if mode == stat.S_IFLNK:
                        target = os.readlink(entry.path).decode(*UTF_8)
                        kind = "a symbolic link to " + printable(target)
                    findings.add(path.decode(*UTF_8), "unsafe", "a regular file", kind)
            except OSError as error:  # gone since
                expected = "something that can be looked at"
                findings.add_error(path.decode(*UTF_8), expected, error.errno)
    return entries


def read_tags(root, entries, findings):  # type: (bytes, Set[str], Findings) -> Dict[str, bytes]
    """The files beside the payload that can be read."""
    texts = {}
    for path in entries.intersection(TAG_FILES + SEAL):
        most = SMALL_TEXT if path in (BAGIT, BAG_INFO, SIGNATURE) else MAX_TEXT
        try:
            with open(os.path.join(root, path.encode()), "rb") as source:
                size = os.fstat(source.fileno()).st_size
                if size <= most:
                    texts[path] = source.read()
                else:
                    actual = "a larger file, of %d" % size
                    findings.add(path, "invalid", "at most %d bytes" % most, actual)
        except OSError as error:
            findings.add_error(path, "a readable file", error.errno)
    return texts


def verify(
    root, level="full", jobs=None, bundle_id=None, state=None, note=None, resume=True, read=None
):  # type: (Path, str, Optional[int], Optional[str], Optional[Path], Say, bool, Count) -> VerificationReport
    """Compares a bundle with its lock; returns all findings.

    Args:
        level: `fast` looks at names, kinds and sizes; `full` also reads every byte.
        jobs: processes that read; None: one for each core that this process may use.
        bundle_id: the id that the bundle must have, 64 hex digits. Another bundle is one finding,
            and its payload is not read.
        state: the folder of journals (`state_folder`); None: keep none.
        note: prints a line: what is resumed, or why nothing can be kept.
        resume: whether to use the journal of an interrupted verification.
        read: called with the number of payload bytes just read.

    Raises:
        CannotVerify: not a bundle; a sound lock that cannot be read; a process was ended.
        OSError: a lack of memory, descriptors or processes; a file server that does not answer.
    """
    check_is_bundle(root)
    findings, where = Findings(), os.fsencode(str(root))
    entries = scan(where, findings)
    texts = read_tags(where, entries, findings)
    seal = sha256_of(texts[TAG_MANIFEST]) if TAG_MANIFEST in texts else None
    texts = judge_tags(texts, findings)
    lock = judge_lock(texts, str(root / LOCK), findings)
    if lock is not None:
        expected = lock.files
    else:
        digests = parse_manifest(texts.get(MANIFEST, b""))
        expected = {path: (None, digest) for path, digest in digests.items()}
    changed = {f.path for f in findings.by_path.values() if f.code == "line-ends"}
    # The bundle id proves what COVERED names: it is the digest of the lock, and the two others are
    # compared with what the lock implies (`judge_lock`). Without a lock nothing is proven: `proof`.
    unproven = tuple(sorted(set(texts) - changed.union(COVERED)))
    texts.clear()  # the processes that read are forked: what is freed here, they do not have either
    judge_names(entries, expected, lock is not None or bool(expected), findings)
    is_known = lock is not None and not findings.by_path.keys() & {LOCK, TAG_MANIFEST}
    is_another = lock is not None and is_known and bundle_id not in (None, lock.id)
    if lock is not None and is_another:
        findings.add(LOCK, "another", "bundle id %s" % bundle_id, "bundle id " + lock.id)
    stamp, there = None, entries.intersection(expected)
    if level == "fast":
        for path in there:
            try:
                size = os.lstat(os.path.join(where, path.encode(*UTF_8))).st_size
                judge_file(path, expected[path], size, None, 0, findings)
            except OSError as error:  # a folder that may be listed and not entered
                findings.add_error(path, "%s bytes" % expected[path][0], error.errno)
    elif not is_another:
        work = [path for path in there if expected[path][1] is not None]
        work.sort(key=lambda path: (-(expected[path][0] or 0), path))
        del entries, there  # before the fork, as `texts`
        with cpu_limit_named(), Journal(state, root, seal, note) as journal:
            work = journal.resume(work, expected) if resume else journal.begin(work)
            read_files(where, work, expected, jobs or cores(), findings, read, journal.keep)
            stamp = None if findings.by_path else journal.fold(expected)
            journal.remove()
    return VerificationReport(
        root,
        level,
        None if lock is None else lock.id,
        len(expected),
        sum(size or 0 for size, _ in expected.values()),
        tuple(sorted(findings.by_path.values())),
        BY_ID if level == "full" and lock is not None else None,
        unproven,
        seal,
        stamp,
    )


BUFFER_SIZE = 2**20  # the memory of a worker; more was no faster
SMALL = 2**18  # bytes of a file that is read in one go
COST_OF_OPENING = 2**16  # bytes that could be read meanwhile
LEAST_SHARE = 2**23  # milliseconds of work
MOST_SHARES = 1024  # their numbers fit into a pipe of one page
REPORT_EVERY = 2**25  # bytes between two reports of progress


def read_files(root, work, expected, jobs, findings, read, done):
    # type: (bytes, Sequence[str], Mapping[str, Entry], int, Findings, Count, Callable[[str, os.stat_result, int], None]) -> None
    """Reads files on every core, and notes those that differ from what is expected.

    Args:
        work: the paths, the largest file first.
        read: called with the number of bytes just read.
        done: called with path, status and the time (ns) before its reading, for each sound file,
            in the process that read it.
    """
    shares = share_out([expected[path][0] or 0 for path in work], jobs)
    folder, parent, buffers = os.open(root, os.O_RDONLY | os.O_DIRECTORY), os.getpid(), []  # type: int, int, List[memoryview]

    def hash_of(source, size, send):  # type: (int, int, Send) -> Tuple[str, int]
        data = os.read(source, size + 1) if size <= SMALL else b""
        if size <= SMALL and len(data) == size:
            return sha256_of(data), size
        os.lseek(source, 0, os.SEEK_SET)  # it is large, or it changed
        if not buffers:  # a `mmap` begins a page: the kernel fills other memory at 2/3 of the speed
            buffers.append(memoryview(mmap.mmap(-1, BUFFER_SIZE)))
        digest, length, reported, count = hashlib.sha256(), 0, 0, 1
        while count:
            count = os.readv(source, buffers)
            digest.update(buffers[0][:count])
            length += count
            if length - reported >= REPORT_EVERY or not count:
                send(["read", length - reported])
                reported = length
        return digest.hexdigest(), length

    def read_share(number, send):  # type: (int, Send) -> None
        small = 0
        for place in shares[number]:
            is_worker = os.getpid() != parent
            if is_worker and os.getppid() != parent:
                os._exit(1)  # the parent was killed, so no process reads the answer
            path, digest, size = work[place], None, 0  # type: str, Optional[str], int
            is_windows = False
            wanted, right = expected[path]
            before = now_ns()
            try:
                source = os.open(path.encode(*UTF_8), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    status = os.fstat(source)
                    size = status.st_size
                    if wanted in (None, size):
                        digest, size = hash_of(source, size, send)
                        small += size if size <= SMALL else 0
                    elif size <= SMALL_TEXT:
                        text = with_unix_lines(os.pread(source, SMALL_TEXT, 0))
                        is_windows = len(text) == wanted and sha256_of(text) == right
                finally:
                    os.close(source)
            except OSError as error:
                send(["bad", place, 0, None, error.errno, False])
                continue
            if digest == right and size == status.st_size:
                done(path, status, before)
            else:
                send(["bad", place, size, digest, 0, is_windows])
        send(["read", small])

    def receive(message):  # type: (List[Any]) -> None
        if message[0] == "bad":
            path = work[message[1]]
            size, digest, error, is_windows = message[2:]
            judge_file(path, expected[path], size, digest, error, findings, is_windows)
        elif read is not None:
            read(message[1])

    try:
        run_in_workers(read_share, len(shares), jobs, receive)
    finally:
        os.close(folder)


def share_out(sizes, jobs):  # type: (Sequence[int], int) -> List[range]
    """Divides files into ranges of about equal cost; so many that all processes end together."""
    total = sum(sizes) + COST_OF_OPENING * len(sizes)
    enough = max(LEAST_SHARE, total // min(32 * jobs, MOST_SHARES))
    shares, first, cost = [], 0, 0
    for place, size in enumerate(sizes):
        cost += size + COST_OF_OPENING
        if cost >= enough or place + 1 == len(sizes):
            shares.append(range(first, place + 1))
            first, cost = place + 1, 0
    return shares


def cores():  # type: () -> int
    """Cores that this process may use: on a shared node fewer than the node has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_workers(work, count, jobs, receive):
    # type: (Callable[[int, Send], None], int, int, Send) -> None
    """Runs `work(number, send)` for each number below `count`; `receive` gets what it sends.

    Workers are forked: they have the parent's data, and start in a millisecond. Threads that hash
    small files spend more time on the interpreter's lock than on hashing. A free worker takes the
    next number from one pipe, and writes to another, in lines that are too short to mix.

    `concurrent.futures` is not used. Its workers wait forever after their parent was killed (seen
    with Python 3.6 to 3.13), it does not start where there is no /dev/shm, and where the user's
    limit of processes is reached it fails.

    Raises:
        CannotVerify: a worker ended before its work was done.
    """
    children, done = [], 0  # type: List[int], int
    if min(jobs, count) > 1:
        (numbers, numbers_in), (results, results_in) = os.pipe(), os.pipe()
        try:
            for _ in range(min(jobs, count)):
                try:
                    child = os.fork()
                except OSError:  # the user's limit of processes: the ones that exist do it all
                    break
                if child == 0:
                    os.close(numbers_in)
                    os.close(results)
                    _be_a_worker(work, numbers, results_in)
                children.append(child)
            os.close(results_in)
            if children:
                os.write(numbers_in, b"".join(n.to_bytes(2, "big") for n in range(count)))
            os.close(numbers_in)
            with open(results, "rb") as lines:
                for message in (json.loads(line.decode()) for line in lines):
                    if message is None:
                        done += 1
                    elif message[0] == "failed":
                        raise CannotVerify(message[1], message[2], 5)
                    else:
                        receive(message)
        finally:
            os.close(numbers)
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    if not children:
        for number in range(count):
            work(number, receive)
    elif done != count:
        problem = "one of %d processes that read was ended (killed? no memory?)." % len(children)
        raise CannotVerify(problem, "Run it again: it resumes. With less memory: --jobs 1.", 5)


def _be_a_worker(work, numbers, results):
    # type: (Callable[[int, Send], None], int, int) -> None
    """Never returns."""

    def send(message):  # type: (Optional[List[Any]]) -> None
        os.write(results, json.dumps(message).encode() + b"\n")

    # The parent reports Ctrl-C. It is ignored already in `script &` of a script.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        number = os.read(numbers, 2)
        while number:
            work(int.from_bytes(number, "big"), send)
            send(None)
            number = os.read(numbers, 2)
    except CannotVerify as error:
        send(["failed", error.message, error.remedy])
    except Exception as error:
        problem = "a process that read failed: %s: %s." % (type(error).__name__, str(error)[:500])
        send(["failed", problem, "Run it again, with fewer --jobs if memory is short."])
    finally:
        os._exit(0)


@contextmanager
def cpu_limit_named():  # type: () -> Iterator[None]
    """Inside it, the end of the CPU time that this shell allows (`ulimit -t`) is CannotVerify."""

    def end(number, frame):  # type: (int, Any) -> None
        problem = "the limit of CPU time of this shell (ulimit -t) ended it."
        remedy = "Run it again: it resumes. Or on a node: srun -N1 -c32 stage verify BUNDLE"
        raise CannotVerify(problem, remedy, 5)

    try:
        before = signal.signal(signal.SIGXCPU, end)
    except ValueError:  # only the main thread may
        yield
        return
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
        if soft == hard and soft > 1:  # where both strike at once, the kernel kills without a word
            resource.setrlimit(resource.RLIMIT_CPU, (soft - 1, hard))
        yield
    finally:
        signal.signal(signal.SIGXCPU, before)


# --- The journal and the receipt ------------------------------------------------------------------

EXPIRES_S = 30 * 86400.0  # disks rot without moving a clock
# Two changes closer than this may have one time on some file systems (Lustre: whole seconds).
UNSURE_NS = 2 * 10**9
# The kernel's own clock of changes moves every 10 ms or faster (CONFIG_HZ is 100 or more).
TICK_NS = 20 * 10**6
KERNELS_OWN = frozenset(("ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay"))
MOUNTS = Path("/proc/self/mountinfo")
RECEIPT_FORMAT = 3


def state_folder(environ):  # type: (Mapping[str, str]) -> Path
    """The folder of this user's receipts and journals: XDG's, else ~/.local/state.

    For a user without a home folder (a container's uid without passwd entry) a path where nothing
    can be.
    """
    base = environ.get("XDG_STATE_HOME", "")
    try:
        return Path(base if base.startswith("/") else Path.home() / ".local/state") / "airlift"
    except (RuntimeError, KeyError):
        return Path(os.devnull, "no home folder", "airlift")


def line_of(path, status):  # type: (str, os.stat_result) -> bytes
    """A file in a journal.

    Each change of a file moves its ctime, which no program can set back. A replaced file has
    another inode. A file that moved has another path: to rename a folder changes no `stat` of a
    file in it.
    There is no device number: the nodes of a cluster number the same mount differently.
    """
    values = (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return path.encode(*UTF_8) + b" %d %d %d %d" % values


def stamp_of(lines, since):  # type: (Iterable[bytes], float) -> Stamp
    """Folds the lines of all payload files into one digest."""
    digest, contents = hashlib.sha256(), hashlib.sha256()
    for line in sorted(lines):
        digest.update(line + b"\n")
        contents.update(line.rpartition(b" ")[0] + b"\n")
    return Stamp(digest.hexdigest(), contents.hexdigest(), since)


def unsure_ns(root):  # type: (Path) -> int
    """The least time between two changes of files below `root` that have different times.

    It is a tick of the kernel's clock if its file systems use that clock, else `UNSURE_NS`.
    """
    here, points = os.path.join(str(root.resolve()), ""), {}
    try:
        for fields in (line.split(" ") for line in MOUNTS.read_text("utf-8").splitlines()):
            # proc(5): field 5 is the mount point (spaces and more as octal numbers), the first
            # field after "-" the type of the file system.
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), fields[4])
            points[os.path.join(point, "")] = fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        return UNSURE_NS
    disk = max((point for point in points if here.startswith(point)), key=len, default=here)
    kinds = {kind for point, kind in points.items() if point == disk or point.startswith(here)}
    return min(TICK_NS, UNSURE_NS) if kinds and kinds <= KERNELS_OWN else UNSURE_NS


def rests_after(status, unsure):  # type: (os.stat_result, int) -> int
    """When (ns) any later change gives the file another ctime.

    Args:
        unsure: of `unsure_ns`. A ctime without a part below a millisecond is of a disk that keeps
            seconds, or FAT's 10 ms.
    """
    return status.st_ctime_ns + (unsure if status.st_ctime_ns % 10**6 else UNSURE_NS)


def now_ns():  # type: () -> int
    """Now, by the clock of changes of files (<linux/time.h>: CLOCK_REALTIME_COARSE)."""
    return int((time.clock_gettime(5) if sys.platform == "linux" else time.time()) * 10**9)


class Journal(object):
    """A line for each file as soon as it was read and found sound (docs/adr/0006).

    It is a file of the user (never in the bundle, which may be read-only and must stay a bag). What
    was killed, and another node, go on from its lines: one counts if the file at that path still
    has all five facts of it. Damage is never kept, and a verdict removes the journal: the next
    verification reads everything again.
    """

    def __init__(self, state, root, seal, note):
        # type: (Optional[Path], Path, Optional[str], Say) -> None
        self.root, self.note, self.began = root, note or str, time.time()
        self.taken, self.since = {}, self.began  # type: Dict[str, bytes], float
        self.file, self.start, self.path, self.unsure = -1, 0, root, 0
        if state is None or seal is None:
            return
        key = sha256_of(("%s\n%s" % (root.resolve(), seal)).encode(*UTF_8))[:32]
        self.path, self.unsure = state / "verify" / (key + ".journal"), unsure_ns(root)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for other in self.path.parent.iterdir():
                try:
                    if other.stat().st_mtime < self.began - EXPIRES_S:
                        other.unlink()
                except OSError:  # another verification ended meanwhile
                    continue
            self.file = os.open(str(self.path), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            again = "if this is interrupted, the next one starts again"
            self.note("%s: %s: %s" % (self.path, error.strerror, again))

    def begin(self, work):  # type: (List[str]) -> List[str]
        """Starts anew, without what an earlier verification read."""
        if self.file >= 0:
            os.ftruncate(self.file, 0)
        self._write(b"began %d" % self.began)
        return work

    def resume(self, work, expected):  # type: (List[str], Mapping[str, Entry]) -> List[str]
        """The files that must be read: not those that an earlier verification read."""
        began, lines = None, {}  # type: Optional[int], Dict[bytes, int]
        for line in self._lines():
            if line.startswith(b"began "):
                at = int(line[6:]) if line[6:].isdigit() else 0
                began = at if self.began - EXPIRES_S < at <= self.began else None
            elif began is not None:
                lines[line] = min(began, lines.get(line, began))
        self.start = 0 if self.file < 0 else os.fstat(self.file).st_size
        self._write(b"\nbegan %d" % self.began)
        root = os.fsencode(str(self.root))
        for path in work if lines else ():
            try:
                line = line_of(path, os.lstat(os.path.join(root, path.encode(*UTF_8))))
            except OSError:
                continue
            if line in lines:
                self.taken[path], self.since = line, min(self.since, lines[line])
        if self.taken:
            size = sum(expected[path][0] or 0 for path in self.taken) / 10.0**9
            counts = (len(self.taken), len(work), size, age(self.began - self.since))
            self.note(
                "resumed: %d of %d files, %.1f GB, were read and found sound in the last %s, and "
                "not touched since (--no-resume reads all again)" % counts
            )
        return [path for path in work if path not in self.taken]

    def keep(self, path, status, before):  # type: (str, os.stat_result, int) -> None
        """Keeps a sound file, in the process that read it.

        Not one that was changed just before its reading began: a change during the reading could
        have the same time.
        """
        if self.file >= 0 and rests_after(status, self.unsure) < before:
            self._write(line_of(path, status))

    def fold(self, expected):  # type: (Mapping[str, Entry]) -> Optional[Stamp]
        """The stamp of all files; None if a line is missing."""
        lines = set(self.taken.values())
        for line in self._lines(self.start):
            if line.rsplit(b" ", 4)[0].decode(*UTF_8) in expected:
                lines.add(line)
        is_whole = self.file >= 0 and len(lines) == len(expected)
        return stamp_of(lines, self.since) if is_whole else None

    def _lines(self, start=0):  # type: (int) -> List[bytes]
        if self.file < 0:
            return []
        with open(os.dup(self.file), "rb") as file:
            file.seek(start)
            return file.read().splitlines()

    def _write(self, line):  # type: (bytes) -> None
        try:
            if self.file >= 0:
                os.write(self.file, line + b"\n")
        except OSError:  # a full disk: the verdict holds without
            pass

    def remove(self):  # type: () -> None
        """Forgets everything: there is a verdict."""
        try:
            if self.file >= 0:
                self.path.unlink()
        except OSError as error:
            if error.errno != errno.ENOENT:  # two verifications at once: the other one ended
                self.note("%s: %s: remove it" % (self.path, error.strerror))

    def __enter__(self):  # type: () -> Journal
        return self

    def __exit__(self, *error):  # type: (object) -> None
        if self.file >= 0:
            os.close(self.file)


def age(seconds):  # type: (float) -> str
    """`40 s`, `12 min`, `5 h`, `3 days`."""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return "%.0f %s" % (seconds / size, name)
    return "%.0f s" % max(seconds, 0)


def receipt_path(state, root):  # type: (Path, Path) -> Path
    return state / "receipts" / (sha256_of(str(root.resolve()).encode(*UTF_8))[:32] + ".json")


def write_receipt(state, report):  # type: (Path, VerificationReport) -> Optional[str]
    """Writes the receipt of a sound bundle that was read whole; damage removes it.

    Returns:
        Why there is no receipt although the bundle is sound; None where there is no reason.

    Raises:
        OSError: the folder cannot be written.
    """
    path, stamp = receipt_path(state, report.root), report.stamp
    if not report.ok and path.exists():
        path.unlink()
    if not report.ok or report.level == "fast":
        return None
    damage = path.with_suffix(".damage.json")  # what `stage verify` had found is repaired
    if damage.exists():
        damage.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if stamp is None:
        return (
            "the verdict holds, but no receipt is kept: files were changed just before they were "
            "read. Where a run file says `bundle.verified: required`, verify once more in two "
            "seconds"
        )
    facts = {"format": RECEIPT_FORMAT, "path": str(report.root.resolve())}  # type: Dict[str, Any]
    facts.update(bundle_id=report.bundle_id, seal=report.seal, level=report.level)
    facts.update(files=report.files, bytes=report.size, host=os.uname().nodename)
    facts.update(digest=stamp.digest, contents=stamp.contents, began=stamp.since)
    facts.update(ended=time.time())
    write_json(path, facts)
    return None


def keep_verdict(write, state, report):
    # type: (Callable[[Path, VerificationReport], Optional[str]], Path, VerificationReport) -> Optional[str]
    """Keeps a receipt. The verdict holds without one.

    Args:
        write: writes it, such as `write_receipt`.

    Returns:
        Why a sound bundle has no receipt; None if it has one, or is not sound.
    """
    try:
        return write(state, report)
    except OSError as error:
        why = (error.filename, error.strerror)
        return "the verdict holds; no receipt of it could be written: %s: %s" % why


def write_json(path, document):  # type: (Path, Mapping[str, Any]) -> None
    """Whole or not at all. Without a sync: what is lost in a power cut is only missed."""
    partial = path.with_suffix(".%d.partial" % os.getpid())
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


# --- The command ----------------------------------------------------------------------------------


def say(text, stream):  # type: (str, Any) -> None
    lines = (escaped(line, ("Cc", "Cs")) for line in text.split("\n"))
    stream.write("\n".join(lines) + "\n")


def parse_arguments():  # type: () -> Any
    import argparse

    add = argparse.ArgumentParser(description="Prove that every byte is as it was fetched.")
    here = Path(__file__).resolve().parent
    add.add_argument("bundle", nargs="?", type=Path, default=here, metavar="BUNDLE")
    add.add_argument("--fast", action="store_true", help="names and sizes, not bytes")
    add.add_argument("--id", metavar="ID", help="the id that the bundle must have")
    add.add_argument("--json", action="store_true", help="print one JSON document")
    add.add_argument("--report", type=Path, metavar="FILE", help="write the JSON there")
    paths = "write the paths of damaged and missing files there, for rsync --files-from"
    add.add_argument("--failed", type=Path, metavar="FILE", help=paths)
    jobs = "processes that read (default: one per core)"
    add.add_argument("--jobs", type=int, default=cores(), help=jobs)
    again = "read also what an interrupted verification found sound"
    add.add_argument("--no-resume", action="store_true", help=again)
    add.add_argument("-q", "--quiet", action="store_true", help="only errors")
    arguments = add.parse_args()
    if arguments.id is not None and not is_sha256(arguments.id):
        add.error("--id: 64 hex digits, as `stage show` prints them where the bundle was made")
    if arguments.jobs < 1:
        add.error("--jobs: at least 1")
    return arguments


def check_output(option, path, root):  # type: (str, Optional[Path], Path) -> None
    """Checks before hours of reading that the file of an option can be written.

    Raises:
        CannotVerify: it is in the bundle `root`, is a folder, or has none.
    """
    if path is None:
        return
    problem, folder = "", path.parent
    if root.resolve() in path.resolve().parents:
        problem = "inside the bundle it would itself be an extra file"
        remedy = "Put it beside the bundle."
    elif path.is_dir():
        problem, remedy = "is a folder", "Give the name of a file."
    elif not path.absolute().parent.is_dir():
        problem, remedy = "there is no folder %s" % folder, "mkdir -p %s" % quote(str(folder))
    if problem:
        raise CannotVerify("%s %s: %s." % (option, path, problem), remedy, 2)


def write_lists(report, document, written, failed, write):
    # type: (VerificationReport, Mapping[str, Any], Optional[Path], Optional[Path], Callable[[Path, bytes], object]) -> Iterator[str]
    """Writes the files of `--report` and `--failed` by `write`; says where, a line each."""
    if written is not None:
        write(written, (json.dumps(document, indent=1) + "\n").encode())
        yield "The report is written to %s" % written
    if failed is not None:
        write(failed, "".join(path + "\n" for path in report.to_carry).encode(*UTF_8))
        yield "The list of paths is written to %s" % failed


def check_nothing_was_imported_from(root):  # type: (Path) -> None
    """Refuses a bundle from which Python imported before it read this file (PYTHONPATH)."""
    inside = os.path.join(os.path.realpath(str(root)), "")
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name != "__main__" and os.path.realpath(file).startswith(inside):
            problem = "Python has run `%s` of this bundle." % escaped(file)
            remedy = "python3 -I %s %s   (examine it)" % (quote(sys.argv[0]), quote(str(root)))
            raise CannotVerify(problem, remedy, 2)


def run(arguments, out, err):  # type: (Any, Any, Any) -> int
    def note(line):  # type: (str) -> None
        if not arguments.quiet and not arguments.json:
            say(line, err)

    check_nothing_was_imported_from(arguments.bundle)
    check_output("--report", arguments.report, arguments.bundle)
    check_output("--failed", arguments.failed, arguments.bundle)
    level, state = "fast" if arguments.fast else "full", state_folder(os.environ)
    wanted = (arguments.bundle, level, arguments.jobs, arguments.id)
    report = verify(*wanted, state=state, note=note, resume=not arguments.no_resume)
    why_not = None if report.is_another else keep_verdict(write_receipt, state, report)
    if why_not:
        note(why_not)
    document = report.to_json()
    files = (arguments.report, arguments.failed)
    written = list(write_lists(report, document, *files, write=Path.write_bytes))
    if arguments.json:
        out.write(json.dumps(document, indent=1) + "\n")
    elif report.ok and not arguments.quiet:
        lines = describe_sound(report, plural(report.files, "file"), "%d bytes" % report.size)
        say("\n".join(lines), out)
    elif not report.ok:
        for finding in report.findings:
            say(str(finding), out)
        say("error: %s: %s." % (report.root, plural(len(report.findings), "finding")), err)
        for remedy in suggest_fixes(report, arguments.report, "python3 -I " + quote(sys.argv[0])):
            say("  -> " + remedy, err)
    for line in written:
        note(line)
    return report.exit_code


def plural(number, noun):  # type: (int, str) -> str
    return "%d %s%s" % (number, noun, "" if number == 1 else "s")


def main():  # type: () -> int
    import io

    # A name that the locale cannot spell must not fail (Python 3.6 has no `reconfigure`).
    options = {"errors": "backslashreplace", "line_buffering": True}  # type: Any
    out, err = (
        io.TextIOWrapper(stream.buffer, encoding=stream.encoding, **options)
        for stream in (sys.stdout, sys.stderr)
    )
    try:
        return run(parse_arguments(), out, err)
    except CannotVerify as error:
        say("error: %s\n  -> %s" % (error.message, error.remedy), err)
        return error.exit_code
    except OSError as error:
        if error.errno == errno.EPIPE:
            sys.stderr.close()
        else:
            say("error: %s" % error, err)
        return 5
    except KeyboardInterrupt:
        say("error: Interrupted.\n  -> Run it again: it resumes.", err)
        return 5


if __name__ == "__main__":
    sys.exit(main())
