"""`scripts/gpu-check OUT [--minutes N]`: runs the items in order and writes after each."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runner.errors import StageError, __version__
from scripts.lib.gpu_check.materials import LARGE, SMALL, Workload, make_bundle
from scripts.lib.gpu_check.node import items as node_items
from scripts.lib.gpu_check.node import measured, run_item
from scripts.lib.gpu_check.record import JSON, MARKDOWN, Item, Record
from scripts.lib.gpu_check.several import Runs
from scripts.lib.gpu_check.suite import run_suite
from scripts.lib.gpu_check.training import COMPARED, Training

PACKAGES = ("deepspeed", "transformers")
LEAST_S = 20.0
"""An item is not begun with less time than this."""


@dataclass(frozen=True)
class Step:
    """An item, and what runs it within a number of seconds."""

    name: str
    work: Callable[[float], dict[str, Any]]


def main() -> int:
    """Runs all items that have no result yet. Exit code 1 if one failed, 5 if time ran out."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check",
        description="Checks this machine's GPUs: facts, tests, memory, speed. Resumable.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of the record")
    parser.add_argument("--minutes", type=float, default=30.0, help="default: %(default)s")
    parser.add_argument(
        "--dry-run", action="store_true", help="small models on the CPU: shows that it works"
    )
    arguments = parser.parse_args()
    ends = time.monotonic() + 60 * arguments.minutes
    out: Path = arguments.out.absolute()
    if arguments.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        machine = measured("software") | {"airlift": __version__}
        machine |= {name: version(name) for name in PACKAGES}
        if not machine["devices"] and not arguments.dry_run:
            print("error: torch sees no GPU here.\n  -> nvidia-smi; or --dry-run", file=sys.stderr)
            return 2
        record = Record(out, {**machine, "dry run": arguments.dry_run})
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for step in _steps(out, machine["devices"], arguments.dry_run):
        if record.is_done(step.name):
            print(f"{step.name}: has a result")
            continue
        left = ends - time.monotonic()
        if left < LEAST_S:
            record.put(Item(step.name, "not run", note="no time left: run it again"))
            continue
        print(f"{step.name} ...", flush=True)
        item = run_item(step.name, lambda step=step, left=left: step.work(left))  # type: ignore[misc]
        if item.status == "failed" and item.seconds > left - 1:
            item = replace(item, status="not run", note="cut at the end of the minutes")
        record.put(item)
        print(f"  {item.status} ({item.seconds:.0f} s) {item.note}", flush=True)
        if step.name == "materials" and item.status != "ok":
            print("no materials: what trains with them is not tried")
            break
    states = [item.status for item in record.items.values()]
    print(f"written: {out / JSON} and {out / MARKDOWN}")
    return 1 if "failed" in states else 5 if "not run" in states else 0


def _steps(out: Path, devices: int, dry_run: bool) -> Iterator[Step]:
    """All items, the most wanted ones first."""
    work = out / "work"
    kind = "cuda" if devices else "cpu"
    for name, look in node_items(os.environ, kind).items():
        yield Step(name, lambda _, look=look: look())  # type: ignore[misc]
    yield Step("tests", lambda left: run_suite(out, on_cpu=dry_run, limit_s=left))
    workloads = SMALL if dry_run else LARGE
    bundle = work / "bundle"
    yield Step("materials", lambda _: _materials(work, workloads))
    ranks = devices or 1
    for workload in workloads:
        yield from _training(Training(work, bundle, workload, ranks, on_gpu=not dry_run))
    if devices > 1 or dry_run:
        runs = Runs(work, bundle, work / f"{workloads[0].name}.yaml", max(2, devices))
        if not dry_run:  # both would be gloo
            yield Step("nccl beside gloo", runs.losses)
        yield Step("killed rank", runs.killed_rank)
        yield Step("stopped rank", runs.stopped_rank)


def _materials(work: Path, workloads: tuple[Workload, ...]) -> dict[str, Any]:
    bundle = make_bundle(work, workloads)
    return {"bundle": str(bundle)}


def _training(training: Training) -> Iterator[Step]:
    name = training.workload.name
    yield Step(f"prepare {name}", lambda _: training.prepare())
    for compiled, how in ((False, "eager"), (True, "compiled")):
        for strategy in COMPARED:
            yield Step(
                f"speed {name} {strategy} {how}",
                lambda left, s=strategy, c=compiled: training.trial(s, compiled=c, limit_s=left),  # type: ignore[misc]
            )
        yield Step(
            f"speed {name} Trainer {how}",
            lambda left, c=compiled: training.trainer(  # type: ignore[misc]
                training.plan("ddp")[0], compiled=c, limit_s=left
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
