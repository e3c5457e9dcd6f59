"""Hostile manifests, and files that an editor has damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stage.hostile.runner import Case, Place

HEAD = "format: 1\nname: m\nassets:\n"
SOUND = HEAD + "  notes:\n    path: notes\n"


def fetch(text: bytes | str, *more: Callable[[Place], object]) -> Callable[[Place], list[str]]:
    """`stage fetch` of a manifest with this text, beside a folder `notes` with a file in it."""

    def prepare(place: Place) -> list[str]:
        place.write("m.yaml", text)
        place.write("notes/a.txt", "a")
        for step in more:
            step(place)
        return ["fetch", "m.yaml", "-o", "bundle"]

    return prepare


def asset(name: str = "x", **entry: Any) -> str:
    """A manifest with one asset. JSON is YAML, and has values that YAML's own style has not."""
    return json.dumps({"format": 1, "name": "m", "assets": {name: entry}})


def _manifest_that(make: Callable[[str], object]) -> Callable[[Place], list[str]]:
    """The path of the manifest is not a regular file."""

    def prepare(place: Place) -> list[str]:
        make(str(place.folder / "m.yaml"))
        return ["fetch", "m.yaml", "-o", "bundle"]

    return prepare


def _pipe(place: Place) -> None:
    os.mkfifo(place.folder / "pipe")


def _pipe_inside(place: Place) -> None:
    os.mkfifo(place.folder / "notes" / "pipe")


def _names(*names: str) -> Callable[[Place], object]:
    return lambda place: [place.write(f"notes/{name}", name) for name in names]


NODE = 'format: 1\nplatform: linux-64\nglibc: "2.28"\n'

CASES = [
    Case(
        "environment for a profile that is not there",
        2,
        ("p.yml: no such profile",),
        lambda place: [
            *("env", "lock", place.write("e.yml", "dependencies: [python]\n").name),
            *("--profile", "p.yml"),
        ],
    ),
    Case(
        "environment for other platforms",
        2,
        ("e.yml:1: linux-64, the platform of p.yml, is not among them", "Add linux-64"),
        lambda place: [
            *("env", "lock"),
            place.write("e.yml", "platforms: [osx-64]\ndependencies: [python]\n").name,
            *("--profile", place.write("p.yml", NODE).name),
        ],
    ),
    Case(
        "environment of no channels",
        2,
        ("e.yml: no channels", "channels: [conda-forge]"),
        lambda place: [
            *("env", "lock", place.write("e.yml", "dependencies: [python]\n").name),
            *("--profile", place.write("p.yml", NODE).name),
        ],
    ),
    Case(
        "environment with a lock in no folder",
        2,
        ("there is no folder no", "mkdir -p no"),
        lambda place: [
            *("env", "lock", place.write("e.yml", "dependencies: [python]\n").name),
            *("--profile", place.write("p.yml", NODE).name, "-o", "no/x.yml"),
        ],
    ),
    Case(
        "environment with requirements in latin-1",
        2,
        ("e.yml:3: r.txt cannot be read: not UTF-8 text", "iconv -f"),
        lambda place: [
            *("env", "lock"),
            place.write(
                "e.yml",
                "dependencies:\n  - pip:\n    - -r "
                + place.write("r.txt", b"# caf\xe9 and more\n").name,
            ).name,
            *("--profile", place.write("p.yml", NODE).name),
        ],
    ),
    Case(
        "alias once",
        2,
        ("m.yaml:7", "aliases"),
        fetch(SOUND + "    exclude: &a ['x']\n    include: *a\n"),
    ),
    Case(
        "merge key",
        2,
        ("aliases",),
        fetch("base: &b {path: notes}\n" + HEAD + "  x:\n    <<: *b\n"),
    ),
    Case("key twice", 2, ("m.yaml:6", "written twice"), fetch(SOUND + "    path: other\n")),
    Case(
        "endless name",
        2,
        ("m.yaml:5", "org/name"),
        fetch(HEAD + "  x:\n    dataset: " + "9" * 5000 + "/b\n"),
    ),
    Case("asset twice", 2, ("written twice",), fetch(SOUND + "  notes:\n    path: other\n")),
    Case("nested lists", 2, ("not a manifest",), fetch("[" * 100_000)),
    Case(
        "nested mappings",
        2,
        ("nested too deeply",),
        fetch("".join(f"{' ' * n}a:\n" for n in range(300))),
    ),
    Case("tabs", 2, ("m.yaml:4", "not valid YAML"), fetch(HEAD + "\tnotes:\n\t\tpath: notes\n")),
    Case("byte order mark is fine", 0, ("bundle id",), fetch(b"\xef\xbb\xbf" + SOUND.encode())),
    Case("UTF-16", 2, ("m.yaml", "not UTF-8"), fetch(SOUND.encode("utf-16"))),
    Case("latin-1", 2, ("m.yaml", "not UTF-8"), fetch(SOUND.encode() + b"# caf\xe9\n")),
    Case("zero byte", 2, ("m.yaml", "not valid YAML"), fetch(SOUND + "# \0\n")),
    Case("escape sequence", 2, ("m.yaml",), fetch(HEAD + '  "\\e[2Jx":\n    path: notes\n')),
    Case("two documents", 2, ("not valid YAML",), fetch(SOUND + "---\n" + SOUND)),
    Case(
        "python object",
        2,
        ("m.yaml:5",),
        fetch(HEAD + "  x:\n    path: !!python/object/apply:os.system [id]\n"),
    ),
    Case("empty", 2, ("found nothing",), fetch("")),
    Case("a list", 2, ("found a list",), fetch("- a\n")),
    Case("a pipe", 2, ("m.yaml", "a pipe or device"), _manifest_that(os.mkfifo), how="process"),
    Case("a folder", 2, ("m.yaml", "is a folder"), _manifest_that(os.mkdir)),
    Case(
        "a device",
        2,
        ("m.yaml", "a pipe or device"),
        _manifest_that(lambda path: Path(path).symlink_to("/dev/zero")),
        how="process",
    ),
    Case(
        "format true", 2, ("m.yaml:1", "`format` must be 1"), fetch(SOUND.replace("1", "true", 1))
    ),
    Case(
        "format of next year",
        2,
        ("format 2; this version of airlift reads format 1", "newer airlift"),
        fetch(SOUND.replace("1", "2", 1)),
    ),
    Case("number of 10,000 digits", 2, ("m.yaml:1",), fetch(SOUND.replace("1", "1" * 10_000, 1))),
    Case(
        "number as name",
        2,
        ("m.yaml:2", "must be text"),
        fetch(SOUND.replace("name: m", "name: 12")),
    ),
    Case(
        "number as path",
        2,
        ("m.yaml:5", "must be text"),
        fetch(SOUND.replace("path: notes", "path: 5")),
    ),
    Case(
        "half a character",
        2,
        ("lone surrogate",),
        fetch('name: "\\ud800"\n' + SOUND.replace("name: m\n", "")),
    ),
    Case("half a character in a path", 2, ("lone surrogate",), fetch(asset(path="a\ud800"))),
    Case("asset name ..", 2, ("cannot name an asset",), fetch(asset("..", path="notes"))),
    Case("asset name with /", 2, ("cannot name an asset",), fetch(asset("../../x", path="notes"))),
    Case("asset name empty", 2, ("cannot name an asset",), fetch(asset("", path="notes"))),
    Case(
        "asset names equal but for case",
        3,
        ("would be one folder",),
        fetch(SOUND + "  Notes:\n    path: notes\n"),
    ),
    Case(
        "asset name in normal form D",
        2,
        ("cannot name an asset",),
        fetch(asset("e\u0301", path="notes")),
    ),
    Case("unknown key", 2, ("Did you mean `path`",), fetch(asset(paht="notes"))),
    Case(
        "environment that is not there",
        2,
        ("there is no e.yml",),
        fetch(asset(environment="e.yml")),
    ),
    Case(
        "environment without a lock or a profile",
        2,
        ("there is no notes/e.conda-lock.yml, and no `profile` to make it for",),
        fetch(
            asset(environment="notes/e.yml"),
            lambda place: place.write("notes/e.yml", "dependencies: [python=3.11]\n"),
        ),
    ),
    Case(
        "profile that is not there",
        2,
        ("there is no p.yml",),
        fetch(asset(environment="notes/a.txt", profile="p.yml")),
    ),
    Case("path of nobody", 2, ("home folder",), fetch(asset(path="~nobody-of-that-name/x"))),
    Case("path with a zero byte", 2, ("there is no",), fetch(asset(path="a\0b"))),
    Case(
        "path of which nothing is left",
        2,
        ("has no file to take",),
        fetch(asset(path="notes", exclude=["*"])),
    ),
    Case("path with a variable", 2, ("no shell reads this file",), fetch(asset(path="$HOME/x"))),
    Case("path to a device", 2, ("/dev/zero",), fetch(asset(path="/dev/zero"))),
    Case("path to a pipe", 2, ("pipe",), fetch(asset(path="pipe"), _pipe)),
    Case(
        "path with a pipe in it",
        3,
        ("pipe", "special file"),
        fetch(asset(path="notes"), _pipe_inside),
    ),
    Case(
        "path with a link out",
        3,
        ("link",),
        fetch(
            asset(path="notes"),
            lambda place: (place.folder / "notes/link").symlink_to("/etc/passwd"),
        ),
    ),
    Case(
        "path with names alike",
        3,
        ("same file",),
        fetch(asset(path="notes"), _names("B.txt", "b.txt")),
    ),
    Case(
        "path with normal forms alike",
        3,
        ("same file",),
        fetch(asset(path="notes"), _names("\u00e9", "e\u0301")),
    ),
    Case(
        "path with a newline in a name",
        3,
        ("control character",),
        fetch(asset(path="notes"), _names("a\nb")),
    ),
    Case(
        "names that Windows reserves are fine",
        0,
        ("bundle id",),
        fetch(asset(path="notes"), _names("con", "a:b")),
    ),
    Case("path with % in a name", 3, ("`%`",), fetch(asset(path="notes"), _names("a%0Ab"))),
    Case(
        "pattern that backtracks",
        2,
        ("matches none",),
        fetch(asset(path="notes", include=["*a" * 60 + "b"]), _names("a" * 200)),
    ),
    Case(
        "pattern that is no range",
        2,
        ("matches none",),
        fetch(asset(path="notes", include=["[z-a]*["])),
    ),
    Case(
        "url with a password",
        2,
        ("password",),
        fetch(asset(url="https://me:secret@127.0.0.1:9/x.zip")),
    ),
    Case("url of a file", 2, ("must begin with https://",), fetch(asset(url="file:///etc/passwd"))),
    Case("url of no host", 2, ("names no host",), fetch(asset(url="http:///x"))),
    Case("url with half an address", 2, ("invalid ipv6",), fetch(asset(url="http://[::1/x"))),
    Case(
        "url with a port of six digits",
        2,
        ("address",),
        fetch(asset(url="http://127.0.0.1:999999/x")),
    ),
    Case("url whose file is ..", 3, ("`..`",), fetch(asset(url="http://127.0.0.1:9/a/%2e%2e"))),
    Case(
        "url whose file leads out",
        3,
        ("`..`",),
        fetch(asset(url="http://127.0.0.1:9/%2e%2e%2f%2e%2e%2fevil")),
    ),
    Case(
        "url with a line break",
        2,
        ("address",),
        fetch(asset(url="http://127.0.0.1:9/a\r\nX-Evil: 1")),
    ),
    Case(
        "sha256 of sha1's length",
        2,
        ("64 hex digits",),
        fetch(asset(url="http://127.0.0.1:9/x", sha256="a" * 40)),
    ),
    Case("repository that is a path", 2, ("repository",), fetch(asset(model="../../etc/passwd"))),
    Case("repository with a query", 2, ("repository",), fetch(asset(model="acme/bert?x=1"))),
]
