"""Bundles with false records, with special files, or with hostile names.

`stage-verify.py` also gets each of them and must report the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from stage.bundle.bundle import (
    BAG_INFO,
    BAGIT,
    FETCH_PARTIAL,
    LOCK,
    MANIFEST,
    SIGNATURE,
    TAG_MANIFEST,
)
from tests.stage.bundles import reseal
from tests.stage.hostile.manifests import SOUND
from tests.stage.hostile.runner import Case, Place

Prepare = Callable[[Place], list[str]]
CONFIG = "data/models/bert/config.json"
HUGE = 10**11  # bytes of a sparse file


def bag(spoil: Callable[[Path], object], command: str = "verify") -> Prepare:
    """A damaged bundle, and the command that reads it."""

    def prepare(place: Place) -> list[str]:
        spoil(place.bundle())
        return [command, "bundle"]

    return prepare


def sealed(name: str, change: Callable[[bytes], bytes]) -> Prepare:
    """A bundle with a changed file beside the payload; its tag manifest agrees."""

    def spoil(root: Path) -> None:
        (root / name).write_bytes(change((root / name).read_bytes()))
        reseal(root, name)

    return bag(spoil)


def changed(name: str, change: Callable[[bytes], bytes]) -> Prepare:
    """The same, but the tag manifest does not agree."""
    return bag(lambda root: (root / name).write_bytes(change((root / name).read_bytes())))


def line(path: str, newline: str = "\n") -> bytes:
    return f"{'0' * 64}  {path}{newline}".encode()


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Replaces a file by something else; the file itself is kept beside the bundle."""

    def spoil(root: Path) -> None:
        shutil.move(root / name, root.parent / "kept")
        make(root / name)

    return spoil


def link(path: Path) -> None:
    path.symlink_to("../kept" if path.parent.name == "bundle" else path.parents[3] / "kept")


def _sparse(name: str, size: int = HUGE) -> Callable[[Path], object]:
    return lambda root: os.truncate(root / name, size)


def _no_right_to(name: str) -> Callable[[Path], object]:
    return lambda root: (root / name).chmod(0)


def _names_that_are_no_text(root: Path) -> None:
    for name in (b"not utf-8 \xff", b"new\nline", b"\x1b[2Jred", "\u202etxt.exe".encode()):
        with open(os.path.join(os.fsencode(root / "data"), name), "wb"):  # noqa: PTH118
            pass


def into(spoil: Callable[[Path], object]) -> Prepare:
    """`stage fetch` into a folder that looks like an interrupted fetch, with a foreign file."""

    def prepare(place: Place) -> list[str]:
        root = place.bundle()
        (root / TAG_MANIFEST).unlink()
        (root / "mine.txt").touch()
        spoil(root)
        place.write("m.yaml", SOUND.replace("name: m\n", "name: made\n"))
        place.write("notes/a.txt", "a")
        return ["fetch", "m.yaml", "-o", "bundle"]

    return prepare


M, T, INFO = MANIFEST, TAG_MANIFEST, BAG_INFO
INVALID = ("invalid",)

CASES = [
    Case(
        "manifest line ..",
        1,
        (M, *INVALID),
        sealed(M, lambda text: text + line("data/../../precious")),
    ),
    Case(
        "manifest line absolute",
        1,
        (M, *INVALID),
        sealed(M, lambda text: line("/etc/passwd") + text),
    ),
    Case(
        "manifest line binary",
        1,
        (M, *INVALID),
        sealed(M, lambda text: text.replace(b"  data", b" *data", 1)),
    ),
    Case(
        "a folder of extra files",
        1,
        ("`data/x/`: extra: a folder of 2 files that are not of the bundle",),
        bag(
            lambda root: [
                (root / "data/x/y").mkdir(parents=True),
                (root / "data/x/y/a").touch(),
                (root / "data/x/b").touch(),
            ]
        ),
    ),
    Case(
        "extra files beside files of the bundle",
        1,
        ("`data/models/bert/x`: extra: expected nothing", "`data/models/bert/y`: extra"),
        bag(lambda root: [(root / "data/models/bert" / name).touch() for name in "xy"]),
    ),
    Case(
        "a lock that is none, in a bundle that is not sealed",
        1,
        ("`stage.lock`: invalid: expected a lock, found something that cannot be read as one",),
        bag(lambda root: [(root / T).unlink(), (root / LOCK).write_bytes(b"{}")]),
    ),
    Case(
        "a patch",
        2,
        ("p: a patch, not a bundle", "stage apply BUNDLE p"),
        lambda place: ["verify", place.write("p/patch.json", "{}").parent.name],
    ),
    Case(
        "unfinished, shown",
        2,
        ("bundle: this bundle is unfinished: it has no tagmanifest-sha256.txt",),
        bag(lambda root: (root / T).unlink(), "show"),
    ),
    Case(
        "another lock than the sealed one, shown",
        1,
        ("bundle/stage.lock: damaged: sha256 ", "Run `stage verify bundle`"),
        bag(lambda root: (root / LOCK).write_bytes(b"{}"), "show"),
    ),
    Case(
        "no environment to check",
        2,
        ("bundle: there is no environment in this bundle",),
        lambda place: ["env", "check", place.bundle().name],
    ),
    Case(
        "an environment that is a model",
        2,
        ("bundle: `bert` is a model, not an environment", "Its environments: none"),
        lambda place: ["env", "create", place.bundle().name, "bert", "x"],
    ),
    Case(
        "pushed by no ssh",
        2,
        ("--ssh: there is no `no-such-ssh` on PATH",),
        lambda place: ["push", place.bundle().name, "host:x", "--ssh", "no-such-ssh -p 2"],
    ),
    Case(
        "lock CRLF",
        1,
        ("`stage.lock`: mismatched", "binary mode"),
        changed(LOCK, lambda text: text.replace(b"\n", b"\r\n")),
    ),
    Case("manifest CRLF", 1, (M, *INVALID), sealed(M, lambda text: text.replace(b"\n", b"\r\n"))),
    Case(
        "manifest percent",
        1,
        (M, *INVALID),
        sealed(M, lambda text: text.replace(b"a b/", b"a%20b/")),
    ),
    Case(
        "manifest line twice",
        1,
        (M, *INVALID),
        sealed(M, lambda text: text + text.splitlines(True)[0]),
    ),
    Case("manifest without its last newline", 1, (M, *INVALID), sealed(M, lambda text: text[:-1])),
    Case(
        "manifest upper case",
        1,
        (M, *INVALID),
        sealed(M, lambda text: text[:64].upper() + text[64:]),
    ),
    Case("manifest empty", 1, (M, *INVALID), sealed(M, lambda _: b"")),
    Case("manifest zeros", 1, (M, *INVALID), sealed(M, lambda text: bytes(len(text)))),
    Case(
        "manifest not UTF-8",
        1,
        (M, *INVALID),
        sealed(M, lambda text: text + b"0" * 64 + b"  data/\xff\n"),
    ),
    Case(
        "a second algorithm",
        1,
        ("manifest-sha512.txt", "extra"),
        bag(lambda root: (root / "manifest-sha512.txt").write_bytes(b"0" * 128 + b"  data/x\n")),
    ),
    Case(
        "fetch.txt",
        1,
        ("fetch.txt", "extra"),
        bag(
            lambda root: (root / "fetch.txt").write_text("http://127.0.0.1:9/x - data/../../evil\n")
        ),
    ),
    Case(
        "tag manifest line ..",
        1,
        (T, *INVALID),
        changed(T, lambda text: text + line("../precious")),
    ),
    Case(
        "tag manifest line of the payload",
        1,
        (T, *INVALID),
        changed(T, lambda text: text + line(CONFIG)),
    ),
    Case(
        "tag manifest line twice",
        1,
        (T, *INVALID),
        changed(T, lambda text: text + text.splitlines(True)[-1]),
    ),
    Case("tag manifest of itself", 1, (T, *INVALID), changed(T, lambda text: text + line(T))),
    Case("tag manifest empty", 1, (T, *INVALID), changed(T, lambda _: b"")),
    Case("tag manifest noise", 1, (T, *INVALID), changed(T, lambda text: bytes(range(256)) * 9)),
    Case(
        "BagIt 0.97",
        1,
        (BAGIT, *INVALID),
        sealed(BAGIT, lambda t: t.replace(b"1.0", b"0.97")),
    ),
    Case(
        "BagIt in UTF-16",
        1,
        (BAGIT,),
        sealed(BAGIT, lambda t: t.replace(b"UTF-8", b"UTF-16")),
    ),
    Case(
        "oxum folded",
        1,
        (INFO, *INVALID),
        sealed(INFO, lambda t: t.replace(b"Payload-Oxum: ", b"Payload-Oxum:\n ")),
    ),
    Case(
        "oxum twice", 1, (INFO, *INVALID), sealed(INFO, lambda text: text + b"Payload-Oxum: 1.1\n")
    ),
    Case(
        "oxum of 10,000 digits",
        1,
        (INFO,),
        sealed(INFO, lambda t: t.replace(b"Oxum: ", b"Oxum: " + b"9" * 10_000)),
    ),
    Case(
        "identifier of another lock",
        1,
        (INFO,),
        sealed(INFO, lambda t: t.replace(b"sha256:", b"sha256:" + b"0" * 8)),
    ),
    Case("bag-info of 100 GB", 1, (INFO, "larger"), bag(_sparse(INFO)), how="process"),
    Case("tag manifest of 100 GB", 1, (T, "larger"), bag(_sparse(T)), how="process"),
    Case(
        "signature of 100 GB",
        1,
        (SIGNATURE, "larger"),
        bag(lambda root: [(root / SIGNATURE).touch(), _sparse(SIGNATURE)(root)]),
        how="process",
    ),
    Case("payload of 100 GB", 1, (CONFIG, "mismatched"), bag(_sparse(CONFIG)), how="process"),
    Case("lock a link", 1, (LOCK, "a symbolic link"), bag(instead(LOCK, link))),
    Case(
        "lock a pipe",
        1,
        (LOCK, "a pipe"),
        bag(instead(LOCK, os.mkfifo)),
        how="process",
    ),
    Case("lock a folder", 1, (LOCK,), bag(instead(LOCK, Path.mkdir))),
    Case("tag manifest a link", 1, (T, "a symbolic link"), bag(instead(T, link))),
    Case("tag manifest a pipe", 1, (T, "a pipe"), bag(instead(T, os.mkfifo)), how="process"),
    Case("payload a link", 1, (CONFIG, "a symbolic link"), bag(instead(CONFIG, link))),
    Case("payload a pipe", 1, (CONFIG, "a pipe"), bag(instead(CONFIG, os.mkfifo)), how="process"),
    Case(
        "a folder that is a link out",
        1,
        ("data/models", "a symbolic link"),
        bag(instead("data/models", link)),
    ),
    Case(
        "names that are no text",
        1,
        ("\\x1b[2Jred", "\\udcff", "new\\nline", "\\u202e"),
        bag(_names_that_are_no_text),
    ),
    Case(
        "a file nobody may read",
        5,
        (CONFIG, "unreadable", "chmod -R u+rX bundle"),
        bag(_no_right_to(CONFIG)),
        how="nobody",
    ),
    Case(
        "a folder nobody may read",
        5,
        ("data/models", "unreadable"),
        bag(_no_right_to("data/models")),
        how="nobody",
    ),
    Case(
        "a lock nobody may read",
        5,
        (LOCK, "unreadable"),
        bag(_no_right_to(LOCK)),
        how="nobody",
    ),
    Case(
        "journal in a finished bundle",
        1,
        (FETCH_PARTIAL, "extra"),
        bag(lambda root: (root / FETCH_PARTIAL).write_text("/etc/passwd\n")),
    ),
    Case(
        "fetch into it: journal not UTF-8",
        2,
        ("did not put these here",),
        into(lambda root: (root / FETCH_PARTIAL).write_bytes(b"\xff\xfe\n../../precious\n")),
    ),
    Case(
        "fetch into it: journal of what is not ours",
        2,
        ("did not put these here",),
        into(lambda root: (root / FETCH_PARTIAL).write_text("../../precious\nstage.lock\n")),
    ),
    Case(
        "fetch into it: a link",
        2,
        ("a link or special file",),
        into(lambda root: (root / "data/link").symlink_to("/etc")),
    ),
    Case(
        "shown: lock a pipe",
        1,
        (LOCK, "pipe"),
        bag(instead(LOCK, os.mkfifo), "show"),
        how="process",
    ),
    Case("shown: lock a link", 1, (LOCK, "a link"), bag(instead(LOCK, link), "show")),
    Case("shown: tag manifest a pipe", 2, (T,), bag(instead(T, os.mkfifo), "show"), how="process"),
    Case(
        "shown: lock of 100 GB",
        1,
        (LOCK, "larger"),
        bag(_sparse(LOCK), "show"),
        how="process",
    ),
    Case(
        "shown: a pipe",
        2,
        ("not a bundle",),
        lambda place: (os.mkfifo(place.folder / "p"), ["show", "p"])[1],
    ),
]
