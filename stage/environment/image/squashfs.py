"""`stage env squash`: an environment -> one squashfs file, for sites that mount such files.

48,000 files become one, which is faster on a network disk. The file is made for the path where
nodes mount it, which need not exist here: the image is unpacked and relocated to that path in a
temporary folder, proven by its tree digest, compiled, and written by mksquashfs. The same
environment, path and mksquashfs give the same bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from stage.environment.image import relocate
from stage.environment.image.create import Creation, check_files, find_environment
from stage.environment.image.image import DATE, LONGEST_PREFIX
from stage.errors import DamageError, IncompleteError, UsageError
from stage.util.digests import hash_file
from stage.util.files import check_folder_of, human_count, human_size
from stage.verify.advice import remedy_for_damage

_READ = ("env.json", "image.tar.gz")
_PLAIN = re.compile(r"/[-A-Za-z0-9._/+@=,~\u0080-\U0010ffff]*[^/]")
"""As in bootstrap.sh: scripts of the environment fail with other characters in their path."""

# Each squashfs reader knows gzip. Its default, level 9, takes several times as long to save 3 %.
_COMPRESSION = ("-comp", "gzip", "-Xcompression-level", "4", "-b", "131072")
_BEHAVIOUR = ("-quiet", "-no-progress", "-noappend", "-exit-on-error")
_OWNERS = ("-all-root", "-no-xattrs", "-no-exports")
_DATES = ("-mkfs-time", str(DATE), "-all-time", str(DATE))
_OPTIONS = (*_BEHAVIOUR, *_COMPRESSION, *_OWNERS, *_DATES)
_UMASK = 0o022
"""Independent of the user's umask: the bytes must be the same, and readable for other users."""


def squash(root: Path, name: str, prefix: Path, target: Path, say: Callable[[str], None]) -> None:
    """Writes the environment `name` of a bundle to the squashfs file `target`.

    Args:
        root: folder of the bundle.
        prefix: the path where nodes mount the file.
        say: prints one line for the user.

    Raises:
        UsageError: no such environment, a prefix it cannot have, `target` exists, no mksquashfs
            here, or a temporary folder that ignores case.
        DamageError: a file of the bundle differs from the fetched one, or the tree digest does.
        IncompleteError: the disk is full, or a tool failed; run it again.
    """
    asset = find_environment(root, name)
    _check_prefix(prefix)
    if target.exists():
        raise UsageError(f"{target} exists.", "Choose another name, or remove it first.")
    check_folder_of(target)
    mksquashfs = shutil.which("mksquashfs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if mksquashfs is None:
        raise UsageError(
            "mksquashfs is not here, neither on PATH nor in /usr/sbin.",
            "It comes with the package squashfs-tools. A Linux laptop can make the file too; then "
            "copy it over.",
        )
    creation = Creation((root / asset.folder).absolute(), asset, prefix, say)
    check_files(root, asset, _READ)
    with tempfile.TemporaryDirectory(prefix="airlift-squash-") as folder:
        part = Path(folder) / "root"
        _lay_out(creation, part)
        files = human_count(sum(len(names) for _, _, names in os.walk(part)), "file")
        say(f"{mksquashfs}: {files} into {target}")
        _write(mksquashfs, part, target)
    say(f"{target}: {human_size(target.stat().st_size)}, sha256 {hash_file(target).sha256}")
    mount = f"mkdir -p {prefix} && squashfuse {target} {prefix}"
    say(f"mount it on each node, only at this path: {mount}")


def _check_prefix(prefix: Path) -> None:
    if not prefix.is_absolute() or ".." in prefix.parts or not _PLAIN.fullmatch(str(prefix)):
        raise UsageError(
            f"{prefix} is no path to mount at.",
            "Give an absolute path of letters, digits and - . _ + @ = , ~",
        )
    if (length := len(os.fsencode(prefix))) > LONGEST_PREFIX:
        raise UsageError(
            f"{prefix} is {length} bytes long; the environment's programs have space for "
            f"{LONGEST_PREFIX}.",
            "Choose a shorter path.",
        )


def _lay_out(creation: Creation, part: Path) -> None:
    """Unpacks the image to `part`, relocates it to the prefix, checks and compiles it."""
    needed, free = int(str(creation.facts()["size"])), shutil.disk_usage(part.parent).free
    if free < needed:
        raise IncompleteError(
            f"{part.parent.parent} has {human_size(free)} free of the {human_size(needed)} "
            "needed to unpack.",
            "Set TMPDIR to a folder on a larger disk.",
        )
    if relocate.ignores_case(str(part.parent)):
        raise UsageError(
            f"{part.parent.parent}: `A` and `a` are one file on this disk.",
            "Set TMPDIR to a folder on a disk that does not ignore case.",
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
            f"{creation.asset.name}: these are not the files that were packed: {error}. Nothing "
            "was written.",
            remedy_for_damage(creation.folder.parents[2]),
        ) from None
    _compile(part, creation.prefix)


def _compile(part: Path, prefix: Path) -> None:
    """Compiles every module, never to be compared with its source: the file system is read-only."""
    for folder in sorted((part / "lib").glob("python3.*")):
        command = [str(part / "bin/python"), "-I", "-S", "-B", "-m", "compileall", "-qq", "-j0"]
        command += ["--invalidation-mode", "unchecked-hash"]
        command += ["-s", str(part), "-p", str(prefix), str(folder)]
        where = {"PATH": os.defpath}
        try:
            # Exit code 1: a file is not valid Python 3, as in any environment.
            code = subprocess.run(
                command, env=where, stdout=subprocess.DEVNULL, umask=_UMASK, check=False
            ).returncode
        except OSError as error:
            raise IncompleteError(
                f"{part}/bin/python does not start ({error.strerror}).",
                "Is that disk mounted noexec? Set TMPDIR to another. Only Linux on the same "
                "processor can make it.",
            ) from None
        if code not in (0, 1):
            raise IncompleteError(f"compiling ended with exit code {code}.", "Run it again.")


def _write(mksquashfs: str, part: Path, target: Path) -> None:
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        _run([mksquashfs, str(part), str(partial), *_OPTIONS], "mksquashfs")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str], what: str) -> None:
    # mksquashfs refuses its options of dates together with this variable.
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise IncompleteError(
            f"{what} stopped: {' / '.join(output.splitlines()[-3:])}. Its partial file is deleted.",
            "Check for a full disk or a quota.",
        )
