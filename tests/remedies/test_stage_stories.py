"""Remedies of `stage` that are made by functions and tables: in manifests, tables and repairs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from stage.bundle.bundle import Bundle
from stage.bundle.receipt import remedy_for_damage
from stage.lock.manifest import Manifest
from tests.remedies.obeyed import in_it, obeys
from tests.remedies.test_stories import bundle, here, remedy_of, run, works

__all__ = ["here"]
VERIFIER = "stage/bundle/verifier.py"
KINDS = "stage/file_kinds.py"
APPLY = "stage/carry/apply.py"
FETCH = "fetch m.yaml -o new --no-offline-check"


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


@obeys(VERIFIER, "Else: {first}Carry {file} there: stage patch", "Other ways: copy again")
@obeys("stage/bundle/receipt.py", "stage verify {} names all damage")
@obeys("stage/bundle/report.py", "Give a file that `stage verify --report` wrote.")
@obeys(KINDS, "`stage lock MANIFEST` writes", "`stage verify BUNDLE --report FILE` writes")
@obeys(APPLY, "Give the folder that `stage patch -o` wrote.")
def test_damage_is_repaired_in_each_way_that_is_named() -> None:
    shutil.copytree(bundle(b="two"), "copy")
    damaged = Path("copy/data/files/a/a.txt")
    damaged.write_text("oh!")
    look = in_it(remedy_for_damage(Path("copy")), r"stage verify \S+")
    wrote = in_it(remedy_of("patch bundle --report none.json -o P", 2), r"stage verify --report")
    Path("notes.json").write_text("{}")
    remedy = remedy_of("patch bundle --report notes.json -o P", 2)
    report = in_it(remedy, "stage verify BUNDLE --report FILE")
    assert run(report.replace("BUNDLE", "copy"))[0] == 1 and Path("FILE").exists()
    lock = in_it(remedy_of("patch bundle --since m.yaml -o P", 2), "stage lock MANIFEST")
    works(lock.replace("MANIFEST", "m.yaml"))
    code, said = run(f"{look} {wrote.split()[-1]} report.json")
    words = " ".join(said.split())
    assert code == 1 and "stage patch" in remedy_for_damage(Path("copy")), "it is known now"
    works(in_it(words, r"stage patch BUNDLE --report \S+ -o PATCH").replace("BUNDLE", "bundle"))
    Path("empty").mkdir()
    assert "stage patch -o" in remedy_of("apply copy empty", 2)
    works(in_it(words, r"stage apply copy PATCH"))
    works("verify copy")

    damaged.write_text("no!")
    assert "-c" in words and "--failed LIST" in words
    assert run("verify copy --failed LIST")[0] == 1
    shell(f"rsync -rc {in_it(words, '--files-from=LIST')} bundle copy")
    works("verify copy")


@obeys("stage/staging/build.py", "Fetch with the versions of the lock, or make it anew: {}")
@obeys("stage/staging/build.py", "{}: use the versions that the lock was made with, or accept")
def test_a_converted_file_that_comes_out_otherwise_is_refused() -> None:
    """By other versions of what converts, and by other bytes from the same."""
    Path("a.csv").write_text("text\na film\n")
    assets = {"a": {"path": "a.csv", "convert": "csv"}}
    Path("m.yaml").write_text(yaml.safe_dump({"format": 1, "name": "m", "assets": assets}))
    works("fetch m.yaml -o bundle --no-offline-check")
    lock = Path("m.lock").read_text()
    pyarrow = in_it(lock, r'(?<="pyarrow": ")[^"]*')
    made = next(f.sha256 for f in Bundle.open(Path("bundle")).asset("a").files if f.made_by) or ""
    for before, after, code in ((pyarrow, "1.0", 2), (made, "0" * 64, 1)):
        Path("m.lock").write_text(lock.replace(before, after))
        remedy = remedy_of("fetch m.yaml -o new --no-offline-check", code)
        works(in_it(remedy, r"stage \S+ m.yaml .*--update \S+"))


def manifest(files: Mapping[str, str | bytes], *top: Mapping[str, Any], **entry: Any) -> None:
    """Writes a manifest with an asset `a`, and the user's files."""
    for name, content in files.items():
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    document = {"format": 1, "name": "m", "assets": {"a": entry}}
    for more in top:
        document |= more
    Path("m.yaml").write_text(yaml.safe_dump(document))


@obeys("stage/bundle/bundle.py", "Run `stage fetch` again where it was made, or copy again")
@obeys(VERIFIER, "This bundle is unfinished: run `stage fetch`", "This is another bundle than")
def test_an_unfinished_bundle_and_one_of_another_id() -> None:
    root = bundle()
    (root / "tagmanifest-sha256.txt").unlink()
    code, said = run("verify bundle")
    assert code == 1 and "run `stage fetch` again where it was made" in " ".join(said.split())
    assert "stage fetch" in remedy_of("show bundle", 2)
    works("fetch m.yaml -o bundle")
    works("verify bundle")
    code, said = run(f"verify bundle --id {'ab' * 32}")
    assert code == 1
    assert in_it(" ".join(said.split()), "`stage show` where it was made prints its id")
    found = in_it(works("show bundle"), r"(?<=bundle id )[0-9a-f]{64}")
    works(f"verify bundle --id {found}")


@obeys("stage/convert/text_files.py", "Get the file again, or remove the byte: tr -d")
def test_a_byte_is_removed_as_its_remedy_says() -> None:
    manifest({"FILE": b"a film\n\0another\n"}, path="FILE", convert="text")
    shell(
        in_it(remedy_of("fetch m.yaml -o c --no-offline-check", 2), r"tr -d '\\000' < FILE > NEW")
    )
    manifest({}, path="NEW", convert="text")
    works("fetch m.yaml -o c --no-offline-check")


@obeys("stage/staging/resolve.py", "Take another repository; or, after reading the licence, add it")
@obeys("stage/lock/manifest.py", "Remove one of the two. For `runner train`, keep `{}`.")
def test_policies_and_ways_that_do_not_go_together() -> None:
    mit, files = {"policy": {"licences": ["mit"]}}, {"a.csv": "text\na film\n"}
    manifest(files, mit, path="a.csv", convert="csv")
    remedy = remedy_of(FETCH, 3)
    licence = yaml.safe_load(in_it(remedy, r"licence: \w+"))
    assert "policy: {licences: [...]}" in remedy
    for policy, entry in ((mit, licence), ({"policy": {"licences": ["x"]}}, {"licence": "x"})):
        manifest(files, policy, path="a.csv", convert="csv", **entry)
        works(FETCH)
        shutil.rmtree("new")

    both = {"dataset": "acme/lines", "config": "plain", "include": ["*.csv"]}
    manifest({}, **both)
    kept = in_it(remedy_of(FETCH, 2), r"(?<=keep `)\w+")
    for gone in {"config", "include"}:
        manifest({}, **{key: value for key, value in both.items() if key != gone})
        assert kept == "config" and Manifest.load(Path("m.yaml")).requests
