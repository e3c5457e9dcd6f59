#!/usr/bin/env python3
"""Verifies the bundle this file lies in, with nothing but Python 3.6 or newer. Never touches the network.

    python3 bundle/stage-verify.py [--fast] [--json] [--report FILE] [--jobs N] [-q] [BUNDLE]

The same findings and exit codes as `stage verify`: 0 sound, 1 damage found, 2 not a bundle or one of a newer format,
3 unsafe path in the lock, 5 could not finish. What vouches for what: tagmanifest-sha256.txt for the files beside the
payload, stage.lock for the payload, blocks/<sha256> for the 16 MiB blocks of a large file. `--report` is what
`stage patch BUNDLE --report FILE` reads where the bundle was made.
"""

# Older Pythons read as far as this, so nothing below may be a syntax error to them.
import sys

if sys.version_info < (3, 6):
    sys.stderr.write("error: needs Python 3.6 or newer, this is %d.%d.\n" % sys.version_info[:2])
    sys.stderr.write("  -> module load python, or: cd BUNDLE && sha256sum -c manifest-sha256.txt\n")
    sys.exit(2)

import argparse
import collections
import errno
import gc
import hashlib
import io
import json
import mmap
import os
import re
import signal
import stat
import struct
import unicodedata
from pathlib import Path
from shlex import quote

FORMAT = 1
BLOCK_SIZE = 16 * 2**20
BLOCKS_ABOVE = 64 * 2**20
BAGIT_TEXT = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
TAG_MANIFEST = "tagmanifest-sha256.txt"
SIGNATURE = TAG_MANIFEST + ".sig"
MANIFEST, LOCK, BAGIT, BAG_INFO = "manifest-sha256.txt", "stage.lock", "bagit.txt", "bag-info.txt"
TAG_FILES = (BAG_INFO, BAGIT, MANIFEST, LOCK, "stage.yaml", "bom.cdx.json", "stage-verify.py")
REQUIRED = {BAG_INFO, BAGIT, MANIFEST, LOCK, "stage.yaml", TAG_MANIFEST}
FOLDERS = {"model": "models", "tokenizer": "models", "dataset": "datasets", "files": "files", "environment": "envs"}
ORDINARY = re.compile(r"(?:[\w+=@-][\w.+=@-]*/)*[\w+=@-][\w.+=@-]*\Z", re.ASCII)
TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # unicodedata.bidirectional
KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class CannotVerify(Exception):
    """Being unable to look, with the exit code that says why."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


class Found:
    """path -> [problem, expected, found, ranges]; the first word on a path is kept."""

    def __init__(self):
        self.by_path = {}

    def add(self, path, problem, expected, found, ranges=()):
        self.by_path.setdefault(path, [problem, expected, found, list(ranges)])

    def blame_record(self, path, record):
        if path in self.by_path and self.by_path[path][0] == "mismatched":
            _, expected, found, _ = self.by_path.pop(path)
            self.add(record, "mismatched", "%s for %s" % (found, path), expected)

    def __contains__(self, path):
        return path in self.by_path

    def to_json(self):
        result = []
        for path, (problem, expected, found, ranges) in sorted(self.by_path.items()):
            entry = {"path": path, "problem": problem, "expected": expected, "found": found}
            if ranges:
                entry["ranges"] = ranges
            result.append(entry)
        return result


def sha256_of(data):
    return hashlib.sha256(data).hexdigest()


def is_hex(value, length=64):
    return isinstance(value, str) and len(value) == length and not value.strip("0123456789abcdef")


def escaped(text, categories):
    """Without what rewrites a terminal or turns the direction of what follows (U+202E)."""
    shown = []
    for c in text:
        hidden = unicodedata.category(c) in categories or unicodedata.bidirectional(c) in TURNS
        shown.append(ascii(c)[1:-1] if hidden else c)
    return "".join(shown)


def printable(path):
    return "`%s`" % escaped(path, ("Cc", "Cs", "Zl", "Zp"))


# ---- the files beside the payload


def real(root, path):
    """A path as the disk has it: names are UTF-8 there, whatever the locale says."""
    return os.path.join(os.fsencode(str(root)), path.encode("utf-8", "surrogateescape"))


def read_file(root, path):
    with open(real(root, path), "rb") as source:
        return source.read()


def manifest_text(digests):
    return "".join("%s  %s\n" % (digests[path], path) for path in sorted(digests)).encode("utf-8", "surrogateescape")


def parse_manifest(data):
    result = {}
    for line in data.decode("utf-8", "replace").split("\n"):
        digest, separator, path = line.partition("  ")
        if separator and len(digest) == 64:
            result[path] = digest
    return result


def is_tag_path(path):
    return path in TAG_FILES or path.startswith("blocks/")


def differ_little(one, other):
    return sum(a != b for a, b in zip(one, other.lower())) <= 4


def has_other_witness(path, texts):
    if path == BAGIT:
        return texts[path] == BAGIT_TEXT
    if path == LOCK:
        line = "External-Identifier: sha256:" + sha256_of(texts[path])
        return line.encode() in texts.get(BAG_INFO, b"").split(b"\n")
    return False


def check_tags(root, entries, found):
    """Reads every file beside the payload; returns those that can be believed, and what the tag manifest records."""
    texts = {}
    for path in entries:
        if is_tag_path(path) or path in (TAG_MANIFEST, SIGNATURE):
            most = 2**20 if path in (BAGIT, BAG_INFO, SIGNATURE) else 2**31
            if entries[path] > most:
                found.add(path, "invalid", "at most %d bytes" % most, "a larger file, of %d" % entries[path])
                continue
            try:
                texts[path] = read_file(root, path)
            except OSError as error:
                found.add(path, "unreadable", "a readable file", error.strerror or "an error")
    if TAG_MANIFEST not in texts:
        found.add(TAG_MANIFEST, "missing", "the file that ends a bundle", "nothing: the bundle is unfinished")
        return {path: text for path, text in texts.items() if path in TAG_FILES}, None
    manifest = texts.pop(TAG_MANIFEST)
    texts.pop(SIGNATURE, None)
    recorded = parse_manifest(manifest)
    sound = {}
    for path, digest in recorded.items():
        if path not in texts:
            if path in TAG_FILES:
                found.add(path, "missing", "sha256 " + digest, "nothing")
            continue
        actual = sha256_of(texts[path])
        if actual == digest:
            sound[path] = texts[path]
        elif differ_little(actual, digest):
            sound[path] = texts[path]
            found.add(TAG_MANIFEST, "mismatched", "sha256 %s for %s" % (actual, path), digest)
        else:
            found.add(path, "mismatched", "sha256 %s (recorded in %s)" % (digest, TAG_MANIFEST), "sha256 " + actual)
            if has_other_witness(path, texts):
                sound[path] = texts[path]
                found.blame_record(path, TAG_MANIFEST)
    uncovered = [path for path in TAG_FILES if path in texts and path not in recorded]
    unknown = [path for path in recorded if not is_tag_path(path)]
    if manifest != manifest_text(recorded) or uncovered or unknown:
        detail = "no sound line for " + uncovered[0] if uncovered else "something else"
        found.add(TAG_MANIFEST, "invalid", "one `<sha256>  <path>` line for each tag file, sorted", detail)
    for path in TAG_FILES:
        if path in texts and path not in recorded:
            sound[path] = texts[path]
    return sound, recorded


# ---- the lock


def folded(path):
    if len(path) == len(path.encode("utf-8", "surrogatepass")):  # ASCII
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def unsafe(path):
    """Whether a path may not be in a bundle (stage/names.py has the reasons)."""
    if ORDINARY.match(path) and len(path) < 256 and ".partial" not in path:
        return False
    hidden = ("Cc", "Cs", "Zl", "Zp")
    if not path or path != escaped(path, hidden) or "\n" in path or "\\" in path or "%" in path:
        return True
    parts = path.split("/")
    return len(path.encode()) > 1024 or any(
        part in ("", ".", "..") or part != part.strip() or len(part.encode()) > 255 or part.endswith(".partial")
        for part in parts
    )


def check_collisions(paths):
    files, folders, known = set(), {}, set()
    for path in paths:
        if folded(path) in files:
            raise CannotVerify("%s: %s is there twice on some disk." % (LOCK, printable(path)), 3)
        files.add(folded(path))
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in known:
            known.add(folder)
            if folded(folder) in files or folders.setdefault(folded(folder), folder) != folder:
                raise CannotVerify("%s: %s collides with another path." % (LOCK, printable(path)), 3)
            folder = folder.rpartition("/")[0]


def lock_text(document):
    """A lock's one true text: what `json.dumps(document, indent=1, sort_keys=True)` makes of it, sooner."""
    assets = document["assets"]
    rest = {name: dict(asset, files=None) for name, asset in assets.items()}
    # Three spaces and a quote at the start of a line: an asset's own key, since text has no raw newline in JSON.
    parts = dumps(dict(document, assets=rest)).split('\n   "files": null')
    text = [parts[0]]
    for name, part in zip(sorted(assets), parts[1:]):
        entries = ",".join(map(entry_text, assets[name]["files"]))
        text += ['\n   "files": [', entries, "\n   ]" if entries else "]", part]
    return ("".join(text) + "\n").encode("utf-8", "replace")


def dumps(value):
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)


def entry_text(entry):
    if len(entry) == 4 and isinstance(entry.get("origin"), str) and isinstance(entry["sha256"], str):
        quoted = tuple(map(json.encoder.encode_basestring, (entry["origin"], entry["path"], entry["sha256"])))
        return ENTRY % (quoted + (entry["size"],))  # noqa: RUF005 - Python 2.7 has to read this file
    return "\n    " + dumps(entry).replace("\n", "\n    ")


ENTRY = '\n    {\n     "origin": %s,\n     "path": %s,\n     "sha256": %s,\n     "size": %d\n    }'


def each_key_once(pairs):
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is written twice")
    return dict(pairs)


def refuse_constant(name):
    raise ValueError(name + " is no number of JSON")


def parse_lock(data):
    """path -> (size, sha256) of each payload file; whether the lock is complete; its one true text."""
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=each_key_once, parse_constant=refuse_constant)
        version = document["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CannotVerify("%s: not a lock." % LOCK)
    if type(version) is not int or version != FORMAT:
        raise CannotVerify("%s: format %r; this verifier reads format %d." % (LOCK, version, FORMAT))
    files, complete = [], True
    try:
        assets = take(document, "assets", dict)
        known = {name: known_asset(name, assets[name]) for name in sorted(assets)}
        for asset in known.values():
            files += [(entry["path"], (entry["size"], entry["sha256"])) for entry in asset["files"]]
            complete = complete and is_complete(asset)
        check_shards(known, {path for path, _ in files})
        document = {"format": FORMAT, "name": take(document, "name", str), "assets": known}
        text = lock_text(document)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise CannotVerify("%s: not a lock: a field is missing or not what it should be." % LOCK)
    check_collisions(sorted(path for path, _ in files))
    return dict(files), complete, text


# The fields of a lock, one by one, as stage/lockreader.py reads and stage/lockfile.py writes them.


def take(mapping, key, kind, optional=False):
    value = mapping.get(key)
    if value is None and optional:
        return None
    fits = type(value) is int and 0 <= value < 2**63 if kind is int else isinstance(value, kind)
    if not fits:
        raise TypeError(key)
    return value


def take_hex(mapping, key, length):
    value = take(mapping, key, str, True)
    if value is not None and not is_hex(value, length):
        raise ValueError(key)
    return value


def given(**fields):
    return {key: value for key, value in fields.items() if value is not None}


def known_evidence(value):
    evidence = take(value, "upstream", dict, True) or None
    if evidence is not None:
        ((algorithm, digest),) = evidence.items()
        if not is_hex(digest, {"sha256": 64, "lfs-sha256": 64, "git-sha1": 40}[algorithm]):
            raise ValueError("upstream")
    return evidence


def known_file(value, folder):
    path = take(value, "path", str)
    if unsafe(path) or not path.startswith(folder):
        raise CannotVerify("%s: the path %s may not be in a bundle." % (LOCK, printable(path)), 3)
    size, sha256, origin = take(value, "size", int), take_hex(value, "sha256", 64), take(value, "origin", str)
    more = given(made_by=take(value, "made_by", str, True), upstream=known_evidence(value))
    return dict(more, path=path, size=size, sha256=sha256, origin=origin)


def known_ingredient(value):
    size, sha256 = take(value, "size", int, True), take_hex(value, "sha256", 64)
    more = given(upstream=known_evidence(value))
    if set(value) & {"split", "convert", "separator"}:
        more.update(split=take(value, "split", str), convert=take(value, "convert", str))
        more.update(given(separator=take(value, "separator", str, True)))
        if not re.match(r"\w+(\.\w+)*\Z", more["split"]):
            raise ValueError("split")
    return dict(more, origin=take(value, "origin", str), size=size, sha256=sha256)


def known_texts(value, key):
    texts = take(value, key, list, True) or []
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(key)
    return sorted(texts)


def known_code(value):
    files = known_texts(value, "files")
    commit = take_hex(value, "commit", 40)
    if commit is None:
        raise KeyError("commit")
    licence = take(value, "licence", str, True)
    return {"repository": take(value, "repository", str), "commit": commit, "licence": licence, "files": files}


def known_source(value):
    kind = take(value, "type", str)
    where = {"hub": "repository", "path": "path", "url": "url", "environment": "environment"}[kind]
    commits = given(commit=take_hex(value, "commit", 40), parquet_commit=take_hex(value, "parquet_commit", 40))
    if kind == "hub" and "commit" not in commits:
        raise KeyError("commit")
    commits.update(given(requested_revision=take(value, "requested_revision", str, True)))
    commits.update({"type": kind, where: take(value, where, str)})
    return commits


def known_split(value):
    shards, schema = take(value, "shards", list), take(value, "schema", list, True)
    if schema is not None:
        schema = [{"name": take(column, "name", str), "type": take(column, "type", str)} for column in schema]
    more = given(declared_rows=take(value, "declared_rows", int, True))
    return dict(more, shards=shards, rows=take(value, "rows", int, True), schema=schema)


def known_environment(value):
    virtual, fields = take(value, "virtual_packages", dict), ("name", "version", "manager", "path")
    return {
        "platform": take(value, "platform", str),
        "virtual_packages": {name: take(virtual, name, str) for name in virtual},
        "packages": [{key: take(package, key, str) for key in fields} for package in take(value, "packages", list)],
        "tree": take_hex(value, "tree", 64),
    }


def known_asset(name, value):
    if unsafe(name) or name[0] in ".-" or name != unicodedata.normalize("NFC", name):
        raise CannotVerify("%s: the asset name %s cannot be used." % (LOCK, printable(name)), 3)
    if not all(c.isalnum() or c in "._-" for c in name):
        raise CannotVerify("%s: the asset name %s cannot be used." % (LOCK, printable(name)), 3)
    kind = take(value, "kind", str)
    folder = "data/%s/%s/" % (FOLDERS[kind], name)
    files = sorted((known_file(entry, folder) for entry in take(value, "files", list)), key=lambda f: f["path"])
    left_out = [
        {"path": take(left, "path", str), "size": take(left, "size", int), "reason": take(left, "reason", str)}
        for left in take(value, "left_out", list)
    ]
    asset = {
        "kind": kind,
        "request": take(value, "request", dict),
        "source": known_source(take(value, "source", dict)),
        "licence": take(value, "licence", str, True),
        "files": files,
        "left_out": sorted(left_out, key=lambda left: left["path"]),
    }
    made_from = [known_ingredient(made) for made in take(value, "made_from", list, True) or []]
    code = [known_code(part) for part in take(value, "code", list, True) or []]
    lists = {
        "made_from": sorted(made_from, key=lambda made: (made["origin"], made.get("split", ""))),
        "aliases": known_texts(value, "aliases"),
        "base_of": known_texts(value, "base_of"),
        "code": sorted(code, key=lambda part: part["repository"]),
    }
    asset.update({key: found for key, found in lists.items() if found})
    base = take(value, "base", dict, True)
    if base:
        asset["base"] = {"repository": take(base, "repository", str), "revision": take(base, "revision", str)}
    if kind == "environment":
        asset["environment"] = known_environment(take(value, "environment", dict))
    if kind == "dataset":
        configs = take(value, "configs", dict)
        asset["configs"] = {
            config: {split: known_split(take(splits, split, dict)) for split in splits}
            for config, splits in ((config, take(configs, config, dict)) for config in configs)
        }
    return asset


def splits_of(asset):
    return [split for config in asset.get("configs", {}).values() for split in config.values()]


def check_shards(assets, paths):
    shards = [shard for asset in assets.values() for split in splits_of(asset) for shard in split["shards"]]
    if not all(isinstance(shard, str) and shard in paths for shard in shards):
        raise ValueError("shards")
    for name, asset in assets.items():
        packages = asset.get("environment", {}).get("packages", [])
        if not all("data/envs/%s/%s" % (name, package["path"]) in paths for package in packages):
            raise ValueError("packages")


def is_complete(asset):
    made_from = asset.get("made_from", [])
    return (
        all(entry["sha256"] for entry in asset["files"])
        and all(split["rows"] is not None and split["schema"] is not None for split in splits_of(asset))
        and all(made["sha256"] and made["size"] is not None for made in made_from)
        and (not made_from or any("made_by" in entry for entry in asset["files"]))
        and asset.get("environment", {"tree": ""})["tree"] is not None
    )


def read_lock(tags, found):
    """The lock's files, whether it is complete, and the bundle id; no files where no lock can be believed."""
    if LOCK not in tags:
        found.add(LOCK, "missing", "the lock", "nothing")
        return None, False, None
    try:
        files, complete, text = parse_lock(tags[LOCK])
    except CannotVerify:
        if TAG_MANIFEST not in found:
            raise
        found.add(LOCK, "invalid", "a lock", "something that cannot be read as one")
        return None, False, None
    if not complete or text != tags[LOCK]:
        found.add(LOCK, "invalid", "a complete lock in its one true text", "an edited or unfinished one")
    return files, complete, sha256_of(text)


def check_implied_texts(root, files, complete, bundle_id, tags, found):
    """`bagit.txt`, the manifest and the Payload-Oxum must say what the lock implies, whatever the digests say."""
    implied = [(BAGIT, BAGIT_TEXT)]
    if complete:
        text = manifest_text({path: digest for path, (_, digest) in files.items()})
        implied.append((MANIFEST, text))
        try:
            if MANIFEST in found and (root / MANIFEST).is_file() and read_file(root, MANIFEST) == text:
                found.blame_record(MANIFEST, TAG_MANIFEST)
        except OSError:
            pass  # told already
    for path, text in implied:
        if path in tags and tags[path] != text:
            found.add(path, "invalid", "the text that stage.lock implies", "another")
    if BAG_INFO in tags:
        lines = tags[BAG_INFO].decode("utf-8", "replace").splitlines()
        oxum = "%d.%d" % (sum(size for size, _ in files.values()), len(files))
        for line in ("Payload-Oxum: " + oxum, "External-Identifier: sha256:" + bundle_id):
            label = line.partition(":")[0].lower()
            if [other for other in lines if other.lower().startswith(label)] != [line]:
                found.add(BAG_INFO, "invalid", "one line `%s`" % line, "none such, or others")
    for size, digest in files.values():
        path = "blocks/" + (digest or "")
        if size > BLOCKS_ABOVE and path in tags and not blocks_of(tags, digest or "", size):
            found.add(path, "invalid", "a sha256 a line, for each 16 MiB", "something else")
    for path in sorted(set(TAG_FILES) | block_paths(files)):
        if path not in tags and path not in found and (root / path).is_file():
            found.add(TAG_MANIFEST, "invalid", "one line for each tag file", "no sound line for " + path)


def block_paths(files):
    return {"blocks/" + digest for size, digest in files.values() if digest and size > BLOCKS_ABOVE}


# ---- the payload


def scan(root, found):
    entries, folders = {}, [""]
    while folders:
        folder = folders.pop()
        try:
            inside = sorted(os.scandir(real(root, folder)), key=lambda entry: entry.name)
        except OSError as error:
            found.add(folder, "unreadable", "a folder that can be listed", error.strerror or "an error")
            continue
        for entry in inside:
            name = entry.name.decode("utf-8", "surrogateescape")
            path = folder + "/" + name if folder else name
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                    continue
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                found.add(path, "unreadable", "something that can be looked at", error.strerror or "an error")
                continue
            if stat.S_ISREG(status.st_mode):
                entries[path] = status.st_size
            elif stat.S_ISLNK(status.st_mode):
                target = printable(str(Path(os.readlink(real(root, path)).decode("utf-8", "surrogateescape"))))
                found.add(path, "unsafe", "a regular file", "a symbolic link to " + target)
            else:
                kind = next((name for test, name in KINDS if test(status.st_mode)), "something else")
                found.add(path, "unsafe", "a regular file", kind)
    return entries


def check_names(entries, expected, files, recorded, found):
    tags = set(TAG_FILES) | {TAG_MANIFEST, SIGNATURE}
    recorded_blocks = {path for path in (entries if recorded is None else recorded) if path.startswith("blocks/")}
    blocks = block_paths(files) if files is not None else recorded_blocks
    knows_payload = files is not None or bool(expected)
    for path in entries:
        in_payload = path.startswith("data/")
        if path not in (expected if in_payload else tags | blocks) and (knows_payload or not in_payload):
            found.add(path, "extra", "nothing of that name", "a file")
    for path in set(expected) | REQUIRED | blocks:
        if path not in entries:
            found.add(path, "missing", "a file", "nothing")


def check_sizes(entries, expected, found):
    sound = []
    for path, (size, digest) in expected.items():
        if path not in entries:
            continue
        if size is not None and entries[path] != size:
            found.add(path, "mismatched", "%d bytes" % size, "%d bytes" % entries[path])
        elif digest is not None:
            sound.append((path, entries[path], digest))
    return sound


def blocks_of(tags, digest, size):
    text = tags.get("blocks/" + digest)
    if size <= BLOCKS_ABOVE or text is None:
        return []
    blocks = text.decode("ascii", "replace").splitlines()
    return blocks if len(blocks) == -(-size // BLOCK_SIZE) and all(map(is_hex, blocks)) else []


def units(files, tags):
    """(path, start, end, sha256, has blocks) of everything to read, the largest files first."""
    for path, size, digest in sorted(files, key=lambda file: (-file[1], file[0])):
        blocks = blocks_of(tags, digest, size)
        if not blocks:
            yield path, 0, size, digest, False
        for number, block in enumerate(blocks):
            start = number * BLOCK_SIZE
            yield path, start, min(start + BLOCK_SIZE, size), block, True


def batches(work, jobs):
    """Places in `work`, in pieces that get smaller towards the end; so few that a pipe holds their numbers."""
    costs = [end - start + 2**16 for _, start, end, _, _ in work]
    left = sum(costs)
    least = max(2**23, left // 1024)
    pieces, first, cost = [], 0, 0
    for place, one in enumerate(costs):
        cost += one
        if cost >= max(left // (2 * jobs), least) or place + 1 == len(costs):
            pieces.append(range(first, place + 1))
            left -= cost
            first, cost = place + 1, 0
    return pieces


class Reader:
    """Hashes units, with one buffer for all of them."""

    def __init__(self, root, work):
        self.root = root
        self.work = work
        # Begins a page: what begins 16 bytes off is filled slower. Each process gets its own (ACCESS_COPY).
        self.buffer = memoryview(mmap.mmap(-1, 2**20, access=mmap.ACCESS_COPY))

    def check(self, numbers):
        """[number, digest, size, why it could not be read] of each unit that is not as it should be."""
        bad = []
        for number in numbers:
            unit = self.work[number]
            try:
                digest, size = self.hash(unit)
            except OSError as error:
                bad.append([number, None, 0, error.strerror or "an error"])
                continue
            if digest != unit[3] or size != unit[2] - unit[1]:
                bad.append([number, digest, size, ""])
        return bad

    def hash(self, unit):
        path, start, end, _, is_block = unit
        want = end - start if is_block else None
        digest, size = hashlib.sha256(), 0
        source = os.open(real(self.root, path), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if want is None and end < len(self.buffer):
                data = os.read(source, end + 1)
                if len(data) == end:
                    return hashlib.sha256(data).hexdigest(), end
            os.lseek(source, start, os.SEEK_SET)
            with open(source, "rb", buffering=0, closefd=False) as file:
                while want is None or size < want:
                    count = file.readinto(self.buffer if want is None else self.buffer[: want - size])
                    if not count:
                        break
                    digest.update(self.buffer[:count])
                    size += count
        finally:
            os.close(source)
        return digest.hexdigest(), size


def shared_out(check, pieces, jobs):
    """`check(piece)` of every piece, in `jobs` processes that take the numbers of pieces from one pipe."""
    jobs = min(jobs, len(pieces))
    if jobs < 2 or not hasattr(os, "fork"):
        return [one for piece in pieces for one in check(piece)]
    numbers, numbers_in = os.pipe()
    parent, results, children = os.getpid(), [], []
    try:
        for _ in range(jobs):
            out, out_in = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(numbers_in)
                be_a_worker(check, pieces, numbers, out_in, parent)
            os.close(out_in)
            children.append(child)
            results.append(out)
        os.close(numbers)
        os.write(numbers_in, b"".join(struct.pack("=H", number) for number in range(len(pieces))))
        os.close(numbers_in)
        lines = []
        for out in results:
            with open(out, "rb") as pipe:
                lines += pipe
        found = [json.loads(line.decode()) for line in lines]
        if len(found) != len(pieces):
            raise CannotVerify("a process that read was ended from outside (no memory?): run it again", 5)
        return [one for bad in found for one in bad]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def be_a_worker(check, pieces, numbers, out, parent):
    """Never returns. A line for each piece: what is not as it should be. Ends when its parent did."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with open(out, "wb") as lines:
            number = os.read(numbers, 2)
            while number and os.getppid() == parent:
                lines.write(json.dumps(check(pieces[struct.unpack("=H", number)[0]])).encode() + b"\n")
                number = os.read(numbers, 2)
    finally:
        os._exit(0)


def check_bytes(root, files, tags, jobs, found):
    work = list(units(files, tags))
    reader = Reader(root, work)
    sizes, digests = {path: size for path, size, _ in files}, {path: digest for path, _, digest in files}
    spans = {}
    for number, digest, size, why in shared_out(reader.check, batches(work, jobs), jobs):
        path, start, end, _, is_block = work[number]
        if is_block:
            spans.setdefault(path, []).append((start, end, why))
        elif why:
            found.add(path, "unreadable", "sha256 " + digests[path], why)
        elif size != sizes[path]:
            found.add(path, "mismatched", "%d bytes" % sizes[path], "%d bytes when read" % size)
        else:
            found.add(path, "mismatched", "sha256 " + digests[path], "sha256 " + digest)
    for path, parts in spans.items():
        add_ranges(path, digests[path], sorted(parts), found)


def add_ranges(path, digest, parts, found):
    ranges = []
    for start, end, _ in parts:
        if ranges and start <= ranges[-1][1]:
            ranges[-1][1] = max(end, ranges[-1][1])
        else:
            ranges.append([start, end])
    shown = ", ".join("%d-%d" % (start, end) for start, end in ranges[:3])
    if len(ranges) > 3:
        shown += " and %d more ranges" % (len(ranges) - 3)
    reasons = [why for _, _, why in parts if why]
    if reasons:
        found.add(path, "unreadable", "sha256 " + digest, "%s at bytes %s" % (reasons[0], shown), ranges)
    else:
        found.add(path, "mismatched", "sha256 " + digest, "other bytes at " + shown, ranges)


# ---- the whole


def verify(root, level, jobs):
    """The report, as `stage verify --json` writes it."""
    require_bundle(root)
    found = Found()
    entries = scan(root, found)
    tags, recorded = check_tags(root, entries, found)
    files, complete, bundle_id = read_lock(tags, found)
    if files is not None:
        expected = files
        check_implied_texts(root, files, complete, bundle_id, tags, found)
    else:
        expected = {path: (None, digest) for path, digest in parse_manifest(tags.get(MANIFEST, b"")).items()}
    check_names(entries, expected, files, recorded, found)
    sound = check_sizes(entries, expected, found)
    if level == "full":
        check_bytes(root, sound, tags, jobs, found)
    report = {
        "format": 1,
        "bundle": str(root),
        "bundle_id": bundle_id,
        "level": level,
        "ok": not found.by_path,
        "files": len(expected),
        "bytes": sum(size or 0 for size, _ in expected.values()),
        "findings": found.to_json(),
    }
    renamed = find_renamed(root, expected, report["findings"]) if level == "full" else {}
    return dict(report, renamed=renamed) if renamed else report


def of_problem(findings, problem):
    return sorted(finding["path"] for finding in findings if finding["problem"] == problem)


def find_renamed(root, expected, findings):
    """Path it should have -> path it has, of missing files whose bytes lie here under a name not of the bundle."""
    missing = [path for path in of_problem(findings, "missing") if path in expected and all(expected[path])]
    wanted, by_digest = {expected[path][0] for path in missing}, {}
    for path in reversed(of_problem(findings, "extra") if missing else []):
        try:
            if os.stat(real(root, path)).st_size in wanted:
                by_digest.setdefault(sha256_of_file(real(root, path)), []).append(path)
        except OSError:
            pass
    digests = {path: expected[path][1] for path in missing}
    return {path: by_digest[digests[path]].pop() for path in missing if by_digest.get(digests[path])}


def sha256_of_file(path):
    digest = hashlib.sha256()
    with open(path, "rb") as source:
        data = source.read(2**20)
        while data:
            digest.update(data)
            data = source.read(2**20)
    return digest.hexdigest()


# ---- in words


def moves(root, renamed):
    """The fewest moves that give files their names again: (to, from) -> the files that this is for."""
    found = {}
    for old, new in renamed.items():
        right, wrong = old.split("/"), new.split("/")
        while len(right) > 1 and len(wrong) > 1 and right[-1] == wrong[-1]:
            right, wrong = right[:-1], wrong[:-1]
        whole = ("/".join(right), "/".join(wrong))
        pair = (old, new) if os.path.lexists(real(root, whole[0])) else whole
        found.setdefault(pair, []).append(old)
    return found


def is_folder(root, path):
    return stat.S_ISDIR(os.lstat(real(root, path)).st_mode)


def whole_folders(root, extra):
    """Extra file -> the topmost folder around it in which nothing is but extra files."""
    known, found = {}, {}

    def is_whole(folder):
        if folder not in known:
            try:
                names = os.listdir(real(root, folder))
                inside = [folder + "/" + name.decode("utf-8", "surrogateescape") for name in names]
                files_first = sorted((is_folder(root, path), path) for path in inside)
            except OSError:
                files_first = [(False, folder)]
            known[folder] = all(is_whole(path) if deeper else path in extra for deeper, path in files_first)
        return known[folder]

    for path in extra:
        parts = path.split("/")[:-1]
        folders = ("/".join(parts[: depth + 1]) for depth in range(len(parts)))
        whole = next(filter(is_whole, folders), None)
        if whole is not None:
            found[path] = whole
    return found


def lines(report):
    """The findings for a person: a file that was renamed is one line, and so is a folder of extra files."""
    findings, renamed = report["findings"], report.get("renamed", {})
    to_move = moves(report["bundle"], renamed)
    move_of = {path: pair for pair, paths in to_move.items() for path in paths}
    folders = whole_folders(report["bundle"], set(of_problem(findings, "extra")) - set(renamed.values()))
    counts, said = collections.Counter(folders.values()), set()
    for finding in findings:
        path = finding["path"]
        pair, folder = move_of.get(path), folders.get(path, "")
        if pair is not None:
            if pair not in said:
                files = " ({:,} files)".format(len(to_move[pair])) if len(to_move[pair]) > 1 else ""
                yield "%s: renamed: it lies here as %s%s" % (printable(pair[0]), printable(pair[1]), files)
            said.add(pair)
        elif counts[folder] > 1:
            if folder not in said:
                count = "{:,} files".format(counts[folder])
                yield "%s: extra: a folder of %s that are not of the bundle" % (printable(folder + "/"), count)
            said.add(folder)
        elif path not in renamed.values():
            words = (printable(path), finding["problem"], finding["expected"], finding["found"])
            yield "%s: %s: expected %s, found %s" % words


def what_to_do(report, written):
    """What mends it, a line each. `written`: where the report lies; None: nowhere."""
    renamed, kinds = report.get("renamed", {}), set()
    for finding in report["findings"]:
        is_closed = finding["problem"] == "unreadable" and finding["found"].startswith(os.strerror(errno.EACCES))
        if finding["path"] not in renamed and finding["path"] not in renamed.values():
            is_link = finding["problem"] == "unsafe"  # where it stands in a file's place, that is missing too
            kinds.add("closed" if is_closed else "extra" if is_link else finding["problem"])
    to_move = list(moves(report["bundle"], renamed))
    for right, wrong in to_move[:5]:
        right, wrong = (os.path.join(report["bundle"], path) for path in (right, wrong))
        above = os.path.dirname(right)
        make = "" if os.path.isdir(above) else "mkdir -p %s && " % quote(above)
        yield "Give it its name again: %smv %s %s" % (make, quote(wrong), quote(right))
    if len(to_move) > 5:
        yield "And so for %d more." % (len(to_move) - 5)
    if "closed" in kinds:
        yield "No right to read: chmod -R u+rX %s (its owner can); then verify again." % quote(report["bundle"])
    if kinds - {"extra", "closed"}:
        first = "" if written else "stage-verify.py --report FILE %s; " % quote(report["bundle"])
        mend = "stage patch BUNDLE --report %s -o PATCH" % (quote(str(written)) if written else "FILE")
        yield "Carry only what is damaged: %swhere it was made: %s. Or copy again: rsync -c." % (first, mend)
    if "extra" in kinds:
        yield "What is extra is not of the bundle: move it out of the folder."


def require_bundle(root):
    if not root.exists():
        raise CannotVerify("%s: no such folder." % root)
    if not root.is_dir() or not any((root / name).exists() for name in (BAGIT, LOCK, TAG_MANIFEST, "fetch.partial")):
        raise CannotVerify("%s: not a bundle: it has neither %s nor %s." % (root, BAGIT, LOCK))


def say(text, stream):
    stream.write("\n".join(escaped(line, ("Cc", "Cs")) for line in text.split("\n")) + "\n")


def run(arguments, out, err):
    report = verify(arguments.bundle, "fast" if arguments.fast else "full", arguments.jobs)
    text = json.dumps(report, indent=1) + "\n"
    if arguments.report is not None:
        arguments.report.write_text(text)
    if arguments.json:
        out.write(text)
        return 0 if report["ok"] else 1
    for line in lines(report):
        say(line, out)
    if not report["ok"]:
        count = len(report["findings"])
        say("error: %s: %d finding%s." % (report["bundle"], count, "" if count == 1 else "s"), err)
        for advice in what_to_do(report, arguments.report):
            say("  -> %s" % advice, err)
        return 1
    if not arguments.quiet:
        how = "names and sizes are right (bytes not read)" if arguments.fast else "every byte is as it was fetched"
        files = "%d file%s" % (report["files"], "" if report["files"] == 1 else "s")
        say("%s: sound: %s, %d bytes, %s" % (report["bundle"], files, report["bytes"], how), out)
        say("bundle id %s" % report["bundle_id"], out)
    return 0


NEED_STAGE = ("--deep", "--shard", "--merge", "--signers")


def parse_arguments():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description="Prove that every byte of a bundle is as it was fetched.")
    parser.add_argument("bundle", nargs="?", type=Path, default=Path(__file__).resolve().parent, metavar="BUNDLE")
    parser.add_argument("--fast", action="store_true", help="only presence and size of every file, not its bytes")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, and nothing else there")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the findings there, as JSON")
    parser.add_argument("--jobs", type=int, default=cores, help="processes that read (default: one a core)")
    parser.add_argument("-q", "--quiet", action="store_true", help="only errors")
    for option in NEED_STAGE:
        parser.add_argument(option, nargs="?", const=True, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for option in NEED_STAGE:
        if getattr(arguments, option[2:]) is not None:
            parser.error(
                "%s: needs `stage verify`, where airlift is installed; without it, all bytes are read" % option
            )
    if arguments.jobs < 1:
        parser.error("--jobs: at least 1")
    report = arguments.report
    if report is not None and arguments.bundle.resolve() in report.resolve().parents:
        parser.error("--report: inside the bundle it would itself be an extra file")
    return arguments


def main():
    # A name the locale cannot spell is no reason to fail (Python 3.6 has no `reconfigure`).
    out, err = (
        io.TextIOWrapper(stream.buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
        for stream in (sys.stdout, sys.stderr)
    )
    gc.disable()  # a lock is many objects without a cycle: going through them again and again frees nothing
    try:
        return run(parse_arguments(), out, err)
    except CannotVerify as error:
        say("error: %s" % error, err)
        return error.code
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
