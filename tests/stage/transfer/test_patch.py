"""Patches: little to carry, nothing half done, nothing lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stage.bundle import bundle as layout
from stage.bundle.bundle import finish, write_blocks
from stage.errors import DamageError, IncompleteError, PolicyError, UsageError
from stage.lock.model import LockedAsset, LockedFile, Source
from stage.lock.write import Lockfile
from stage.transfer.apply_patch import apply
from stage.transfer.make_patch import patch_damage, patch_since
from stage.util.digests import BLOCK_SIZE, hash_file, sha256_of_bytes
from stage.util.progress import Reporter
from stage.verify.report import read_report
from stage.verify.verify import verify
from tests.stage.bundles import BIG, make_bundle

MIB = 2**20
QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("sound") / "bundle").root


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "copy"
    subprocess.run(["cp", "-r", "--sparse=always", sound, root], check=True)
    yield root
    shutil.rmtree(tmp_path, ignore_errors=True)


def stage(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stage", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def state(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def mended(sound: Path, copy: Path, folder: Path, volume_size: int | None = None) -> Path:
    """A patch for the damage of `copy`."""
    (folder / "r.json").write_text(json.dumps(verify(copy).to_json()))
    patch_damage(sound, read_report(folder / "r.json"), folder / "patch", volume_size, QUIET)
    return folder / "patch"


def test_a_flipped_bit_of_a_large_file_costs_one_block_to_mend(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    """The whole road by the command."""
    with open(copy / BIG, "r+b") as file:
        file.seek(40 * MIB + 5)
        file.write(b"\x01")
    done = stage("verify", copy, "--report", tmp_path / "r.json", "-q")
    assert done.returncode == 1 and "other bytes at 33554432-50331648" in done.stdout
    assert json.loads((tmp_path / "r.json").read_text())["findings"][0]["ranges"] == [
        [33554432, 50331648]
    ]
    done = stage(
        "patch", sound, "--report", tmp_path / "r.json", "-o", tmp_path / "patch", "--json"
    )
    assert done.returncode == 0 and json.loads(done.stdout)["bytes"] == BLOCK_SIZE, done.stderr
    assert size_of(tmp_path / "patch") <= 17 * MIB
    checked = subprocess.run(
        ["sha256sum", "-c", "--quiet", "manifest-sha256.txt"], cwd=tmp_path / "patch"
    )
    assert checked.returncode == 0
    done = stage("apply", copy, tmp_path / "patch")
    assert done.returncode == 0 and f"bundle id {verify(sound, 'fast').bundle_id}" in done.stdout, (
        done.stderr
    )
    assert verify(copy).ok and sorted(p.name for p in tmp_path.iterdir()) == [
        "copy",
        "patch",
        "r.json",
    ]


def test_a_patch_is_a_bag_that_bagit_accepts(sound: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "data/models/bert/vocab.txt").unlink()
    patch = mended(sound, copy, tmp_path)
    bagged = subprocess.run(
        [sys.executable, "-m", "bagit", "--validate", patch], capture_output=True, text=True
    )
    assert bagged.returncode == 0, bagged.stderr


@pytest.mark.parametrize("chance", range(8))
def test_any_damage_to_the_bytes_is_mended(
    sound: Path, copy: Path, tmp_path: Path, chance: int
) -> None:
    noise = random.Random(chance)
    paths = sorted(path for path in copy.rglob("*") if path.is_file())
    for path in noise.sample(paths, 3):
        data = bytearray(path.read_bytes())
        match noise.choice(["flip", "cut", "grow", "gone", "link"]):
            case "flip" if data:
                data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
                path.write_bytes(data)
            case "cut" if data:
                os.truncate(path, noise.randrange(len(data)))
            case "link":
                path.unlink()
                path.symlink_to("/etc/hostname")
            case "gone":
                path.unlink()
            case _:
                path.write_bytes(data + b"x")
    if (before := verify(copy)).bundle_id is None and not (copy / layout.BAG_INFO).is_file():
        pytest.xfail("nothing is left that says which bundle this is")
    outcome = apply(copy, [mended(sound, copy, tmp_path)], QUIET)
    assert outcome.bundle_id == verify(sound, "fast").bundle_id and verify(copy).ok, before
    assert state(copy) == state(sound)


def test_bytes_that_went_bad_after_the_report_stop_the_patch_and_nothing_changes(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    for offset in (1, 50 * MIB):
        with open(copy / BIG, "r+b") as file:
            file.seek(offset)
            file.write(b"\x01")
        if offset == 1:
            patch = mended(sound, copy, tmp_path)
    before = state(copy)
    with pytest.raises(DamageError, match="more of it is damaged than the patch repairs"):
        apply(copy, [patch], QUIET)
    assert state(copy) == before


def test_a_report_or_a_patch_of_another_bundle_is_refused(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    other = make_bundle(tmp_path / "other", big=False).root
    (other / "data/models/bert/vocab.txt").unlink()
    (tmp_path / "r.json").write_text(json.dumps(verify(other).to_json()))
    with pytest.raises(UsageError, match="of another bundle, or of this one as it was before"):
        patch_damage(sound, read_report(tmp_path / "r.json"), tmp_path / "patch", None, QUIET)
    (copy / "data/models/bert/vocab.txt").unlink()
    patch = mended(sound, copy, tmp_path)
    before = state(other)
    done = stage("apply", other, patch)
    assert done.returncode == 2 and "the patch is for another bundle" in done.stderr
    assert state(other) == before


def test_a_damaged_patch_is_refused_before_the_bundle_is_touched(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    (copy / "data/models/bert/vocab.txt").unlink()
    patch = mended(sound, copy, tmp_path)
    before = state(copy)
    for path in [patch / "patch.json", *(patch / "data").iterdir()]:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DamageError):
            apply(copy, [patch], QUIET)
        path.write_bytes(data)
    assert state(copy) == before
    apply(copy, [patch], QUIET)


def test_a_damaged_origin_makes_no_patch(sound: Path, copy: Path, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    subprocess.run(["cp", "-r", "--sparse=always", sound, origin], check=True)
    for root in (origin, copy):
        (root / "data/models/bert/vocab.txt").write_bytes(b'{"equal in size": 001}\n')
    with pytest.raises(DamageError, match="damaged here too"):
        mended(origin, copy, tmp_path)
    assert not (tmp_path / "patch").exists() and not list(tmp_path.glob("*.partial"))


def test_extra_files_are_left_to_a_person(sound: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "data/mine.txt").write_text("unsaved")
    (copy / "data/models/bert/vocab.txt").unlink()
    with pytest.raises(
        DamageError, match=r"(?s)with the patch every byte of the bundle is sound.*mine\.txt"
    ):
        apply(copy, [mended(sound, copy, tmp_path)], QUIET)
    assert not copy.with_name(f"{copy.name}.apply.partial").exists()
    assert (copy / "data/mine.txt").read_text() == "unsaved"
    assert [finding.path for finding in verify(copy).findings] == ["data/mine.txt"]


def new_version(old: Path, root: Path, *, big: bool = True) -> Path:
    """A bundle with files of `old` renamed, swapped, shared, changed, dropped, added."""
    root.mkdir()
    moves = {
        "data/models/bert/model.safetensors": "data/models/bert/renamed.safetensors",
        "data/models/bert/config.json": "data/models/bert/vocab.txt",  # swapped
        "data/models/bert/vocab.txt": "data/models/bert/config.json",
        "data/models/bert/1_Pooling/config.json": "data/models/bert/1_Pooling/config.json",
    }
    if big:
        moves[BIG] = "data/files/big/moved/sparse.bin"
    for source, target in moves.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(old / source, root / target)
    shutil.copyfile(
        old / "data/models/bert/1_Pooling/config.json", root / "data/models/bert/shared.json"
    )
    noise = random.Random(5).randbytes(70 * MIB if big else 70_000)
    (root / "data/files/big").mkdir(parents=True, exist_ok=True)
    for name in ("new.bin", "twin.bin"):
        (root / "data/files/big" / name).write_bytes(noise)
    (root / "data/files/big/empty").touch()
    assets = []
    for name, kind in (("bert", "model"), ("big", "files")):
        folder = root / "data" / ("models" if kind == "model" else "files") / name
        files = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            digests = hash_file(path)
            if digests.blocks:
                write_blocks(root, digests.sha256, digests.blocks)
            relative = path.relative_to(root).as_posix()
            files.append(
                LockedFile(
                    relative,
                    digests.size,
                    digests.sha256,
                    None,
                    path.name,
                    blocks=digests.blocks_sha256,
                )
            )
        assets.append(LockedAsset(name, kind, {"path": "x"}, Source("path", "x"), tuple(files)))
    finish(
        root,
        Lockfile("made", {asset.name: asset for asset in assets}),
        b"format: 1\n",
        [("Airlift-Host", "new")],
    )
    return root


@pytest.fixture(scope="module")
def new(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_version(sound, tmp_path_factory.mktemp("new") / "bundle")


def test_an_update_carries_what_is_new_once_and_makes_the_new_bundle(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    done = stage("patch", new, "--since", sound / layout.LOCK, "-o", tmp_path / "patch")
    assert done.returncode == 0, done.stderr
    assert 70 * MIB < size_of(tmp_path / "patch") < 71 * MIB, "twins twice, or moved files carried"
    done = stage("apply", copy, tmp_path / "patch", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bundle_id"] == verify(new, "fast").bundle_id
    assert state(copy) == state(new)
    assert {path.stat().st_nlink for path in copy.rglob("*") if path.is_file()} == {1}, (
        "two files share their bytes"
    )
    again = stage("apply", copy, tmp_path / "patch")
    assert again.returncode == 0 and state(copy) == state(new), again.stderr


def test_volumes_come_one_by_one_in_any_order(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    outcome = patch_since(new, sound / layout.LOCK, tmp_path / "patch", 20 * MIB, QUIET)
    volumes = sorted((tmp_path / "patch").iterdir())
    assert len(volumes) == outcome.plan.count > 3
    assert [size_of(volume) <= 20 * MIB for volume in volumes] == [True] * len(volumes)
    for volume in volumes:
        bagged = subprocess.run(
            [sys.executable, "-m", "bagit", "--validate", volume], capture_output=True
        )
        assert bagged.returncode == 0
    random.Random(1).shuffle(volumes)
    before = state(copy)
    for index, volume in enumerate(volumes[:-1]):
        with pytest.raises(IncompleteError, match="still missing") as refused:
            apply(copy, [volume], QUIET)
        for other in volumes[index + 1 :]:
            assert str(int(other.name.split("-")[1])) in refused.value.message
    assert state(copy) == before
    apply(copy, [volumes[-1]], QUIET)
    assert state(copy) == state(new)


def test_a_volume_too_small_for_a_block_is_refused(sound: Path, new: Path, tmp_path: Path) -> None:
    done = stage(
        "patch", new, "--since", sound / layout.LOCK, "-o", tmp_path / "p", "--volume-size", "10MB"
    )
    assert (
        done.returncode == 2
        and "--volume-size 17MB" in done.stderr
        and not (tmp_path / "p").exists()
    )


@pytest.mark.parametrize("kind", ["repair", "update"])
def test_an_apply_that_is_killed_can_be_run_again(
    sound: Path, new: Path, copy: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "update":
        patch_since(new, sound / layout.LOCK, tmp_path / "patch", None, QUIET)
    else:
        (copy / "data/models/bert/vocab.txt").unlink()
        with open(copy / BIG, "r+b") as file:
            file.write(b"bad")
        mended(sound, copy, tmp_path)
    for delay in (0.3, 0.5, 0.7, 0.9):
        command = [sys.executable, "-m", "stage", "apply", str(copy), str(tmp_path / "patch")]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)  # wherever that is: any moment must do
        running.send_signal(signal.SIGKILL)
        running.wait()
    # Processes of the killed one hold its lock until they end, too.
    deadline = time.monotonic() + 120
    while True:
        try:
            apply(copy, [tmp_path / "patch"], QUIET)
            break
        except IncompleteError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert state(copy) == state(new if kind == "update" else sound)


CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.chmod", "os.truncate"}


def apply_killed_at(root: Path, patch: Path, moment: int) -> bool:
    """Applies in a child, killed before its `moment`-th change to the disk; whether it was."""
    child = os.fork()
    if child == 0:
        changes = 0

        def kill(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal changes
            writes = (
                event == "open"
                and isinstance(arguments[2], int)
                and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if event in CHANGES or writes:
                changes += 1
                if changes == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            apply(root, [patch], QUIET)
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 7
    return os.WIFSIGNALED(status)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where fsync costs nothing, if there is one."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="airlift-") as name:
        yield Path(name)


@pytest.mark.parametrize("kind", ["repair", "update"])
def test_an_apply_killed_before_any_change_to_the_disk_can_be_run_again(
    memory: Path, kind: str
) -> None:
    tmp_path = memory
    old = make_bundle(tmp_path / "old", big=False).root
    copy, target = tmp_path / "copy", old
    shutil.copytree(old, copy)
    if kind == "update":
        target = new_version(old, tmp_path / "new", big=False)
        patch_since(target, old / layout.LOCK, tmp_path / "patch", None, QUIET)
    else:
        (copy / "data/models/bert/vocab.txt").unlink()
        (copy / "data/models/bert/model.safetensors").write_bytes(b"bad")
        (copy / layout.MANIFEST).write_bytes(b"bad")
        mended(old, copy, tmp_path)
    after = state(target)
    ids = {verify(old).bundle_id, verify(target).bundle_id}
    moment = 1
    while True:
        root = tmp_path / f"at-{moment}"
        shutil.copytree(copy, root)
        killed = apply_killed_at(root, tmp_path / "patch", moment)
        report = verify(root)
        assert not report.ok or report.bundle_id in ids
        apply(root, [tmp_path / "patch"], QUIET)
        assert state(root) == after, f"killed before change {moment}"
        assert not list(tmp_path.glob(f"at-{moment}.*"))
        shutil.rmtree(root)
        if not killed:
            break
        moment += 1
    assert moment > 20


def test_an_update_does_not_drop_files_nobody_fetched(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    patch_since(new, sound / layout.LOCK, tmp_path / "patch", None, QUIET)
    (copy / "data/mine.txt").write_text("unsaved")
    before = state(copy)
    with pytest.raises(UsageError, match=r"mine\.txt"):
        apply(copy, [tmp_path / "patch"], QUIET)
    assert state(copy) == before


def test_an_update_that_counts_on_a_damaged_file_says_so_and_changes_nothing(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    patch_since(new, sound / layout.LOCK, tmp_path / "patch", None, QUIET)
    with open(copy / "data/models/bert/model.safetensors", "r+b") as file:
        file.write(b"bad")
    before = state(copy)
    with pytest.raises(DamageError, match="needs a file of the old bundle"):
        apply(copy, [tmp_path / "patch"], QUIET)
    assert state(copy) == before


def test_what_cannot_be_patched_is_said(sound: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(verify(copy).to_json()))
    (tmp_path / "not.json").write_text("[1]")
    for arguments, said in (
        ((sound, "-o", tmp_path / "p"), "Either --report or --since"),
        (
            (sound, "--report", tmp_path / "r.json", "-o", tmp_path / "p"),
            "names nothing that a patch can repair",
        ),
        (
            (sound, "--report", tmp_path / "not.json", "-o", tmp_path / "p"),
            "not a verification report",
        ),
        ((sound, "--since", sound / layout.LOCK, "-o", tmp_path / "p"), "nothing to carry"),
        ((sound, "--since", tmp_path / "no.lock", "-o", tmp_path / "p"), "no.lock"),
        (
            (sound, "--since", sound / layout.LOCK, "-o", tmp_path / "p", "--volume-size", "big"),
            "not a size",
        ),
    ):
        done = stage("patch", *arguments)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, (
            done.stderr
        )
    assert stage("apply", copy, tmp_path).returncode == 2


def test_bundle_and_patch_in_each_others_place_get_the_right_command(
    copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "mend").mkdir()
    (tmp_path / "mend" / layout.PATCH_PLAN).write_text("{}")
    with pytest.raises(UsageError) as swapped:
        apply(tmp_path / "mend", [copy], QUIET)
    assert swapped.value.remedy == f"stage apply {copy} {tmp_path / 'mend'}"
    with pytest.raises(UsageError, match="a bundle, not a patch"):
        apply(copy, [copy], QUIET)


def test_nothing_is_written_through_a_link(sound: Path, copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(copy / "data/models/bert", outside)
    (copy / "data/models/bert").symlink_to(outside)
    (outside / "vocab.txt").unlink()
    patch = mended(sound, copy, tmp_path)
    done = stage("apply", copy, patch)
    assert (
        done.returncode == 3 and "a link or file stands where a folder has to be" in done.stderr
    ), done.stderr
    assert not (outside / "vocab.txt").exists()


def test_a_plan_that_was_edited_and_resealed_writes_nothing_outside(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    (copy / "data/models/bert/vocab.txt").unlink()
    patch = mended(sound, copy, tmp_path)
    good = json.loads((patch / "patch.json").read_bytes())
    for edit in (
        {"repair": ["data/../../escape"]},
        {"tags": {"../escape": "0" * 64}},
        {"repair": ["/etc/passwd"]},
        {"format": 2},
        {"pieces": {"../../x": 1}},
        {"contents": []},
        {"volumes": 0},
        {"contents": {"0" * 64: {"size": 2, "pieces": [[1, 9**20, "0" * 64]]}}},
    ):
        text = json.dumps({**good, **edit}).encode()
        (patch / "patch.json").write_bytes(text)
        lines = layout.parse_manifest((patch / layout.TAG_MANIFEST).read_bytes())
        lines["patch.json"] = sha256_of_bytes(text)
        (patch / layout.TAG_MANIFEST).write_bytes(layout.manifest_text(lines))
        done = stage("apply", copy, patch)
        assert done.returncode in (2, 3) and "Traceback" not in done.stderr, done.stderr
    assert (
        not list(tmp_path.glob("**/escape")) and not (copy / "data/models/bert/vocab.txt").exists()
    )


def test_a_shards_report_makes_no_patch(sound: Path, copy: Path, tmp_path: Path) -> None:
    from stage.verify.report import Shard

    (copy / "data/models/bert/vocab.txt").unlink()
    report = replace(verify(copy), shard=Shard(1, 2))
    with pytest.raises(UsageError, match="one shard"):
        patch_damage(sound, report, tmp_path / "patch", None, QUIET)


def test_after_a_patch_what_no_patch_mends_is_all_told_with_what_does(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    bert = copy / "data/models/bert"
    (bert / "config.json").unlink()
    patch = mended(sound, copy, tmp_path)
    (bert / "link").symlink_to("vocab.txt")
    for name in "abcd":
        (copy / f"data/{name}").write_text("mine")
    with pytest.raises(DamageError) as caught:
        apply(copy, [patch], QUIET)
    told = str(caught.value)
    assert all(f"`data/{name}`" in told for name in ("a", "b", "c", "d", "models/bert/link")), told
    assert "stage patch" not in told and "move them out" in told
    verified = stage("verify", copy).stderr
    assert "stage patch" not in verified and "move them out" in verified


def test_a_lock_put_in_place_is_counted(sound: Path, copy: Path, tmp_path: Path) -> None:
    (copy / layout.LOCK).write_text("{}")
    done = stage("apply", copy, mended(sound, copy, tmp_path))
    assert "sound: 1 file put in place (1 of them beside the payload)" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.fixture(scope="module")
def small_update(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An old bundle without large files, a new one, and the patch between them."""
    folder = tmp_path_factory.mktemp("small")
    old = make_bundle(folder / "old", big=False).root
    new = new_version(old, folder / "new", big=False)
    patch_since(new, old / layout.LOCK, folder / "patch", None, QUIET)
    return old, new, folder / "patch"


def with_a_mount(folder: Path, mount: str, script: str) -> subprocess.CompletedProcess[str]:
    """A shell in the folder `folder`, with something mounted at `disk` that nobody else sees."""
    (folder / "disk").mkdir()
    namespace = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
    command = [*namespace, "sh", "-c", f"{mount} disk || exit 99\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    if done.returncode == 99 or "unshare:" in done.stderr:
        pytest.skip("cannot mount here")
    return done


def test_a_bundle_behind_a_link_to_another_disk_is_updated(
    small_update: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    old, new, patch = small_update
    (tmp_path / "link").symlink_to("disk/bundle")
    script = f"""cp -r {old} disk/bundle && {sys.executable} -m stage apply link {patch} &&
    diff -r disk/bundle {new} && ls disk . """
    done = with_a_mount(tmp_path, "mount -t tmpfs none", script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "apply.partial" not in done.stdout


@pytest.mark.parametrize("mount", ["mount -t tmpfs none", "mount --bind bundle"])
def test_a_bundle_that_is_a_mount_point_is_refused_before_anything_changes(
    small_update: tuple[Path, Path, Path], tmp_path: Path, mount: str
) -> None:
    old, _, patch = small_update
    shutil.copytree(old, tmp_path / "bundle")
    script = f"""[ -e disk/data ] || cp -r bundle/. disk
    find disk -type f -exec sha256sum {{}} + >before
    {sys.executable} -m stage apply disk {patch}; code=$?
    find disk -type f -exec sha256sum {{}} + | cmp before && exit $code"""
    done = with_a_mount(tmp_path, mount, script)
    assert done.returncode == 2 and "is a mount point" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "disk.apply.partial").exists()


def test_an_empty_folder_in_a_files_place_makes_room_and_a_full_one_is_refused(
    small_update: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    old, new, patch = small_update
    for name in ("update", "repair", "full"):
        shutil.copytree(old, tmp_path / name)
        payload = "data/files/big/new.bin" if name == "update" else "data/models/bert/vocab.txt"
        for path in (payload, layout.MANIFEST, layout.BOM, layout.TAG_MANIFEST):
            (tmp_path / name / path).unlink(missing_ok=True)
            (tmp_path / name / path / "inner").mkdir(parents=True)
    apply(tmp_path / "update", [patch], QUIET)
    assert state(tmp_path / "update") == state(new)
    mend = mended(old, tmp_path / "repair", tmp_path)
    (tmp_path / "full/data/models/bert/vocab.txt/inner/mine").write_text("unsaved")
    before = state(tmp_path / "full")
    with pytest.raises(PolicyError, match="a folder with files is in the place of a file"):
        apply(tmp_path / "full", [mend], QUIET)
    assert state(tmp_path / "full") == before
    apply(tmp_path / "repair", [mend], QUIET)
    assert state(tmp_path / "repair") == state(old) and verify(tmp_path / "repair").ok
