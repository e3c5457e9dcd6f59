"""Signatures: an OpenSSH signature (`ssh-keygen -Y`, PROTOCOL.sshsig) of the tag manifest.

The tag manifest has the digest of every file beside the payload, the lock among them has the digest
of every payload file: so one signature covers every byte. Keys are the ones that people have, in
files or in an agent. A file in the format of ssh's `allowed_signers` says which keys to believe.
ssh-keygen decides, and its own words are in the messages. Nothing here uses the network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stage.bundle.bundle import (
    PAYLOAD,
    SIGNATURE,
    TAG_MANIFEST,
    Bundle,
    check_is_bundle,
    read_tag,
    verify,
)
from stage.bundle.verifier import Finding
from stage.errors import DamageError, SignatureError, UsageError, as_shown, quoted, suggest_path
from stage.files import human_count, read_file, write_atomically
from stage.paths import printable

NAMESPACE = "airlift-bundle"  # a signature of a git commit or a mail is not valid for a bundle
MAX_SIZE = 2**20  # bytes of a signature: an RSA key of 16,384 bits makes 6 kB
_COPY_AGAIN = "Copy that file again from where the bundle was signed"


@dataclass(frozen=True)
class Signer:
    """The signer: a name of the allowed signers file, and the key's fingerprint (`SHA256:...`)."""

    identity: str
    key: str

    def __str__(self) -> str:
        return f"{self.identity} ({self.key})"

    def to_json(self) -> dict[str, Any]:
        """As `--json` and reports give it."""
        return asdict(self)


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
    report = verify(root, "fast")
    if not report.ok:
        findings = human_count(len(report.findings), "finding")
        raise DamageError(
            f"{root}: not signed: {findings}, the first: {report.findings[0]}.",
            f"Run `stage verify {quoted(root)}`; sign what is sound.",
        )
    if not key.is_file():
        raise UsageError(
            f"{key}: there is no such key.",
            suggest_path(key, "Make one: ssh-keygen -t ed25519 -f KEY"),
        )
    manifest = read_tag(root, TAG_MANIFEST)
    done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, data=manifest)
    if done.returncode != 0:
        raise UsageError(
            f"{key}: cannot sign: {_last_words(done)}.",
            "Give a private key of OpenSSH, or the .pub of a key that is in your agent "
            "(ssh-add KEY; ssh-add -L shows it).",
        )
    write_atomically(root / SIGNATURE, done.stdout)
    return _fingerprint(root / SIGNATURE, manifest)


def signed_by(root: Path) -> str | None:
    """The fingerprint of the key that signed, of any signer; None: no good signature."""
    try:
        return _fingerprint(root / SIGNATURE, read_tag(root, TAG_MANIFEST))
    except (DamageError, SignatureError, UsageError):
        return None


def check_signature(root: Path, signers: Path) -> Signer:
    """Finds the signer of the tag manifest in a file of signers to believe.

    Args:
        signers: a file of allowed signers (`man ssh-keygen`, ALLOWED SIGNERS):
            `alice@lab ssh-ed25519 AAAA...`.

    Raises:
        SignatureError: it is missing, damaged, for something else, of another tag manifest, or by
            a key that is not listed.
        UsageError: no such file of signers; no OpenSSH that can verify.
    """
    _check_signers(signers)
    path = root / SIGNATURE
    try:
        manifest = read_tag(root, TAG_MANIFEST)
    except DamageError as error:
        raise SignatureError(f"{error.message} So it is not signed.", f"{_COPY_AGAIN}.") from None
    if not os.path.lexists(path):
        raise SignatureError(
            f"{root}: not signed: there is no {SIGNATURE}.",
            f"Where it was made: stage sign {quoted(root)} --key KEY; then copy that file too.",
        )
    key = _fingerprint(path, manifest)
    answer = _ssh_keygen("find-principals", "-f", str(signers), "-s", str(path.absolute()))
    for identity in answer.stdout.decode("utf-8", "replace").splitlines():
        options = ("-f", str(signers), "-I", identity, "-n", NAMESPACE)
        answer = _ssh_keygen("verify", *options, "-s", str(path.absolute()), data=manifest)
        if answer.returncode == 0:
            return Signer(identity, key)
    raise SignatureError(
        f"{path}: signed by {key}, and {signers} does not list that key for this "
        f"({_last_words(answer)}).",
        f"If you know that the key is its maker's, add a line to {signers}, or correct its options "
        f'(namespaces="{NAMESPACE}", valid-before=...); if not, do not use this bundle.',
    )


def _fingerprint(path: Path, manifest: bytes) -> str:
    """The fingerprint of the key that signed the tag manifest.

    Raises:
        SignatureError: it is no signature of it.
    """
    try:
        read_file(path, MAX_SIZE, follow=False)  # ssh-keygen would wait for a pipe
    except OSError as error:
        raise SignatureError(
            f"{path}: cannot be read: {error.strerror}.", f"{_COPY_AGAIN}."
        ) from None
    options = ("-n", NAMESPACE, "-s", str(path.absolute()))
    done = _ssh_keygen("check-novalidate", *options, data=manifest)
    key = re.search(rb"key (SHA256:\S+)", done.stdout)
    if done.returncode != 0 or key is None:
        raise SignatureError(
            f"{path}: not a good signature of {TAG_MANIFEST}: {_last_words(done)}.",
            f"{_COPY_AGAIN}, and {TAG_MANIFEST} with it. If the bundle was made again "
            f"since, sign again there: stage sign {quoted(path.parent)} --key KEY",
        )
    return key[1].decode("ascii", "replace")


def _check_signers(signers: Path) -> None:
    """Users give other files: the signer's public key, their own private key, an empty file.

    Raises:
        UsageError: the file is one of these, or not there.
    """
    if not signers.is_file():
        raise UsageError(
            f"{signers}: there is no such file of signers.",
            suggest_path(signers, "Write one: a line `NAME ssh-ed25519 AAAA...` per signer."),
        )
    lines = [
        line for line in signers.read_bytes().splitlines() if line.strip() and line[:1] != b"#"
    ]
    named = quoted(signers)
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


@dataclass(frozen=True)
class Trust:
    """The result of checking a signature: a signer, or why the signature is not believed."""

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

    def with_findings(self, root: Path, findings: Iterable[Finding]) -> Trust:
        """A good signature is of no use if a tag file is not as the signed tag manifest says."""
        paths = [
            printable(finding.path)
            for finding in findings
            if finding.problem != "extra"
            and finding.path not in ("", SIGNATURE)
            and not finding.path.startswith(f"{PAYLOAD}/")
        ]
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
        if self.error is not None:
            return {"signature": {"ok": False, "error": self.error.message}}
        return {"signature": {"ok": True, **self.signer.to_json()}} if self.signer else {}


def _ssh_keygen(
    operation: str, *arguments: str, data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Runs `ssh-keygen -Y`, in English.

    Raises:
        UsageError: there is none, or it is older than OpenSSH 8.2 (8.1 cannot look up signers).
    """
    program = shutil.which("ssh-keygen")
    install = (
        "Install OpenSSH 8.2 or newer (apt install openssh-client; conda install -c conda-forge "
        "openssh), first on PATH. RHEL 8 has 8.0."
    )
    if program is None:
        raise UsageError("Signatures need ssh-keygen, and there is none on PATH.", install)
    # Without a timeout: it may ask on the terminal for a passphrase, or for a touch of a key.
    command = [program, "-Y", operation, *arguments]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, input=data, capture_output=True, env=environment)
    if re.search(rb"option -- '?Y|Unsupported operation for -Y", done.stderr):
        raise UsageError(
            f"{program}: too old for signatures: `-Y {operation}` is not known to it.", install
        )
    return done


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """What ssh-keygen said, on one line."""
    lines = done.stderr.decode("utf-8", "replace").split("\n")
    said = "; ".join(line.rstrip(".\r") for line in lines if line.strip())
    return f"ssh-keygen says: {as_shown(said)[-300:]}" if said else f"exit {done.returncode}"
