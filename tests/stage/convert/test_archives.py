"""Untrusted archives: sound ones are unpacked completely, hostile ones write nothing elsewhere."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.convert.archives import Limits, unpack
from stage.errors import DamageError, PolicyError, StageError, UsageError

FILES = {"a/one.txt": b"one", "a/b/zwei ü.txt": b"zwei" * 5000, "empty": b""}


def tar(
    entries: list[tuple[tarfile.TarInfo | str, bytes]], format: int = tarfile.PAX_FORMAT
) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=format) as archive:
        for entry, data in entries:
            info = tarfile.TarInfo(entry) if isinstance(entry, str) else entry
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def zipped(entries: list[tuple[zipfile.ZipInfo | str, bytes]]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in entries:
            archive.writestr(entry, data)
    return sink.getvalue()


def zip_link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("link")
    info.create_system, info.external_attr = 3, 0o120777 << 16
    return info


def encrypted_zip() -> bytes:
    data = bytearray(zipped([("a", b"secret")]))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    return bytes(data)


def long_header() -> bytes:
    """A tar whose long name is announced as 1 GB."""
    info = special("././@LongLink", tarfile.GNUTYPE_LONGNAME)
    info.size = 10**9
    return info.tobuf(tarfile.GNU_FORMAT) + b"a" * 10_240


def written(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def tried(tmp_path: Path, data: bytes, limits: Limits | None = None) -> list[str]:
    (tmp_path / "archive").write_bytes(data)
    return unpack(tmp_path / "archive", tmp_path / "out" / "here", "m.yaml:3: `x`", limits)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "tar": lambda data: data,
    "tar.gz": gzip.compress,
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
}


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_tar_comes_out_as_it_went_in(tmp_path: Path, packer: str, format: int) -> None:
    entries: list[tuple[tarfile.TarInfo | str, bytes]] = [(special("./a", tarfile.DIRTYPE), b"")]
    data = PACKERS[packer](
        tar([*entries, *((f"./{name}", data) for name, data in FILES.items())], format)
    )
    assert tried(tmp_path, data) == sorted(FILES)
    assert written(tmp_path / "out" / "here") == FILES


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_are_fine(tmp_path: Path, format: int) -> None:
    name = "/".join(["x" * 120] * 3)
    assert tried(tmp_path, tar([(name, b"1")], format)) == [name]


def test_a_zip_comes_out_as_it_went_in(tmp_path: Path) -> None:
    assert tried(tmp_path, zipped([("a/", b""), *FILES.items()])) == sorted(FILES)
    assert written(tmp_path / "out" / "here") == FILES


def test_a_tar_whose_last_file_is_a_zip_is_a_tar(tmp_path: Path) -> None:
    """A plain tar of .npz shards, wheels or documents: it ends as a zip does."""
    files = {
        "train/a.npz": zipped([("x.npy", b"1")]),
        "labels.csv": b"a,b\n",
        "val/z.npz": zipped([("y.npy", b"2")]),
    }
    assert tried(tmp_path, tar(list(files.items()))) == sorted(files)
    assert written(tmp_path / "out" / "here") == files


def test_what_only_ends_as_a_zip_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an archive"):
        tried(tmp_path, b"7z\xbc\xaf\x27\x1c" + zipped([("a", b"1")]))


ZIP = zipped([("a", b"one"), ("b", b"two")])
WITH_COMMENT = ZIP[:-2] + struct.pack("<H", 7) + b"comment"


def test_a_zip_may_have_a_comment(tmp_path: Path) -> None:
    assert tried(tmp_path, WITH_COMMENT) == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (ZIP + b"more", "follows its end"),
        (ZIP + bytes(70_000), "not a zip file"),
        (WITH_COMMENT + b"more", "follows its end"),
        (WITH_COMMENT[:-1], "comment is cut off"),
        (ZIP[:-1], "not a zip file"),
        (ZIP[: len(ZIP) // 2], "not a zip file"),
        (zipped([("lost", b"0")]) + ZIP, "precedes"),
    ],
    ids=[
        "behind",
        "far behind",
        "behind the comment",
        "comment cut",
        "end cut",
        "half",
        "two zips",
    ],
)
def test_a_zip_that_is_torn_or_has_something_around_it_is_damage(
    tmp_path: Path, data: bytes, said: str
) -> None:
    with pytest.raises(DamageError, match=said):
        tried(tmp_path, data)
    assert not written(tmp_path / "out")


HOSTILE: dict[str, tuple[bytes, str]] = {
    "tar dot dot": (tar([("good", b""), ("../evil", b"x")]), "`..`"),
    "tar inner dot dot": (tar([("a/../../evil", b"x")]), "`..`"),
    "tar absolute": (tar([("/tmp/evil", b"x")]), "absolute"),
    "tar folder outside": (tar([("a", b""), (special("../evil", tarfile.DIRTYPE), b"")]), "`..`"),
    "tar symlink": (
        tar([(special("a", tarfile.SYMTYPE, "/etc"), b""), ("a/passwd", b"x")]),
        "a link",
    ),
    "tar hard link": (tar([("b", b"1"), (special("a", tarfile.LNKTYPE, "b"), b"")]), "a link"),
    "tar device": (tar([(special("a", tarfile.CHRTYPE), b"")]), "special"),
    "tar pipe": (tar([(special("a", tarfile.FIFOTYPE), b"")]), "special"),
    "tar twice": (tar([("a", b"1"), ("a", b"2")]), "same file"),
    "tar case": (tar([("A/x", b"1"), ("a/y", b"2")]), "same file"),
    "tar normal form": (tar([("\u00e9", b"1"), ("e\u0301", b"2")]), "same file"),
    "tar file and folder": (tar([("a", b"1"), ("a/b", b"2")]), "same file"),
    "tar newline": (tar([("a\nb", b"1")]), "control character"),
    "tar backslash": (tar([("..\\evil", b"1")]), "backslash"),
    "tar partial": (tar([("x.partial", b"1")]), "unfinished"),
    "tar long header": (long_header(), "header"),
    "zip dot dot": (zipped([("../evil", b"x")]), "`..`"),
    "zip absolute": (zipped([("/evil", b"x")]), "absolute"),
    "zip folder outside": (zipped([("a", b""), ("../evil/", b"")]), "`..`"),
    "zip backslash": (zipped([("..\\evil", b"x")]), "backslash"),
    "zip link": (zipped([(zip_link(), b"/etc")]), "a link"),
    "zip encrypted": (encrypted_zip(), "encrypted"),
    "zip case": (zipped([("a", b"1"), ("A", b"2")]), "same file"),
    "zip zero byte": (zipped([("evilXtxt", b"1")]).replace(b"evilX", b"evil\0"), "zero byte"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_lands_outside(tmp_path: Path, name: str) -> None:
    data, said = HOSTILE[name]
    with pytest.raises(PolicyError, match=said) as caught:
        tried(tmp_path, data)
    assert caught.value.exit_code == 3 and caught.value.remedy
    assert not written(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["archive", "out"]


def test_names_are_judged_before_the_first_byte_is_written(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        tried(tmp_path, gzip.compress(tar([("good", b"x" * 100_000), ("../evil", b"x")])))
    assert not written(tmp_path / "out")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_bomb_is_refused_by_its_ratio(tmp_path: Path, kind: str) -> None:
    zeros = bytes(70 * 2**20)
    data = bz2.compress(tar([("zeros", zeros)])) if kind == "tar" else zipped([("zeros", zeros)])
    with pytest.raises(PolicyError, match="times its size") as caught:
        tried(tmp_path, data, Limits(ratio=100))
    assert "MB" in caught.value.message and "100 times" in caught.value.message
    assert sum(map(len, written(tmp_path / "out").values())) == 0


def test_padding_without_end_is_a_bomb(tmp_path: Path) -> None:
    data = bz2.compress(tar([("a", b"x")])[:1024] + bytes(80 * 2**20))
    with pytest.raises(PolicyError, match="times its size"):
        tried(tmp_path, data, Limits(ratio=100))


def test_a_bomb_is_refused_by_its_size_and_by_its_files(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="more than 1 kB"):
        tried(tmp_path, tar([("a", bytes(600)), ("b", bytes(600))]), Limits(size=1000))
    with pytest.raises(PolicyError, match="more than 2 files"):
        tried(tmp_path, zipped([("a", b""), ("b", b""), ("c", b"")]), Limits(entries=2))


def test_a_zip_that_lies_about_a_size(tmp_path: Path) -> None:
    data = bytearray(zipped([("a", bytes(5000))]))
    at = data.index(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<I", 10)
    with pytest.raises((PolicyError, DamageError)):
        tried(tmp_path, bytes(data))
    assert sum(map(len, written(tmp_path / "out").values())) <= 10


@pytest.mark.parametrize("packer", PACKERS)
def test_a_torn_archive_is_damage(tmp_path: Path, packer: str) -> None:
    data = PACKERS[packer](tar([("a", b"x" * 50_000), ("b", bytes(range(256)) * 400)]))
    with pytest.raises(DamageError, match="cut off or damaged"):
        tried(tmp_path, data[: len(data) * 2 // 3])


def test_what_is_no_archive_is_said(tmp_path: Path) -> None:
    for data in (
        b"",
        b"hello",
        gzip.compress(b"hello"),
        b"\x1f\x8b\x07 nonsense",
        b"PK\x05\x06" + bytes(18),
    ):
        with pytest.raises(UsageError):
            tried(tmp_path, data)


@settings(max_examples=80)
@given(st.data())
def test_any_change_of_an_archive_gives_its_files_or_words(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = data.draw(
        st.sampled_from(
            [
                tar(list(FILES.items())),
                gzip.compress(tar([("a", b"x")]), mtime=0),
                zipped(list(FILES.items())),
            ]
        )
    )
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("fuzz")
    with suppress(StageError):
        tried(folder, bytes(changed))
    assert sorted(p.name for p in folder.iterdir()) in (["archive"], ["archive", "out"])


def test_an_archive_with_a_forbidden_name_is_not_told_to_exclude_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(tar([("../evil", b"x")]))
    with pytest.raises(PolicyError) as caught:
        unpack(tmp_path / "a", tmp_path / "out", "evil")
    assert "exclude" not in str(caught.value) and "`path:`" in caught.value.remedy


GBK = {"训练/图片.csv": b"a,b\n1,2\n", "训练/说明.txt": b"x"}


def stating_nothing(
    files: Mapping[str, bytes], encoding: str, extra: bool = False, host: int = 0
) -> bytes:
    """A zip as Windows' own packer makes it: names in the code page, without the flag.

    Args:
        extra: a field that WinRAR and 7-Zip add.
    """

    class Entry(zipfile.ZipInfo):
        def _encodeFilenameFlags(self) -> tuple[bytes, int]:
            return self.filename.encode(encoding), 0

    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as opened:
        for name, data in files.items():
            entry = Entry(name)
            entry.create_system = host
            if extra:
                field = b"\1" + struct.pack("<I", zlib.crc32(name.encode(encoding))) + name.encode()
                entry.extra = (
                    struct.pack("<HH", 0x0001, 0) + struct.pack("<HH", 0x7075, len(field)) + field
                )
            opened.writestr(entry, data)
    return sink.getvalue()


@pytest.mark.parametrize("encoding", ["gbk", "cp1251"])
def test_names_of_a_zip_that_states_no_encoding_are_refused_and_the_command_unpacks_them(
    tmp_path: Path, encoding: str
) -> None:
    files = GBK if encoding == "gbk" else {"данные/таблица.csv": b"1"}
    with pytest.raises(PolicyError, match=next(iter(files))) as caught:
        tried(tmp_path, stating_nothing(files, encoding))
    assert written(tmp_path / "out") == {}
    command = caught.value.remedy.partition(": ")[2].partition(" (Python")[0]
    if sys.version_info >= (3, 11):
        command = (
            command.replace("python3", sys.executable)
            .replace("FILE", "archive")
            .replace("FOLDER", "own")
        )
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        assert written(tmp_path / "own") == files


@pytest.mark.parametrize(
    "data", [stating_nothing(GBK, "gbk", extra=True), stating_nothing(GBK, "utf-8", host=3)]
)
def test_names_of_a_zip_are_what_its_extra_field_or_a_mac_says(tmp_path: Path, data: bytes) -> None:
    assert tried(tmp_path, data) == sorted(GBK)
    assert written(tmp_path / "out" / "here") == GBK


def test_an_extra_field_of_another_name_or_with_a_path_out_is_not_believed(tmp_path: Path) -> None:
    data = stating_nothing(GBK, "gbk", extra=True)
    with pytest.raises(PolicyError, match="in which encoding"):
        tried(
            tmp_path,
            data.replace(struct.pack("<I", zlib.crc32("训练/图片.csv".encode("gbk"))), b"\0\0\0\0"),
        )
    out = "../../../x图.csv"
    with pytest.raises(PolicyError, match=r"component `\.\.`"):
        tried(tmp_path, stating_nothing({out: b"1"}, "gbk", extra=True))


def test_names_of_a_tar_that_are_not_utf_8_are_refused_and_the_command_unpacks_them(
    tmp_path: Path,
) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.GNU_FORMAT, encoding="gbk") as opened:
        for name, data in GBK.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    with pytest.raises(PolicyError, match="训练/图片") as caught:
        tried(tmp_path, sink.getvalue())
    command = (
        caught.value.remedy.partition("`: ")[2].replace("FILE", "archive").replace("FOLDER", "own")
    )
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert written(tmp_path / "own") == GBK


def test_an_lfs_pointer_in_an_archive_is_called_that(tmp_path: Path) -> None:
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n".encode()
    )
    for pack in (lambda files: tar(list(files)), lambda files: zipped(list(files))):
        with pytest.raises(UsageError, match=r"`r/train\.parquet` is a Git LFS pointer") as caught:
            tried(tmp_path, pack([("r/README.md", b"see spec/v1"), ("r/train.parquet", pointer)]))
        assert "git lfs pull" in caught.value.remedy
