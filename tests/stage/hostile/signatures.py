"""Invalid signatures, and bundles that another person signed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from stage.bundle.bundle import SIGNATURE, TAG_MANIFEST
from stage.bundle.signature import NAMESPACE
from tests.stage.hostile.runner import Case, Place

Prepare = Callable[[Place], list[str]]
BEGIN, END = b"-----BEGIN SSH SIGNATURE-----\n", b"-----END SSH SIGNATURE-----\n"


@cache
def _keys() -> tuple[bytes, bytes]:
    with TemporaryDirectory() as folder:
        key = Path(folder, "key")
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True
        )
        return key.read_bytes(), key.with_suffix(".pub").read_bytes()


def signed(
    change: Callable[[bytes], bytes], signers: bytes | None = None, namespace: str = NAMESPACE
) -> Prepare:
    """`stage verify --signers` of a signed bundle whose signature was changed afterwards."""

    def prepare(place: Place) -> list[str]:
        root = place.bundle()
        private, public = _keys()
        key = place.write("key", private)
        key.chmod(0o600)
        done = subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", namespace],
            input=(root / TAG_MANIFEST).read_bytes(),
            capture_output=True,
            check=True,
        )
        (root / SIGNATURE).write_bytes(change(done.stdout))
        place.write("signers", b"alice " + public if signers is None else signers)
        return ["verify", "bundle", "--signers", "signers"]

    return prepare


DAMAGED = (SIGNATURE, "not a good signature")

CASES = [
    Case("sound", 0, ("signed by alice",), signed(bytes)),
    Case("empty", 4, DAMAGED, signed(lambda _: b"")),
    Case("noise", 4, DAMAGED, signed(lambda _: bytes(range(256)) * 4)),
    Case("no base64", 4, DAMAGED, signed(lambda _: BEGIN + b"!!!!\n" + END)),
    Case("armour of nothing", 4, DAMAGED, signed(lambda _: BEGIN + END)),
    Case("cut", 4, DAMAGED, signed(lambda signature: signature[:-40])),
    Case(
        "a byte changed",
        4,
        (SIGNATURE,),
        signed(
            lambda s: (
                s.replace(s[200:201], b"A", 1) if s[200:201] != b"A" else s.replace(b"A", b"B", 1)
            )
        ),
    ),
    Case("for a mail", 4, ("not a good signature",), signed(bytes, namespace="email")),
    Case("of 2 MB", 4, ("larger",), signed(lambda _: b"A" * 2**21)),
    Case("by nobody listed", 4, ("does not list",), signed(bytes, b"alice ssh-ed25519 AAAA\n")),
    Case(
        "listed for another use",
        4,
        ("for this",),
        signed(bytes, b'alice namespaces="git" ' + _keys()[1]),
    ),
    Case("signers of noise", 4, ("does not list",), signed(bytes, bytes(range(256)) * 10)),
    Case(
        "signers that are a public key",
        2,
        ("signers: a public key, not a file of signers", "alice@lab $(cat signers)"),
        signed(bytes, _keys()[1]),
    ),
    Case(
        "signers that are a private key",
        2,
        ("signers: a private key, which signs", "alice@lab $(ssh-keygen -y -f signers)"),
        signed(bytes, b"# mine\n\n-----BEGIN OPENSSH PRIVATE KEY-----\n"),
    ),
    Case(
        "signers that are comments",
        2,
        ("signers: empty, not a file of signers", "alice@lab $(cat KEY.pub)"),
        signed(bytes, b"# alice\n\n"),
    ),
    Case(
        "no bundle",
        2,
        ("x: not a bundle",),
        lambda place: [
            "verify",
            place.write("x/a", "").parent.name,
            "--signers",
            place.write("signers", b"alice " + _keys()[1]).name,
        ],
    ),
    Case(
        "signers that are none",
        2,
        ("no such file of signers",),
        lambda place: [*signed(bytes)(place)[:3], "gone"],
    ),
]
