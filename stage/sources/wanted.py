"""One file to get: where, how to call it, and by what it is known when it came."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from stage.digest import Digest, FileDigests
from stage.sources.streams import ByteSource


@dataclass(frozen=True)
class Download:
    """One file to get.

    Attributes:
        what: how to call it in messages (`bert: model.safetensors`).
        url: where to ask; may redirect.
        size: bytes; None where the server does not say: then nothing can be resumed.
        evidence: digests the bytes must have; none where this download is what pins them.
        version: what a server says of this version of the file (an ETag), where there is no evidence: what is here of
            another version is not gone on with, nor is anything without evidence or version.
        redirects_expire: whether a refusal by another host means an address that expired (a CDN's), so ask again.
        token, login: sent to `url`'s own origin and to nobody else; `login` is `user:password`. Kept out of `repr`.
        refused: turns a final refusal (401, 403, 404, ...) of `url`'s own origin into the error to raise.
        source: where the bytes come from, if not by HTTP from `url`.
        pin: what to do about bytes of another digest, where the evidence is what a person or a lock says of an address
            and not what its server says of the file today; None: the server does.
    """

    what: str
    url: str
    size: int | None
    evidence: tuple[Digest, ...]
    refused: Callable[[int, str | None], Exception]
    token: str | None = None
    version: str | None = None
    redirects_expire: bool = True
    login: str | None = None
    source: ByteSource | None = None
    pin: str | None = None

    def __repr__(self) -> str:
        return f"Download({self.what!r}, {self.size})"

    @property
    def identity(self) -> Digest:
        """What tells the beginning of this file from that of another version of it."""
        if self.evidence:
            return self.evidence[0]
        version = f"{self.url}\n{self.size}\n{self.version}"
        return Digest("sha256", hashlib.sha256(version.encode()).hexdigest())

    def mismatch(self, digests: FileDigests) -> str | None:
        """How bytes of these digests differ from the evidence, in words; None if they do not."""
        for evidence in self.evidence:
            if not digests.matches(evidence):
                said = "pinned" if self.pin else "announced"
                found = digests.found(evidence.algorithm)
                return f"its {evidence.algorithm} is {found}, not {evidence.value} as {said}"
        return None
