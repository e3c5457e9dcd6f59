"""The road by a carried disk: refused before the copy, read back from it, and the way back."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.from_stage import DamageError, StageError, UsageError
from runner.remote import submit_to as carried
from runner.remote.pull import Disk, Wanted, bring
from runner.remote.road import plan_text
from runner.remote.submit_to import check_disk, write_to_disk
from stage.bundle.bundle import Bundle, verify
from stage.carry import push as pushing
from tests.remedies.obeyed import in_it, obeys
from tests.runner.folders import run_folder
from tests.runner.remote.far import GO, Far, each_shell, plan_of
from tests.stage.bundles import make_bundle
from tests.stage.carry.conftest import WEIGHTS, flip


def test_it_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, disk = make_bundle(tmp_path / "bundle", big=False).root, tmp_path / "disk"
    with pytest.raises(StageError, match="is no folder here"):
        check_disk(disk, bundle)
    disk.mkdir()
    assert check_disk(disk, bundle)[0].startswith("to write: 210 kB; free on ")
    monkeypatch.setattr(carried, "read_mounts", lambda: f"/dev/sdb1 {disk} vfat rw 0 0\n")
    monkeypatch.setattr(carried, "_MOST_ON_FAT", 100_000)
    with pytest.raises(StageError, match="is FAT32"):
        put(disk, bundle)
    monkeypatch.setattr(carried, "read_mounts", str)
    usage = shutil.disk_usage(disk)._replace(free=1000)
    bad = {"ok": False, "findings": [{"path": "data/x"}]}
    with (
        monkeypatch.context() as patch,
        pytest.raises(DamageError, match="differs from the original: bundle/data/x"),
    ):
        patch.setattr(carried, "push", lambda *_, **__: SimpleNamespace(report=bad))
        put(disk, bundle)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StageError, match=r"210 kB are to be written, and 1 kB are free"):
        put(disk, bundle)
    assert list(disk.iterdir()) == []


@obeys("runner/remote/submit_to.py", "in one file: tar -cf {} BUNDLE")
@pytest.mark.parametrize(
    "name", ["a:b", "what?", 'a"b', "end.", "end ", "con", "AUX.txt", "a\\b", "x/nul/y"]
)
def test_names_that_a_disk_of_windows_cannot_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bundle, disk = make_bundle(tmp_path / "bundle", big=False).root, tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(carried, "read_mounts", lambda: f"/dev/sdb1 {disk} exfat rw 0 0\n")
    check_disk(disk, bundle)
    path = f"data/files/notes/{name}"
    lock = SimpleNamespace(files=[SimpleNamespace(path=path, size=1)])
    with monkeypatch.context() as patch:
        patch.setattr(Bundle, "open", lambda _: SimpleNamespace(lock=lock))
        with pytest.raises(UsageError, match="a disk with exfat cannot hold 1 name") as refused:
            check_disk(disk, bundle)
        patch.setattr(carried, "read_mounts", lambda: f"/dev/sdb1 {disk} ext4 rw 0 0\n")
        check_disk(disk, bundle)
    assert list(disk.iterdir()) == []
    words = shlex.split(in_it(refused.value.remedy, r"tar -cf .* BUNDLE"))
    subprocess.run([*words[:-1], "-C", str(tmp_path), "bundle"], check=True)
    subprocess.run(["tar", "-xf", "bundle.tar"], cwd=disk, check=True)
    assert verify(disk / "bundle").ok


def test_names_that_differ_in_case_alone_are_one_file_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [SimpleNamespace(path=f"data/files/n/{name}", size=1) for name in ("A", "a", "b")]
    lock = SimpleNamespace(files=files)
    monkeypatch.setattr(Bundle, "open", lambda _: SimpleNamespace(lock=lock))
    monkeypatch.setattr(carried, "read_mounts", lambda: f"/dev/sdb1 {tmp_path} ntfs3 rw 0 0\n")
    with pytest.raises(UsageError, match="cannot hold 2 names"):
        check_disk(tmp_path, tmp_path)


def put(disk: Path, bundle: Path, text: str = "name: my\n") -> list[str]:
    """Writes a run to a disk."""
    plan = plan_of(text, BUNDLE_ID=verify(bundle, "fast").bundle_id or "")
    files = {f"{plan['RUNS']}/my.yaml": text, "go.sh": GO.read_text()}
    texts = {**files, ".airlift/plan": plan_text(plan)}
    return write_to_disk(disk, bundle, {n: t.encode() for n, t in texts.items()}, quiet=True)


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own: a file with ext4, mounted through a loop device."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("a loop device needs root, and mkfs.ext4")
    image, folder = tmp_path / "image", tmp_path / "media"
    with open(image, "wb") as file:
        file.truncate(32 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    folder.mkdir()
    if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip("no loop device may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@each_shell
@obeys("runner/remote/pull.py", "On the cluster, with the disk: sh FOLDER/go.sh --results DISK")
def test_there_and_back_by_a_disk(
    ext4: Path, tmp_path: Path, shell: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", big=False).root
    said = put(ext4, bundle)
    assert said[1] == f"next: eject it; on the cluster: sh {ext4}/go.sh FOLDER"
    assert put(ext4, bundle) == said  # again: nothing to send
    assert check_disk(ext4, bundle)[0].startswith("to write: 0 B;")
    far = Far(tmp_path / "cluster")
    shutil.rmtree(far.folder)
    refused = far.go(shell, go=ext4 / "go.sh")
    assert refused.returncode == 2 and f"{ext4} is the carried disk" in refused.stderr
    assert f"-> sh '{ext4}/go.sh' ~/work copies all there" in refused.stderr
    done = far.go(shell, "../work", go=ext4 / "go.sh")
    assert done.returncode == 0, done.stderr + far.read("log")
    assert far.steps[:4] == ["copy begin 0", "copy done 0", "verify begin 0", "verify done 0"]
    assert far.read("result") == "w1 0 17\n" and verify(far.folder / "bundle").ok
    # Again, from the disk and without it.
    for go in (ext4 / "go.sh", far.folder / "go.sh"):
        done = far.go(shell, *(["../work"] if go.parent == ext4 else []), go=go)
        assert done.returncode == 0 and far.steps[-1] == "submit skipped 0"
    assert far.steps.count("copy skipped 0") == 1 and len(far.calls) == 2

    root = run_folder(far.folder / "output/my", name="my")
    (root / "model").mkdir()
    (root / "model/config.json").write_text("{}")
    (root / "model/link").symlink_to("config.json")
    out, disk = tmp_path / "out", Disk(ext4, str(ext4))
    with pytest.raises(StageError, match="not all results of my were written") as missing:
        bring(disk, "my", out, Wanted())
    done = far.go(shell, "--results", ext4, "nothing")
    assert done.returncode == 2 and "-> There are: my\n" in done.stderr
    assert not (ext4 / "results").exists()
    subprocess.run(["mount", "-o", "remount,ro", ext4], check=True)
    done = far.go(shell, "--results", ext4)
    assert done.returncode == 5 and "or mount it writable" in done.stderr
    subprocess.run(["mount", "-o", "remount,rw", ext4], check=True)
    words = in_it(missing.value.remedy, r"(?<=go\.sh )--results DISK my").split()
    done = far.go(shell, *(str(ext4) if word == "DISK" else word for word in words))
    assert done.returncode == 0 and "not brought: model/link (link)" in done.stdout, done.stderr
    # A disk that takes no more: said, and nothing is listed that is not there.
    shutil.rmtree(ext4 / "results")
    for room in (0, 6000):
        fill(ext4, room)
        done = far.go(shell, "--results", ext4)
        assert done.returncode == 5, done.stderr
        assert ("could not be copied" in done.stderr) == bool(room)
        assert not list(ext4.rglob("results.sha256")), room
        (ext4 / "filled").unlink()
    assert far.go(shell, "--results", ext4, "my").returncode == 0
    assert bring(disk, "my", out, Wanted()) == 1
    assert "refused: model/link: is a link" in capfd.readouterr().err
    assert not (out / "model").exists()  # not half of it
    (root / "model/link").unlink()
    assert far.go(shell, "--results", ext4, "my").returncode == 0
    assert bring(disk, "my", out, Wanted()) == 0
    for name in ("metrics.jsonl", "config.yaml", "environment.json", "model/config.json"):
        assert (out / name).read_bytes() == (root / name).read_bytes()
    flip(ext4 / "results/my/model/config.json", 0)
    (out / "model/config.json").unlink()
    with pytest.raises(StageError, match=r"refused, the first: model/config\.json"):
        bring(disk, "my", out, Wanted())


def fill(disk: Path, room: int) -> None:
    """Leaves about so many bytes on a disk."""
    with suppress(OSError), open(disk / "filled", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    os.truncate(disk / "filled", (disk / "filled").stat().st_size - room)


@contextmanager
def small(folder: Path) -> Iterator[None]:
    """A disk of 128 kB, seen at a folder."""
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no tmpfs may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@each_shell
def test_a_disk_that_was_full_for_one_line_of_a_list_has_no_list(
    tmp_path: Path, shell: list[str]
) -> None:
    """It is full until the second of two files is read: the line of the first is not written."""
    far, disk = Far(tmp_path / "cluster"), tmp_path / "disk"
    for folder in (disk, far.folder / "output/my/model"):
        folder.mkdir(parents=True)
    for name in ("one", "two"):
        (far.folder / "output/my/model" / name).write_text(name)
    real = shutil.which("sha256sum")
    far.add("sha256sum", f'[ ! -e "$0.seen" ] || rm -f {disk}/filled; : >"$0.seen"; exec {real}')
    with small(disk):
        fill(disk, 0)
        assert far.go(shell, "--results", disk).returncode == 5
        assert not list(disk.rglob("results.sha256"))


@each_shell
def test_a_copy_that_is_cut_or_damaged_is_copied_again(tmp_path: Path, shell: list[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    put(disk, make_bundle(tmp_path / "bundle", big=False).root)
    far = Far(tmp_path / "cluster")
    shutil.rmtree(far.folder)
    far.folder.mkdir()
    with small(far.folder):
        done = far.go(shell, far.folder, go=disk / "go.sh")
        assert done.returncode == 5 and far.steps[-1] == "copy failed 5", far.read("log")
        assert "could not be copied" in far.read("log")
        assert not (far.folder / "bundle/tagmanifest-sha256.txt").exists()
        shutil.copytree(far.folder, tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", far.folder, dirs_exist_ok=True)
    (far.folder / "bundle/data/models/bert").mkdir(parents=True, exist_ok=True)
    (far.folder / "bundle/data/models/bert/vocab.txt").write_bytes(b'{"equal in size": 000}\n')
    flip(next((far.folder / "bundle/data/models").rglob("vocab.txt")))
    done = far.go(shell, far.folder, go=disk / "go.sh")
    assert done.returncode == 1 and far.read("damaged").endswith("vocab.txt\n")
    done = far.go(shell, far.folder, go=disk / "go.sh")
    assert done.returncode == 0, far.read("log")
    # A newer version of the bundle: what it has no more goes; another bundle is refused.
    shutil.rmtree(disk)
    disk.mkdir()
    put(disk, make_bundle(tmp_path / "newer", files={"data/files/notes/a": b"1"}, big=False).root)
    done = far.go(shell, far.folder, go=disk / "go.sh")
    assert done.returncode == 2 and "these jobs read it: 17. Nothing was" in far.read("log")
    (far.notes / "queue").write_text("")
    assert far.go(shell, far.folder, go=disk / "go.sh").returncode == 0, far.read("log")
    assert not (far.folder / "bundle" / WEIGHTS).exists() and verify(far.folder / "bundle").ok
    other = make_bundle(tmp_path / "other", big=False, name="other").root
    shutil.rmtree(disk / "bundle")
    put(disk, other)
    assert far.go(shell, far.folder, go=disk / "go.sh").returncode == 2
    assert "is another bundle. Nothing was changed." in far.read("log")
    assert verify(far.folder / "bundle").ok


@each_shell
def test_what_macos_writes_beside_the_files_of_a_disk_stays_there(
    tmp_path: Path, shell: list[str]
) -> None:
    disk, far = tmp_path / "disk", Far(tmp_path / "cluster")
    shutil.rmtree(far.folder / "bundle")
    disk.mkdir()
    put(disk, make_bundle(tmp_path / "bundle", big=False).root)
    for path in [disk / "bundle/bagit.txt", *disk.rglob("vocab.txt")]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
    done = far.go(shell, far.folder, go=disk / "go.sh")
    assert done.returncode == 0, far.read("log")
    assert not list(far.folder.rglob("._*")) and verify(far.folder / "bundle").ok


@each_shell
@pytest.mark.parametrize("cut", [len('main "$@"\n'), len(' "$@"\n')])
def test_a_script_whose_last_line_is_cut_does_not_end_with_0(
    tmp_path: Path, shell: list[str], cut: int
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    put(disk, make_bundle(tmp_path / "bundle", big=False).root)
    script = disk / "go.sh"
    script.write_bytes(script.read_bytes()[:-cut])
    far = Far(tmp_path / "cluster")
    done = far.go(shell, far.folder, go=script)
    assert done.returncode == 1 and "the end of this file is missing" in done.stderr
    put(disk, tmp_path / "bundle")  # the same command again writes it
    assert far.go(shell, far.folder, go=script).returncode == 0, far.read("log")


def test_a_run_file_that_the_disk_does_not_keep_is_not_said_to_be_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, disk = make_bundle(tmp_path / "bundle", big=False).root, tmp_path / "disk"
    disk.mkdir()
    rots = lambda _: [flip(path) for path in disk.glob("runs-*/my.yaml")]  # noqa: E731
    monkeypatch.setattr(carried, "drop_from_memory", rots)
    with pytest.raises(DamageError, match="differs from the original: runs-"):
        put(disk, bundle)


@each_shell
def test_a_byte_of_run_file_plan_or_script_that_rots_on_the_disk_submits_nothing(
    tmp_path: Path, shell: list[str]
) -> None:
    disk, far = tmp_path / "disk", Far(tmp_path / "cluster")
    bundle = make_bundle(tmp_path / "bundle", big=False).root
    disk.mkdir()
    for stale in ("name: other\n", "name: my\nsteps: 5\n"):  # an earlier submit to the disk
        put(disk, bundle, stale)
    plan = (disk / ".airlift/plan").read_text()
    (disk / ".airlift/plan").write_text(plan.replace("output/my", "output/other"))
    assert put(disk, bundle, stale)[0] == (
        "note: go.sh there took output/other; now it takes this run alone"
    )
    shutil.rmtree(far.folder)
    (run_file,) = (path for path in disk.glob("runs-*/my.yaml") if b"5" in path.read_bytes())
    for path in (run_file, disk / ".airlift/plan", disk / ".airlift/carried", disk / "go.sh"):
        whole = path.read_bytes()
        for damage in (lambda at=path, old=whole: flip(at, len(old) - 2), path.unlink, None):
            damage() if damage else path.write_bytes(whole[: len(whole) // 2])
            if path.name != "go.sh" or path.exists():
                done = far.go(shell, far.folder, go=disk / "go.sh")
                assert done.returncode and far.calls == [], f"{path}: {done.stdout}"
            path.write_bytes(whole)
    assert far.go(shell, far.folder, go=disk / "go.sh").returncode == 0
    assert (far.folder / run_file.parent.name / "my.yaml").read_bytes() == run_file.read_bytes()
    # A byte there, later: it is copied again. Without the disk: refused.
    (far.notes / "queue").write_text("")
    flip(far.folder / run_file.parent.name / "my.yaml")
    assert far.go(shell).returncode == 1 and len(far.calls) == 2
    assert far.go(shell, far.folder, go=disk / "go.sh").returncode == 0 and len(far.calls) == 4


@each_shell
def test_a_disk_that_lost_files_takes_nothing_from_a_sound_copy(
    tmp_path: Path, shell: list[str]
) -> None:
    disk, far = tmp_path / "disk", Far(tmp_path / "cluster")
    bundle = make_bundle(tmp_path / "bundle", big=False).root
    disk.mkdir()
    put(disk, bundle)
    shutil.rmtree(far.folder)
    mask = os.umask(0o002)  # a login node for project groups
    assert far.go(shell, far.folder, go=disk / "go.sh").returncode == 0, far.read("log")
    os.umask(mask)
    obeyed = (far.folder, *far.folder.glob("go.sh"), *far.folder.glob("runs-*/*"))
    obeyed += (far.folder / ".airlift", far.folder / ".airlift/plan")
    assert [path for path in obeyed if path.stat().st_mode & 0o022] == []
    (far.notes / "queue").write_text("")
    (disk / "bundle" / WEIGHTS).unlink()
    for lost in ("tagmanifest-sha256.txt", "stage.lock", ""):
        shutil.rmtree(disk / "bundle") if not lost else (disk / "bundle" / lost).unlink()
        done = far.go(shell, far.folder, go=disk / "go.sh")
        assert done.returncode == 1 and "Write the disk again" in done.stderr, lost
        assert "files are missing. Nothing was changed." in far.read("log")
        assert verify(far.folder / "bundle").ok
    said = put(disk, bundle, "name: my\nsteps: 5\n")
    assert not said[0].startswith("note:") and (disk / "bundle" / WEIGHTS).exists()
    flip(disk / "bundle/stage-verify.py", 900)  # a program that checks is no program any more
    shutil.rmtree(far.folder)
    done = far.go(shell, far.folder, go=disk / "go.sh")
    assert done.returncode == 1 and "stage-verify.py is damaged." in done.stderr
    assert "Where the disk itself is damaged: Write the disk again" in done.stdout
    assert far.read("damaged") == "stage-verify.py\n"


def test_what_is_read_back_is_the_disk_and_not_the_memory(ext4: Path, tmp_path: Path) -> None:
    """A byte that rots below the file system is seen, though the file was just written."""
    bundle = make_bundle(tmp_path / "bundle", big=False).root
    put(ext4, bundle)
    marker = (bundle / WEIGHTS).read_bytes()[-200:]
    image = (tmp_path / "image").read_bytes()
    at = image.find(marker)
    assert at > 0
    with open(tmp_path / "image", "r+b") as raw:
        raw.seek(at)
        raw.write(bytes(200))
        os.fsync(raw.fileno())
    device = subprocess.run(
        ["findmnt", "-no", "SOURCE", ext4], capture_output=True, text=True, check=True
    ).stdout.strip()
    subprocess.run(["blockdev", "--flushbufs", device], check=True)
    assert verify(ext4 / "bundle").ok  # the kernel's memory answers
    pushing.drop_from_memory((ext4 / "bundle").rglob("*"))
    assert [finding.path for finding in verify(ext4 / "bundle").findings] == [WEIGHTS]
    put(ext4, bundle)  # it is seen, and written again
    pushing.drop_from_memory((ext4 / "bundle").rglob("*"))
    assert verify(ext4 / "bundle").ok
