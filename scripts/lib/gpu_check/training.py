"""Memory and speed of training: one trial of `runner bench` per strategy, beside Trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.prepare import store_path
from runner.data.recipe import recipes
from runner.data.store import Store, Stores
from runner.errors import StageError, isolated
from runner.job import devices
from runner.job.job import Job
from runner.job.memory import activation_bytes, model_state
from runner.job.plan import decide
from runner.job.shapes import shape_of
from runner.launch.place import Start
from runner.run_folder.layout import RunFolder
from runner.training.out_of_memory import is_out_of_memory
from runner.trials.bench import prepare_trials
from runner.trials.strategies import STRATEGIES
from runner.trials.trial import Bench, run_trial
from scripts.lib.gpu_check.limited import run_limited
from scripts.lib.gpu_check.materials import Workload

COMPARED = ("ddp", "zero2", "zero3", "fsdp-full")
LARGEST = 64  # sequences per micro batch
STEPS = 10


@dataclass
class Training:
    """Trials of one workload.

    Attributes:
        folder: for run folders; the run file is beside the bundle.
        bundle: its folder.
        workload: the model.
        world_size: ranks, one per GPU.
        on_gpu: False in a dry run.
    """

    folder: Path
    bundle: Path
    workload: Workload
    world_size: int
    on_gpu: bool

    def prepare(self) -> dict[str, Any]:
        """Tokenises the text, and saves the same tokens for Trainer."""
        run = self._run()
        num_sequences = prepare_trials(run, Start(self.world_size))
        recipe = recipes(run.config, run.inputs, self.workload.length)["train"][0]
        store = Stores([Store(store_path(recipe, run.folder.stores))])
        count = min(len(store), LARGEST * STEPS)
        np.save(self._tokens, store.rows(range(count)).ids)
        return {"sequences": num_sequences}

    def plan(self, strategy: str) -> tuple[int, float]:
        """What `auto` means for a strategy.

        Returns:
            The micro batch, and the GiB that a rank is planned to need with it.

        Raises:
            StageError: the driver does not answer.
        """
        sets = [f"engine={STRATEGIES[strategy]}", f"batch.global={LARGEST * self.world_size}"]
        run = self._run(sets)
        device = devices.here(self.world_size, os.environ)
        if device is None:
            raise StageError("the driver of the GPU does not answer.", "nvidia-smi", 1)
        shape = shape_of(run.config, run.inputs.model)
        plan = decide(run.config, shape, device, self.world_size)
        decided = replace(run.config, precision=plan.precision)  # type: ignore[arg-type]
        fixed, each = activation_bytes(decided, shape, plan.sequence_length, plan.zero)
        state = model_state(decided, shape, plan.zero, self.world_size, plan.offload)
        return plan.micro, (state + fixed + each * plan.micro) / 2**30

    def trial(self, strategy: str, *, compiled: bool, limit_s: float) -> dict[str, Any]:
        """Runs a few steps of `runner train`'s own loop.

        Raises:
            StageError: it did not run; the message has its cause.
        """
        bench = Bench(
            run_file=self._run_file,
            bundle=self.bundle,
            theirs=(f"compile={str(compiled).lower()}",),
            folder=self._results,
            start=Start(self.world_size),
            steps=STEPS,
            memory_gib=None,
            limit_s=limit_s,
        )
        micro, planned_gib = self.plan(strategy)
        found = run_trial(bench, strategy, micro)
        if found.outcome != "fits":
            raise StageError(f"micro {micro}: {found.words}", f"{self._results}", 1)
        values: dict[str, Any] = {
            "micro": micro,
            "tokens/s": found.tokens_per_s,
            "step s": found.step_s,
            "planned GiB": planned_gib,
        }
        if self.on_gpu:
            share = planned_gib / found.memory_gib
            values |= {"peak GiB": found.memory_gib, "planned / peak": share}
        else:  # a process with its libraries: nothing to compare with the plan
            values["resident GiB"] = found.memory_gib
        return values | ({"MFU": found.mfu} if found.mfu is not None else {})

    def trainer(self, micro: int, *, compiled: bool, limit_s: float) -> dict[str, Any]:
        """Runs transformers' Trainer on the same tokens, one rank per GPU.

        That it does not fit is a result.

        Raises:
            StageError: it did not run.
        """
        how = "compiled" if compiled else "eager"
        answer = self.folder / f"trainer-{self.workload.name}-{how}.json"
        answer.unlink(missing_ok=True)
        model = Job.load(self._run_file, self.bundle, None, ()).inputs.model.path
        arguments = [str(model), str(self._tokens), self.workload.task, str(micro), str(STEPS)]
        command = isolated(
            "torch.distributed.run", "--standalone", f"--nproc_per_node={self.world_size}",
            str(Path(__file__).with_name("trainer_peer.py")), *arguments,
            str(compiled), str(answer), str(self.folder / "trainer"),
        )  # fmt: skip
        log = answer.with_suffix(".log")
        code = run_limited(command, log, limit_s, cwd=self.folder, environ=os.environ)
        if code and is_out_of_memory(RuntimeError(log.read_text(errors="replace"))):
            return {"micro": micro, "does not fit": True}
        if code != 0:
            ended = f"not done in {limit_s:.0f} s" if code is None else f"exit code {code}"
            raise StageError(f"Trainer: {ended}.", f"less {log}", 1)
        found: Mapping[str, Any] = json.loads(answer.read_text())
        return dict(found)

    @property
    def _run_file(self) -> Path:
        return self.bundle.with_name(f"{self.workload.name}.yaml")

    @property
    def _results(self) -> Path:
        return self.folder / f"{self.workload.name}-trials"

    @property
    def _tokens(self) -> Path:
        return self.folder / f"{self.workload.name}.npy"

    def _run(self, sets: list[str] | None = None) -> Job:
        run = Job.load(self._run_file, self.bundle, None, sets or [])
        return Job(run.config, run.inputs, RunFolder(self._results), run.bundle, run.overrides)
