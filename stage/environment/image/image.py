"""An environment in a folder -> its description (`.airlift/`), and its image, one file.

The same folder gives the same image bytes on any machine: sorted, without dates and owners, hard
links as files. The compressor matters too. The output of zlib differs between the builds in
Pythons; libdeflate's (`deflate`) does not. gzip files may have several members, so all cores
compress members of 8 MiB. `gzip -d` reads them as one file.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stage.environment.image import relocate
from stage.errors import IncompleteError, UsageError
from stage.sandbox import isolated

FORMAT = 1
# conda-build makes packages for a prefix of 255 bytes (`prefix_length`); in binaries a text in its
# place may be shorter, not longer.
PLACEHOLDER = ("/airlift-environment-prefix" + "_placeholder" * 20)[:200]
LONGEST_PREFIX = len(PLACEHOLDER)  # bytes: the space in binaries
TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
DATE = 1_700_000_000  # mtime of each file; modules compiled on the cluster record it
_MEMBER = 8 << 20  # bytes: large beside gzip's window of 32 KiB, so members cost no compression
_LEVEL = 4  # 6 is a third slower and 3 % smaller
_DISK_BLOCK = 4096  # bytes: the default of ext4 and XFS


def lay_out(
    root: Path,
    *,
    conda: Iterable[Path],
    wheels: list[Path],
    platform: str,
    python: str = "",
) -> dict[str, Any]:
    """Links packages into `root`, a new folder, with the child process `link`.

    Args:
        python: version of the site's Python; empty: it is among the conda packages.

    Returns:
        The result of `Linking.run`.

    Raises:
        UsageError: the packages cannot be in one folder.
        IncompleteError: py-rattler or installer failed, with its message.
    """
    cache = root.with_name(f"{root.name}.cache")
    request = {
        "root": str(root),
        "cache": str(cache),
        "placeholder": PLACEHOLDER,
        "platform": platform,
        "python": python,
        "conda": sorted(map(str, conda)),
        "wheels": [str(path) for path in sorted(wheels, key=lambda wheel: wheel.name)],
    }
    done = subprocess.run(
        isolated("stage.environment.image.link"),
        input=json.dumps(request).encode(),
        capture_output=True,
    )
    if done.returncode != 0:
        output = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise IncompleteError(
            f"{root}: the packages could not be linked: {output.splitlines()[-1]}",
            "Check for a full disk.",
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    if refused := answer.get("refused"):
        problem = f"The packages cannot be one environment: {refused}."
        raise UsageError(problem, "Leave one of them out and lock again.")
    return answer


def describe_tree(root: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a linked folder: adds `activate`, and `.airlift/` with its digests and relocations.

    Args:
        known: what is known about the environment: `platform`, `python`, `virtual_packages`,
            `lock_sha256`, and the needs that `env-check.sh` reads.

    Returns:
        The contents of `env.json`: `known`, and

        - tree: the tree digest;
        - placeholder: the text in the files that stands for the prefix; a prefix may not be longer;
        - files: number of files and links, without compiled modules;
        - modules: number of them that are compiled on the cluster, each to one more file;
        - size: bytes on disk, compiled modules included.
    """
    activate = (TEMPLATES / "activate.sh").read_text(encoding="utf-8")
    (root / "activate").write_text(activate.replace("@PREFIX@", PLACEHOLDER), encoding="utf-8")
    (root / "activate").chmod(0o644)
    relocations, placeholder = _relocations(root), PLACEHOLDER.encode()
    lines = relocate.tree_lines(str(root), relocations, placeholder, placeholder)
    sizes = {path: (root / path).lstat().st_size for path in relocate.walk(str(root))}
    is_module = re.compile(r"lib/python.*\.py", re.DOTALL).fullmatch
    modules = [size for path, size in sizes.items() if is_module(path)]
    facts = {
        **known,
        "format": FORMAT,
        "tree": relocate.digest_of(lines),
        "placeholder": PLACEHOLDER,
        "files": len(sizes),
        "modules": len(modules),
        "size": sum(map(_on_disk, [*sizes.values(), *modules])),
    }
    kept = root / relocate.BOOKKEEPING
    kept.mkdir()
    (kept / relocate.TREE).write_bytes(b"".join(lines))
    text = json.dumps(relocations, sort_keys=True) + "\n"
    (kept / relocate.RELOCATIONS).write_text(text, encoding="utf-8")
    (kept / relocate.ENV).write_bytes(to_json(facts))
    (kept / "relocate.py").write_bytes(Path(relocate.__file__).read_bytes())
    for path in kept.iterdir():
        path.chmod(0o644)
    return facts


def to_json(facts: Mapping[str, Any]) -> bytes:
    """The text of `env.json`."""
    return (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode()


def _on_disk(size: int) -> int:
    return -(-size // _DISK_BLOCK) * _DISK_BLOCK


def _relocations(root: Path) -> dict[str, Any]:
    """Path -> kind of the file and the regions with the placeholder.

    A file is binary if it has a NUL: conda-build's own rule.
    """
    placeholder = PLACEHOLDER.encode()
    relocations: dict[str, Any] = {}
    for relative in sorted(relocate.walk(str(root))):
        path = root / relative
        if path.is_symlink() or placeholder not in (content := path.read_bytes()):
            continue
        kind = "binary" if b"\0" in content else "text"
        regions = relocate.find_regions(content, placeholder, is_binary=kind == "binary")
        relocations[relative] = {"kind": kind, "at": regions}
    return relocations


def pack(root: Path, image: Path) -> None:
    """Writes a folder as one `tar.gz`."""
    with (
        open(image, "wb") as target,
        _Members(target) as members,
        tarfile.open(fileobj=members, mode="w|", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name, path in sorted(
            (path.relative_to(root).as_posix(), path) for path in root.rglob("*")
        ):
            entry = _tar_entry(path, name)
            if entry.isreg():
                with open(path, "rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)


def _tar_entry(path: Path, name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mtime = DATE
    status = path.lstat()
    if path.is_symlink():
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
    elif path.is_dir():
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    else:
        entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
    return entry


class _Members(io.RawIOBase):
    """Writes gzip members of 8 MiB each, compressed in several threads."""

    def __init__(self, target: io.BufferedWriter) -> None:
        import deflate

        self._compress: Callable[[bytes, int], bytearray] = deflate.gzip_compress
        self._target = target
        self._buffer = bytearray()
        self._at_once = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._at_once)
        self._waiting: deque[Future[bytearray]] = deque()

    def write(self, data: Any) -> int:
        self._buffer += data
        while len(self._buffer) >= _MEMBER:
            self._submit(bytes(self._buffer[:_MEMBER]))
            del self._buffer[:_MEMBER]
        return len(data)

    def close(self) -> None:
        if not self.closed:
            if self._buffer:
                self._submit(bytes(self._buffer))
            while self._waiting:
                self._target.write(self._waiting.popleft().result())
            self._pool.shutdown()
        super().close()

    def _submit(self, data: bytes) -> None:
        self._waiting.append(self._pool.submit(self._compress, data, _LEVEL))
        if len(self._waiting) > 2 * self._at_once:  # memory: what is compressed and not written
            self._target.write(self._waiting.popleft().result())
