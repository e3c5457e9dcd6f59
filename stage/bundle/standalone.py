#!/usr/bin/env python3
"""Verifies the bundle that contains this file. Needs Python 3.6 or newer, and never a network.

    python3 -I bundle/stage-verify.py [--fast] [--id ID] [--json] [--report FILE] [--jobs N] [-q]

Findings and exit codes are those of `stage verify`: 0 sound, 1 damage found, 2 not a bundle or one
of a newer format, 3 unsafe path in the lock, 5 could not finish. `stage patch BUNDLE --report FILE`
reads the report where the bundle was made. `-I` keeps PYTHONPATH and the current folder out; this
file also drops them itself, before it imports anything. The bundle id (`--id`) covers the payload.
If the bundle is not signed, a person who replaced this file can make it print anything.
"""

# ruff: noqa: E402
# Older Pythons read as far as this, so nothing below may be a syntax error to them.
import sys

if sys.version_info < (3, 6):
    sys.stderr.write("error: needs Python 3.6 or newer, this is %d.%d.\n" % sys.version_info[:2])
    sys.stderr.write("  -> module load python, or: cd BUNDLE && sha256sum -c manifest-sha256.txt\n")
    sys.exit(2)

# A `json.py` beside this file would be imported in place of Python's own, and could print "sound".
# `encodings` is imported before anything else, so it is where Python's own modules are.
home = sys.modules["encodings"].__path__[0].rpartition("/")[0]
prefixes = (home, sys.exec_prefix, sys.base_exec_prefix)
sys.path[:] = [home] + [
    entry for entry in sys.path if entry.endswith("/lib-dynload") and entry.startswith(prefixes)
]


def report_fault(kind, error, trace):
    """An unforeseen fault (no memory, no process) ends with 5: it is not damage."""
    try:
        sys.stderr.write("error: could not verify: %s: %s\n" % (kind.__name__, error))
        sys.stderr.write("  -> Run it again, with more memory (ulimit -v) or --jobs 1.\n")
    finally:
        sys.exit(5)


sys.excepthook = report_fault

import argparse
import errno
import hashlib
import io
import json
import mmap
import os
import re
import signal
import stat
import unicodedata
from pathlib import Path
from shlex import quote

BAGIT_TEXT = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
TAG_MANIFEST = "tagmanifest-sha256.txt"
SIGNATURE = TAG_MANIFEST + ".sig"
MANIFEST, LOCK, BAGIT, BAG_INFO = "manifest-sha256.txt", "stage.lock", "bagit.txt", "bag-info.txt"
REQUIRED = {BAG_INFO, BAGIT, MANIFEST, LOCK, "stage.yaml", TAG_MANIFEST}
TAG_FILES = (BAG_INFO, BAGIT, MANIFEST, LOCK, "stage.yaml", "stage-verify.py")
COVERED = {BAGIT, MANIFEST, LOCK}  # by the bundle id
ORDINARY = re.compile(r"(?:[\w+=@-][\w.+=@-]*/)*[\w+=@-][\w.+=@-]*\Z", re.ASCII)
UTF_8 = ("utf-8", "surrogateescape")  # names on the disk, in every locale
HIDDEN = ("Cc", "Cs", "Zl", "Zp")  # control characters, half characters, line separators
TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # change the direction
KINDS = dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")
KINDS.update({stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"})
# Errors that say nothing about a file: no memory, descriptors or processes; a lost file server.
NO_MEANS = ["ENOMEM", "EMFILE", "ENFILE", "EAGAIN", "ENOBUFS", "ESTALE"]
NO_MEANS += ["ETIMEDOUT", "ENOTCONN", "ESHUTDOWN", "ECONNRESET", "EHOSTDOWN"]
LOOKS = ("something that can be looked at", "a folder that can be listed")


class CannotVerify(Exception):
    """The bundle could not be examined. Arguments: a message, the exit code."""


def reason(error):
    """The system's message about a file. Raises an error that says nothing about it (NO_MEANS)."""
    if errno.errorcode.get(error.errno) in NO_MEANS:
        raise error
    return error.strerror or "an error"


def sha256_of(data):
    return hashlib.sha256(data).hexdigest()


def is_hex(value):
    return isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")


def escaped(text, categories=HIDDEN):
    """Without characters that rewrite a terminal or change the direction of what follows."""
    hidden = [c for c in set(text) if unicodedata.category(c) in categories]
    hidden += [c for c in set(text) if unicodedata.bidirectional(c) in TURNS]
    return text.translate({ord(c): ascii(c)[1:-1] for c in hidden})


def manifest_text(digests):
    lines = ("%s  %s\n" % (digests[path], path) for path in sorted(digests))
    return "".join(lines).encode(*UTF_8)


def parse_manifest(data):
    lines = (line.partition("  ") for line in data.decode("utf-8", "replace").split("\n"))
    return {path: digest for digest, separator, path in lines if separator and len(digest) == 64}


def unsafe(path):
    """Whether a path may not be in a bundle (stage/paths.py has the reasons)."""
    if ORDINARY.match(path) and len(path) < 256 and ".partial" not in path:
        return False
    if path != escaped(path) or set(path) & set("\n\\%") or len(path.encode()) > 1024:
        return True
    return any(
        part in ("", ".", "..")
        or part != part.strip()
        or len(part.encode()) > 255
        or part.endswith(".partial")
        for part in path.split("/")
    )


def collide(paths):
    """Whether two of the files, or folders around them, are one on a disk that ignores case."""
    folders = {path[: slash.start()] for path in paths for slash in re.finditer("/", path)}
    names = (unicodedata.normalize("NFC", name) for name in paths + list(folders))
    folded = {unicodedata.normalize("NFC", name.casefold()) for name in names}
    return len(folded) < len(paths) + len(folders)


class Lock:
    """What a verification needs of a lock. Fields that say nothing about bytes are not checked.

    `files`: path -> (size, sha256).
    """

    def __init__(self, data):
        self.files, self.is_canonical = {}, True
        try:
            document = json.loads(data.decode())
            options = {"indent": 1, "sort_keys": True, "ensure_ascii": False, "allow_nan": False}
            text = (json.dumps(document, **options) + "\n").encode()
            version, assets = document["format"], document["assets"]
            if type(version) is not int or version != 1:
                message = "%s: format %r; this verifier reads format 1."
                raise CannotVerify(message % (LOCK, version), 2)
            for name in assets:
                paths = [self.add_row(name, row) for row in assets[name]["files"]]
                self.is_canonical &= paths == sorted(paths)
            if not isinstance(document["name"], str):
                raise ValueError("name")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise CannotVerify("%s: not a lock, or a field is not what it should be." % LOCK, 2)
        if collide(list(self.files)):
            raise CannotVerify("%s: two paths are one on some disk." % LOCK, 3)
        self.id = sha256_of(text)
        self.is_canonical &= text == data
        self.is_complete = None not in [digest for _, digest in self.files.values()]

    def add_row(self, name, row):
        path, size, digest = row["path"], row["size"], row["sha256"]
        if unsafe(path) or path in self.files or path.split("/")[::2][:2] != ["data", name]:
            raise CannotVerify("%s: the path `%s` is not allowed." % (LOCK, escaped(path)), 3)
        is_digest = digest is None or is_hex(digest)
        if type(size) is not int or not 0 <= size < 2**63 or not is_digest:
            raise ValueError(path)
        self.files[path] = (size, digest)
        return path


class Verification:
    """Compares a bundle with its lock.

    `found`: path -> (path, problem, expected, found). `entries`: path -> size of each regular file.
    `tags`: the files beside the payload that can be believed. `expected`: path -> (size, sha256) of
    the payload.
    """

    def __init__(self, root, level, jobs, wanted):
        self.root, self.level, self.jobs = root, level, jobs
        self.found, self.entries, self.texts, self.proof = {}, {}, {}, None
        check_is_bundle(root)
        self.scan()
        self.tags = self.check_tags()
        self.lock, is_another = self.read_lock(), False
        if self.lock is None:
            digests = parse_manifest(self.tags.get(MANIFEST, b""))
            self.expected = {path: (None, digest) for path, digest in digests.items()}
        else:
            self.expected = self.lock.files
            if wanted not in (None, self.lock.id) and not {LOCK, TAG_MANIFEST} & set(self.found):
                is_another = True
                self.add(LOCK, "mismatched", "bundle id " + wanted, "bundle id " + self.lock.id)
            self.check_implied_texts()
            if level == "full":
                self.proof = "bundle id"
        files = self.check_names()
        if level == "full" and not is_another:
            self.check_bytes(files)

    def report(self):
        """As `stage verify --json` writes it."""
        keys = ("path", "problem", "expected", "found")
        unproven = [path for path in sorted(TAG_FILES) if path in set(self.tags) - COVERED]
        return {
            "format": 1,
            "bundle": str(self.root),
            "bundle_id": self.lock and self.lock.id,
            "level": self.level,
            "ok": not self.found,
            "files": len(self.expected),
            "bytes": sum(size or 0 for size, _ in self.expected.values()),
            "findings": [dict(zip(keys, row)) for _, row in sorted(self.found.items())],
            "proof": {"payload": self.proof, "unproven": unproven},
        }

    def add(self, path, problem, expected, found):
        """Notes a finding unless there is one on that path."""
        self.found.setdefault(path, (path, problem, expected, found))

    def real(self, path):
        return os.path.join(os.fsencode(str(self.root)), path.encode(*UTF_8))

    def scan(self):
        paths = [("", True)]
        while paths:
            path, is_folder = paths.pop()
            expected = LOOKS[is_folder]
            try:
                status = os.lstat(self.real(path))
                if stat.S_ISREG(status.st_mode):
                    self.entries[path], expected = status.st_size, "a readable file"
                    if path in TAG_FILES or path in (TAG_MANIFEST, SIGNATURE):
                        self.read_tag(path, status.st_size)
                elif stat.S_ISDIR(status.st_mode):
                    for entry in os.scandir(self.real(path)):
                        below = os.path.join(path, str(entry.name, *UTF_8))
                        paths.append((below, entry.is_dir(follow_symlinks=False)))
                else:
                    kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
                    if stat.S_ISLNK(status.st_mode):
                        target = Path(str(os.readlink(self.real(path)), *UTF_8))
                        kind = "a symbolic link to `%s`" % escaped(str(target))
                    self.add(path, "unsafe", "a regular file", kind)
            except OSError as error:
                if not path:
                    raise
                self.add(path, "unreadable", expected, reason(error))

    def read_tag(self, path, size):
        most = 2**20 if path in (BAGIT, BAG_INFO, SIGNATURE) else 2**31
        if size > most:
            self.add(path, "invalid", "at most %d bytes" % most, "a larger file, of %d" % size)
        else:
            with open(self.real(path), "rb") as source:
                self.texts[path] = source.read()

    def check_tags(self):
        """The tag files that can be believed."""
        texts, unfinished = self.texts, "nothing: the bundle is unfinished"
        if TAG_MANIFEST not in texts:
            self.add(TAG_MANIFEST, "missing", "the file that ends a bundle", unfinished)
            return {path: texts[path] for path in TAG_FILES if path in texts}
        manifest, _ = texts.pop(TAG_MANIFEST), texts.pop(SIGNATURE, None)
        recorded = parse_manifest(manifest)
        uncovered = [path for path in TAG_FILES if path in texts and path not in recorded]
        sound = {path: texts[path] for path in uncovered}
        for path, digest in recorded.items():
            if path not in texts:
                if path in TAG_FILES:
                    self.add(path, "missing", "sha256 " + digest, "nothing")
                continue
            actual = sha256_of(texts[path])
            if actual == digest:
                sound[path] = texts[path]
            else:
                expected = "sha256 %s (recorded in %s)" % (digest, TAG_MANIFEST)
                self.add(path, "mismatched", expected, "sha256 " + actual)
        is_exact = manifest == manifest_text(recorded)
        if not is_exact or uncovered or set(recorded) - set(TAG_FILES):
            detail = "no sound line for " + uncovered[0] if uncovered else "something else"
            expected = "one `<sha256>  <path>` line for each tag file, sorted"
            self.add(TAG_MANIFEST, "invalid", expected, detail)
        return sound

    def read_lock(self):
        """The lock; None where there is none that can be believed."""
        if LOCK not in self.tags:
            self.add(LOCK, "missing", "the lock", "nothing")
            return None
        try:
            lock = Lock(self.tags[LOCK])
        except CannotVerify:
            if TAG_MANIFEST not in self.found:
                raise
            self.add(LOCK, "invalid", "a lock", "something that cannot be read as one")
            return None
        if not lock.is_complete or not lock.is_canonical:
            expected = "a complete lock in its one true text"
            self.add(LOCK, "invalid", expected, "an edited or unfinished one")
        return lock

    def check_implied_texts(self):
        """The lock implies the text of bagit.txt and the manifest, and lines of bag-info.txt."""
        lock, tags, implied = self.lock, self.tags, {BAGIT: BAGIT_TEXT}
        if lock.is_complete:
            text = manifest_text({path: digest for path, (_, digest) in lock.files.items()})
            implied[MANIFEST] = text
        for path in implied:
            if path in tags and tags[path] != implied[path]:
                self.add(path, "invalid", "the text that stage.lock implies", "another")
        oxum = "%d.%d" % (sum(size for size, _ in lock.files.values()), len(lock.files))
        info = tags.get(BAG_INFO, b"").decode("utf-8", "replace").splitlines()
        for line in ("Payload-Oxum: " + oxum, "External-Identifier: sha256:" + lock.id):
            label = line.partition(":")[0].lower()
            if BAG_INFO in tags and [i for i in info if i.lower().startswith(label)] != [line]:
                self.add(BAG_INFO, "invalid", "one line `%s`" % line, "none such, or others")

    def check_names(self):
        """(path, size, sha256) of the files that can be read and compared, the largest first."""
        known = REQUIRED.union(TAG_FILES, [SIGNATURE], self.expected)
        for path in set(self.entries) - known:
            if self.lock is not None or self.expected or not path.startswith("data/"):
                self.add(path, "extra", "nothing of that name", "a file")
        for path in REQUIRED.union(self.expected) - set(self.entries):
            above = [self.found.get(path[: slash.start()]) for slash in re.finditer("/", path)]
            closed = [row[3] for row in above if row and row[1] == "unreadable"]
            problem, found = ("unreadable", closed[0]) if closed else ("missing", "nothing")
            self.add(path, problem, "a file", found)
        sound = []
        for path in set(self.expected) & set(self.entries):
            (size, digest), there = self.expected[path], self.entries[path]
            if size not in (None, there):
                self.add(path, "mismatched", "%d bytes" % size, "%d bytes" % there)
            elif digest is not None:
                sound.append((path, there, digest))
        return sorted(sound, key=lambda file: (-file[1], file[0]))

    def check_bytes(self, files):
        bad = share_out(lambda part: self.check_files(files, part), len(files), self.jobs)
        for number, digest, size, why in sorted(bad):
            path, end, expected = files[number]
            if why:
                self.add(path, "unreadable", "sha256 " + expected, why)
            elif size != end:
                self.add(path, "mismatched", "%d bytes" % end, "%d bytes when read" % size)
            else:
                self.add(path, "mismatched", "sha256 " + expected, "sha256 " + digest)

    def check_files(self, files, numbers):
        """[number, digest, size, why not read] of each file that is not as it should be."""
        # It begins a page: memory that begins 16 bytes off is filled at two thirds of the speed.
        buffer, bad = memoryview(mmap.mmap(-1, 2**20)), []
        for number in numbers:
            path, end, expected = files[number]
            digest, size, count = hashlib.sha256(), 0, 1
            try:
                source = os.open(self.real(path), os.O_RDONLY | os.O_NOFOLLOW)
                with open(source, "rb", buffering=0) as file:
                    while count:
                        count = file.readinto(buffer)
                        digest.update(buffer[:count])
                        size += count
                if (digest.hexdigest(), size) != (expected, end):
                    bad.append([number, digest.hexdigest(), size, ""])
            except OSError as error:
                bad.append([number, "", 0, reason(error)])
        return bad


def share_out(check, count, jobs):
    """All that `check(numbers)` finds, in `jobs` processes, each with its part of the numbers."""
    parts = [range(first, count, jobs) for first in range(min(jobs, count))]
    parent, children, bad = os.getpid(), [], []
    try:
        while len(parts) > 1:
            out, out_in = os.pipe()
            try:
                child = os.fork()
            except OSError:  # this user may have no more processes: this one does the rest
                break
            part = parts.pop()
            if child == 0:
                try:
                    needed = (n for n in part if os.getppid() == parent or os._exit(1))
                    with open(out_in, "wb") as pipe:
                        pipe.write(json.dumps(check(needed)).encode())
                finally:
                    os._exit(0)
            os.close(out_in)
            children.append((child, out))
        for part in parts:
            bad += check(part)
        for _, out in children:
            with open(out, "rb") as pipe:
                bad += json.loads(pipe.read().decode())
        return bad
    except ValueError:
        raise CannotVerify("a process that read was ended (no memory?): run it again", 5)
    finally:
        for child, _ in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def check_is_bundle(root):
    """Also refuses a bundle from which Python imported before it read this file (PYTHONPATH)."""
    inside = os.path.join(os.path.realpath(str(root)), "")
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name != "__main__" and os.path.realpath(file).startswith(inside):
            message = "Python has run `%s` of this bundle.\n  -> python3 -I %s %s   (examine it)"
            values = (escaped(file), quote(sys.argv[0]), quote(str(root)))
            raise CannotVerify(message % values, 2)
    if not root.exists():
        raise CannotVerify("%s: no such folder." % root, 2)
    names = (BAGIT, LOCK, TAG_MANIFEST, "fetch.partial")
    if not root.is_dir() or not any((root / name).exists() for name in names):
        raise CannotVerify("%s: not a bundle: it has neither %s nor %s." % (root, BAGIT, LOCK), 2)


def say(text, stream):
    lines = (escaped(line, ("Cc", "Cs")) for line in text.split("\n"))
    stream.write("\n".join(lines) + "\n")


def remedies(report, written):
    """What repairs the damage, a line each. `written`: the file of the report, or None."""
    findings, bundle = report["findings"], quote(report["bundle"])
    problems = {finding["problem"] for finding in findings}
    if any(finding["expected"].startswith("bundle id ") for finding in findings):
        yield "This is another bundle than the one asked for; its payload was not read."
    elif os.strerror(errno.EACCES) in [finding["found"] for finding in findings]:
        yield "No right to read: chmod -R u+rX %s (its owner can); then verify again." % bundle
    elif problems - {"extra", "unsafe"}:
        first = "" if written else "python3 -I %s --report FILE %s; " % (quote(sys.argv[0]), bundle)
        patch = "stage patch BUNDLE --report %s -o PATCH" % quote(str(written or "FILE"))
        yield "%swhere it was made: %s. Or copy again: rsync -c." % (first, patch)
    if problems & {"extra", "unsafe"}:
        yield "Extra files are not part of the bundle: move them out of the folder."


def describe(report):
    """The verdict on a sound bundle, as `stage verify` prints it, a line each."""
    payload, beside = report["proof"]["payload"], ", ".join(report["proof"]["unproven"])
    how = "every byte is as it was fetched" if payload else "names and sizes are right"
    files = "%d file%s" % (report["files"], "s" * (report["files"] != 1))
    not_read = "" if payload else " (bytes not read)"
    yield "%s: sound: %s, %d bytes, %s" % (report["bundle"], files, report["bytes"], how + not_read)
    yield "bundle id %s" % report["bundle_id"]
    if payload:
        but = " (which does not cover %s)" % beside if beside else ""
        yield "every byte of data/ proven against the bundle id" + but


def run(arguments, out, err):
    level = "fast" if arguments.fast else "full"
    report = Verification(arguments.bundle, level, arguments.jobs, arguments.id).report()
    text = json.dumps(report, indent=1) + "\n"
    if arguments.report is not None:
        arguments.report.write_text(text)
    if arguments.json:
        out.write(text)
    elif report["ok"]:
        for line in () if arguments.quiet else describe(report):
            say(line, out)
    else:
        for finding in report["findings"]:
            line = "{problem}: expected {expected}, found {found}".format(**finding)
            say("`%s`: %s" % (escaped(finding["path"]), line), out)
        count = len(report["findings"])
        say("error: %s: %d finding%s." % (report["bundle"], count, "s" * (count != 1)), err)
        for remedy in remedies(report, arguments.report):
            say("  -> " + remedy, err)
    closed = ("unreadable", os.strerror(errno.EACCES))  # a right is missing: that is no damage
    all_closed = all((row["problem"], row["found"]) == closed for row in report["findings"])
    return 0 if report["ok"] else 5 if all_closed else 1


def parse_arguments():
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    add = argparse.ArgumentParser(description="Prove that every byte is as it was fetched.")
    here, jobs = Path(__file__).resolve().parent, "processes that read (default: one per core)"
    add.add_argument("bundle", nargs="?", type=Path, default=here, metavar="BUNDLE")
    add.add_argument("--fast", action="store_true", help="names and sizes, not bytes")
    add.add_argument("--id", metavar="ID", help="the id that the bundle must have")
    add.add_argument("--json", action="store_true", help="print one JSON document")
    add.add_argument("--report", type=Path, metavar="FILE", help="write the JSON there")
    add.add_argument("--jobs", type=int, default=len(affinity(0)), help=jobs)
    add.add_argument("-q", "--quiet", action="store_true", help="only errors")
    arguments = add.parse_args()
    if arguments.id is not None and not is_hex(arguments.id):
        add.error("--id: 64 hex digits, as `stage show` prints them where the bundle was made")
    if arguments.jobs < 1:
        add.error("--jobs: at least 1")
    report = arguments.report
    if report is not None and arguments.bundle.resolve() in report.resolve().parents:
        add.error("--report: inside the bundle it would itself be an extra file")
    return arguments


def main():
    # A name that the locale cannot spell must not fail (Python 3.6 has no `reconfigure`).
    options = {"errors": "backslashreplace", "line_buffering": True}
    out, err = (
        io.TextIOWrapper(stream.buffer, encoding=stream.encoding, **options)
        for stream in (sys.stdout, sys.stderr)
    )
    try:
        return run(parse_arguments(), out, err)
    except CannotVerify as error:
        say("error: %s" % error.args[0], err)
        return error.args[1]
    except OSError as error:
        if error.errno == errno.EPIPE:
            sys.stderr.close()
        else:
            say("error: %s" % error, err)
        return 5
    except KeyboardInterrupt:
        say("error: Interrupted.", err)
        return 5


if __name__ == "__main__":
    sys.exit(main())
