"""What travels of a user's project, and that the job has all of it or nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.from_stage import DamageError, IncompleteError, UsageError
from runner.run_folder import project as project_module
from runner.run_folder.layout import GitError
from runner.run_folder.project import (
    Project,
    find_root,
    list_project,
    pack,
    read_description,
    set_earlier_work_aside,
    unpack,
)
from stage.files import read_file
from tests.remedies.obeyed import in_it, obeys
from tests.support.rights import as_another_user

PROJECT = "runner/run_folder/project.py"
WAITS = "import sys; print('now', flush=True); sys.stdin.read()"


def git(folder: Path, *words: str) -> None:
    told = ["-c", "user.name=me", "-c", "user.email=me@lab", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *told, *words], cwd=folder, check=True, capture_output=True)


def write(folder: Path, **files: str) -> None:
    """Writes files; `__` in a name is a `/`, and a final `_py` is `.py`."""
    for name, text in files.items():
        path = folder / re.sub("_py$", ".py", name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with two commits' worth of files; some tracked, some not, some ignored."""
    root = tmp_path / "my project"
    write(root, train_py="import lib\n", lib__init_py="", lib__old_py="", configs__a="x: 1\n")
    (root / ".gitignore").write_text("*.log\n.env\nbig/\n")
    git(root, "init", "-q", ".")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., list[str]]:
    """Unpacks what was packed, into `run/work`; packs first, if a project is given."""
    folder = tmp_path / "run"
    folder.mkdir()

    def there(project: Project | None = None) -> list[str]:
        if project is not None:
            pack(project, folder / "project.tar", folder / "project.json")
        return unpack(folder / "project.tar", folder / "project.json", folder / "work")

    return there


def names(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in found}


def test_of_a_checkout_what_git_does_not_ignore_travels(
    checkout: Path, tmp_path: Path, place: Callable[..., list[str]]
) -> None:
    (checkout / "lib/old.py").unlink()
    write(checkout, new_py="print(1)", out__log="", big__data="1", wandb__run="")
    (checkout / "train.log").write_text("")
    (checkout / "new.py").chmod(0o700)
    (checkout / "bytes\udcff\nname").write_text("")
    project = list_project(checkout, (), ())
    taken = {".gitignore", "train.py", "lib/init.py", "configs/a", "new.py", "out/log"}
    taken |= {"bytes\udcff\nname"}
    assert set(project.files) == taken and list(project.files) == sorted(taken)
    assert project.commit and len(project.commit) == 40 and project.is_dirty
    place(project)
    work = tmp_path / "run/work"
    assert names(work) == taken
    assert (work / "train.py").read_bytes() == (checkout / "train.py").read_bytes()
    assert {p for p in taken if os.access(work / p, os.X_OK)} == {"new.py"} or os.geteuid() == 0
    assert (work / "new.py").stat().st_mode & stat.S_IXUSR
    assert not (work / "train.py").stat().st_mode & stat.S_IXUSR
    assert (work / "train.py").stat().st_mtime == int((checkout / "train.py").stat().st_mtime)


def test_a_checkout_as_it_was_committed_is_clean(checkout: Path) -> None:
    assert list_project(checkout, (), ()).is_dirty is False
    write(checkout, train_py="edited")
    assert list_project(checkout, (), ()).is_dirty is True
    git(checkout, "commit", "-qam", "second")
    assert list_project(checkout, (), ()).is_dirty is False
    write(checkout, new_py="")
    assert list_project(checkout, (), ()).is_dirty is True
    git(checkout, "add", "new.py")
    git(checkout, "commit", "-qm", "third")
    write(checkout, output__run__x="")
    assert list_project(checkout, (), [checkout / "output"]).is_dirty is False
    git(checkout, "add", "-f", "output")
    git(checkout, "commit", "-qm", "by accident")
    assert "output/run/x" in list_project(checkout, (), ()).files
    assert "output/run/x" not in list_project(checkout, (), [checkout / "output"]).files
    assert list_project(checkout / "lib", (), ()).files == {"init.py": 0, "old.py": 0}


def test_submodules_clones_and_worktrees_travel(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, code_py="1")
    git(other, "init", "-q", ".")
    git(other, "add", ".")
    git(other, "commit", "-qm", "x")
    git(checkout, "submodule", "add", "-q", str(other), "sub")
    git(checkout, "clone", "-q", str(other), "clone")
    write(checkout / "sub", new_py="")
    git(checkout, "commit", "-qm", "sub")
    inside = {"sub/code.py", "sub/new.py", "clone/code.py"}
    assert inside <= set(list_project(checkout, (), ()).files)
    git(checkout, "worktree", "add", "-q", str(tmp_path / "tree"))
    tree = list_project(tmp_path / "tree", (), ())
    assert "train.py" in tree.files and ".git" not in tree.files and not tree.is_dirty


def test_what_the_user_replaced_travels_as_it_is_now(
    checkout: Path, tmp_path: Path, place: Callable[..., list[str]]
) -> None:
    (checkout / "lib").rename(tmp_path / "lib")
    (checkout / "lib").symlink_to(tmp_path / "lib")
    (checkout / "configs/a").unlink()
    (checkout / "configs").rmdir()
    write(checkout, configs="", venv__pyvenv="")
    (checkout / "venv/pyvenv").rename(checkout / "venv/pyvenv.cfg")
    git(checkout, "clone", "-q", str(checkout), "venv/src")
    place(list_project(checkout, (), ()))
    assert names(tmp_path / "run/work") == {".gitignore", "train.py", "lib", "configs"}


def test_private_files_stay_and_are_named_also_those_git_ignores(checkout: Path) -> None:
    (checkout / ".env").write_text("TOKEN=x")
    write(checkout, key="-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (checkout / "big").mkdir()
    (checkout / "big/vocab").write_text("x")
    write(checkout, **{".ssh__config": "", ".gitignore": ".env\nbig/\n.ssh/\n"})
    project = list_project(checkout, (), ())
    assert set(project.omitted) == {
        "`.env` (settings, often with passwords and tokens)",
        "`key` (a private key)",
    }
    assert not {".env", "key", "big/vocab"} & set(project.files)
    project = list_project(checkout, [".env", "big/vocab"], ())
    assert {".env", "big/vocab"} <= set(project.files)
    assert not any(".env" in one for one in project.omitted) and project.omitted
    assert project.is_dirty


def test_without_git_all_travels_but_what_programs_and_runs_left(tmp_path: Path) -> None:
    write(
        *(tmp_path,), train_py="", runs__a="x", runs__b__c="", output__r__x="", wandb__x="",
    )  # fmt: skip
    for left in ("venv/pyvenv.cfg", "conda/conda-meta/history", "lib/__pycache__/a.pyc"):
        (tmp_path / left).parent.mkdir(parents=True)
        (tmp_path / left).write_text("")
    for left in ("checkpoint-12", "runs/b", "mine"):
        (tmp_path / left).mkdir(exist_ok=True)
        (tmp_path / left / "events.out.tfevents.1").write_text("")
    (tmp_path / ".env").write_text("")
    (tmp_path / "mine/x").write_text("")
    project = list_project(tmp_path, (), [tmp_path / "mine", tmp_path.parent])
    assert set(project.files) == {"train.py", "runs/a", "runs/b/c"}
    assert project.commit is None and project.is_dirty is None and len(project.omitted) == 1
    assert "not a git repository" in project.notes[0] and "checkpoint-12/" in project.notes[0]


@pytest.mark.parametrize("fault", ["no git", "broken", "ignored", "another's"])
def test_where_git_cannot_say_the_folder_is_listed(
    checkout: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, tracked = checkout, {"train.py", "configs/a"}
    if fault == "no git":
        monkeypatch.setenv("PATH", "/nowhere")
    elif fault == "broken":
        (checkout / ".git/HEAD").unlink()
    elif fault == "ignored":
        root, tracked = checkout / "big", {"x"}
        write(root, x="")
    elif os.geteuid() == 0:
        os.chown(checkout, 12345, 12345)
    else:
        pytest.skip("needs root")
    project = list_project(root, (), ())
    assert tracked <= set(project.files) and not any(".git/" in path for path in project.files)
    assert project.commit is None and project.is_dirty is None
    assert "the project is the whole folder" in project.notes[0]


def test_links_lead_to_the_copy_or_to_where_they_led(
    checkout: Path, tmp_path: Path, place: Callable[..., list[str]]
) -> None:
    write(tmp_path, data__x="1")
    for name, target in {
        "a": "train.py",
        "lib/up": "../configs",
        "absolute": str(checkout / "configs/a"),
        "back": f"../{checkout.name}/train.py",
        "chain": "a",
        "lib/out": "../../data",
        "gone": "/nowhere/x",
        "ignored": "big/x",
        "loop": "loop",
    }.items():
        (checkout / name).symlink_to(target)
    write(checkout, big__x="")
    project = list_project(checkout, (), ())
    place(project)
    work = tmp_path / "run/work"
    for name in ("a", "lib/up", "absolute", "back", "chain"):
        assert (work / name).resolve().is_relative_to(work), name
        assert (work / name).exists(), name
    assert (work / "lib/out").resolve() == tmp_path / "data"
    assert (work / "ignored").resolve() == checkout / "big/x"
    *_, note = project.notes
    for name in ("lib/out", "gone", "ignored"):
        assert f"`{name}`" in note
    assert "`a`" not in note


SPARSE = 60_000_000


@obeys(PROJECT, "Keep it out of the project: {}")
@pytest.mark.parametrize("kind", ["untracked", "tracked", "no git"])
def test_a_large_file_is_named_with_its_way(
    checkout: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "no git":
        monkeypatch.setattr(project_module, "_list_checkout", _no_git)
    (checkout / "data").mkdir()
    for name, size in (("big [1].bin", SPARSE), ("small.bin", 10)):
        with open(checkout / "data" / name, "wb") as file:
            file.truncate(size)
    if kind == "tracked":
        git(checkout, "add", "data")
    with pytest.raises(UsageError) as caught:
        list_project(checkout, (), ())
    told = str(caught.value)
    assert "`data/big [1].bin` (60 MB)" in told and "no file above 50 MB" in told
    command = in_it(told, "(?<=Keep it out of the project: ).*")
    subprocess.run(command, shell=True, check=True)
    assert "data/small.bin" in list_project(checkout, (), ()).files
    asset = yaml.safe_load(in_it(told, "(?<=write `).*(?=`, then)"))
    ((name, entry),) = asset.items()
    assert Path(entry["path"]).stat().st_size == SPARSE
    assert f"$AIRLIFT_BUNDLE/data/files/{name}" in told


def _no_git(*words: object) -> Any:
    raise GitError("no git")


def test_many_files_or_bytes_are_named_by_their_folder(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        write(checkout, **{f"images__{number}": "x" * 100})
    monkeypatch.setattr(project_module, "MOST_FILES", 30)
    with pytest.raises(UsageError, match=r"`images` \(30 files\), `lib` \(2 files\)"):
        list_project(checkout, (), ())
    monkeypatch.setattr(project_module, "MOST_FILES", 100)
    monkeypatch.setattr(project_module, "MOST_BYTES", 2000)
    with pytest.raises(UsageError, match=r"(?s)`images` \(3 kB\).*data/files/images") as caught:
        list_project(checkout, (), ())
    command = in_it(str(caught.value), "(?<=Keep it out of the project: ).*")
    subprocess.run(command, shell=True, check=True)
    assert "images/1" not in list_project(checkout, (), ()).files


def test_a_pointer_a_closed_file_and_an_empty_folder_are_refused(
    checkout: Path, tmp_path: Path
) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234567\n"
    write(checkout, weights=pointer)
    with pytest.raises(UsageError, match="lfs pull"):
        list_project(checkout, (), ())
    (checkout / "weights").write_text("")
    (checkout / "weights").chmod(0)
    code = "from runner.run_folder.project import list_project as l; from pathlib import Path\n"
    code += "import sys; l(Path(sys.argv[1]), (), ())"
    command = [*as_another_user(), sys.executable, "-c", code, str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "chmod -R u+rX" in done.stderr, done.stderr
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no file that travels"):
        list_project(tmp_path / "none", (), ())


@obeys(PROJECT, "Put its files into a folder of their own")
def test_the_root_is_the_checkout_or_the_folder_never_all(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_root(None, checkout / "configs/run.yaml") == checkout
    assert find_root(Path("../lib"), checkout / "configs/run.yaml") == checkout / "lib"
    assert find_root(None, tmp_path / "a/run.yaml") == tmp_path / "a"
    monkeypatch.chdir(checkout)
    assert find_root(None, Path("configs/run.yaml")) == checkout
    with pytest.raises(UsageError, match=r"names .*/nowhere, which is no folder"):
        find_root(Path("nowhere"), checkout / "run.yaml")
    monkeypatch.setenv("HOME", str(checkout))
    with pytest.raises(UsageError) as caught:
        find_root(None, checkout / "configs/run.yaml")
    told = yaml.safe_load(in_it(str(caught.value), "code: FOLDER"))
    assert find_root(Path(told["code"].replace("FOLDER", ".")), checkout / "configs/run.yaml")
    with pytest.raises(UsageError, match="more than a project"):
        find_root(Path("/"), checkout / "run.yaml")


def test_the_digest_is_that_of_names_modes_and_contents(checkout: Path, tmp_path: Path) -> None:
    archive, description = tmp_path / "project.tar", tmp_path / "project.json"

    def digest() -> str:
        return pack(list_project(checkout, (), ()), archive, description)

    first = digest()
    packed = read_description(description)
    assert packed is not None and packed.digest == first and packed.root == str(checkout)
    assert packed.files["configs/a"][0] == 5 and packed.is_dirty is False
    os.utime(checkout / "train.py", (1, 1))
    assert digest() == first
    (checkout / "train.py").chmod(0o755)
    second = digest()
    write(checkout, train_py="import lix\n")
    assert len({first, second, digest()}) == 3
    description.write_text("{}")
    assert read_description(description) is None
    assert read_description(tmp_path / "none") is None


@pytest.mark.parametrize("how", ["grows", "shrinks", "is replaced", "is removed", "is a pipe"])
def test_a_file_that_changes_while_it_is_packed_is_an_error(
    checkout: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = checkout / "train.py"
    file.write_bytes(b"x" * 3_000_000)
    project = list_project(checkout, (), ())
    pack(project, tmp_path / "project.tar", tmp_path / "project.json")
    read = read_file

    def change(path: Path, *more: Any, **options: Any) -> bytes:
        data = read(path, *more, **options)
        if path == file and how == "grows":
            with open(file, "ab") as target:
                target.write(b"x")
        elif path == file and how == "shrinks":
            os.truncate(file, 1_500_000)
        return data

    monkeypatch.setattr(project_module, "read_file", change)
    if how == "is replaced":
        file.write_bytes(b"y")
    elif how in ("is removed", "is a pipe"):
        file.unlink()
    if how == "is a pipe":
        os.mkfifo(file)
    with pytest.raises(IncompleteError, match=r"train\.py changed"):
        pack(project, tmp_path / "project.tar", tmp_path / "project.json")
    assert not (tmp_path / "project.json").exists()


def test_a_killed_pack_leaves_no_project_or_all_of_it(checkout: Path, tmp_path: Path) -> None:
    with open(checkout / "random", "wb") as file:
        file.write(os.urandom(30_000_000))
    code = f"""
from pathlib import Path
from runner.run_folder.project import *
project = list_project(Path({str(checkout)!r}), (), ())
folder = Path({str(tmp_path / "run")!r})
print("now", flush=True)
pack(project, folder / "project.tar", folder / "project.json")
print(unpack(folder / "project.tar", folder / "project.json", folder / "work"))
"""
    folder = tmp_path / "run"
    folder.mkdir()
    whole = 0
    for wait_ms in (0, 10, 20, 40, 60, 80, 100, 150, 200, 300):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(wait_ms / 1000)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        packed = read_description(folder / "project.json")
        if packed is not None:
            unpack(folder / "project.tar", folder / "project.json", folder / "check")
        if (folder / "work").exists():
            whole += 1
            assert names(folder / "work") == set(list_project(checkout, (), ()).files)
            assert (folder / "work/random").stat().st_size == 30_000_000
            set_earlier_work_aside(folder / "work")
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert names(folder / "work") == set(list_project(checkout, (), ()).files)
    assert not list(folder.glob("*.partial"))


def test_work_stays_until_the_project_is_another(
    checkout: Path, tmp_path: Path, place: Callable[..., list[str]]
) -> None:
    project = list_project(checkout, (), ())
    assert len(place(project)) == 1
    work = tmp_path / "run/work"
    write(work, result="1")
    assert place() == [] and place(project) == [] and (work / "result").exists()
    write(checkout, new_py="")
    lines = place(list_project(checkout, (), ()))
    assert "work-1" in lines[0] and (tmp_path / "run/work-1/result").exists()
    assert (work / "new.py").exists() and not (work / "result").exists()
    assert set_earlier_work_aside(work) == tmp_path / "run/work-2"
    assert len(place()) == 1 and work.is_dir()


def hostile(folder: Path, members: dict[str, bytes | str], **more: Any) -> None:
    """An archive and a description of these files (bytes) and links (text)."""
    project_files, links = {}, {}
    with tarfile.open(folder / "project.tar", "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname, links[name] = tarfile.SYMTYPE, content, content
                tar.addfile(info)
            else:
                sha256 = hashlib.sha256(content).hexdigest()
                info.size, project_files[name] = len(content), [len(content), sha256]
                tar.addfile(info, io.BytesIO(content))
    told = {"format": 1, "digest": "d", "commit": None, "dirty": None, "root": "/x"}
    told |= {"files": project_files, "links": links}
    (folder / "project.json").write_text(json.dumps({**told, **more}))


@pytest.mark.parametrize(
    "members",
    [
        {"../../escaped": b"x"},
        {"a/../../../escaped": b"x"},
        {"ABSOLUTE": b"x"},
        {"link": "OUT", "link/escaped": b"x"},
        {"link/escaped": b"x", "link": "OUT"},
        {"": b"x"},
        {".": b"x"},
        {"a//b": b"x"},
    ],
)
def test_an_archive_never_writes_outside(
    tmp_path: Path, place: Callable[..., list[str]], members: dict[str, bytes | str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    put = {"ABSOLUTE": str(out / "escaped")}
    hostile(
        tmp_path / "run",
        {put.get(name, name): str(out) if c == "OUT" else c for name, c in members.items()},
    )
    with pytest.raises(DamageError):
        place()
    assert not list(out.iterdir()) and not (tmp_path / "escaped").exists()
    assert not (tmp_path / "run/escaped").exists() and not (tmp_path / "run/work").exists()


def test_a_damaged_archive_makes_no_work(
    checkout: Path, tmp_path: Path, place: Callable[..., list[str]]
) -> None:
    folder = tmp_path / "run"
    hostile(folder, {"a": b"1", "b": "a"})
    assert len(place()) == 1 and (folder / "work/b").read_bytes() == b"1"
    set_earlier_work_aside(folder / "work")
    whole = (folder / "project.tar").read_bytes()
    for damaged in (whole[:700], whole.replace(b"1", b"2", 1), whole[:512] + b"2" + whole[513:]):
        (folder / "project.tar").write_bytes(damaged)
        with pytest.raises(DamageError):
            place()
    hostile(folder, {"a": b"1"}, files={})
    with pytest.raises(DamageError):
        place()
    hostile(folder, {}, files={"a": [1, "x"]})
    with pytest.raises(DamageError):
        place()
    for missing in ("project.tar", "project.json"):
        hostile(folder, {"a": b"1"})
        (folder / missing).unlink()
        with pytest.raises(DamageError):
            place()
    assert not (folder / "work").exists()


def test_a_corrected_project_goes_on_from_what_the_command_wrote(
    checkout: Path, tmp_path: Path, place: Callable[..., list[str]]
) -> None:
    folder = tmp_path / "run"
    place(list_project(checkout, (), ()))
    work = folder / "work"
    (work / "out/checkpoint-3").mkdir(parents=True)
    (work / "out/checkpoint-3/model.bin").write_bytes(b"weights")
    (work / "out/last").symlink_to("checkpoint-3")
    first = next(iter(list_project(checkout, (), ()).files))
    (work / first).write_text("changed by the command\n")
    (checkout / "corrected.py").write_text("new = 1\n")
    pack(list_project(checkout, (), ()), folder / "project.tar", folder / "project.json")

    said = unpack(folder / "project.tar", folder / "project.json", work, goes_on=True)
    assert "2 files that the command wrote before" in said[-1]
    assert (work / "out/last/model.bin").read_bytes() == b"weights"
    assert (work / "corrected.py").is_file()
    assert (work / first).read_bytes() == (checkout / first).read_bytes()  # the new project counts
    assert (folder / "work-1" / first).read_text() == "changed by the command\n"  # nothing is lost

    # An end in the middle of moving: the next start moves the rest.
    (folder / "work-1/out").mkdir(exist_ok=True)
    (folder / "work-1/out/late.bin").write_bytes(b"x")
    (folder / "carried.json").write_text('{"from": "work-1", "project": []}')
    unpack(folder / "project.tar", folder / "project.json", work, goes_on=True)
    assert (work / "out/late.bin").is_file() and not (folder / "carried.json").exists()


def test_what_git_ignores_is_named_unless_a_program_left_it(checkout: Path) -> None:
    """A data file was in .gitignore: the job began, and did not find it."""
    assert list_project(checkout, (), ()).notes == ()
    for name in ("big/train.bin", "a.log", "wandb/a.log"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("rows")
    (note,) = list_project(checkout, (), ()).notes
    assert note.startswith("git ignores, and so here stays: `a.log`, `big/`; where the command")
    project = list_project(checkout, ["big/"], ())
    assert "big/train.bin" in project.files
    (note,) = project.notes
    assert "big" not in note.partition(";")[0]
