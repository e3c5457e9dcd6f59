"""Foreign locks: beside a manifest, where `fetch` would follow them, and sealed in a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stage.bundle.bundle import LOCK
from stage.files import sha256_of_bytes
from tests.stage.bundles import reseal
from tests.stage.hostile.manifests import SOUND, asset, fetch
from tests.stage.hostile.runner import Case, Place
from tests.stage.locks import document, every_kind

Prepare = Callable[[Place], list[str]]
TEXT = every_kind().to_json()


def follow(lock: bytes | str, manifest: str = SOUND) -> Prepare:
    """`stage fetch` of a sound manifest that has this lock beside it."""

    def prepare(place: Place) -> list[str]:
        place.write("m.yaml", manifest)
        place.write("notes/a.txt", "a")
        place.write("m.lock", lock)
        return ["fetch", "m.yaml", "-o", "bundle"]

    return prepare


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    """The sound lock of `every_kind`, changed."""
    lock = document()
    edit(lock)
    return json.dumps(lock).encode()


def file(number: int = 0, **changes: Any) -> bytes:
    """The sound lock with one payload file changed (default: the first)."""
    return edited(lambda lock: lock["assets"]["bert"]["files"][number].update(changes))


def replaced(old: bytes, new: bytes) -> bytes:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def sealed(change: Callable[[bytes], bytes], command: str = "verify") -> Prepare:
    """A bundle whose tag manifest seals the changed lock."""

    def prepare(place: Place) -> list[str]:
        root = place.bundle()
        lock = change((root / LOCK).read_bytes())
        (root / LOCK).write_bytes(lock)
        reseal(root, LOCK)
        return [command, "bundle"]

    return prepare


def sealed_claim(**changes: Any) -> Prepare:
    """A sealed lock that claims this of its first file."""

    def change(text: bytes) -> bytes:
        lock = json.loads(text)
        lock["assets"]["bert"]["files"][0].update(changes)
        return (json.dumps(lock, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()

    return sealed(change)


def _lock_of(entry: dict[str, Any], **more: Any) -> bytes:
    """A lock for the one asset `x` of a manifest."""
    kind = {"kind": "files", "request": entry, "licence": None, "files": [], "left_out": [], **more}
    return json.dumps({"format": 1, "name": "m", "assets": {"x": kind}}).encode()


URL = "http://127.0.0.1:9/x.bin"
PINNED = {"url": URL, "sha256": "a" * 64}
NOTES = {"path": "notes"}
OUTSIDE = {"url": "http://127.0.0.1:9/..%2F..%2F..%2Fevil", "sha256": "a" * 64}
ENV = {
    "kind": "environment",
    "request": {},
    "source": {"type": "path", "path": "e.yml"},
    "files": [],
    "left_out": [],
}
A, B = "data/models/bert/config.json", "data/models/bert/model.safetensors"
ALIKE = "data/models/bert/MODEL.safetensors"

CASES = [
    Case("empty", 2, ("m.lock", "not JSON"), follow(b"")),
    Case("cut in two", 2, ("m.lock", "not JSON"), follow(TEXT[: len(TEXT) // 2])),
    Case("not UTF-8", 2, ("not JSON",), follow(replaced(b"every-kind", b"every-\xff"))),
    Case("UTF-16", 2, ("not JSON",), follow(TEXT.decode().encode("utf-16"))),
    Case("byte order mark", 2, ("not JSON",), follow(b"\xef\xbb\xbf" + TEXT)),
    Case("a list", 2, ("no `format`",), follow(b"[]")),
    Case("NaN", 2, ("NaN",), follow(file(size=float("nan")))),
    Case("Infinity", 2, ("Infinity",), follow(file(size=float("inf")))),
    Case("a fraction", 2, ("bert.files[0].size", "whole number"), follow(file(size=7.0))),
    Case("negative size", 2, ("bert.files[0].size",), follow(file(size=-1))),
    Case("size true", 2, ("bert.files[0].size",), follow(file(size=True))),
    Case("size of 2^70", 2, ("bert.files[0].size", "2^63"), follow(file(size=2**70))),
    Case("size of 4,000 digits", 2, ("bert.files[0].size",), follow(file(size=10**4000))),
    Case(
        "size of 10,000 digits",
        2,
        ("not JSON",),
        follow(replaced(b'"size": 7', b'"size": ' + b"7" * 10_000)),
    ),
    Case(
        "number beyond any",
        2,
        ("more than a float64",),
        follow(replaced(b'"request": {', b'"request": {"a": 1e999,')),
    ),
    Case(
        "request of a mapping",
        2,
        ("must be a text, a number",),
        follow(replaced(b'"request": {', b'"request": {"a": {},')),
    ),
    Case(
        "key twice",
        2,
        ("`size` is written twice",),
        follow(replaced(b'"size": 7', b'"size": 7, "size": 8')),
    ),
    Case(
        "asset twice",
        2,
        ("written twice",),
        follow(replaced(b'"bert": {', b'"bert": {}, "bert": {')),
    ),
    Case("nested lists", 2, ("m.lock",), follow(b"[" * 100_000)),
    Case(
        "the lock is a folder",
        2,
        ("m.lock: cannot be read: Is a directory",),
        fetch(SOUND, lambda place: (place.folder / "m.lock").mkdir()),
    ),
    Case(
        "the id of another lock",
        1,
        ("`stage.lock`: mismatched", "This is another bundle than the one asked for"),
        lambda place: [
            "verify",
            place.bundle().name,
            "--id",
            place.write("m.lock", TEXT).name,
        ],
    ),
    Case(
        "the id of no lock",
        2,
        ("--id m.lock: neither an id (64 hex digits) nor a lock that can be read",),
        lambda place: ["verify", place.bundle().name, "--id", "m.lock"],
    ),
    Case(
        "the id of an unfinished lock",
        2,
        ("--id m.lock: an incomplete lock",),
        lambda place: [
            "verify",
            place.bundle().name,
            "--id",
            place.write("m.lock", file(sha256=None)).name,
        ],
    ),
    Case(
        "nested request",
        2,
        ("or a list of texts, found a mapping",),
        follow(replaced(b'"request": {', b'"request": {"a": ' + b"[" * 500 + b"]" * 500 + b",")),
    ),
    Case(
        "half a character",
        2,
        ("lone surrogate",),
        follow(replaced(b'"apache-2.0"', b'"\\ud800"')),
    ),
    Case(
        "newer format",
        2,
        ("format 3", "newer airlift"),
        follow(replaced(b'"format": 1', b'"format": 3')),
    ),
    Case("format 1.0", 2, ("format 1.0",), follow(replaced(b'"format": 1', b'"format": 1.0'))),
    Case("format true", 2, ("format True",), follow(replaced(b'"format": 1', b'"format": true'))),
    Case(
        "files a mapping",
        2,
        ("bert.files",),
        follow(edited(lambda d: d["assets"]["bert"].update(files={}))),
    ),
    Case("path a number", 2, ("bert.files[0].path",), follow(file(path=5))),
    Case("path with ..", 3, ("`..`",), follow(file(path="data/models/bert/../../../x"))),
    Case("path absolute", 3, ("absolute",), follow(file(path="/etc/passwd"))),
    Case("path with backslash", 3, ("backslash",), follow(file(path="data/models/bert/..\\x"))),
    Case(
        "path with escape sequence",
        3,
        ("control character",),
        follow(file(path="data/models/bert/\x1b[2J")),
    ),
    Case(
        "path that is shown backwards",
        3,
        ("U+202E",),
        follow(file(path="data/models/bert/\u202egpj.exe")),
    ),
    Case(
        "sealed: path that is shown backwards",
        3,
        ("U+202E",),
        sealed(lambda t: t.replace(b"vocab", "\u202ebacov".encode())),
    ),
    Case(
        "path of another asset",
        3,
        ("outside its asset",),
        follow(file(path="data/models/tok/x.json")),
    ),
    Case("path beside the payload", 3, ("outside its asset",), follow(file(path="stage.lock"))),
    Case(
        "path of 2,000 bytes",
        3,
        ("longer than 1024",),
        follow(file(path="data/models/bert/" + "a/" * 1000 + "b")),
    ),
    Case("path twice", 3, ("same file",), follow(replaced(A.encode(), B.encode()))),
    Case(
        "paths equal but for case",
        3,
        ("same file",),
        follow(file(path=B.replace("model.s", "Model.s"))),
    ),
    Case("path below a file", 3, ("same file",), follow(file(path=B + "/x"))),
    Case("asset named ..", 3, ("asset name",), follow(replaced(b'"bert": {', b'"..": {'))),
    Case(
        "kind unknown",
        2,
        ("bert.kind",),
        follow(edited(lambda d: d["assets"]["bert"].update(kind="code"))),
    ),
    Case("digest upper case", 2, ("sha256", "lowercase"), follow(file(sha256="A" * 64))),
    Case("digest too short", 2, ("sha256",), follow(file(sha256="a" * 63))),
    Case("digest with a newline", 2, ("sha256",), follow(file(sha256="a" * 64 + "\n"))),
    Case("digest of full-width digits", 2, ("sha256",), follow(file(sha256="\uff11" * 64))),
    Case(
        "evidence by md5",
        2,
        ("unknown digest algorithm",),
        follow(file(upstream={"md5": "a" * 32})),
    ),
    Case("evidence too short", 2, ("upstream",), follow(file(upstream={"git-sha1": "a" * 39}))),
    Case(
        "two evidences",
        2,
        ("upstream",),
        follow(file(upstream={"git-sha1": "a" * 40, "lfs-sha256": "a" * 64})),
    ),
    Case(
        "commit that is a branch",
        2,
        ("source.commit",),
        follow(edited(lambda d: d["assets"]["bert"]["source"].update(commit="main"))),
    ),
    Case(
        "shard that is no file",
        2,
        ("not a file here",),
        follow(
            edited(
                lambda d: d["assets"]["lines"]["configs"]["plain"]["train"].update(
                    shards=["/etc/passwd"]
                )
            )
        ),
    ),
    Case(
        "environment without packages",
        2,
        ("env.environment.packages` is missing",),
        follow(
            edited(
                lambda d: d["assets"].update(
                    env=ENV | {"environment": {"platform": "x", "virtual_packages": {}}}
                )
            )
        ),
    ),
    Case(
        "environment of a package that nobody fetched",
        2,
        ("env.environment.packages` names https://x/a, which is not in `made_from`",),
        follow(
            edited(
                lambda d: d["assets"].update(
                    env=ENV
                    | {
                        "environment": {
                            "platform": "linux-64",
                            "virtual_packages": {},
                            "packages": [
                                {
                                    "name": "a",
                                    "version": "1",
                                    "manager": "pip",
                                    "url": "https://x/a",
                                }
                            ],
                        }
                    }
                )
            )
        ),
    ),
    Case(
        "split without shards",
        2,
        ("lines.configs.plain.train.shards` is missing",),
        follow(edited(lambda d: d["assets"]["lines"]["configs"]["plain"]["train"].pop("shards"))),
    ),
    Case(
        "evidence a number",
        2,
        ("upstream` must be one digest",),
        follow(file(upstream={"git-sha1": 7})),
    ),
    Case(
        "rows negative",
        2,
        ("rows",),
        follow(edited(lambda d: d["assets"]["lines"]["configs"]["plain"]["train"].update(rows=-1))),
    ),
    Case(
        "another sha256 than the manifest's",
        2,
        ("pins " + "b" * 64,),
        follow(
            _lock_of(
                PINNED,
                source={"type": "url", "url": URL},
                made_from=[{"origin": URL, "size": 1, "sha256": "b" * 64}],
            ),
            asset(**PINNED),
        ),
    ),
    Case(
        "another address than the manifest's",
        2,
        ("instead of " + URL,),
        follow(
            _lock_of(
                PINNED,
                source={"type": "url", "url": URL},
                made_from=[{"origin": "http://127.0.0.1:9/evil", "size": 1, "sha256": "a" * 64}],
            ),
            asset(**PINNED),
        ),
    ),
    Case(
        "an address whose file name leads out",
        3,
        ("`..`",),
        follow(
            _lock_of(
                OUTSIDE,
                source={"type": "url", "url": OUTSIDE["url"]},
                made_from=[{"origin": OUTSIDE["url"], "size": 1, "sha256": "a" * 64}],
            ),
            asset(**OUTSIDE),
        ),
    ),
    Case(
        "a local file from outside",
        3,
        ("`..`",),
        follow(
            _lock_of(
                NOTES,
                source={"type": "path", "path": "notes"},
                files=[
                    {
                        "path": "data/files/x/a.txt",
                        "size": 1,
                        "sha256": sha256_of_bytes(b"a"),
                        "origin": "../../precious",
                    }
                ],
            ),
            asset(**NOTES),
        ),
    ),
    Case(
        "sealed: newer format",
        2,
        ("format 3; this version of airlift reads",),
        sealed(lambda text: text.replace(b'"format": 1', b'"format": 3')),
    ),
    Case("sealed: path equal but for case", 3, ("ignores case",), sealed_claim(path=ALIKE)),
    Case("sealed: path of a tag file", 3, ("outside its asset",), sealed_claim(path="stage.lock")),
    Case(
        "sealed: name a number",
        2,
        ("not a lock",),
        sealed(lambda text: text.replace(b'"name": "made"', b'"name": 5')),
    ),
    Case("sealed: path a list", 2, ("not a lock",), sealed_claim(path=["data"])),
    Case("sealed: size negative", 2, ("not a lock",), sealed_claim(size=-1)),
    Case("sealed: size true", 2, ("not a lock",), sealed_claim(size=True)),
    Case("sealed: half a byte", 2, ("not a lock",), sealed_claim(size=0.5)),
    Case("sealed: no digest", 1, ("External-Identifier",), sealed_claim(sha256=None)),
    Case("sealed: digest that is a path", 2, ("not a lock",), sealed_claim(sha256="../../x")),
    Case("sealed: no JSON", 2, ("stage.lock", "not JSON"), sealed(lambda text: text[:-5])),
    Case(
        "sealed: path escape",
        3,
        ("`..`",),
        sealed(lambda text: text.replace(b"bert/vocab", b"bert/../vocab")),
    ),
    Case(
        "sealed: key twice",
        1,
        ("stage.lock", "one true text"),
        sealed(lambda t: t.replace(b'"name":', b'"name": "x", "name":')),
    ),
    Case(
        "sealed: other spacing",
        1,
        ("stage.lock", "one true text"),
        sealed(lambda text: text + b"\n"),
    ),
    Case(
        "sealed: path of another asset",
        3,
        ("outside its asset",),
        sealed(lambda t: t.replace(b'"data/models/bert/vocab', b'"data/models/other/vocab')),
    ),
    Case(
        "sealed: one file twice",
        3,
        ("there twice",),
        sealed(lambda t: t.replace(b"bert/vocab.txt", b"bert/config.json")),
    ),
    Case("sealed: UTF-16", 2, ("not JSON",), sealed(lambda text: text.decode().encode("utf-16"))),
    Case("shown: no JSON", 2, ("not JSON",), sealed(lambda text: text[:-5], "show")),
    Case(
        "shown: path escape",
        3,
        ("`..`",),
        sealed(lambda t: t.replace(b"bert/vocab", b"bert/../vocab"), "show"),
    ),
]


def of_bert(command: str, **changes: Any) -> Prepare:
    """A sealed lock whose first model is changed."""

    def change(text: bytes) -> bytes:
        lock = json.loads(text)
        lock["assets"]["bert"].update(changes)
        return (json.dumps(lock, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()

    return sealed(change, command)


# What a verification does not read, because it says nothing about bytes: the lock is another one
# than bag-info.txt names. What uses the bundle reads it, and says which field is wrong.
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "licence a number": ("bert.licence", {"licence": 5}),
    "a key of next year": ("", {"remark": "added by hand"}),
    "no source": ("bert.source", {"source": None}),
    "source unknown": ("source.type", {"source": {"type": "ftp", "ftp": "x"}}),
    "source without commit": (
        "source.commit",
        {"source": {"type": "hub", "repository": "acme/bert"}},
    ),
    "left out a number": ("bert.left_out", {"left_out": 5}),
    "left out without size": ("left_out[0].size", {"left_out": [{"path": "x", "reason": "y"}]}),
    "aliases of numbers": ("bert.aliases", {"aliases": [5]}),
    "aliases not in order": ("", {"aliases": ["b", "a"]}),
    "no aliases, at length": ("", {"aliases": []}),
    "made of what nobody knows": (
        "",
        {"made_from": [{"origin": "x", "size": None, "sha256": None}]},
    ),
    "made of nothing with a size": (
        "made_from[0].size",
        {"made_from": [{"origin": "x", "size": -1}]},
    ),
    "configs of a model": ("", {"configs": {}}),
    "request a list": ("bert.request", {"request": []}),
}
CASES += [
    Case(f"sealed: {name}", 1, ("External-Identifier",), of_bert("verify", **more))
    for name, (_, more) in FIELDS.items()
]
CASES += [
    Case(f"shown: {name}", 2, (said,), of_bert("show", **more))
    for name, (said, more) in FIELDS.items()
    if said
]
