"""One file to download: its address, its name in messages, and the digests it must have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from stage.digests import Digest, Expected


@dataclass(frozen=True)
class Download:
    """One file to download.

    Attributes:
        what: its name in messages (`bert: model.safetensors`).
        url: its address; the server may redirect.
        expected: its size (None where the server does not say; then a download cannot be resumed)
            and the digests that the bytes must have; none where this download sets the pin.
        refused: turns a final refusal (401, 403, 404, ...) of `url`'s own origin into an error.
            Its arguments are the status and the Hub's X-Error-Code.
        version: what a server calls this version of the file (an ETag), where there is no
            evidence. A partial file of another version is not resumed, nor is one that has
            neither evidence nor version.
        redirects_expire: whether a refusal by another host means an expired address (of a CDN),
            so that the next attempt asks `url` again.
        token, login: sent to `url`'s own origin only, and kept out of `repr`. `login` is
            `user:password`.
        pin: advice for bytes with another digest, where the evidence comes from a manifest or a
            lock; None where it comes from the server.
    """

    what: str
    url: str
    expected: Expected
    refused: Callable[[int, str | None], Exception]
    token: str | None = field(default=None, repr=False)
    version: str | None = None
    redirects_expire: bool = True
    login: str | None = field(default=None, repr=False)
    pin: str | None = None

    @property
    def size(self) -> int | None:
        """Bytes, as far as known."""
        return self.expected.size

    @property
    def evidence(self) -> tuple[Digest, ...]:
        """The digests that the bytes must have."""
        return self.expected.evidence

    @property
    def identity(self) -> Digest:
        """Names this version of the file, so that only its own partial file is resumed."""
        if self.evidence:
            return self.evidence[0]
        version = f"{self.url}\n{self.size}\n{self.version}"
        return Digest("sha256", hashlib.sha256(version.encode()).hexdigest())
