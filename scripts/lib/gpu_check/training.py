"""Memory and speed of training: `runner bench`, and transformers' Trainer on the same text."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.child import runner_command
from runner.from_stage import StageError
from runner.training.faults import is_out_of_memory
from scripts.lib.gpu_check.limited import run_limited
from scripts.lib.gpu_check.materials import TEXTS, Workload

COMPARED = ("ddp", "zero2", "zero3", "fsdp-full")
STEPS = 10
PEERS = Path(__file__).parents[1] / "bench" / "workloads" / "training_peers.py"


@dataclass
class Training:
    """Trials of one workload.

    Attributes:
        folder: holds the bundle and the run file; for run folders.
        workload: the model.
        ranks: one per GPU.
    """

    folder: Path
    workload: Workload
    ranks: int

    def bench(self, strategy: str, limit_s: float) -> dict[str, Any]:
        """Searches the largest micro batch with `runner bench`; the fastest trial.

        Raises:
            StageError: no trial fits.
        """
        name = self.workload.name
        results = self.folder / f"{name}-{strategy}"
        command = runner_command(
            "bench", f"{name}.yaml", "--bundle", "bundle", "--output", str(results),
            "--processes", str(self.ranks), "--strategies", strategy, "--steps", str(STEPS),
            "--largest", str(self.workload.largest),
        )  # fmt: skip
        log = self.folder / f"bench-{name}-{strategy}.log"
        code = run_limited(command, log, limit_s, cwd=self.folder, environ=os.environ)
        if code != 0:
            raise StageError(f"runner bench: {_end(code, limit_s)}.", f"less {log}", 1)
        (found,) = json.loads((results / "results.json").read_text())["strategies"]
        trials = [trial for trial in found["trials"] if trial["outcome"] == "fits"]
        best = max(trials, key=lambda trial: float(trial["tokens_per_s"]))
        return {key: best[key] for key in ("micro", "tokens_per_s", "step_s", "memory_gib", "mfu")}

    def trainer(self, precision: str, limit_s: float) -> dict[str, Any]:
        """Runs transformers' Trainer, one rank per GPU, with the largest micro batch that fits.

        Args:
            precision: `bf16` or `fp16`.
            limit_s: the most seconds for all its tries.

        Raises:
            StageError: it did not run.
        """
        ends, name = time.monotonic() + limit_s, self.workload.name
        answer, log = (self.folder / f"trainer-{name}.{end}" for end in ("answer", "log"))
        settings = {
            "answer": str(answer), "length": self.workload.length, "model": name,
            "precision": precision, "steps": STEPS, "task": self.workload.task, "texts": TEXTS,
            "unit": 1,
        }  # fmt: skip
        micro = self.workload.largest
        while micro:
            path = self.folder / f"trainer-{name}.json"
            path.write_text(json.dumps({**settings, "batch": micro}))
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc_per_node={self.ranks}", str(PEERS), "trainer", str(path),
            ]  # fmt: skip
            left = ends - time.monotonic()
            code = run_limited(command, log, left, cwd=self.folder, environ=os.environ)
            if code == 0:
                speed = 1 / json.loads(answer.read_text())["seconds"]
                return {"micro": micro, "tokens_per_s": speed}
            if not is_out_of_memory(RuntimeError(log.read_text(errors="replace"))):
                raise StageError(f"Trainer: {_end(code, left)}.", f"less {log}", 1)
            micro //= 2
        return {"does not fit": True}


def _end(code: int | None, limit_s: float) -> str:
    return f"not done in {limit_s:.0f} s" if code is None else f"exit code {code}"
