"""`scripts/bench`: reads the options; prints each table as soon as it is measured."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from scripts.lib.bench.measure import BenchError
from scripts.lib.bench.options import ROOT, parse
from scripts.lib.bench.peers import Peers
from scripts.lib.bench.report import (
    Result,
    describe_machine,
    load,
    page,
    read_results,
    section,
    write_results,
)
from scripts.lib.bench.workload import Workload, measure
from scripts.lib.bench.workloads.environments import environment_workloads
from scripts.lib.bench.workloads.fetching import fetch_workloads
from scripts.lib.bench.workloads.serving import serve_workloads
from scripts.lib.bench.workloads.training import training_workloads
from scripts.lib.bench.workloads.verifying import verify_workloads

Part = Callable[[Path, Peers], AbstractContextManager[list[Workload]]]
PARTS: dict[str, dict[str, Part]] = {
    "stage": {"fetch": fetch_workloads, "verify": verify_workloads, "serve": serve_workloads},
    "env": {"environment": environment_workloads},
    "runner": {"training": training_workloads},
}


def main() -> int:
    """Measures, prints, writes. Exit code 1: it failed; the results up to then are written."""
    arguments = parse(sys.argv[1:])
    known, folder = PARTS[arguments.area], arguments.folder.absolute()
    where = [folder, ROOT / "docs"] if arguments.record else [folder]
    parts = [known[part] for part in arguments.parts or known]
    try:
        failed = _measure(parts, arguments.rounds, folder, where)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nwritten: {', '.join(str(path / 'benchmarks.md') for path in where)}")
    for text in failed:
        print(f"error: {text}", file=sys.stderr)
    return 1 if failed else 0


def _measure(parts: Sequence[Part], rounds: int, folder: Path, where: Sequence[Path]) -> list[str]:
    """Measures; writes each workload at once, so that an interruption costs one workload only.

    Returns:
        What went wrong with a workload; those after it were measured.
    """
    failed: list[str] = []
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
                    try:
                        result = _result(workload, rounds, work, peers)
                    except BenchError as error:
                        failed.append(f"{workload.title}: {error}")
                        _say(f"error: {failed[-1]}")
                        continue
                    _say(section(result))
                    for path in where:
                        _write(path, {result.name: result}, peers)
        finally:
            shutil.rmtree(work)
    return failed


def _result(workload: Workload, rounds: int, work: Path, peers: Peers) -> Result:
    before = load()
    samples = measure(workload, rounds, work, _say)
    commands = {
        step.ends: shlex.join(step.command)
        .replace(str(work), ".")
        .replace(str(peers.venv), "peers")
        .replace(f"{ROOT}/", "")
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
        machine=describe_machine(work),
        versions=peers.versions(),
        commands={name: _short(command) for name, command in commands.items()},
        load=(before, load()),
        skipped=workload.skipped,
        unit=workload.unit,
        per=workload.per,
    )


def _short(command: str) -> str:
    """A command without the folders of this Python, and without the text of a `-c` program."""
    plain = command.replace(sys.executable, "python").replace(f"{sys.base_prefix}/bin/", "")
    head, separator, _ = plain.partition(" -c 'import")
    return f"{head} -c ..." if separator else head


def _write(folder: Path, results: dict[str, Result], peers: Peers) -> None:
    """Adds results to the page, the samples and the plots of a folder."""
    samples = folder / "benchmarks/results.json"
    together = {**read_results(samples), **results}
    write_results(samples, together)
    (folder / "benchmarks.md").write_text(page(together))
    plot = Path(__file__).with_name("plot.py")
    command = [peers.command("python"), str(plot), str(samples), str(samples.parent)]
    subprocess.run(command, check=True)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
