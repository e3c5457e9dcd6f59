"""`scripts/bench`: which parts, how often, where; prints each table as soon as it is measured."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from scripts.lib.bench.environments import environment_workloads
from scripts.lib.bench.fetching import fetch_workloads
from scripts.lib.bench.machine import describe, load
from scripts.lib.bench.measure import BenchError
from scripts.lib.bench.peers import Peers
from scripts.lib.bench.report import Result, page, read_results, section, write_results
from scripts.lib.bench.verifying import verify_workloads
from scripts.lib.bench.workload import Workload, measure

Part = Callable[[Path, Peers], AbstractContextManager[list[Workload]]]
ROOT = Path(__file__).resolve().parents[3]
AREAS = {"stage": {"fetch": fetch_workloads, "verify": verify_workloads}, "env": {"environment": environment_workloads}}


def main() -> int:
    """Measures, prints, writes. Exit code 1 if it could not be done, whatever was measured before stays."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures stage beside other tools.")
    parser.add_argument("area", choices=list(AREAS))
    parser.add_argument("parts", nargs="*", metavar="PART", help="of stage: fetch, verify; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=ROOT / "output/scripts-bench", help="where to work")
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.md too")
    arguments = parser.parse_args()
    known = AREAS[arguments.area]
    if unknown := set(arguments.parts) - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if not Path("/proc/self/smaps_rollup").exists():
        parser.error("memory is read from /proc/*/smaps_rollup, which only Linux has")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    folder = arguments.folder.absolute()
    where = [folder, ROOT / "docs"] if arguments.record else [folder]
    try:
        _measure([known[part] for part in arguments.parts or known], arguments.rounds, folder, where)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nwritten: {', '.join(str(place / 'benchmarks.md') for place in where)}")
    return 0


def _measure(parts: Sequence[Part], rounds: int, folder: Path, where: Sequence[Path]) -> None:
    """Measures; each workload is written as soon as it has been, so that an interruption costs only the next one."""
    folder.mkdir(parents=True, exist_ok=True)
    peers = Peers.install(folder / "peers", _say)
    for part in parts:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        _say("\n== making files")
        try:
            with part(work, peers) as workloads:
                for workload in workloads:
                    _say(f"\n== {workload.title}")
                    result = _result(workload, rounds, work, peers)
                    _say(section(result))
                    for place in where:
                        _write(place, {result.name: result}, peers)
        finally:
            shutil.rmtree(work)


def _result(workload: Workload, rounds: int, work: Path, peers: Peers) -> Result:
    before = load()
    samples = measure(workload, rounds, work, _say)
    commands = {
        step.ends: shlex.join(step.command).replace(str(work), ".").replace(str(peers.venv), "peers")
        for candidate in workload.candidates
        for step in candidate.steps
        if step.ends
    }
    return Result(
        name=workload.name,
        title=workload.title,
        note=f"{workload.note}\n\n{workload.afterwards()}".strip(),
        size=workload.size,
        base=workload.base,
        rounds=samples,
        targets=workload.targets(samples),
        machine=describe(work),
        versions=peers.versions(),
        commands={name: _short(command) for name, command in commands.items()},
        load=(before, load()),
        skipped=workload.skipped,
    )


def _short(command: str) -> str:
    """Without the folders of our own interpreter and of the one it was made from; a program given by `-c` left out."""
    plain = command.replace(str(Path(sys.executable)), "python").replace(f"{sys.base_prefix}/bin/", "")
    head, separator, _ = plain.partition(" -c 'import")
    return f"{head} -c ..." if separator else head


def _write(place: Path, results: dict[str, Result], peers: Peers) -> None:
    """The page, the samples and the pictures, beside what was measured before."""
    samples = place / "benchmarks/results.json"
    together = {**read_results(samples), **results}
    write_results(samples, together)
    (place / "benchmarks.md").write_text(page(together))
    plot = Path(__file__).with_name("plot.py")
    subprocess.run([peers.command("python"), str(plot), str(samples), str(samples.parent)], check=True)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
