"""`scripts/gpu-check OUT [--minutes N]`: runs the items in order and writes after each."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runner.child import in_child
from runner.from_stage import StageError, __version__
from runner.trials.children import run_kernels
from scripts.lib.gpu_check import device
from scripts.lib.gpu_check.limited import run_limited
from scripts.lib.gpu_check.materials import LARGE, SMALL, make_bundle
from scripts.lib.gpu_check.record import Item, Record
from scripts.lib.gpu_check.several import Runs
from scripts.lib.gpu_check.training import COMPARED, Training

ROOT = Path(__file__).resolve().parents[3]
LEAST_S = 20.0
"""An item is not begun with less time than this."""

Work = Callable[[float], object]


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
        machine = _in_child(device.software) | {"airlift": __version__}
        machine |= {name: version(name) for name in ("deepspeed", "transformers")}
        if not machine["devices"] and not arguments.dry_run:
            print("error: torch sees no GPU here.\n  -> nvidia-smi; or --dry-run", file=sys.stderr)
            return 2
        record = Record(out, {**machine, "dry run": arguments.dry_run})
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for name, work in _items(out, machine, arguments.dry_run):
        if record.is_done(name):
            print(f"{name}: has a result")
            continue
        left = ends - time.monotonic()
        if left < LEAST_S:
            record.put(Item(name, "not run", note="no time left: run it again"))
            continue
        print(f"{name} ...", flush=True)
        item = _run(name, work, left)
        record.put(item)
        print(f"  {item.status} ({item.seconds:.0f} s) {item.note}{item.values or ''}", flush=True)
    states = [item.status for item in record.items.values()]
    print(f"written: {record.path}")
    return 1 if "failed" in states else 5 if "not run" in states else 0


def _items(out: Path, machine: dict[str, Any], dry_run: bool) -> Iterator[tuple[str, Work]]:
    """All items, the most wanted ones first."""
    work, devices = out / "work", machine["devices"]
    yield "node", lambda _: device.node()
    yield "kernels", lambda _: _in_child(run_kernels)
    yield "tests", partial(_run_tests, out, dry_run)
    workloads = SMALL if dry_run else LARGE
    yield "materials", lambda _: make_bundle(work, workloads)
    for workload in workloads:
        training = Training(work, workload, devices or 1)
        for strategy in COMPARED:
            yield f"bench {workload.name} {strategy}", partial(training.bench, strategy)
        precision = "bf16" if float(machine.get("capability", 8)) >= 8 else "fp16"
        yield f"Trainer {workload.name}", partial(training.trainer, precision)
    if devices > 1 or dry_run:
        runs = Runs(work, workloads[0].name, max(2, devices))
        if not dry_run:  # both would be gloo
            yield "nccl beside gloo", runs.losses
        yield "killed rank", partial(runs.disturbed, signal.SIGKILL)
        yield "stopped rank", partial(runs.disturbed, signal.SIGSTOP)


def _in_child(work: Callable[[], Any]) -> Any:
    """Calls it in a child process: a device that fails ends only the child."""
    return in_child(work, (), "asking torch for its devices", "See above.")


def _run(name: str, work: Work, limit_s: float) -> Item:
    """Runs one item. A failure is a result, not an end; to be cut at the end is none."""
    began = time.monotonic()
    try:
        found = work(limit_s)
    except StageError as error:
        note = str(error)
    except Exception as error:  # noqa: BLE001 - the items behind it are wanted all the same
        traceback.print_exc()
        note = f"{type(error).__name__}: {error}"
    else:
        values = found if isinstance(found, dict) else {"found": str(found)}
        return Item(name, "ok", time.monotonic() - began, values)
    seconds = time.monotonic() - began
    if seconds > limit_s - 1:
        return Item(name, "not run", seconds, note="cut at the end of the minutes")
    return Item(name, "failed", seconds, note=note)


def _run_tests(out: Path, on_cpu: bool, limit_s: float) -> dict[str, Any]:
    """Runs tests/gpu; the last line of pytest.

    Raises:
        StageError: a test failed, or they did not run.
    """
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-n", "0", "-q", "-rs"]
    log = out / "tests.log"
    environ = {**os.environ, **({"AIRLIFT_GPU_TESTS_ON_CPU": "1"} if on_cpu else {})}
    code = run_limited(
        [*command, "-p", "no:cacheprovider"], log, limit_s, cwd=ROOT, environ=environ
    )
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    if code != 0:
        raise StageError(f"tests/gpu: {last}", f"less {log}", 1)
    return {"pytest": last}


if __name__ == "__main__":
    sys.exit(main())
