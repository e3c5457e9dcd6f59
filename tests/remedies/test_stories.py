"""Remedies whose obeying takes several commands, with bundles, patches and signatures."""

from __future__ import annotations

import json
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
from tests.support.servers.web import serve

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


@obeys("stage/bundle/bundle.py", "Run `stage verify {}` to see all that is damaged")
def test_a_damaged_lock_is_looked_at_and_comes_again() -> None:
    lock = bundle() / "stage.lock"
    lock.write_bytes(lock.read_bytes().replace(b'"size": 3', b'"size": 7'))
    code, said = run(in_it(remedy_of("show bundle", 1), r"stage verify [^` ]+"))
    assert code == 1 and "stage.lock" in said and "stage fetch" in said
    works("fetch m.yaml -o bundle")
    works("show bundle")


@obeys(SIGNATURE, "Run `stage verify {}`; sign what is sound")
def test_a_damaged_bundle_is_looked_at_before_it_is_signed() -> None:
    key_and_signers()
    (bundle() / "data/files/a/a.txt").unlink()
    code, said = run(in_it(remedy_of("sign bundle --key KEY", 1), r"stage verify [^` ]+"))
    assert code == 1 and "stage fetch" in said
    works("fetch m.yaml -o bundle")
    works("sign bundle --key KEY")


@obeys(SIGNATURE, "sign again there: stage sign")
def test_a_signature_of_before_an_update_is_made_again() -> None:
    key_and_signers()
    root = bundle()
    works("sign bundle --key KEY")
    before = (root / "tagmanifest-sha256.txt.sig").read_bytes()
    Path("a.txt").write_text("another one")
    works("fetch m.yaml -o bundle --update a")
    (root / "tagmanifest-sha256.txt.sig").write_bytes(before)
    works(in_it(remedy_of("verify bundle --signers signers", 4), r"stage sign \S+ --key KEY"))
    works("verify bundle --signers signers")


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


@obeys(APPLY, "Copy the patch again: rsync -c")
def test_a_patch_that_arrived_damaged_is_copied_again() -> None:
    damaged_copy()
    works("patch bundle --report report.json -o patch")
    shutil.copytree("patch", "arrived")
    Path("arrived/data/data/files/a/a.txt").write_text("no!")
    assert "rsync -c" in remedy_of("apply copy arrived", 1)
    shutil.rmtree("arrived")
    shutil.copytree("patch", "arrived")  # as `rsync -c` would make it
    works("apply copy arrived")


@obeys(APPLY, "Give the folder that `stage patch -o` wrote: stage apply {} PATCH")
def test_a_bundle_in_place_of_a_patch_is_exchanged_for_one() -> None:
    damaged_copy()
    works("patch bundle --report report.json -o PATCH")
    works(in_it(remedy_of("apply copy bundle", 2), r"stage apply copy PATCH"))


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


def test_a_lock_that_may_be_meant_is_that_of_another_version() -> None:
    update()
    shutil.rmtree("patch")
    since = "patch bundle --since none.lock -o patch"
    assert "mean" not in remedy_of(since, 2), "of this bundle: m.lock"
    shutil.copy("copy/stage.lock", "once.lock")
    works(since.replace("none.lock", in_it(remedy_of(since, 2), r"(?<=mean )[\w.]+(?=\?)")))
    works("apply copy patch")


@obeys(PATCH, "If this one was fetched again since: stage push")
def test_a_report_of_before_an_update_makes_a_patch_with_the_copys_lock() -> None:
    damaged_copy()
    Path("b.txt").write_text("another two")
    works("fetch m.yaml -o bundle --update b")
    remedy = remedy_of("patch bundle --report report.json -o patch", 2)
    works(in_it(remedy, r"stage patch bundle --since \S+ -o \S+"))
    run("apply copy patch")  # `a` is still damaged there
    assert run("verify copy --report report.json")[0] == 1
    works("patch bundle --report report.json -o patch2")
    works("apply copy patch2")


@obeys(PATCH, "Fetch another revision, then: stage patch --since OLD.lock")
def test_what_does_not_load_travels_as_an_update() -> None:
    bundle()
    shutil.copytree("bundle", "copy")
    shutil.copy("bundle/stage.lock", "OLD.lock")
    report = json.loads(works("verify bundle --json"))
    finding = {"path": "data/files/a/a.txt", "problem": "unloadable", "code": "unloadable"}
    report |= {"ok": False, "level": "deep"}
    report["findings"] = [finding | {"expected": "a model", "found": "none"}]
    Path("report.json").write_text(json.dumps(report))
    assert "stage patch --since OLD.lock" in remedy_of("patch bundle --report report.json -o p", 2)
    Path("a.txt").write_text("another one")
    works("fetch m.yaml -o bundle --update a")
    works("patch bundle --since OLD.lock -o p")
    works("apply copy p")


@obeys(PATCH, "Run `stage fetch` again into it, then this again")
def test_a_patch_from_a_damaged_bundle_waits_for_a_fetch() -> None:
    damaged_copy()
    Path("bundle/data/files/a/a.txt").write_text("no!")
    assert "stage fetch" in remedy_of("patch bundle --report report.json -o patch", 1)
    works("fetch m.yaml -o bundle")
    works("patch bundle --report report.json -o patch")
    works("apply copy patch")


@obeys("stage/carry/push.py", "Give a new folder: {}/bundle")
def test_a_push_into_somebodys_folder_takes_one_inside() -> None:
    bundle()
    Path("there").mkdir()
    Path("there/mine").write_text("x")
    works(f"push bundle {in_it(remedy_of('push bundle there', 2), r'there/bundle')}")


@obeys("stage/carry/push.py", "Repair this copy, then push again: stage fetch MANIFEST -o {}")
def test_damage_here_is_repaired_from_the_manifest_or_a_sound_copy_and_pushed() -> None:
    file = bundle() / "data/files/a/a.txt"
    shutil.copytree("bundle", "COPY")
    works("verify bundle")  # a push looks for what changed since
    file.write_text("oh!")
    remedy = remedy_of("push bundle there", 1)
    works(in_it(remedy, "stage fetch MANIFEST -o bundle").replace("MANIFEST", "m.yaml"))
    works("push bundle there")

    file.write_text("oh!")
    assert run(in_it(remedy, "stage verify bundle --report FILE"))[0] == 1
    said = works(in_it(remedy, "stage patch COPY --report FILE -o PATCH"))
    works(in_it(said, "stage apply BUNDLE PATCH").replace("BUNDLE", "bundle"))
    works("verify bundle")


@obeys("stage/cli/__init__.py", "stage show {} --sbom")
def test_a_bill_of_materials_comes_alone() -> None:
    pytest.importorskip("cyclonedx")
    bundle()
    works(in_it(remedy_of("show bundle --sbom --json", 2), r"stage show bundle --sbom"))


@obeys("stage/lock/manifest.py", "List those you allow: `policy: {licences:")
def test_an_empty_policy_lists_what_it_allows() -> None:
    bundle()
    document = yaml.safe_load(Path("m.yaml").read_text())
    document["assets"]["a"]["licence"] = "mit"
    Path("m.yaml").write_text(yaml.safe_dump({**document, "policy": {"licences": []}}))
    remedy = remedy_of("fetch m.yaml -o new", 2)
    policy = yaml.safe_load(in_it(remedy, r"policy: \{[^}]*\}"))
    for way in (policy, {}):
        Path("m.yaml").write_text(yaml.safe_dump({**document, **way}))
        works("fetch m.yaml -o new")


@obeys("stage/lock/read.py", "Make it again with `stage lock`")
def test_a_lock_that_cannot_be_read_is_made_again() -> None:
    bundle()
    Path("m.lock").write_text("{")
    assert "stage lock" in remedy_of("fetch m.yaml -o bundle", 2)
    Path("m.lock").unlink()
    works("stage lock m.yaml")
    works("fetch m.yaml -o bundle")


@obeys("stage/lock/requests.py", "Write `url: {}`.")
def test_an_address_in_place_of_a_path_is_fetched() -> None:
    with serve() as web:
        web.files["/x.csv"] = b"text\na film\n"
        document = {"format": 1, "name": "m", "assets": {"a": {"path": web.url("/x.csv")}}}
        Path("m.yaml").write_text(yaml.safe_dump(document))
        entry = yaml.safe_load(in_it(remedy_of("fetch m.yaml -o bundle", 2), r"url: [^`]*"))
        Path("m.yaml").write_text(yaml.safe_dump({**document, "assets": {"a": entry}}))
        works("fetch m.yaml -o bundle")
    assert Path("bundle/data/files/a/x.csv").read_bytes() == b"text\na film\n"
