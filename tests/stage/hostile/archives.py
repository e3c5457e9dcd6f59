"""Archives that `url:` with `unpack: true` fetches."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import tarfile
from collections.abc import Callable
from functools import partial

from tests.stage.convert.test_archives import encrypted_zip, special, tar, zip_link, zipped
from tests.stage.hostile.manifests import asset
from tests.stage.hostile.runner import Case, Place
from tests.support.servers.liar import Answer

Prepare = Callable[[Place], list[str]]
Make = bytes | Callable[[], bytes]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 9\n" % (b"a" * 64)


def unpacked(data: Make) -> Prepare:
    """`stage fetch` of an archive on a server."""

    def prepare(place: Place) -> list[str]:
        place.liar.answers["/x.bin"] = Answer(data if isinstance(data, bytes) else data())
        place.write("m.yaml", asset(url=place.liar.url("/x.bin"), unpack=True))
        return ["fetch", "m.yaml", "-o", "bundle"]

    return prepare


def sized(name: str, size: int, data: bytes = b"") -> bytes:
    """A tar with one file, or long name, whose header states another size."""
    info = special(name, tarfile.GNUTYPE_LONGNAME if "LongLink" in name else tarfile.REGTYPE)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(1024)


def with_pax(**headers: str) -> bytes:
    """A tar with one small file, and extended headers for it."""
    info = tarfile.TarInfo("a")
    info.pax_headers = headers
    return tar([(info, b"data")])


def pax_header(text: bytes) -> bytes:
    """A tar with this value as an extended header."""
    info = special("././@PaxHeader", tarfile.XHDTYPE)
    info.size = len(text)
    return info.tobuf() + text + bytes(-len(text) % 512) + tar([("a", b"data")])


def zeros(size: int) -> bytes:
    return sized("zeros", size, bytes(size))


def zip_of_two_names() -> bytes:
    """A zip whose entry is `b` in its local header (name at byte 30), and `a` at the end."""
    data = bytearray(zipped([("a", b"x")]))
    assert data[30:31] == b"a"
    data[30:31] = b"b"
    return bytes(data)


def zip_with(offset: int, form: str, value: int, *, central: bool = True) -> bytes:
    """A sound zip with one file and one changed header field."""
    data = bytearray(zipped([("a", b"data" * 100)]))
    struct.pack_into(
        form, data, data.index(b"PK\x01\x02" if central else b"PK\x03\x04") + offset, value
    )
    return bytes(data)


def polyglot() -> bytes:
    """A tar with a zip after its end: readers disagree which of the two it is."""
    return tar([("../evil", b"x")]) + zipped([("../../evil", b"x")])


NOISE = bytes(range(256)) * 400
LINK, HARD, CHR, FIFO = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE
TORN = ("cut off or damaged",)


def bomb(pack: Callable[[bytes], bytes], data: Callable[[], bytes]) -> Callable[[], bytes]:
    return lambda: pack(data())


CASES = [
    Case("tar ..", 3, ("`..`",), unpacked(tar([("good", b""), ("../../precious", b"x")]))),
    Case(
        "tar of a pointer",
        2,
        ("the archive's `a.bin` is a Git LFS pointer, not the file itself",),
        unpacked(tar([("a.bin", POINTER)])),
    ),
    Case("tar absolute", 3, ("absolute",), unpacked(tar([("/tmp/evil", b"x")]))),
    Case(
        "tar writes through a link",
        3,
        ("a link",),
        unpacked(tar([(special("a", LINK, ".."), b""), ("a/b", b"x")])),
    ),
    Case(
        "tar hard link outward",
        3,
        ("a link",),
        unpacked(tar([(special("a", HARD, "/etc/passwd"), b"")])),
    ),
    Case(
        "tar hard link to a link",
        3,
        ("a link",),
        unpacked(
            tar([("f", b"1"), (special("l", LINK, "../.."), b""), (special("h", HARD, "l"), b"")])
        ),
    ),
    Case("tar device", 3, ("special",), unpacked(tar([(special("zero", CHR), b"")]))),
    Case("tar pipe", 3, ("special",), unpacked(tar([(special("pipe", FIFO), b"")]))),
    Case("tar of an unknown kind", 3, ("special",), unpacked(tar([(special("a", b"Z"), b"")]))),
    Case(
        "tar folder outside",
        3,
        ("`..`",),
        unpacked(tar([("a", b""), (special("../e", tarfile.DIRTYPE), b"")])),
    ),
    Case(
        "tar sparse",
        3,
        ("sparse",),
        unpacked(with_pax(**{"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999"})),
    ),
    Case(
        "tar sparse without its map",
        1,
        TORN,
        unpacked(
            with_pax(
                **{
                    "GNU.sparse.major": "1",
                    "GNU.sparse.minor": "0",
                    "GNU.sparse.realsize": "9" * 18,
                }
            )
        ),
    ),
    Case("tar pax size no number", 1, TORN, unpacked(with_pax(size="x"))),
    Case(
        "tar pax size of 30 digits",
        3,
        ("more than the limit of",),
        unpacked(with_pax(size="9" * 30)),
    ),
    Case("tar pax path ..", 3, ("`..`",), unpacked(with_pax(path="../../evil"))),
    Case("tar pax header of digits", 1, TORN, unpacked(gzip.compress(pax_header(b"1" * 2**20)))),
    Case(
        "tar pax header of 10 MB", 3, ("header",), unpacked(gzip.compress(pax_header(b"1" * 10**7)))
    ),
    Case("tar size of 1 EB", 3, ("more than the limit of",), unpacked(sized("a", 10**18))),
    Case(
        "tar bomb", 3, ("times its size",), unpacked(bomb(bz2.compress, partial(zeros, 80 * 2**20)))
    ),
    Case(
        "tar bomb in xz",
        3,
        ("times its size",),
        unpacked(bomb(partial(lzma.compress, preset=0), partial(zeros, 80 * 2**20))),
    ),
    Case(
        "tar in a tar is a file",
        0,
        ("bundle id",),
        unpacked(tar([("inner.tar", tar([("../evil", b"x")]))])),
    ),
    Case("tar name twice", 3, ("same file",), unpacked(tar([("a", b"1"), ("a", b"2")]))),
    Case(
        "tar names equal but for case",
        3,
        ("same file",),
        unpacked(tar([("A/x", b"1"), ("a/y", b"2")])),
    ),
    Case(
        "tar names equal but for normal form",
        3,
        ("same file",),
        unpacked(tar([("\u00e9", b"1"), ("e\u0301", b"2")])),
    ),
    Case(
        "tar file where a folder is", 3, ("same file",), unpacked(tar([("a/b", b"1"), ("a", b"2")]))
    ),
    Case("tar escape sequence", 3, ("control character",), unpacked(tar([("\x1b[2Jx", b"1")]))),
    Case(
        "tar name not UTF-8",
        3,
        ("does not say in which encoding",),
        unpacked(tar([("\udcff", b"1")], tarfile.GNU_FORMAT)),
    ),
    Case("tar unfinished file", 3, ("unfinished",), unpacked(tar([("x.partial", b"1")]))),
    Case(
        "tar name announced as 1 GB",
        3,
        ("header",),
        unpacked(gzip.compress(sized("././@LongLink", 10**9, b"a" * 10_240))),
    ),
    Case("tar name of 2,000 bytes", 3, ("longer than",), unpacked(tar([("n" * 2000, b"1")]))),
    Case("tar cut in a file", 1, TORN, unpacked(tar([("a", NOISE)])[:50_000])),
    Case("tar cut between two files", 1, TORN, unpacked(tar([("a", b""), ("b", b"x")])[:512])),
    Case("tar behind a tar", 1, TORN, unpacked(tar([("a", b"1")]) + tar([("b", b"2")]))),
    Case("tar.gz cut", 1, TORN, unpacked(gzip.compress(tar([("a", NOISE)]))[:-200])),
    Case("tar.bz2 cut", 1, TORN, unpacked(bz2.compress(tar([("a", NOISE)]))[:30])),
    Case("tar.xz cut", 1, TORN, unpacked(lzma.compress(tar([("a", NOISE)]))[:-20])),
    Case(
        "tar.gz with a tail of garbage",
        1,
        TORN,
        unpacked(gzip.compress(tar([("a", b"1")])) + b"garbage" * 50),
    ),
    Case(
        "tar of a folder alone",
        2,
        ("the archive has no file in it",),
        unpacked(tar([(special("a", tarfile.DIRTYPE), b"")])),
    ),
    Case("tar of nothing", 2, ("not an archive",), unpacked(bytes(10240))),
    Case("zip ..", 3, ("`..`",), unpacked(zipped([("../../precious", b"x")]))),
    Case("zip absolute", 3, ("absolute",), unpacked(zipped([("/tmp/evil", b"x")]))),
    Case("zip backslash", 3, ("backslash",), unpacked(zipped([("..\\evil", b"x")]))),
    Case("zip drive", 3, ("backslash",), unpacked(zipped([("C:\\evil", b"x")]))),
    Case("zip link", 3, ("a link",), unpacked(zipped([(zip_link(), b"/etc")]))),
    Case("zip encrypted", 3, ("encrypted",), unpacked(encrypted_zip())),
    Case(
        "zip zero byte",
        3,
        ("zero byte",),
        unpacked(zipped([("evilXtxt", b"1")]).replace(b"evilX", b"evil\0")),
    ),
    Case("zip name twice", 3, ("same file",), unpacked(zipped([("a", b"1"), ("a", b"2")]))),
    Case(
        "zip names equal but for case",
        3,
        ("same file",),
        unpacked(zipped([("a", b"1"), ("A", b"2")])),
    ),
    Case("zip CRC wrong", 1, TORN, unpacked(zip_with(16, "<I", 1))),
    Case("zip method unknown", 3, ("number 77",), unpacked(zip_with(10, "<H", 77))),
    Case("zip offset behind its end", 1, TORN, unpacked(zip_with(42, "<I", 10**9))),
    Case("zip that unpacks to more than it says", 1, TORN, unpacked(zip_with(24, "<I", 10))),
    Case("zip local name another", 1, TORN, unpacked(zip_of_two_names())),
    Case("zip cut", 1, TORN, unpacked(zipped([("a", NOISE)])[:-30])),
    Case("zip behind a tar", 1, ("something follows its end",), unpacked(polyglot())),
    Case("no archive", 2, ("not an archive",), unpacked(b"<html>quota exceeded</html>" * 100)),
]
