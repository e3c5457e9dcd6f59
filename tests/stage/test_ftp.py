"""`url: ftp://...` against a real FTP server: pinned, resumed, never a mixture; refused in words."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from stage.bundle import Bundle
from stage.cli import main
from tests.support.ftp import Ftp, serve

DATA = bytes(range(256)) * 12_000  # 3 MB


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[Ftp]:
    (tmp_path / "server/pub").mkdir(parents=True)
    with serve(tmp_path / "server") as started:
        yield started


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    (tmp_path / "laptop").mkdir()
    monkeypatch.chdir(tmp_path / "laptop")
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "2")

    def stage(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, list(arguments))
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output and (done.exception is None or isinstance(done.exception, SystemExit))
        return done

    return stage


def manifest(url: str, **more: Any) -> None:
    Path("m.yaml").write_text(json.dumps({"format": 1, "name": "m", "assets": {"x": {"url": url, **more}}}))


def publish(ftp: Ftp, data: bytes, name: str = "pub/a file.bin", changed_at: int = 1_700_000_000) -> None:
    (ftp.root / name).write_bytes(data)
    os.utime(ftp.root / name, (changed_at, changed_at))


def fetched(bundle: str = "b") -> bytes:
    (file,) = Bundle.open(Path(bundle)).asset("x").files
    return Path(bundle, file.path).read_bytes()


def test_a_file_is_fetched_pinned_and_followed(ftp: Ftp, run: Callable[..., Result]) -> None:
    publish(ftp, DATA)
    manifest(ftp.url("/pub/a%20file.bin"))
    run("fetch", "m.yaml", "-o", "b")
    asset = Bundle.open(Path("b")).asset("x")
    assert fetched() == DATA and asset.files[0].path == "data/files/x/a file.bin"
    assert (asset.made_from[0].size, asset.made_from[0].sha256) == (len(DATA), hashlib.sha256(DATA).hexdigest())
    assert set(ftp.asked("USER")) == {"anonymous"} and set(ftp.asked("TYPE")) == {"I"}
    run("verify", "b")
    run("fetch", "m.yaml", "-o", "c")
    assert Bundle.open(Path("c")).id == Bundle.open(Path("b")).id
    publish(ftp, DATA[::-1])
    assert "sha256" in run("fetch", "m.yaml", "-o", "d", code=1).output
    run("fetch", "m.yaml", "-o", "b", "--update", "x")
    assert fetched() == DATA[::-1]


def test_a_torn_transfer_goes_on_where_it_was(ftp: Ftp, run: Callable[..., Result]) -> None:
    publish(ftp, DATA)
    ftp.cut = [2_000_000, 500_000]
    manifest(ftp.url("/pub/a%20file.bin"), sha256=hashlib.sha256(DATA).hexdigest())
    run("fetch", "m.yaml", "-o", "b")
    assert fetched() == DATA
    first, second = map(int, ftp.asked("REST"))
    assert 0 < first <= 2_000_000 and first < second <= first + 500_000


def test_a_file_that_changed_in_between_is_no_mixture(ftp: Ftp, run: Callable[..., Result]) -> None:
    publish(ftp, DATA)
    ftp.cut = [2_000_000]
    manifest(ftp.url("/pub/a%20file.bin"))

    class Changes(list[tuple[str, str]]):
        def append(self, command: tuple[str, str]) -> None:
            if sum(name == "RETR" for name, _ in self) == 1 and command[0] == "USER":
                publish(ftp, DATA[::-1], changed_at=1_800_000_000)
            super().append(command)

    ftp.commands = Changes()
    run("fetch", "m.yaml", "-o", "b")
    assert fetched() == DATA[::-1] and ftp.asked("REST") == []


@pytest.mark.parametrize("lacks", [{"REST"}, {"SIZE"}, {"MDTM"}, {"SIZE", "MDTM", "REST"}, {"EPSV"}], ids=sorted)
def test_a_server_that_knows_less_gives_the_same_file(ftp: Ftp, run: Callable[..., Result], lacks: set[str]) -> None:
    publish(ftp, DATA)
    ftp.cut, ftp.lacks = [2_000_000], lacks
    manifest(ftp.url("/pub/a%20file.bin"))
    run("fetch", "m.yaml", "-o", "b")
    assert fetched() == DATA
    assert Bundle.open(Path("b")).asset("x").made_from[0].size == len(DATA)


def test_an_archive_is_unpacked_from_ftp_too(ftp: Ftp, run: Callable[..., Result]) -> None:
    publish(ftp, b"User,Prompt\na,b\n", "pub/prompts.csv")
    manifest(ftp.url("/pub/prompts.csv"), convert="csv")
    run("fetch", "m.yaml", "-o", "b")
    assert Bundle.open(Path("b")).asset("x").configs["default"]["train"].rows == 1


def test_what_is_not_there_is_said_at_once(ftp: Ftp, run: Callable[..., Result]) -> None:
    manifest(ftp.url("/pub/nothing"))
    said = run("lock", "m.yaml", code=2).output
    assert "is not there (ftp: 550" in said and "m.yaml:1" in said


def test_a_server_for_members_is_said_at_once(tmp_path: Path, run: Callable[..., Result]) -> None:
    with serve(tmp_path, anonymous=False) as ftp:
        manifest(ftp.url("/f"))
        said = run("lock", "m.yaml", code=2).output
        assert "not given to everybody (ftp: 530" in said and "`path:`" in said


def test_no_server_at_all_is_tried_and_told(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    from stage.sources import retry

    monkeypatch.setattr(retry.RetryPolicy, "delay", lambda *_: 0.0)
    manifest("ftp://127.0.0.1:9/f")
    said = run("lock", "m.yaml", code=5).output
    assert "connection failed" in said and "gave up after 8 attempts" in said
