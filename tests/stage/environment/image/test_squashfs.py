"""An environment as one squashfs file: the same bytes each time; it runs where it is mounted."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from stage.environment.image.relocate import check_tree
from stage.environment.image.squashfs import squash
from stage.errors import DamageError, UsageError
from tests.support.environment.laptop import EnvironmentLaptop, alone, tree_of


@pytest.fixture(scope="module")
def made(
    environment_laptop: EnvironmentLaptop, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    """(file, its mount path, the output). The path is an existing folder, as for a mount."""
    folder = tmp_path_factory.mktemp("squash")
    file, prefix = folder / "env.squashfs", folder / "mounted-here"
    prefix.mkdir()
    done = environment_laptop.stage("env", "squash", "bundle", "small-env", prefix, file)
    assert done.returncode == 0, done.stderr
    return file, prefix, done.stdout


@pytest.mark.slow
def test_made_twice_it_is_the_same_bytes_whoever_makes_it_when(
    environment_laptop: EnvironmentLaptop,
    made: tuple[Path, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, prefix, said = made
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234567890")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = os.umask(0o077)
    try:
        squash(environment_laptop.bundle, "small-env", prefix, tmp_path / "again", print)
    finally:
        os.umask(before)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert digest in said
    assert hashlib.sha256((tmp_path / "again").read_bytes()).hexdigest() == digest
    assert [path.name for path in tmp_path.iterdir()] == ["again"], "nothing else is left"


def test_inside_is_the_tree_that_was_locked_readable_to_all(
    made: tuple[Path, Path, str], tmp_path: Path
) -> None:
    file, prefix, _ = made
    subprocess.run(
        ["unsquashfs", "-q", "-n", "-d", tmp_path / "root", file],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    root = tmp_path / "root"
    check_tree(str(root), tree_of(root), str(prefix))
    assert (root / ".airlift/prefix").read_text() == f"{prefix}\n"
    modes = {
        path: stat.S_IMODE(path.lstat().st_mode)
        for path in [root, *root.rglob("*")]
        if not path.is_symlink()
    }
    assert [path for path, mode in modes.items() if not mode & 0o004] == []
    compiled = next((root / "lib").glob("python3.*/__pycache__/json*.pyc"), None) or next(
        (root / "lib").glob("python3.*/json/__pycache__/decoder.*.pyc")
    )
    assert compiled.read_bytes()[4:8] == b"\x01\0\0\0", (
        "by its content, unchecked: dates say nothing in there"
    )


@pytest.mark.fuse
def test_mounted_it_runs_and_compiles_nothing(made: tuple[Path, Path, str]) -> None:
    """With the real squashfuse, in mounts of its own."""
    file, prefix, _ = made
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        pytest.skip(f"needs a /dev/fuse that may be opened: {error.strerror}")
    code = "import json.decoder, sys; print(sys.prefix, json.decoder.__cached__)"
    script = (
        'squashfuse "$0" "$1" || exit; trap \'umount "$1"\' EXIT; "$1"/bin/greet && '
        '"$1"/bin/python -c "$2"; '
        ': >"$1"/new 2>/dev/null && echo writable'
    )
    command = [*alone("m"), "sh", "-c", script, str(file), str(prefix), code]
    done = subprocess.run(command, env={"PATH": os.defpath}, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "hello from the environment 1.1", done.stderr
    assert lines[1].startswith(f"{prefix} {prefix}/lib/python3.")
    assert len(lines) == 2, "it can be written to"
    assert list(prefix.iterdir()) == [], "unmounted"


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("here/env", "no path to mount at"),
        ("/tmp/with blank", "no path to mount at"),
        ("/tmp/../env", "no path to mount at"),
        ("/tmp/" + "long" * 50, "205 bytes long; the environment's programs have space for 200"),
    ],
)
def test_a_path_it_could_not_run_at_is_refused(
    environment_laptop: EnvironmentLaptop, tmp_path: Path, prefix: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        squash(environment_laptop.bundle, "small-env", Path(prefix), tmp_path / "file", print)


def test_a_file_that_exists_and_a_missing_tool_are_told_before_anything_is_unpacked(
    environment_laptop: EnvironmentLaptop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        squash(environment_laptop.bundle, "small-env", Path("/opt/env"), tmp_path / "there", print)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="mksquashfs is not here") as told:
        squash(environment_laptop.bundle, "small-env", Path("/opt/env"), tmp_path / "new", print)
    assert "squashfs-tools" in str(told.value.remedy)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_damaged_image_becomes_no_file(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(environment_laptop.bundle, bundle, copy_function=os.link)
    image = bundle / "data/envs/small-env/image.tar.gz"
    content = bytearray(image.read_bytes())
    content[len(content) // 2] ^= 1
    image.unlink()
    image.write_bytes(content)
    with pytest.raises(DamageError, match=r"image\.tar\.gz is not the file that was fetched"):
        squash(bundle, "small-env", Path("/opt/env"), tmp_path / "file", print)
    assert not (tmp_path / "file").exists()
