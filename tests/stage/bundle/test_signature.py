"""Signatures with real keys, a real ssh-keygen and a real ssh-agent: good and bad ones."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from stage.cli import main
from tests.stage.bundles import make_bundle

SIGNATURE = "tagmanifest-sha256.txt.sig"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `stage`; returns exit code, stdout, stderr. No agent unless a test starts one."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main.main([str(a) for a in arguments], prog_name="stage")
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle", big=False).root


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the private keys `alice` and `mallory`, and their `.pub`s."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("alice", "mallory"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name],
            check=True,
        )
    return folder


@pytest.fixture
def signers(keys: Path, tmp_path: Path) -> Path:
    """Only alice is trusted."""
    file = tmp_path / "signers"
    file.write_text(f"# the lab\nalice@lab {(keys / 'alice.pub').read_text()}")
    return file


@pytest.fixture
def signed(bundle: Path, keys: Path, run: Run) -> Path:
    code, out, err = run("sign", bundle, "--key", keys / "alice")
    assert code == 0, err
    assert f"{SIGNATURE}: signed with SHA256:" in out
    return bundle


def _verified(run: Run, bundle: Path, signers: Path, code: int) -> tuple[str, str]:
    got, out, err = run("verify", bundle, "--signers", signers)
    assert got == code, err
    return out, err


CONFIG = "data/models/bert/config.json"


def _damage(bundle: Path) -> None:
    (bundle / CONFIG).write_bytes(b"{}")


def _change_the_lock(bundle: Path) -> None:
    lock = bundle / "stage.lock"
    lock.write_bytes(lock.read_bytes().replace(b'"mit"', b'"gpl"'))


def _damage_without_signature(bundle: Path) -> None:
    _damage(bundle)
    (bundle / SIGNATURE).unlink()


# what happened to it -> the exit code, and what is said
NOT_THE_SIGNED_ONE: dict[Callable[[Path], None], tuple[int, tuple[str, ...]]] = {
    _change_the_lock: (4, ("changed since alice@lab (SHA256:", "stage.lock")),
    _damage: (1, (CONFIG, "1 finding", "signed by alice@lab (SHA256:", "the signature is good")),
    _damage_without_signature: (4, (CONFIG, "1 finding", f"not signed: there is no {SIGNATURE}")),
}


@pytest.mark.parametrize("spoil", NOT_THE_SIGNED_ONE, ids=lambda spoil: spoil.__name__)
def test_what_changed_after_the_signing_is_said_with_its_exit_code(
    signed: Path, signers: Path, run: Run, spoil: Callable[[Path], None]
) -> None:
    code, words = NOT_THE_SIGNED_ONE[spoil]
    spoil(signed)
    said = "\n".join(_verified(run, signed, signers, code))
    assert [part for part in words if part not in said] == [], said


def test_a_file_that_is_no_key_signs_nothing(
    bundle: Path, keys: Path, tmp_path: Path, run: Run
) -> None:
    for key in (tmp_path / "absent", bundle / "bagit.txt"):
        code, _, err = run("sign", bundle, "--key", key)
        assert code == 2 and str(key) in err and not (bundle / SIGNATURE).exists()


def test_a_signed_bundle_verifies_and_names_its_signer(
    signed: Path, signers: Path, run: Run
) -> None:
    code, out, _ = run("verify", signed, "--signers", signers)
    assert code == 0
    assert "signed by alice@lab (SHA256:" in out
    assert run("verify", signed)[0] == 0  # the signature is no extra file to who asks for none
