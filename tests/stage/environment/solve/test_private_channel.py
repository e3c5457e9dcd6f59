"""Private channels: tokens and passwords are used, and never written down."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.stage.environment.solve.conftest import A800, Desk
from tests.support.environment.laptop import MANIFEST


@pytest.fixture
def private_channel(desk: Desk) -> Iterator[str]:
    """A private channel over HTTP, with a token in its URL; and its URL without the token."""

    class Guarded(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            inside = path.removeprefix("/t/tk-s3cret")
            return super().translate_path(inside if inside != path else "/nowhere")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Guarded, directory=str(desk.channel.parent))
    )
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/{desk.channel.name}"
    finally:
        server.shutdown()
        server.server_close()


def test_passwords_are_asked_with_and_never_kept(
    desk: Desk,
    private_channel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a channel and of an index: for locking, for sizes, and for fetching the files."""
    from stage.lock.manifest import Manifest
    from stage.lock.model import read_lock
    from stage.progress import Reporter
    from stage.staging.resolve import open_sources
    from stage.staging.sources.source import FetchOptions, FetchRun

    desk.index.password = "member:w%20rd-s3cret"
    secrets = {"CHANNEL_TOKEN": "tk-s3cret", "WORD": "w%2520rd-s3cret"}
    host, _, channel = private_channel.rpartition("/")
    text = (desk.folder / "environment.yml").read_text()
    text = text.replace(desk.channel.as_uri(), f'"{host}/t/${{CHANNEL_TOKEN}}/{channel}"')
    text = text.replace(desk.index.url, desk.index.url.replace("://", "://member:${WORD}@"))
    (desk.folder / "environment.yml").write_text(text)
    (desk.folder / "small.yaml").write_text(MANIFEST)
    (desk.folder / "cluster.yml").write_text(A800)
    desk.lock_path.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "stage", "lock", "small.yaml"], cwd=desk.folder,
        capture_output=True, text=True,
        timeout=120, env=desk.environment(**secrets), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lock_text = (desk.folder / "small.lock").read_text()
    assert "s3cret" not in done.stdout + done.stderr + lock_text + desk.lock_path.read_text()
    assert desk.lock.channels == (private_channel,)
    for name in ("CHANNEL_TOKEN", "WORD"):
        monkeypatch.setenv(name, secrets[name])
    manifest, locked = (
        Manifest.load(desk.folder / "small.yaml"),
        read_lock(lock_text.encode(), "small.lock"),
    )
    asset = locked.assets["small-env"]
    with Reporter(quiet=True) as reporter:
        run = FetchRun.connected(manifest, FetchOptions(), reporter)
        source = open_sources(run)["small-env"]
        for ending in ("/tool-1.0-py3-none-any.whl", "/greeter-1.1-pyh0000000_0.conda"):
            (package,) = [p for p in asset.made_from if p.origin.endswith(ending)]
            target = desk.folder / ending.strip("/")
            found = source.fetch(asset, package, target, lambda _: None)
            assert found.sha256 == package.sha256
