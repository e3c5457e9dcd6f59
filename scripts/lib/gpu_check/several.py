"""What needs two GPUs: losses over NCCL beside gloo, a rank that is killed, one that hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from runner.child import runner_command
from runner.from_stage import StageError
from scripts.lib.gpu_check.limited import run_limited

HANG_S = 30
"""Without `hang_after` a hang is found after five minutes."""

TOLERANCE = 2e-2
"""Relative: bf16 on GPUs beside float32 on CPUs."""


@dataclass
class Runs:
    """Short runs of the small workload.

    Attributes:
        folder: holds the bundle; for run folders.
        name: of the workload.
        ranks: one per GPU, at least two.
    """

    folder: Path
    name: str
    ranks: int

    def losses(self, limit_s: float) -> dict[str, Any]:
        """Trains the same steps over NCCL on GPUs and over gloo on CPUs.

        Raises:
            StageError: the losses differ, or a run failed.
        """
        over_gloo = self._losses("gloo", {"CUDA_VISIBLE_DEVICES": ""}, limit_s / 2)
        over_nccl = self._losses("nccl", {}, limit_s / 2)
        worst = max(abs(a - b) / abs(b) for a, b in zip(over_nccl, over_gloo, strict=True))
        if worst > TOLERANCE:
            raise StageError(f"losses over NCCL {over_nccl}, over gloo {over_gloo}.", "", 1)
        return {"largest relative difference": worst, "losses": over_nccl}

    def _losses(self, backend: str, more: dict[str, str], limit_s: float) -> list[float]:
        command, output = self._command(backend, "--set", "steps=6")
        log = output.with_suffix(".log")
        code = run_limited(command, log, limit_s, cwd=self.folder, environ={**os.environ, **more})
        if code != 0:
            raise StageError(f"{backend}: exit code {code}.", f"less {log}", 1)
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def disturbed(self, number: signal.Signals, limit_s: float) -> dict[str, Any]:
        """Kills a rank while it trains, or stops it: the run must end with 5.

        Args:
            number: SIGKILL, or SIGSTOP: the hang must be found.
            limit_s: the most seconds it may take.

        Raises:
            StageError: it did not.
        """
        command, output = self._command(
            number.name, "--set", "steps=100000", "--set", f"hang_after={HANG_S}"
        )
        ends, metrics, victim = time.monotonic() + limit_s, output / "metrics.jsonl", 0
        with open(output.with_suffix(".log"), "wb") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        try:
            while not (metrics.exists() and '"loss"' in metrics.read_text()):
                if process.poll() is not None or time.monotonic() > ends:
                    raise StageError("it came to no step.", f"less {log.name}", 1)
                time.sleep(0.2)
            victim = _rank_process(output, 1)
            os.kill(victim, number)
            disturbed = time.monotonic()
            code = process.wait(max(1.0, ends - disturbed))
        except subprocess.TimeoutExpired:
            raise StageError(f"no end in {limit_s:.0f} s.", f"less {log.name}", 1) from None
        finally:
            process.kill()
            if victim:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        if code != 5:
            raise StageError(f"exit code {code}, not 5.", f"less {log.name}", 1)
        return {"exit code": 5, "found after s": time.monotonic() - disturbed}

    def _command(self, name: str, *more: str) -> tuple[list[str], Path]:
        """The command of a run, and its run folder, which is empty."""
        output = self.folder / f"several-{name}"
        shutil.rmtree(output, ignore_errors=True)  # of a call whose minutes were over
        command = runner_command(
            "train", f"{self.name}.yaml", "--bundle", "bundle", "--output", str(output),
            "--processes", str(self.ranks), "--set", "engine.name=ddp",
            "--set", f"batch.global={4 * self.ranks}", "--set", "batch.micro=2", *more,
        )  # fmt: skip
        return command, output


def _rank_process(output: Path, rank: int) -> int:
    """The process id of a rank on this machine: the process with RANK in its environment."""
    for process in psutil.process_iter(["environ", "cmdline"]):
        variables, words = process.info["environ"] or {}, process.info["cmdline"] or []
        if variables.get("RANK") == str(rank) and str(output) in words:
            return int(process.pid)
    raise StageError(f"rank {rank} has no process here.", "", 1)
