"""`path:` entries: other files beside the data, all mistakes in one error, disk space first."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stage.bundle.bundle import TAG_FILES, TAG_MANIFEST, verify
from stage.bundle.inspect import ParquetFooter, parquet_footer
from stage.files import FileDigests, hash_file
from stage.private_files import is_named
from stage.staging.sources import local, source
from stage.staging.sources.local import PathSource
from tests.support.rights import as_another_user
from tests.support.staging import run_here

OPENSSH_KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\n-----END OPENSSH PRIVATE KEY-----\n"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIRLIFT_STORE", "none")
    (tmp_path / "raw/sub").mkdir(parents=True)
    (tmp_path / "raw/a.txt").write_text("a\n")
    (tmp_path / "raw/sub/b.txt").write_text("b\n")
    return tmp_path


def manifest(folder: Path, *entries: str) -> None:
    lines = "".join(f"  {entry}\n" for entry in entries)
    (folder / "m.yaml").write_text(f"format: 1\nname: m\nassets:\n{lines}")


def taken(folder: Path) -> set[str]:
    """Paths of the asset `r` in the bundle's lock."""
    lock = json.loads((folder / "m.lock").read_bytes())
    return {file["path"].removeprefix("data/files/r/") for file in lock["assets"]["r"]["files"]}


def test_what_programs_left_stays_behind_and_is_told(folder: Path) -> None:
    for path in (
        *(".DS_Store", "._a.txt", "sub/._b.txt", "__pycache__/a.pyc", ".cache/huggingface/x"),
        *("sub/env/pyvenv.cfg", "sub/b/fetch.partial"),
    ):
        (folder / "raw" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "raw" / path).write_text("x")
    manifest(folder, "r: {path: raw}")
    done = run_here("fetch", "m.yaml", "-o", "bundle")
    assert taken(folder) == {"a.txt", "sub/b.txt"}
    assert (
        ": .DS_Store, 2 ._*, .cache/huggingface, __pycache__, a virtual environment: `sub/env`, "
        "another bundle: `sub/b`"
    ) in done.stderr, done.stderr


PRIVATE = {
    "id_ed25519": OPENSSH_KEY,
    # A key's ending: all of it is looked at.
    "sub/server.pem": "\n" * 5000
    + f"Bag Attributes\n{CERTIFICATE}"
    + OPENSSH_KEY.replace("OPENSSH ", ""),
    "notes.txt": "-----BEGIN PGP PRIVATE KEY BLOCK-----\n",
    ".Env.local": "WANDB_API_KEY=1\n",
    ".netrc": "machine x\n",
    "sub/token": "hf_" + "a" * 34 + "\n",
    ".ssh/config": "Host x\n",
    "keys.P12": "\0",
}


def test_keys_and_tokens_in_a_folder_are_refused_all_at_once_and_travel_only_by_name(
    folder: Path,
) -> None:
    harmless = {
        "ca.pem": CERTIFICATE,
        ".env.example": "KEY=\n",
        ".environment": "KEY=\n",
        "empty": "",
        "readme.txt": "\n" * 5000 + OPENSSH_KEY,
        "sub/words": "hf_" + "a" * 34 + " is a token\n",
        "sub/short": "hf_abc\n",
        "id_rsa.pub": "ssh-rsa AAAA\n",
        "token": "the word\n",
    }
    for path, text in {**PRIVATE, **harmless}.items():
        (folder / "raw" / path).parent.mkdir(exist_ok=True)
        (folder / "raw" / path).write_text(text)
    for entry in ("r: {path: raw}", 'r: {path: raw, include: ["sub/*", "*"]}'):
        manifest(folder, entry)
        done = run_here("fetch", "m.yaml", "-o", "bundle", code=3)
        assert all(f"`{path}` (" in done.stderr for path in PRIVATE), done.stderr
        assert not any(f"`{path}` (" in done.stderr for path in harmless), done.stderr
        assert "m.yaml:4" in done.stderr and "exclude: [" in done.stderr
        assert not (folder / "bundle").exists() and not (folder / "m.lock").exists()
    exclude = json.dumps([path for path in PRIVATE if path != "id_ed25519"])
    manifest(folder, f'r: {{path: raw, include: ["*", "id_*"], exclude: {exclude}}}')
    run_here("fetch", "m.yaml", "-o", "bundle")
    assert taken(folder) == {"a.txt", "sub/b.txt", "id_ed25519", *harmless}
    manifest(folder, "r: {path: raw/.Env.local}")
    run_here("lock", "m.yaml")
    assert taken(folder) == {".Env.local"}


NAMES_THEM = {
    "kaggle.json": ("kaggle.json", "kaggle.*", "k*.json", "sub/kaggle.json"),
    ".env": (".env", ".e*", "?env"),
    ".ssh": (".ssh/", ".ssh/*"),
    "id_rsa": ("id_*",),
    "keys.p12": ("*.p12", "keys.*"),
    "server.pem": ("*.pem",),
    ".git": (".git/", ".git*"),
}
NAMES_NOTHING = (
    "*",
    "*.*",
    "**",
    "?*",
    "[!x]*",
    "[!x]*.*",
    ".*",
    "*.json",
    "[a-z]*.json",
    "*.env",
    "*.ssh",
    "*.git",
)


def test_a_pattern_for_everything_or_for_a_kind_names_no_key() -> None:
    for name, patterns in NAMES_THEM.items():
        whole = name not in ("keys.p12", "server.pem")
        assert all(is_named(name, [pattern], whole=whole) for pattern in patterns), name
        assert not is_named(name, NAMES_NOTHING, whole=whole), name


@pytest.mark.parametrize("closed", ["raw/sub", "raw/a.txt"])
def test_what_cannot_be_read_is_named_and_not_passed_over(folder: Path, closed: str) -> None:
    manifest(folder, "r: {path: raw}")
    (folder / closed).chmod(0)
    command = [*as_another_user(), sys.executable, "-m", "stage", "fetch", "m.yaml", "-o", "bundle"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    (folder / closed).chmod(0o755)
    assert (
        done.returncode == 2
        and "m.yaml:4: `r`: " in done.stderr
        and "chmod -R u+rX raw" in done.stderr
    )
    assert closed.removeprefix("raw/") in done.stderr


def test_a_corrected_file_is_taken_by_the_same_command_after_a_failed_conversion(
    folder: Path,
) -> None:
    """A pin says what a bundle holds: what never entered one is not held to it."""
    manifest(folder, "r: {path: t.csv, convert: csv}", "other: {path: raw}")
    (folder / "t.csv").write_text("a,b\n1,2\n1,2,3\n")
    run_here("fetch", "m.yaml", "-o", "the bundle", code=2)
    (folder / "t.csv").write_text("a,b\n1,2\n1,3\n")
    (folder / "raw/a.txt").write_text("corrected too\n")
    run_here("fetch", "m.yaml", "-o", "the bundle")
    assert (folder / "m.lock").read_bytes() == (folder / "the bundle/stage.lock").read_bytes()
    (folder / "t.csv").write_text("a,b\n1,2\n1,4\n")
    refused = run_here("fetch", "m.yaml", "-o", "the bundle", code=2)
    command = refused.stderr.partition("as they are now: ")[2].strip()
    assert command == "stage fetch m.yaml -o 'the bundle' --update r"
    run_here("verify", "the bundle")
    (folder / "t.csv").write_text("a,b\n1,2,3\n")  # an update that fails keeps the old pin
    before = (folder / "m.lock").read_bytes()
    run_here(*shlex.split(command)[1:], code=2)
    assert (folder / "m.lock").read_bytes() == before
    (folder / "t.csv").write_text("a,b\n1,2\n1,5\n")
    run_here(*shlex.split(command)[1:])


READS = """
import os, sys
read = []
def watch(event, arguments):
    if event == "open" and "raw/" in str(arguments[0]):
        read.append(arguments[0])
sys.addaudithook(watch)
from stage.cli import main
try:
    main()
finally:
    print("read:", len(read))
"""


@pytest.mark.parametrize("fault", ["read-only", "too small"])
def test_the_target_is_looked_at_before_local_files_are_read(folder: Path, fault: str) -> None:
    with open(folder / "raw/big", "wb") as big:
        big.truncate(2**40 if fault == "too small" else 100_000)
    (folder / "disk").mkdir()
    manifest(folder, 'r: {path: raw, include: ["big"]}')
    if fault == "read-only":
        (folder / "disk").chmod(0o555)
    command = [
        *as_another_user(),
        sys.executable,
        "-c",
        READS,
        "fetch",
        "m.yaml",
        "-o",
        "disk/a/bundle",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    (folder / "disk").chmod(0o755)
    assert done.stdout == "read: 0\n"
    if fault == "read-only":
        assert done.returncode == 2 and "disk: Permission denied" in done.stderr, done.stderr
    else:
        assert done.returncode == 5 and "are missing" in done.stderr, done.stderr
    assert not (folder / "disk/a/bundle").exists() and not (folder / "m.lock").exists()


def test_a_fetch_mends_a_bundle_from_which_any_file_beside_the_payload_is_gone(
    folder: Path,
) -> None:
    manifest(folder, "r: {path: raw}")
    run_here("fetch", "m.yaml", "-o", "bundle")
    for name in [*TAG_FILES, TAG_MANIFEST]:
        (folder / "bundle" / name).unlink()
        run_here("fetch", "m.yaml", "-o", "bundle")
        assert (folder / "bundle" / name).is_file() and verify(folder / "bundle").ok, name


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("t.csv", "{path: raw/t.csv, convert: csv}"),
        ("t.json", "{path: raw, convert: json}"),
        ("train.parquet", "{path: raw}"),
        ("model.safetensors", "{path: raw}"),
        ("tokenizer.json", "{path: raw/tokenizer.json}"),
        ("sub/data.tar.gz", "{path: raw}"),
        ("cat/1.png", "{path: raw, convert: imagefolder}"),
    ],
)
def test_a_clone_without_its_lfs_files_is_called_that_whatever_the_file(
    folder: Path, name: str, entry: str
) -> None:
    (folder / "raw" / name).parent.mkdir(exist_ok=True)
    (folder / "raw" / name).write_text(POINTER)
    (folder / "raw/CONTRIBUTING.md").write_text(f"A pointer begins with\n{POINTER}")
    manifest(folder, f"r: {entry}")
    said = run_here("fetch", "m.yaml", "-o", "b", code=2).output
    assert f"`{name}` is a Git LFS pointer" in said and "git -C raw" in said and "lfs pull" in said
    assert not (folder / "b").exists() and not (folder / "m.lock").exists()


def test_a_table_is_hashed_once_and_its_parquet_is_opened_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table may take minutes to read. One that changes meanwhile is read again, and refused."""
    hashed, opened = list[str](), list[str]()

    def hash_noted(path: Path, **options: Any) -> FileDigests:
        hashed.append(path.name)
        return hash_file(path, **options)

    def open_noted(path: Path) -> ParquetFooter:
        opened.append(path.name)
        return parquet_footer(path)

    monkeypatch.setattr(local, "hash_file", hash_noted)
    monkeypatch.setattr(source, "parquet_footer", open_noted)
    manifest(folder, "r: {path: t.csv, convert: csv}")
    (folder / "t.csv").write_text("a,b\n1,2\n")
    run_here("fetch", "m.yaml", "-o", "bundle", "--no-offline-check", code=0)
    assert hashed == ["t.csv"] and len(opened) == 1, (hashed, opened)
    split = json.loads((folder / "m.lock").read_bytes())["assets"]["r"]["configs"]["default"]
    assert split["train"]["rows"] == 1 and len(split["train"]["schema"]) == 2

    def change_then_check(self: PathSource, *_: object) -> None:
        (folder / "t.csv").write_text("a,b\n1,3\n")

    monkeypatch.setattr(PathSource, "check_can_make", change_then_check)
    (folder / "bundle/data/datasets/r/default").rename(folder / "elsewhere")
    done = run_here("fetch", "m.yaml", "-o", "bundle", code=2)
    assert "t.csv: changed since it was locked" in done.stderr
