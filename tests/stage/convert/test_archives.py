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


def written(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def tried(tmp_path: Path, data: bytes, limits: Limits | None = None) -> list[str]:
    (tmp_path / "archive").write_bytes(data)
    return unpack(tmp_path / "archive", tmp_path / "out" / "here", limits)


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


ZIP = zipped([("a", b"one"), ("b", b"two")])
WITH_COMMENT = ZIP[:-2] + struct.pack("<H", 7) + b"comment"


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


def test_a_bomb_is_refused_by_its_size_and_by_its_files(tmp_path: Path) -> None:
    assert tried(
        tmp_path, zipped([("a", bytes(500)), ("b", bytes(500))]), Limits(size=1000, entries=2)
    ) == ["a", "b"]
    with pytest.raises(PolicyError, match="more than the limit of 1 kB"):
        tried(tmp_path, tar([("a", bytes(600)), ("b", bytes(600))]), Limits(size=1000))
    with pytest.raises(PolicyError, match="more than 2 files"):
        tried(tmp_path, zipped([("a", b""), ("b", b""), ("c", b"")]), Limits(entries=2))


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


def test_an_lfs_pointer_in_an_archive_is_called_that(tmp_path: Path) -> None:
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n".encode()
    )
    for pack in (lambda files: tar(list(files)), lambda files: zipped(list(files))):
        with pytest.raises(UsageError, match=r"`r/train\.parquet` is a Git LFS pointer") as caught:
            tried(tmp_path, pack([("r/README.md", b"see spec/v1"), ("r/train.parquet", pointer)]))
        assert "git lfs pull" in caught.value.remedy
