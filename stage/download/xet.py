"""Files that the Hub does not serve over plain HTTP: ordered bytes from its Xet store, by `hf_xet`.

Only files above the Hub's limit come from Xet. All others come over HTTP, which resumes, is
checked and works with mirrors. `hf_xet` gives the bytes; the downloader hashes, resumes and
retries, so hf_xet's own retries are kept short. Only this module uses `hf_xet`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stage.download.http import origin_of
from stage.download.request import Stream
from stage.download.retry import AttemptFailed
from stage.errors import UsageError
from stage.installation import install_command

PLAIN_HTTP_LIMIT = 50 * 10**9  # bytes: the Hub's CDN serves no larger file


def is_for_xet(size: int) -> bool:
    """Whether a file of this size comes from Xet; $HF_HUB_DISABLE_XET turns Xet off."""
    is_off = os.environ.get("HF_HUB_DISABLE_XET", "").upper() in ("1", "ON", "YES", "TRUE")
    return size > PLAIN_HTTP_LIMIT and not is_off


class XetStore:
    """A session with the store, opened at first use.

    Args:
        timeout_s: how long the store may stay silent.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._session: Any = None
        self._lock = threading.Lock()

    def session(self, what: str) -> Any:
        """The `hf_xet.XetSession`.

        Raises:
            UsageError: hf_xet is not installed.
        """
        try:
            import hf_xet
        except ImportError:
            raise UsageError(
                f"{what}: the Hub does not serve so large a file over HTTP, and hf_xet, which "
                "can fetch it, is not installed here.",
                install_command("xet"),
            ) from None
        with self._lock:
            if self._session is None:
                settings = {
                    "client.retry_max_attempts": 1,
                    "client.retry_base_delay": "500ms",
                    "client.connect_timeout": "10s",
                    "client.read_timeout": f"{max(1, round(self._timeout_s))}s",
                    "telemetry.enabled": False,
                }
                self._session = hf_xet.XetSession(hf_xet.XetConfig().with_config(settings))
            return self._session


class XetFile:
    """One file in the store, as a source of bytes.

    Args:
        what: its name in messages.
        hash: the store's own (Merkle) hash of it.
        size: bytes.
        refresh_url: where the Hub gives out tokens for its store.
        home: the Hub's address.
        token: the user's, for the Hub; sent to `refresh_url` only if that has `home`'s origin.
    """

    def __init__(
        self,
        store: XetStore,
        what: str,
        hash: str,
        size: int,
        refresh_url: str,
        home: str,
        token: str | None,
    ) -> None:
        self._store, self._what, self._hash, self._size = store, what, hash, size
        self._refresh_url = refresh_url
        is_home = origin_of(refresh_url) == origin_of(home)
        self._headers = {"Authorization": f"Bearer {token}"} if token and is_home else {}

    def probe(self) -> tuple[int | None, str | None]:
        """Its size, and the store's hash as the version."""
        return self._size, self._hash

    @contextmanager
    def open(self, offset: int, version: str | None) -> Iterator[Stream]:
        """Its bytes from `offset`.

        Raises:
            UsageError: hf_xet is not installed.
            AttemptFailed: the store does not answer, or not with this file.
        """
        session = self._store.session(self._what)
        with _described_failures():
            group = session.new_download_stream_group(
                token_refresh_url=self._refresh_url, token_refresh_headers=self._headers
            )
        with group:
            yield Stream(offset, self._pieces(group, offset))

    def _pieces(self, group: Any, offset: int) -> Iterator[bytes]:
        from hf_xet import XetFileInfo

        with _described_failures():
            stream = iter(
                group.download_stream(XetFileInfo(self._hash, self._size), start=offset or None)
            )
        while True:
            with _described_failures():
                piece: bytes | None = next(stream, None)
            if piece is None:
                return
            yield piece


@contextmanager
def _described_failures() -> Iterator[None]:
    """Turns hf_xet's errors into `AttemptFailed`. It raises Python's general exceptions."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise AttemptFailed(f"the Hub's Xet store: {text}") from None
