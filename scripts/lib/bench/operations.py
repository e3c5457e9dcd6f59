"""Counts the file-system operations of ranks: `python -m scripts.lib.bench.operations [RANKS...]`.

On Lustre each is a question to a metadata server, so what one rank asks is asked a thousand times.
strace counts the system calls with a file name, and getdents64. The peer is what each training
script imports. Prints a table in Markdown.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.lib.bench.workload import BenchError, plain_environment
from scripts.lib.bench.workloads.training import make_bundle, write_settings

IMPORTS = "import torch, deepspeed; from transformers import BertForMaskedLM"
STRACE = (
    "strace",
    "-f",
    "-y",
    "-qq",
    "-s",
    "4096",
    "-e",
    "trace=%file,getdents64,clone,clone3,vfork,fork",
)
_CALL = re.compile(r"^(\d+) +(<\.\.\. )?(\w+)(?:\(| resumed)(.*)$")
_CREATES = ("clone", "clone3", "vfork", "fork")
_IS_RANK = re.compile(r'runner", "rank", ')


def main() -> int:
    """Counts for each number of ranks."""
    numbers = [int(text) for text in sys.argv[1:]] or [2, 4, 8]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bundle(folder, ["one short line of text"] * 64)
        write_settings(
            folder, "run", "fp32", engine="{zero: 2}", length=32, batch=1, steps=2, model="small"
        )
        bare = _count(folder, [sys.executable, "-c", IMPORTS], {})
        (imports,) = {sum(calls.values()) for calls in bare.values()}
        print("| ranks | per rank | of the bare imports | on the bundle | in the run folder |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        for number in numbers:
            print(_row(folder, number, imports), flush=True)
    return 0


def _row(folder: Path, number: int, imports: int) -> str:
    output = folder / f"run-{number}"
    command = [sys.executable, "-m", "runner", "train", "run.yaml", "--bundle", "bundle"]
    command += ["--output", str(output), "--processes", str(number)]
    command += ["--set", f"batch.global={number}"]
    ranks = _count(folder, command, {"bundle": folder / "bundle", "run": output})
    if len(ranks) != number:
        raise BenchError(f"{number} ranks were started, and {len(ranks)} seen")
    most = {name: max(calls[name] for calls in ranks.values()) for name in ("bundle", "run")}
    whole = max(sum(calls.values()) for calls in ranks.values())
    return f"| {number} | {whole} | {whole / imports:.2f} | {most['bundle']} | {most['run']} |"


def _count(folder: Path, command: list[str], below: dict[str, Path]) -> dict[int, Counter[str]]:
    """Operations of each process that a launcher started as a rank, and of its descendants.

    Args:
        below: name -> folder whose operations are counted apart; all others have no name.

    Returns:
        Process -> name -> operations.
    """
    trace = folder / "trace"
    done = subprocess.run(
        [*STRACE, "-o", trace, *command], cwd=folder, env=plain_environment(), capture_output=True
    )
    if done.returncode:
        raise BenchError(f"{command[1:4]}: {done.stderr[-2000:].decode(errors='replace')}")
    parents: dict[int, int] = {}
    starts: set[int] = set()
    for pid, call, rest, _ in _calls(trace):
        if call in _CREATES and (child := re.search(r"= (\d+)$", rest)):
            parents[int(child[1])] = pid
        elif call == "execve" and (not below or _IS_RANK.search(rest)):
            starts.add(pid)
    counts: dict[int, Counter[str]] = {}
    for pid, call, rest, is_end in _calls(trace):
        while pid not in starts and pid in parents:
            pid = parents[pid]
        if call not in _CREATES and pid in starts and not is_end:
            where = [name for name, path in below.items() if str(path) in rest]
            counts.setdefault(pid, Counter())[where[0] if where else ""] += 1
    return counts


def _calls(trace: Path) -> Iterator[tuple[int, str, str, bool]]:
    """Process, call, its arguments and result, and whether it is the end of an interrupted line."""
    with open(trace, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if call := _CALL.match(line.rstrip()):
                yield int(call[1]), call[3], call[4], bool(call[2])


if __name__ == "__main__":
    sys.exit(main())
