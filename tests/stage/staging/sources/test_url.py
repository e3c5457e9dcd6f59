"""`url:` and `convert:` in a manifest: fetched, pinned, resumed, unpacked, converted, repaired."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from stage.bundle.bundle import Bundle
from tests.stage.staging.sources.conftest import DATA, archive, manifest, sha256
from tests.support.servers.web import Web


def test_where_no_proxy_answers_it_gives_up_soon(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("format: 1\nassets:\n  x:\n    url: http://example.org/x\n")
    done = subprocess.run(
        [sys.executable, "-m", "stage", "lock", "m.yaml"],
        cwd=tmp_path,
        env={**os.environ, "no_proxy": "", "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 5 and "gave up after 3 attempts" in done.stderr
    assert "cannot connect to the proxy 127.0.0.1:9 that the environment" in done.stderr


def test_a_file_is_fetched_pinned_and_followed(stage: Callable[..., Result], web: Web) -> None:
    web.files["/data/a%20file.bin"] = DATA
    manifest(url=web.url("/data/a%20file.bin?x=1").partition("?")[0])
    stage("fetch", "m.yaml", "-o", "b")
    asset = Bundle.open(Path("b")).asset("x")
    (file,) = asset.files
    assert file.path == "data/files/x/a file.bin" and Path("b", file.path).read_bytes() == DATA
    assert (asset.made_from[0].size, asset.made_from[0].sha256) == (len(DATA), sha256(DATA))
    assert Path("m.lock").read_bytes() == Path("b/stage.lock").read_bytes()
    stage("verify", "b")
    stage("fetch", "m.yaml", "-o", "second")
    assert Bundle.open(Path("second")).id == Bundle.open(Path("b")).id
    web.files["/data/a%20file.bin"] = DATA[::-1]
    said = stage("fetch", "m.yaml", "-o", "third", code=1).output
    assert "sha256" in said and "--update" in said
    web.files["/data/a%20file.bin"] = DATA[::-1] + b"more"
    said = stage("fetch", "m.yaml", "-o", "third", code=1).output
    assert f"refused: it has {len(DATA) + 4:,} bytes, not {len(DATA):,}" in said
    web.files["/data/a%20file.bin"] = DATA[::-1]
    stage("fetch", "m.yaml", "--update", "x", "-o", "b")
    assert Path("b", file.path).read_bytes() == DATA[::-1]


@pytest.mark.parametrize(("path", "encoding"), [("/f.tar.gz", "x-gzip"), ("/F.TGZ", "gzip")])
def test_a_gz_that_a_server_calls_encoded_comes_as_it_lies_there(
    stage: Callable[..., Result], web: Web, path: str, encoding: str
) -> None:
    """Apache's AddEncoding and cloud stores do so. curl and wget keep these bytes too."""
    packed = archive({"train.csv": b"a,b\n1,2\n" * 100})
    web.files[path], web.encodings[path] = packed, encoding
    manifest(url=web.url(path))
    stage("fetch", "m.yaml", "-o", "b")
    assert Path("b/data/files/x", path[1:]).read_bytes() == packed
    manifest(url=web.url(path), sha256=sha256(packed), unpack=True)
    stage("fetch", "m.yaml", "-o", "unpacked")
    assert Path("unpacked/data/files/x/train.csv").read_bytes() == b"a,b\n1,2\n" * 100


def test_what_is_encoded_for_the_way_is_unpacked(stage: Callable[..., Result], web: Web) -> None:
    web.files["/f.csv"], web.encodings["/f.csv"] = gzip.compress(b"a,b\n1,2\n"), "gzip"
    manifest(url=web.url("/f.csv"), sha256=sha256(b"a,b\n1,2\n"))
    stage("fetch", "m.yaml", "-o", "b")
    assert Path("b/data/files/x/f.csv").read_bytes() == b"a,b\n1,2\n"


def test_a_whole_file_that_an_earlier_run_left_is_taken_if_the_server_says_so(
    stage: Callable[..., Result], web: Web
) -> None:
    """No digest is known before the bundle is finished, and the lock is not written in between."""
    web.files["/t.csv"] = b"a,b\n1,2\n1,2,3\n"
    manifest(url=web.url("/t.csv"), convert="csv")
    stage("fetch", "m.yaml", "-o", "b", code=2)
    assert json.loads(Path("m.lock").read_text())["assets"]["x"]["made_from"][0]["sha256"] is None
    web.probes, web.requests = 0, []
    stage("fetch", "m.yaml", "-o", "b", code=2)
    assert len(web.requests) == 1, "only asked for its version"
    web.validator = False
    stage("fetch", "m.yaml", "-o", "b", code=2)
    assert len(web.requests) == 3


def test_a_file_that_changes_between_two_answers_is_not_a_mixture(
    stage: Callable[..., Result], web: Web
) -> None:
    web.files["/f"] = DATA
    web.cut = [1_000_000]
    manifest(url=web.url("/f"))
    new = DATA[::-1]
    answers = iter([DATA, DATA, DATA])

    class Changing(dict[str, bytes]):
        def __getitem__(self, path: str) -> bytes:
            return next(answers, new)

    web.files = Changing(web.files)
    stage("fetch", "m.yaml", "-o", "b")
    assert Path("b/data/files/x/f").read_bytes() in (DATA, new)


@pytest.mark.parametrize("validator", [True, False])
@pytest.mark.parametrize("length", ["chunked", "none"])
def test_a_server_that_does_not_say_how_long_the_file_is(
    stage: Callable[..., Result], web: Web, length: str, validator: bool
) -> None:
    web.files["/f"], web.length, web.validator = DATA, length, validator
    web.cut = [1_000_000] if length == "chunked" else []
    manifest(url=web.url("/f"))
    if length == "none":
        assert "sha256" in stage("fetch", "m.yaml", "-o", "b", code=5).output
        manifest(url=web.url("/f"), sha256=sha256(DATA))
    stage("fetch", "m.yaml", "-o", "b")
    assert Path("b/data/files/x/f").read_bytes() == DATA
    stage("verify", "b")


@pytest.mark.parametrize("pinned", [False, True])
def test_an_lfs_pointer_at_an_address_is_called_that(
    stage: Callable[..., Result], web: Web, pinned: bool
) -> None:
    """A sha256 in the manifest is of the file itself; alone it would only report another file."""
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n".encode()
    )
    web.files["/a/f.bin"] = pointer
    manifest(url=web.url("/a/f.bin"), **({"sha256": "a" * 64} if pinned else {}))
    said = stage("fetch", "m.yaml", "-o", "b", code=2).output
    assert "gives a Git LFS pointer, not the file itself" in said and "git lfs pull" in said
    assert not list(Path("b").rglob("*.bin*"))


REFUSED = {
    "ftp://me:secret@host/f.tar": (2, "name the file: path: FILE"),
    "ftp://me:secret@host": (2, "name the file: path: FILE"),
    "FTP://host/pub/": (2, "name the file: path: FILE"),
    "ftps://host/f.tar": (2, "must begin with https:// or http://"),
    "gopher://host/f": (2, "must begin with https:// or http://"),
    "https://me:secret@host/f": (2, "password"),
    "https://host/folder/": (2, "ends in `/`"),
    "https://host/..": (3, "`..`"),
    "https://host/%2e%2e": (3, "`..`"),
    "https://host/a%2Fb%00": (3, "control"),
    "https://host/50%25": (3, "%"),
}


@pytest.mark.parametrize("url", REFUSED)
def test_an_address_that_cannot_be_used(stage: Callable[..., Result], url: str) -> None:
    code, said = REFUSED[url]
    manifest(url=url)
    output = stage("fetch", "m.yaml", "-o", "b", code=code).output
    assert said in output and "secret" not in output


@pytest.mark.parametrize("key", ["path", "url", "model"])
@pytest.mark.parametrize("address", ["ftp://me:secret@host/f", "https://host/f?token=secret"])
def test_no_message_has_the_secrets_of_an_address(
    stage: Callable[..., Result], key: str, address: str
) -> None:
    Path("m.yaml").write_text(f"format: 1\nname: m\nassets: {{x: {{{key}: '{address}', ab: 1}}}}\n")
    assert "secret" not in stage("lock", "m.yaml", code=2).output


def test_what_is_not_there_is_said_at_once(stage: Callable[..., Result], web: Web) -> None:
    manifest(url=web.url("/nothing?token=secret"))
    said = stage("lock", "m.yaml", code=2).output
    assert "404" in said and "m.yaml:1" in said and "secret" not in said
    web.redirects["/moved"] = web.url("/nothing")
    manifest(url=web.url("/moved"))
    assert "404" in stage("lock", "m.yaml", code=2).output


@pytest.mark.parametrize("left", [0, 1_000_000])
def test_a_pinned_file_of_another_size_is_refused_at_once_as_one_of_other_bytes_is(
    stage: Callable[..., Result], web: Web, left: int
) -> None:
    web.files["/f"] = DATA
    manifest(url=web.url("/f"), sha256=sha256(DATA))
    stage("lock", "m.yaml")
    web.files["/f"] = DATA + b"more"
    web.requests.clear()
    if left:
        folder = Path("b/workshop.partial/x/originals")
        folder.mkdir(parents=True)
        (folder / f"f.{sha256(DATA)[:12]}.partial").write_bytes(DATA[:left])
        Path("b/fetch.partial").write_text("")
    said = stage("fetch", "m.yaml", "-o", "b", code=1).output
    assert web.requests == [("/f", f"bytes={left}-" if left else None)]
    assert (
        f"refused: it has {len(DATA) + 4:,} bytes, not {len(DATA):,}" in said
        and "--update x" in said
    )
    assert "listing" not in said and not list(Path("b").rglob("f.*"))
