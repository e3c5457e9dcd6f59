"""What needs two GPUs: losses over NCCL beside gloo, a rank that is killed, one that hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.child import runner_command
from runner.errors import StageError

STEPS = 6
HANG_S = 30
"""Without `hang_after` a hang is found after five minutes."""

TOLERANCE = 2e-2
"""Relative: bf16 on GPUs beside float32 on CPUs."""


@dataclass
class Runs:
    """Short runs of the small workload.

    Attributes:
        folder: for run folders.
        bundle: its folder.
        run_file: of the workload.
        ranks: one per GPU, at least two.
    """

    folder: Path
    bundle: Path
    run_file: Path
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

    def killed_rank(self, limit_s: float) -> dict[str, Any]:
        """Kills a rank while it trains: the run must end with 5 and name it."""
        return self._disturbed("killed", signal.SIGKILL, limit_s)

    def stopped_rank(self, limit_s: float) -> dict[str, Any]:
        """Stops a rank (SIGSTOP): the hang must be found, and the run end with 5."""
        return self._disturbed("stopped", signal.SIGSTOP, limit_s)

    def _disturbed(self, name: str, number: signal.Signals, limit_s: float) -> dict[str, Any]:
        more = ("--set", "steps=100000", "--set", f"hang_after={HANG_S}")
        process, output = self._start(name, {}, more)
        metrics = output / "metrics.jsonl"
        began = time.monotonic()
        _wait_for(
            lambda: metrics.exists() and '"loss"' in metrics.read_text(), process, limit_s / 2
        )
        victim = _rank_process(output, 1)
        os.kill(victim, number)
        disturbed = time.monotonic()
        try:
            process.wait(max(1.0, limit_s - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            raise StageError(
                f"it did not end in {limit_s:.0f} s.", f"ls {output}/logs", 1
            ) from None
        finally:
            if number is signal.SIGSTOP:
                _kill_quietly(victim)
        if process.returncode != 5:
            raise StageError(f"exit code {process.returncode}, not 5.", f"ls {output}/logs", 1)
        return {"exit code": 5, "found after s": time.monotonic() - disturbed}

    def _losses(self, name: str, environ: dict[str, str], limit_s: float) -> list[float]:
        process, output = self._start(name, environ, ("--set", f"steps={STEPS}"))
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise StageError(f"{name}: not done in {limit_s:.0f} s.", f"ls {output}", 1) from None
        if code:
            raise StageError(f"{name}: exit code {code}.", f"less {output}.log", 1)
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def _start(
        self, name: str, environ: dict[str, str], more: tuple[str, ...]
    ) -> tuple[subprocess.Popen[bytes], Path]:
        output = self.folder / f"several-{name}"
        shutil.rmtree(output, ignore_errors=True)  # of a call whose minutes were over
        command = runner_command(
            "train", str(self.run_file), "--bundle", str(self.bundle), "--output", str(output),
            "--processes", str(self.ranks), "--set", "engine.name=ddp",
            "--set", f"batch.global={4 * self.ranks}", "--set", "batch.micro=2", *more,
        )  # fmt: skip
        with open(f"{output}.log", "wb") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **environ}, stdout=log, stderr=subprocess.STDOUT
            )
        return process, output


def _wait_for(done: Callable[[], bool], process: subprocess.Popen[bytes], limit_s: float) -> None:
    ends = time.monotonic() + limit_s
    while not done():
        if process.poll() is not None:
            raise StageError(f"it ended before its first step, with {process.returncode}.", "", 1)
        if time.monotonic() > ends:
            process.kill()
            raise StageError(f"no step in {limit_s:.0f} s.", "", 1)
        time.sleep(0.2)


def _rank_process(output: Path, rank: int) -> int:
    """The process id of a rank on this machine: the process with RANK in its environment."""
    wanted = {f"RANK={rank}".encode()}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = set((folder / "environ").read_bytes().split(b"\0"))
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted <= variables and str(output).encode() in words:
            return int(folder.name)
    raise StageError(f"rank {rank} has no process here.", "", 1)


def _kill_quietly(number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)
