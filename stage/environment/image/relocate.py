"""Relocates an unpacked environment (placeholder -> prefix), and proves that it is unchanged.

Runs on the cluster, by the environment's python, from its `.airlift` folder (`bootstrap.sh` calls
it). Standard library only: airlift cannot be trusted before this is done.

    python -I -S relocate.py ROOT PREFIX TREE

ROOT is the unpacked folder (beside PREFIX), TREE the digest that it must have. Exit code 1: these
are not the files that were made; 5: could not finish. The tree digest is the sha256 of
`.airlift/tree.txt`, which has a line for each file:

    x 2c26b46b68ffc68f... bin/python3.10      (x executable, - not, l a link: digest of its target)

The digest is that of the content with the placeholder, so it is the same in each prefix. Hashing
reverts the relocation, by the offsets in `.airlift/relocations.json`, never by searching: a prefix
such as `/a` is everywhere.

An environment on the site's Python is joined to it before the rename: `.airlift/site`, which
`bootstrap.sh` writes, has that Python and the folders it imports from, one per line.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python's exit code for an unexpected error (no memory for imports) is 1, which means damage
    # here.
    sys.excepthook = lambda kind, error, _: (
        print(f"not made: {kind.__name__}: {error}", file=sys.stderr),
        sys.exit(5),
    )

import compileall
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BOOKKEEPING = ".airlift"
ENV, TREE, RELOCATIONS, PREFIX = "env.json", "tree.txt", "relocations.json", "prefix"
OWNER = "owner"  # `bootstrap.sh` writes its machine there while it works
SITE, FOLDERS = "site", "zz-airlift-site.pth"
MAX_WORKERS = 8  # login nodes are shared

# A region with placeholders: (start, length, offsets of the placeholders in it). In text, it is one
# placeholder; in a binary, the rest of the C string, which keeps its length: NULs fill it up.
Region = tuple[int, int, Sequence[int]]


class NotAsMade(Exception):
    """A file is not the one that was made."""


class NotOnThisSite(Exception):
    """The environment cannot be used with the site's Python; the reason was printed."""


def find_regions(content: bytes, placeholder: bytes, *, is_binary: bool) -> list[Region]:
    """The regions of a file that have the placeholder."""
    regions: list[Region] = []
    start = content.find(placeholder)
    while start >= 0:
        end = start + len(placeholder)
        if is_binary:
            nul = content.find(b"\0", end)
            end = nul if nul >= 0 else len(content)
        offsets: list[int] = []
        offset = content.find(placeholder, start, end)
        while offset >= 0:
            offsets.append(offset - start)
            offset = content.find(placeholder, offset + len(placeholder), end)
        regions.append((start, end - start, offsets))
        start = content.find(placeholder, end)
    return regions


def replace(
    content: bytes, regions: Sequence[Region], old: bytes, new: bytes, *, is_binary: bool
) -> bytes:
    """The content with `new` (not longer than `old` in a binary) for `old` in the regions.

    Raises:
        NotAsMade: `old` is not there.
    """
    parts: list[bytes] = []
    at = 0
    for start, length, offsets in regions:
        changed = _exchange(content[start : start + length], offsets, old, new)
        parts += [content[at:start], changed, b"\0" * (length - len(changed) if is_binary else 0)]
        at = start + length
    return b"".join([*parts, content[at:]])


def restore(
    content: bytes, regions: Sequence[Region], old: bytes, new: bytes, *, is_binary: bool
) -> bytes:
    """Undoes `replace`: the content as it was with `old` in it.

    Raises:
        NotAsMade: `new` is not where `replace` put it.
    """
    parts: list[bytes] = []
    at = end = 0  # read so far of `content`; end of the last region before `replace`
    growth = len(new) - len(old)
    for start, length, offsets in regions:
        parts.append(content[at : at + start - end])
        at += start - end
        changed = length + len(offsets) * growth
        moved = [offset + number * growth for number, offset in enumerate(offsets)]
        parts.append(_exchange(content[at : at + changed], moved, new, old))
        at += changed
        if is_binary:
            if content[at : at + length - changed].strip(b"\0"):
                raise NotAsMade
            at += length - changed
        end = start + length
    return b"".join([*parts, content[at:]])


def _exchange(region: bytes, offsets: Sequence[int], old: bytes, new: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    for offset in offsets:
        if region[offset : offset + len(old)] != old:
            raise NotAsMade
        parts += [region[at:offset], new]
        at = offset + len(old)
    return b"".join([*parts, region[at:]])


def walk(root: str) -> Iterator[str]:
    """The relative path of each file and link under `root`, without `.airlift` and bytecode."""
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        if folder == root:
            folders[:] = [name for name in folders if name != BOOKKEEPING]
        is_cache = os.path.basename(folder) == "__pycache__"
        for name in [*files, *links]:
            if not (is_cache and name.endswith(".pyc")):
                yield os.path.relpath(os.path.join(folder, name), root)


def tree_lines(
    root: str,
    relocations: Mapping[str, Any],
    old: bytes,
    new: bytes,
    added: Sequence[str] = (),
) -> list[bytes]:
    """The lines of `tree.txt`, sorted, for the files in `root`.

    Args:
        relocations: as in `relocations.json`.
        old, new: the placeholder, and the current text in its place.
        added: files that are not of the image.
    """

    def line(relative: str) -> bytes:
        path = os.path.join(root, relative)
        if os.path.islink(path):
            return _line("l", os.fsencode(os.readlink(path)), relative)
        with open(path, "rb") as file:
            content = file.read()
            kind = "x" if os.fstat(file.fileno()).st_mode & 0o100 else "-"
        if entry := relocations.get(relative):
            is_binary = entry["kind"] == "binary"
            try:
                content = restore(content, entry["at"], old, new, is_binary=is_binary)
            except NotAsMade:
                kind = "?"
        return _line(kind, content, relative)

    with ThreadPoolExecutor(_workers()) as pool:
        return sorted(pool.map(line, (path for path in walk(root) if path not in added)))


def _line(kind: str, content: bytes, relative: str) -> bytes:
    return f"{kind} {hashlib.sha256(content).hexdigest()} ".encode() + os.fsencode(relative) + b"\n"


def digest_of(lines: Sequence[bytes]) -> str:
    """The tree digest of the lines of a `tree.txt`."""
    return hashlib.sha256(b"".join(lines)).hexdigest()


def check_tree(root: str, tree: str, prefix: str) -> None:
    """Checks that the files in `root`, relocated to `prefix`, are the tree with that digest.

    Raises:
        NotAsMade: with the first files that differ.
    """
    with open(_kept(root, TREE), "rb") as file:
        made = file.readlines()
    if digest_of(made) != tree:
        raise NotAsMade(f"{BOOKKEEPING}/{TREE}")
    facts, new = _read_json(_kept(root, ENV)), os.fsencode(prefix)
    old, added = os.fsencode(facts["placeholder"]), _added(facts) if "provides" in facts else ()
    found = tree_lines(root, _read_json(_kept(root, RELOCATIONS)), old, new, added)
    if different := sorted({os.fsdecode(line[67:-1]) for line in {*made} ^ {*found}}):
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise NotAsMade(", ".join(different[:3]) + more)


def relocate(root: str, prefix: str) -> None:
    """Writes `prefix` for each placeholder. A file is replaced, never changed: some are running.

    Raises:
        NotAsMade: a file does not have the placeholder at its offset.
    """
    old, new = os.fsencode(_read_json(_kept(root, ENV))["placeholder"]), os.fsencode(prefix)
    for relative, entry in _read_json(_kept(root, RELOCATIONS)).items():
        path = os.path.join(root, relative)
        with open(path, "rb") as file:
            content = file.read()
            mode = os.fstat(file.fileno()).st_mode
        try:
            content = replace(content, entry["at"], old, new, is_binary=entry["kind"] == "binary")
        except NotAsMade:
            raise NotAsMade(relative) from None
        _write(path, content, mode & 0o777)
    _write(_kept(root, PREFIX), new + b"\n", 0o644)


def _added(facts: Mapping[str, Any]) -> Sequence[str]:
    """What `join_site` adds; the last one names the site's folders."""
    library = "python" + ".".join(facts["python"].split(".")[:2])
    folders = f"lib/{library}/site-packages/{FOLDERS}"
    return "pyvenv.cfg", "bin/python", "bin/python3", "lib64", folders


def join_site(root: str) -> None:
    """Makes the folder a virtual environment of the site's Python (PEP 405).

    The folders from which that Python imports (of modules, or of a virtual environment that it is
    of) are named as lines, so that no `.pth` in them is run.
    """
    config, python, python3, lib64, folders = (
        os.path.join(root, path) for path in _added(_read_json(_kept(root, ENV)))
    )
    with open(_kept(root, SITE), encoding="utf-8") as file:
        base, *site = file.read().splitlines()
    os.symlink(base, python3)
    os.symlink("python3", python)
    os.symlink("lib", lib64)
    home = f"home = {os.path.dirname(base)}\ninclude-system-site-packages = true\n"
    version = ".".join(map(str, sys.version_info[:3]))
    _write(config, f"{home}version = {version}\n".encode(), 0o644)
    show = [python3, "-I", "-c", "import sys; print('\\n'.join(sys.path))"]
    own = subprocess.run(show, stdout=subprocess.PIPE, check=True).stdout.decode().splitlines()
    lines = [path for path in site if path not in own] + ["import _airlift_site"]
    _write(folders, ("\n".join(lines) + "\n").encode(), 0o644)


def compile_modules(root: str, prefix: str) -> None:
    """Compiles each module under `lib/python*`, so that no rank has to.

    By time and size of the source, like Python's default: an edit in site-packages is noticed.
    """
    for name in sorted(os.listdir(os.path.join(root, "lib"))):
        folder = os.path.join(root, "lib", name)
        if name.startswith("python") and os.path.isdir(folder) and not os.path.islink(folder):
            options: dict[str, Any] = {"quiet": 2, "stripdir": root, "prependdir": prefix}
            try:
                compileall.compile_dir(folder, workers=_workers(), **options)
            except OSError:  # no semaphores on this machine
                compileall.compile_dir(folder, workers=1, **options)


def _workers() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    return min(MAX_WORKERS, os.cpu_count() or 1)


def _kept(root: str, name: str) -> str:
    return os.path.join(root, BOOKKEEPING, name)


def _read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _write(path: str, content: bytes, mode: int) -> None:
    temporary = f"{path}.airlift-new"
    with open(temporary, "wb") as file:
        file.write(content)
    os.chmod(temporary, mode)
    os.replace(temporary, path)


def put_in_place(root: str, prefix: str, tree: str) -> None:
    """Relocates, checks and compiles; renames the folder to PREFIX last.

    Raises:
        NotAsMade: a file is not the one that was made.
        NotOnThisSite: it does not work on the site's Python.
        OSError: the disk or the folder cannot be written, PREFIX exists by now, or the parent
            process was killed: then another run may be removing the folder at this moment.
    """
    started_by = os.getppid()
    relocate(root, prefix)
    check_tree(root, tree, prefix)
    on_site = os.path.exists(_kept(root, SITE))
    if on_site:
        join_site(root)
    compile_modules(root, prefix)
    if on_site:
        prove = [f"{root}/bin/python3", "-I", "-B", "-m", "stage.environment.check.on_site"]
        own_disk = {**os.environ, "TMPDIR": _kept(root, "")}  # a container may have no other
        if subprocess.run(prove, env=own_disk).returncode != 0:
            raise NotOnThisSite
    if os.getppid() != started_by:
        raise OSError("the process that started this is gone")
    if os.path.exists(_kept(root, OWNER)):
        os.unlink(_kept(root, OWNER))
    os.rename(root, prefix)


def main(arguments: Sequence[str]) -> int:
    """`relocate.py ROOT PREFIX TREE`; returns the exit code."""
    root, prefix, tree = arguments
    try:
        put_in_place(root, prefix, tree)
    except NotAsMade as error:
        problem = f"these are not the files that were packed: {error}"
        print(f"{prefix}: not made: {problem}", file=sys.stderr)
        return 1
    except NotOnThisSite:
        return 1
    except Exception as error:  # noqa: BLE001 - 1 would mean damage
        print(f"{prefix}: not made: {type(error).__name__}: {error}", file=sys.stderr)
        return 5
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
