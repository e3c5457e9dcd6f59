"""Remedies whose obeying takes several commands, with bundles, patches and signatures."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from stage.cli import main as stage
from tests.remedies.obeyed import in_it, obeys

APPLY = "stage/carry/apply.py"
PATCH = "stage/carry/patch.py"
SIGNATURE = "stage/bundle/signature.py"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def run(command: str) -> tuple[int, str]:
    words = shlex.split(command)
    if words[0] == "push":  # rsync writes to the real streams
        program = [sys.executable, "-m", "stage", *words]
        ended = subprocess.run(program, capture_output=True, text=True)
        return ended.returncode, ended.stderr
    done = CliRunner().invoke(stage, words[words[0] == "stage" :], prog_name="stage")
    return done.exit_code, done.output


def works(command: str) -> str:
    code, said = run(command)
    assert code == 0, f"{command}\n{said}"
    return said


def remedy_of(command: str, code: int) -> str:
    """What the failing command prints as its remedy."""
    ended, said = run(command)
    assert (ended, "-> " in said) == (code, True), said
    return " ".join(said.partition("-> ")[2].split())


def bundle(**texts: str) -> Path:
    """A bundle with a text file `a` (`one`), and more."""
    files = {"a": "one", **texts}
    for asset, text in files.items():
        Path(f"{asset}.txt").write_text(text)
    assets = {asset: {"path": f"{asset}.txt"} for asset in files}
    Path("m.yaml").write_text(yaml.safe_dump({"format": 1, "name": "m", "assets": assets}))
    works("fetch m.yaml -o bundle")
    return Path("bundle")


def key_and_signers() -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "KEY"], check=True)
    Path("signers").write_text(f"me {Path('KEY.pub').read_text()}")


@obeys(SIGNATURE, "Run `stage verify {}`; sign what is sound")
def test_a_damaged_bundle_is_looked_at_before_it_is_signed() -> None:
    key_and_signers()
    (bundle() / "data/files/a/a.txt").unlink()
    code, said = run(in_it(remedy_of("sign bundle --key KEY", 1), r"stage verify [^` ]+"))
    assert code == 1 and "stage fetch" in said
    works("fetch m.yaml -o bundle")
    works("sign bundle --key KEY")


@obeys(SIGNATURE, "Write one: a line `NAME ssh-ed25519 AAAA...` per signer")
def test_a_file_of_signers_is_written_as_its_remedy_says() -> None:
    key_and_signers()
    Path("signers").unlink()
    bundle()
    works("sign bundle --key KEY")
    line = in_it(remedy_of("verify bundle --signers signers", 2), r"NAME ssh-ed25519 \S+?(?=`)")
    key = Path("KEY.pub").read_text().split()[1]
    Path("signers").write_text(line.replace("AAAA...", key) + "\n")
    works("verify bundle --signers signers")


def damaged_copy() -> Path:
    """A copy of a bundle with one damaged file, and the report of it."""
    bundle(b="two")
    shutil.copytree("bundle", "copy")
    Path("copy/data/files/a/a.txt").write_text("oh!")
    assert run("verify copy --report report.json")[0] == 1
    return Path("copy")


@obeys(APPLY, "Move it out of the bundle: mv {} ELSEWHERE")
def test_a_folder_in_the_place_of_a_file_is_moved_out() -> None:
    file = damaged_copy() / "data/files/a/a.txt"
    file.unlink()
    file.mkdir()
    (file / "mine").write_text("notes")
    works("patch bundle --report report.json -o patch")
    words = shlex.split(in_it(remedy_of("apply copy patch", 3), r"mv \S+ ELSEWHERE"))
    shutil.move(words[1], words[2])
    works("apply copy patch")


def update() -> None:
    """A copy of the bundle; the bundle then changes, and a patch leads from one to the other."""
    bundle()
    shutil.copytree("bundle", "copy")
    Path("a.txt").write_text("another one")
    works("fetch m.yaml -o bundle --update a")
    works("patch bundle --since copy/stage.lock -o patch")


@obeys(APPLY, "prints the id of this bundle; make a patch for it")
def test_a_patch_for_another_bundle_is_made_for_this_one() -> None:
    update()
    works("apply copy patch")
    Path("a.txt").write_text("a third")
    works("fetch m.yaml -o bundle --update a")
    shutil.rmtree("patch")
    shutil.copytree("bundle", "third")
    Path("a.txt").write_text("a fourth")
    works("fetch m.yaml -o bundle --update a")
    works("patch bundle --since third/stage.lock -o patch")
    works(in_it(remedy_of("apply copy patch", 2), r"stage verify copy"))
    works("patch bundle --since copy/stage.lock -o patch2")
    works("apply copy patch2")


@obeys(APPLY, "stage verify {} --report FILE, and repair it with stage patch --report FILE")
def test_damage_is_repaired_before_an_update_that_needs_the_file() -> None:
    bundle(b="two", c="two")
    shutil.copytree("bundle", "old")
    shutil.copytree("bundle", "copy")
    document = yaml.safe_load(Path("m.yaml").read_text())
    document["assets"]["d"] = document["assets"].pop("b")
    Path("m.yaml").write_text(yaml.safe_dump(document))
    works("fetch m.yaml -o bundle")
    works("patch bundle --since copy/stage.lock -o patch")
    for name in "bc":
        Path(f"copy/data/files/{name}/{name}.txt").write_text("oh!")
    remedy = remedy_of("apply copy patch", 1)
    look = in_it(remedy, r"stage verify copy --report FILE")
    assert run(look)[0] == 1
    works("stage patch old --report FILE -o repair")
    works("apply copy repair")
    works("apply copy patch")


@obeys(PATCH, "Run `stage fetch` again into it, then this again")
def test_a_patch_from_a_damaged_bundle_waits_for_a_fetch() -> None:
    damaged_copy()
    Path("bundle/data/files/a/a.txt").write_text("no!")
    assert "stage fetch" in remedy_of("patch bundle --report report.json -o patch", 1)
    works("fetch m.yaml -o bundle")
    works("patch bundle --report report.json -o patch")
    works("apply copy patch")


@obeys("stage/lock/manifest.py", "List those you allow: `policy: {licences:")
def test_an_empty_policy_lists_what_it_allows() -> None:
    bundle()
    document = yaml.safe_load(Path("m.yaml").read_text())
    document["assets"]["a"]["licence"] = "mit"
    Path("m.yaml").write_text(yaml.safe_dump({**document, "policy": {"licences": []}}))
    remedy = remedy_of("fetch m.yaml -o new", 2)
    policy = yaml.safe_load(in_it(remedy, r"policy: \{[^}]*\}"))
    for way in (policy, dict[str, object]()):
        Path("m.yaml").write_text(yaml.safe_dump({**document, **way}))
        works("fetch m.yaml -o new")
