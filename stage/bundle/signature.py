"""Signatures: an OpenSSH signature (`ssh-keygen -Y`, PROTOCOL.sshsig) of the tag manifest.

The tag manifest has the digest of every file beside the payload, the lock among them has the digest
of every payload file: so one signature covers every byte. Keys are the ones that people have, in
files or in an agent. A file in the format of ssh's `allowed_signers` says which keys to believe.
Nothing here uses the network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.bundle import bundle as layout
from stage.bundle.bundle import Bundle, check_is_bundle, read_tag
from stage.bundle.report import Finding
from stage.bundle.verify import verify
from stage.errors import DamageError, SignatureError, UsageError, as_shown, suggest_path
from stage.files import check_writable, human_count, read_file, write_atomically
from stage.paths import printable

NAMESPACE = "airlift-bundle"  # a signature made for a git commit or a mail is none for a bundle

MAX_SIZE = 2**20  # bytes of a signature: an RSA key of 16,384 bits makes 6 kB

_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_TOO_OLD = (
    "unknown option -- Y",
    "invalid option -- 'Y'",
    "illegal option -- Y",
    "Unsupported operation for -Y",
)


@dataclass(frozen=True)
class Signer:
    """Who signed: a name of the allowed signers file, and the key's fingerprint (`SHA256:...`)."""

    identity: str
    key: str

    def __str__(self) -> str:
        return f"{self.identity} ({self.key})"

    def to_json(self) -> dict[str, Any]:
        """As `--json` and reports give it."""
        return {"identity": self.identity, "key": self.key}


def sign(root: Path, key: Path) -> str:
    """Writes the signature of a finished bundle beside its tag manifest, replacing an earlier one.

    Args:
        key: a private key, or a public key whose private half is in the agent or beside it. A
            passphrase is asked for on the terminal.

    Returns:
        The fingerprint of the key.

    Raises:
        UsageError: no bundle, unfinished; a key that cannot be used; no OpenSSH that can sign.
        DamageError: names, sizes or digests of tag files are not as `fetch` left them.
    """
    Bundle.open(root)
    check_writable(root)
    report = verify(root, "fast")
    if not report.ok:
        findings = human_count(len(report.findings), "finding")
        raise DamageError(
            f"{root}: not signed: {findings}, the first: {report.findings[0]}.",
            f"Run `stage verify {root}`; sign what is sound.",
        )
    if not key.is_file():
        raise UsageError(
            f"{key}: there is no such key.",
            suggest_path(key, "Make one: ssh-keygen -t ed25519 -f KEY"),
        )
    done = _ssh_keygen(
        "sign", "-f", str(key), "-n", NAMESPACE, data=read_tag(root, layout.TAG_MANIFEST)
    )
    if done.returncode != 0:
        raise UsageError(f"{key}: cannot sign: {_last_line(done)}.", _key_remedy(key))
    signature = _Signature.parse(done.stdout)
    write_atomically(root / layout.SIGNATURE, done.stdout)
    return signature.fingerprint


def signed_by(root: Path) -> str | None:
    """The fingerprint of the key that a signature claims, unchecked; None: no signature."""
    try:
        return _Signature.parse(read_file(root / layout.SIGNATURE, MAX_SIZE)).fingerprint
    except (OSError, SignatureError):
        return None


def check_signature(root: Path, signers: Path) -> Signer:
    """Finds out who signed the tag manifest, and whether that is somebody to believe.

    Args:
        signers: a file of allowed signers (`man ssh-keygen`, ALLOWED SIGNERS):
            `alice@lab ssh-ed25519 AAAA...`.

    Raises:
        SignatureError: none there, damaged, for something else, of another tag manifest, or by
            nobody listed.
        UsageError: no such file of signers; no OpenSSH that can verify.
    """
    if not signers.is_file():
        raise UsageError(
            f"{signers}: there is no such file of signers.",
            suggest_path(signers, "Write one: a line `NAME ssh-ed25519 AAAA...` per signer."),
        )
    _check_signers(signers)
    manifest = read_tag(root, layout.TAG_MANIFEST)
    path = root / layout.SIGNATURE
    try:
        text = read_file(path, MAX_SIZE, follow=False)
    except FileNotFoundError:
        raise SignatureError(
            f"{root}: not signed: there is no {layout.SIGNATURE}.",
            f"Where it was made: stage sign {root} --key KEY; then copy that file too.",
        ) from None
    except OSError as error:
        raise SignatureError(
            f"{path}: cannot be read: {error.strerror}.",
            "Copy that file again from where the bundle was signed.",
        ) from None
    signature = _Signature.parse(text, str(path))
    if signature.namespace != NAMESPACE:
        raise SignatureError(
            f"{path}: a signature for {printable(signature.namespace)}, not for `{NAMESPACE}`: "
            "made for another use.",
            f"stage sign {root} --key KEY",
        )
    options = ("-n", NAMESPACE, "-s", str(path.absolute()))
    if _ssh_keygen("check-novalidate", *options, data=manifest).returncode != 0:
        raise _does_not_fit(root, manifest, signature)
    return _trusted(path, signature, signers, options, manifest)


def _check_signers(signers: Path) -> None:
    """Users give other files: the signer's public key, their own private key, an empty file.

    Raises:
        UsageError: the file is one of these.
    """
    lines = [
        line for line in signers.read_bytes().splitlines() if line.strip() and line[:1] != b"#"
    ]
    named = shlex.quote(str(signers))
    if not lines:
        what, key = "empty", "$(cat KEY.pub)"
    elif re.match(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----|PuTTY-User-Key-File-", lines[0]):
        what, key = (
            "a private key, which signs (and stays with its owner)",
            f"$(ssh-keygen -y -f {named})",
        )
    elif re.match(rb"(ssh-|ecdsa-sha2-|sk-ssh-|sk-ecdsa-)\S+ +[A-Za-z0-9+/=]{20,}", lines[0]):
        what, key = "a public key", f"$(cat {named})"
    else:
        return
    raise UsageError(
        f"{signers}: {what}, not a file of signers: that has a line "
        "`alice@lab ssh-ed25519 AAAA...` for each person to believe, a name in front of their "
        "public key.",
        f'Make one: echo "alice@lab {key}" > signers   (the name is yours to choose), '
        "and give that file.",
    )


def _does_not_fit(root: Path, manifest: bytes, signature: _Signature) -> SignatureError:
    """The signature is of other bytes: the tag manifest's consistency shows which changed."""
    if _agrees_with_files(root, manifest):
        return SignatureError(
            f"{root / layout.SIGNATURE}: not the signature of this bundle: it was damaged, is "
            "another bundle's, or the bundle was made again after "
            f"{signature.fingerprint} signed it.",
            "Copy it again from where it was signed, or sign again there.",
        )
    return SignatureError(
        f"{root / layout.TAG_MANIFEST}: not the one that {signature.fingerprint} signed, and it "
        "does not agree with the files beside it: it was changed after signing.",
        "Copy the bundle again from where it was signed.",
    )


def _agrees_with_files(root: Path, manifest: bytes) -> bool:
    recorded = layout.parse_manifest(manifest)
    return layout.manifest_text(recorded) == manifest and all(
        (root / name).is_file() and hashlib.sha256((root / name).read_bytes()).hexdigest() == digest
        for name, digest in recorded.items()
    )


def _trusted(
    path: Path, signature: _Signature, signers: Path, options: tuple[str, ...], manifest: bytes
) -> Signer:
    found = _ssh_keygen("find-principals", "-f", str(signers), "-s", str(path.absolute()))
    listed = _lists(signers, signature)
    if found.returncode != 0:
        if not listed:
            raise SignatureError(
                f"{path}: signed by {signature.fingerprint} ({signature.key_type}), "
                f"whom {signers} does not list.",
                f"If you know that key is its maker's, add a line to {signers}; "
                "if not, do not use this bundle.",
            )
        raise _not_for_this(path, signature, signers, found)
    refusal = found
    for identity in found.stdout.decode("utf-8", "replace").splitlines():
        refusal = _ssh_keygen("verify", "-f", str(signers), "-I", identity, *options, data=manifest)
        if refusal.returncode == 0:
            return Signer(identity, signature.fingerprint)
    raise _not_for_this(path, signature, signers, refusal)


def _not_for_this(
    path: Path, signature: _Signature, signers: Path, done: subprocess.CompletedProcess[bytes]
) -> SignatureError:
    said = [
        line
        for line in done.stderr.decode("utf-8", "replace").splitlines()
        if line.startswith(str(signers))
    ]
    reason = said[0].removeprefix(f"{signers}:").strip() if said else _last_line(done)
    return SignatureError(
        f"{path}: signed with {signature.fingerprint}, a wrong key: {signers} lists it, "
        f"but not for this ({as_shown(reason)}).",
        f"Sign with a key that may, or correct that line "
        f'(namespaces="{NAMESPACE}", valid-before=...).',
    )


def _lists(signers: Path, signature: _Signature) -> bool:
    blob = base64.b64encode(signature.public_key)
    return any(
        blob in line.split()
        for line in signers.read_bytes().splitlines()
        if not line.startswith(b"#")
    )


@dataclass(frozen=True)
class Trust:
    """The result of checking a signature: a signer, or why there is none to believe."""

    signer: Signer | None = None
    error: SignatureError | None = None

    @staticmethod
    def check(root: Path, signers: Path) -> Trust:
        """Checks the signature.

        Raises:
            UsageError: as for `check_signature`; no bundle.
        """
        check_is_bundle(root)
        try:
            return Trust(check_signature(root, signers))
        except SignatureError as error:
            return Trust(error=error)
        except DamageError:
            return Trust(
                error=SignatureError(
                    f"{root}: not signed: its {layout.TAG_MANIFEST} cannot be read.",
                    "Copy that file again from where the bundle was signed.",
                )
            )

    def with_findings(self, root: Path, findings: Iterable[Finding]) -> Trust:
        """A good signature is of no use if a tag file is not as the signed tag manifest says."""
        paths = [printable(f.path) for f in findings if _is_signed_for(f)]
        if self.signer is None or not paths:
            return self
        return Trust(
            error=SignatureError(
                f"{root}: changed since {self.signer} signed it: {', '.join(paths[:5])}.",
                "Copy these files again from where it was signed.",
            )
        )

    def to_json(self) -> dict[str, Any]:
        """What it adds to a report."""
        if self.signer is not None:
            return {"signature": {"ok": True, **self.signer.to_json()}}
        return (
            {"signature": {"ok": False, "error": self.error.message}}
            if self.error is not None
            else {}
        )


def _is_signed_for(finding: Finding) -> bool:
    if finding.problem == "extra":
        return False
    return not finding.path.startswith(f"{layout.PAYLOAD}/") and finding.path not in (
        "",
        layout.SIGNATURE,
    )


@dataclass(frozen=True)
class _Signature:
    """What an armoured signature says of itself (OpenSSH, PROTOCOL.sshsig)."""

    public_key: bytes
    namespace: str

    @property
    def key_type(self) -> str:
        return _take_string(self.public_key)[0].decode("ascii", "replace")

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.public_key).digest()
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"

    @staticmethod
    def parse(text: bytes, where: str = layout.SIGNATURE) -> _Signature:
        """Reads the armour and the fields in front.

        Raises:
            SignatureError: it is damaged.
        """
        try:
            lines = text.decode("ascii").strip().splitlines()
            if lines[0] != _BEGIN or lines[-1] != _END:
                raise ValueError("no armour")
            blob = base64.b64decode("".join(lines[1:-1]), validate=True)
            if blob[:6] != b"SSHSIG" or struct.unpack(">I", blob[6:10])[0] != 1:
                raise ValueError("no SSHSIG of version 1")
            public_key, rest = _take_string(blob[10:])
            namespace, rest = _take_string(rest)
            key_type, _ = _take_string(public_key)
            for _ in range(3):  # reserved, hash algorithm, signature
                _, rest = _take_string(rest)
            if rest or not key_type.isascii():
                raise ValueError("something behind its end")
            return _Signature(public_key, namespace.decode())
        except (ValueError, IndexError, struct.error, binascii.Error):
            raise SignatureError(
                f"{where}: damaged: it cannot be read as an OpenSSH signature.",
                "Copy that file again from where the bundle was signed.",
            ) from None


def _take_string(data: bytes) -> tuple[bytes, bytes]:
    """A length (32 bits, big-endian) and that many bytes (RFC 4251, 5); and what follows."""
    (length,) = struct.unpack(">I", data[:4])
    if len(data) < 4 + length:
        raise ValueError("cut short")
    return data[4 : 4 + length], data[4 + length :]


def _ssh_keygen(
    operation: str, *arguments: str, data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Runs `ssh-keygen -Y`, in English.

    Raises:
        UsageError: there is none, or it is older than OpenSSH 8.2 (8.1 cannot look up signers).
    """
    program = shutil.which("ssh-keygen")
    if program is None:
        raise UsageError("Signatures need ssh-keygen, and there is none on PATH.", _INSTALL)
    command = [program, "-Y", operation, *arguments]
    done = subprocess.run(
        command, input=data, capture_output=True, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode != 0 and any(
        words in done.stderr.decode("utf-8", "replace") for words in _TOO_OLD
    ):
        raise UsageError(
            f"{program}: too old for signatures: `-Y {operation}` is not known to it.", _INSTALL
        )
    return done


_INSTALL = (
    "Install OpenSSH 8.2 or newer (apt install openssh-client; conda install -c conda-forge "
    "openssh), first on PATH. RHEL 8 has 8.0."
)


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return (
        as_shown(lines[-1].rstrip(".\r")) if lines else f"ssh-keygen ended with {done.returncode}"
    )


def _key_remedy(key: Path) -> str:
    if key.suffix == ".pub":
        private = key.with_suffix("")
        return f"Put its private half into the agent (ssh-add {private}), or give the private key."
    return "Give a private key of OpenSSH, or the .pub of a key that is in your agent (ssh-add -L)."
