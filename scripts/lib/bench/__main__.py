"""`scripts/bench`: reads the options; prints each table as soon as it is measured."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date
from importlib.metadata import version
from pathlib import Path

from scripts.lib.bench.workload import ROOT, BenchError, Workload, measure
from scripts.lib.bench.workloads.fetching import fetch_workloads
from scripts.lib.bench.workloads.training import training_workloads
from scripts.lib.bench.workloads.verifying import verify_workloads

Part = Callable[[Path], AbstractContextManager[list[Workload]]]
PARTS: dict[str, tuple[Part, ...]] = {
    "stage": (fetch_workloads, verify_workloads),
    "fetch": (fetch_workloads,),
    "verify": (verify_workloads,),
    "runner": (training_workloads,),
}


def main() -> int:
    """Measures, prints, writes each table. Exit code 1: a workload failed; the others went on."""
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument("area", choices=list(PARTS), help="stage: fetch and verify")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "output/scripts-bench", help="default: %(default)s"
    )
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    failed, page = False, folder / "benchmarks.md"
    page.write_text(f"{_machine()}\n")
    for part in PARTS[options.area]:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        print("\n== making files", flush=True)
        with part(work) as workloads:
            for workload in workloads:
                print(f"\n== {workload.title}", flush=True)
                try:
                    text = measure(workload, options.rounds, work)
                except BenchError as error:
                    failed, text = True, f"error: {error}"
                text = f"\n## {workload.title}\n\n{workload.note}\n\n{text}\n"
                print(text, flush=True)
                with page.open("a") as file:
                    file.write(text)
        shutil.rmtree(work)
    print(f"\nwritten: {page}")
    return int(failed)


def _machine() -> str:
    """The facts that a reader needs to judge the numbers."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{date.today()}. {len(os.sched_getaffinity(0))} cores, "
        f"{cpu[1] if cpu else platform.machine()}, {memory:.0f} GiB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}. "
        f"huggingface_hub {version('huggingface_hub')}, bagit {version('bagit')}."
    )


if __name__ == "__main__":
    sys.exit(main())
