"""A bundle's environment -> one squashfs file, for sites that mount such files: `stage env squash`.

48,000 files become one, which a network disk serves as one. It is made for the path where nodes will mount it, which
need not exist here: image -> unpacked and relocated to that path in a temporary folder -> proven by its tree digest ->
compiled -> mksquashfs. The same environment, path and mksquashfs: the same bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from stage.digest import hash_file
from stage.disk import human_count, human_size, require_folder_of
from stage.environment import relocate
from stage.environment.create import Creation, check_files, find_environment
from stage.environment.image import DATE, LONGEST_PREFIX
from stage.errors import DamageError, IncompleteError, UsageError

_READ = ("env.json", "image.tar.gz")
_PLAIN = re.compile(r"/[-A-Za-z0-9._/+@=,~\u0080-\U0010ffff]*[^/]")
"""As in bootstrap.sh: scripts of the environment would trip over anything else."""

# gzip is what every squashfs reader has. Its default, level 9, takes several times as long to save 3 %.
_FLAGS = ("-noappend", "-comp", "gzip", "-Xcompression-level", "4", "-b", "131072", "-exit-on-error")
_NOBODYS = ("-all-root", "-no-xattrs", "-no-exports")
_UMASK = 0o022
"""Not the user's: the bytes shall be the same, and readable to whom the site mounts them for."""

_DATES = ("-mkfs-time", str(DATE), "-all-time", str(DATE))


def squash(root: Path, name: str, prefix: Path, target: Path, say: Callable[[str], None]) -> None:
    """Writes the environment `name` of the bundle, as it is at `prefix`, to the squashfs file `target`.

    Raises:
        UsageError: no such environment, a prefix it cannot have, `target` exists, or no mksquashfs here.
        DamageError: a file of the bundle is not the one that was fetched, or the tree comes out different.
        IncompleteError: the disk, or a tool, did not let us; run it again.
    """
    asset = find_environment(root, name)
    _check_prefix(prefix)
    if target.exists():
        raise UsageError(f"{target} exists.", "Choose another name, or remove it first.")
    require_folder_of(target)
    mksquashfs = shutil.which("mksquashfs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if mksquashfs is None:
        raise UsageError(
            "mksquashfs is not here, neither on PATH nor in /usr/sbin.",
            "It comes with the package squashfs-tools. A Linux laptop can make the file too; then copy it over.",
        )
    creation = Creation((root / asset.folder).absolute(), asset, prefix, say)
    check_files(root, asset, _READ)
    with tempfile.TemporaryDirectory(prefix="airlift-squash-") as folder:
        part = Path(folder) / "root"
        _lay_out(creation, part)
        say(f"{mksquashfs}: {human_count(sum(len(files) for _, _, files in os.walk(part)), 'file')} into {target}")
        _write(mksquashfs, part, target)
    say(f"{target}: {human_size(target.stat().st_size)}, sha256 {hash_file(target).sha256}")
    say(f"mount it on each node, there and nowhere else: mkdir -p {prefix} && squashfuse {target} {prefix}")


def _check_prefix(prefix: Path) -> None:
    if not prefix.is_absolute() or ".." in prefix.parts or not _PLAIN.fullmatch(str(prefix)):
        raise UsageError(
            f"{prefix} is no path to mount at.", "Give an absolute path of letters, digits and - . _ + @ = , ~"
        )
    if (length := len(os.fsencode(prefix))) > LONGEST_PREFIX:
        raise UsageError(
            f"{prefix} is {length} bytes long; the environment's programs have room for {LONGEST_PREFIX}.",
            "Choose a shorter path.",
        )


def _lay_out(creation: Creation, part: Path) -> None:
    """The image in `part`, as it is at the prefix, proven and compiled."""
    needed, free = int(str(creation.facts()["size"])), shutil.disk_usage(part.parent).free
    if free < needed:
        raise IncompleteError(
            f"{part.parent.parent} has {human_size(free)} free of the {human_size(needed)} needed to unpack.",
            "Set TMPDIR to a folder on a larger disk.",
        )
    part.mkdir()
    part.chmod(0o755)
    _run(["tar", "-xzpof", str(creation.folder / "image.tar.gz"), "-C", str(part)], "unpacking")
    assert creation.asset.environment is not None
    tree = creation.asset.environment.tree
    creation.say("relocating, checking, compiling")
    try:
        relocate.relocate(str(part), str(creation.prefix))
        relocate.check_tree(str(part), str(tree), str(creation.prefix))
    except relocate.NotAsMade as error:
        raise DamageError(
            f"{creation.asset.name}: these are not the files that were packed: {error}. Nothing was written.",
            "stage verify the bundle.",
        ) from None
    _compile(part, creation.prefix)


def _compile(part: Path, prefix: Path) -> None:
    """Compiles every module, not to be compared with its source: nobody can edit that, and its date is nobody's."""
    for folder in sorted((part / "lib").glob("python3.*")):
        command = [str(part / "bin/python"), "-I", "-S", "-B", "-m", "compileall", "-qq", "-j0"]
        command += ["--invalidation-mode", "unchecked-hash", "-s", str(part), "-p", str(prefix), str(folder)]
        try:
            # Exit code 1: some file is no Python of today, as in any environment.
            done = subprocess.run(
                command, env={"PATH": os.defpath}, stdout=subprocess.DEVNULL, umask=_UMASK, check=False
            )
        except OSError as error:
            raise IncompleteError(
                f"{part}/bin/python does not start ({error.strerror}).",
                "Is that disk mounted noexec? Set TMPDIR to another. Only Linux on the same processor can make it.",
            ) from None
        if done.returncode not in (0, 1):
            raise IncompleteError(f"compiling ended with exit code {done.returncode}.", "Run it again.")


def _write(mksquashfs: str, part: Path, target: Path) -> None:
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        _run([mksquashfs, str(part), str(partial), "-quiet", "-no-progress", *_FLAGS, *_NOBODYS, *_DATES], "mksquashfs")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str], what: str) -> None:
    # Beside our dates, mksquashfs refuses to have another in the environment.
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:] or [f"exit code {done.returncode}"]
        raise IncompleteError(
            f"{what} stopped: {' / '.join(words)}. Nothing is left of it.", "Look for a full disk or a quota."
        )
