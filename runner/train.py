"""`runner train` and `runner prepare`: from a run file to ranks at work.

The same command is a launcher and, started again by itself or by srun, a rank. The launcher checks, prepares the data
and writes the run folder; the rank trains. So whoever calls it how, the heavy work is done once and outside the ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from runner import devices, launch, node_local, offline, preflight
from runner import inputs as inputs_module
from runner.batch import tasks_per_node
from runner.config import RunConfig
from runner.data.prepare import check_together, is_prepared, prepare
from runner.data.recipe import Recipe, recipes
from runner.decisions import listed, told
from runner.errors import LostPeerError, StageError, UsageError
from runner.history import is_finished
from runner.holder import Holder, holder_of, holding
from runner.inputs import Inputs
from runner.plan import sequence_length
from runner.ranks import RANK_FLAG, die_with
from runner.records import RunFolder
from runner.shapes import Device, ModelShape
from runner.slurm import SlurmJobEnvironment
from runner.vitals import Vitals
from runner.without_torch import leave_torch_alone


@dataclass(frozen=True)
class Run:
    """A run file with what it names, found."""

    config: RunConfig
    inputs: Inputs
    folder: RunFolder
    bundle: Path
    overrides: tuple[str, ...]

    @staticmethod
    def load(run_file: Path, bundle: Path, output: Path | None, overrides: Sequence[str]) -> Run:
        """Reads the run file and resolves its assets.

        Raises:
            UsageError, DamageError: as for `RunConfig.load` and `inputs.resolve`; a run folder inside the bundle.
        """
        config = RunConfig.load(run_file, overrides)
        inputs = inputs_module.resolve(config, bundle)
        folder = RunFolder((output or Path("output") / config.name).absolute())
        inputs_module.refuse_inside(folder.root, inputs.bundle)
        return Run(config, inputs, folder, bundle, tuple(overrides))

    def check(self, world_size: int | None, say: Callable[[str], None], device: Device | None = None) -> None:
        """Refuses what cannot work."""
        for line in preflight.check(self.config, self.inputs, self.folder, world_size, device):
            say(line)
        if self.config.environment is not None and self.inputs.environment is not None:
            say(node_local.foresee(self.config.environment.node_local, self.inputs.environment))

    def held(self, environ: Mapping[str, str]) -> list[str]:
        """A line on who trains in the run folder now; empty where nobody does."""
        holder = holder_of(self.folder, Holder.me(environ))
        return [f"{self.folder.root}: {holder.in_words} trains there now; `train` would be refused"] if holder else []

    def finished(self) -> list[str]:
        """A line that says so, where this run has done all that is asked of it; else empty."""
        said = is_finished(self.folder, self.config)
        return [f"{self.folder.root}: {said}"] if said else []

    def write_config(self) -> None:
        """The run file as it was understood, into the run folder; in comments, what of it nobody chose."""
        text = f"{self.config.to_yaml()}{listed(self.config.explain())}"
        self.folder.config.write_text(text, encoding="utf-8")


def refuse_finished(runs: Sequence[Run]) -> None:
    """Refuses to queue what has nothing left to do.

    Raises:
        UsageError: all of them are finished; with the ways on.
    """
    said = [line for run in runs for line in run.finished()]
    if len(said) == len(runs):
        raise UsageError(
            f"{'; '.join(said)}.",
            "Ask for more steps or epochs, and it goes on; or begin anew: another name or --output. To have the model "
            "exported again, remove model/ first.",
        )


def train(run: Run, processes: int | None, *, dry_run: bool, environ: Mapping[str, str]) -> int:
    """Trains, as whatever this process is. Returns the exit code.

    Raises:
        StageError: before anything is launched.
    """
    offline.set_variables(os.environ)
    role = launch.role(environ, processes)
    if role == "rank":
        return _be_a_rank(run, environ)
    num_local = processes or 1
    print(f"{run.config.path}: {run.config.name}, bundle {run.inputs.bundle_id[:12]}, run folder {run.folder.root}")
    run.check(world_size(role, num_local, environ), print, _device(run, role, num_local, environ))
    _explain(run, "" if dry_run else f" (one a line in {run.folder.config})")
    if dry_run:
        for line in run.held(environ):
            print(line)
        print("dry run: nothing was started")
        return 0
    if finished := run.finished():
        print("\n".join(finished))
        return 0
    run.folder.make()
    with holding(run.folder, environ):
        return _launch(run, role, num_local, environ)


def _launch(run: Run, role: str, num_local: int, environ: Mapping[str, str]) -> int:
    prepare_behind_wall(run)
    run.write_config()
    offline.set_cache_folders(os.environ)
    prefix = _environment_for_ranks(run, role, environ)
    argv = launch.runner_command(
        "train", str(run.config.path), "--bundle", str(run.bundle.absolute()), "--output", str(run.folder.root),
        *(word for override in run.overrides for word in ("--set", override)), prefix=prefix,
    )  # fmt: skip
    hang_after_s = None if run.config.hang_after == "auto" else run.config.hang_after
    if role == "batch":
        argv = [*run.config.slurm.container, *argv]
        return launch.run_batch(argv, run.folder.root, hang_after_s=hang_after_s)
    return launch.run_local(argv, num_local, run.folder.root, hang_after_s=hang_after_s)


def _environment_for_ranks(run: Run, role: str, environ: Mapping[str, str]) -> Path | None:
    """The prefix that the ranks run from, on their nodes; None: what runs this.

    Raises:
        StageError: they would run another environment than the run file asks for.
    """
    wanted, environment = run.config.environment, run.inputs.environment
    if wanted is None or environment is None:
        return None
    if role == "batch":
        return node_local.arrange(wanted.node_local, environment, environ, print)
    node_local.require_running(environment)
    return None


def prepare_behind_wall(run: Run) -> None:
    """Makes the stores in a child process that cannot open an internet socket; instant if they are there.

    Raises:
        StageError: what the child met.
    """
    length, _ = sequence_length(run.config, ModelShape.of(run.inputs.model.settings, None))
    wanted = recipes(run.config, run.inputs, length)
    if all(is_prepared(recipe, run.folder.stores) for several in wanted.values() for recipe in several):
        _prepare_all(run, wanted)
        return
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_prepare_in_child, args=(run, length, sender, os.getpid()))
    child.start()
    sender.close()
    try:
        problem = receiver.recv()
    except EOFError:
        problem = None
    child.join()
    if isinstance(problem, StageError):
        raise problem
    if child.exitcode != 0:
        raise StageError(
            f"preparing the data ended with {child.exitcode} (see above; -9 is often too little memory).",
            "Run it on a machine with more memory, then train.",
            exit_code=1,
        )


def _prepare_all(run: Run, wanted: Mapping[str, tuple[Recipe, ...]]) -> None:
    check_together(
        {role: [prepare(recipe, run.folder.stores, print) for recipe in several] for role, several in wanted.items()}
    )


def _prepare_in_child(run: Run, length: int, sender: multiprocessing.connection.Connection, launcher: int) -> None:
    die_with(launcher)
    leave_torch_alone()
    if why_not := offline.wall():
        print(f"no network wall round the preparation: {why_not}")
    try:
        _prepare_all(run, recipes(run.config, run.inputs, length))
    except StageError as error:
        sender.send(error)
    except OSError as error:
        sender.send(
            StageError(
                f"{error.filename or run.folder.stores}: {error.strerror}.", "Mend that, then run again.", exit_code=5
            )
        )
    else:
        sender.send(None)


def take_place(folder: RunFolder, environ: Mapping[str, str]) -> tuple[launch.RankEnvironment, Vitals]:
    """What every rank does before torch is imported: shows that it lives, and sets its variables and the tripwire.

    Raises:
        UsageError: as for `launch.rank_environment`.
    """
    place = launch.rank_environment(environ)
    vitals = Vitals(folder.logs, place.rank)
    os.environ.update(place.variables())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    offline.tripwire([place.master_addr])
    return place, vitals


def _be_a_rank(run: Run, environ: Mapping[str, str]) -> int:
    place, vitals = take_place(run.folder, environ)
    # Ranks of somebody else's launcher (torchrun, srun): the first of them stands for all.
    alone = environ.get(RANK_FLAG) != "1" and place.rank == 0
    try:
        from runner.training.start import train as train_rank

        if alone:
            run.folder.make()
        with holding(run.folder, environ) if alone else nullcontext():
            if not run.folder.config.exists():
                run.folder.make()
                if place.rank == 0:
                    run.write_config()
            train_rank(run.config, run.inputs, run.folder, place, vitals)
    except StageError as error:
        _give_up(run.folder, place.rank, vitals, f"error: {error}", error)
    except Exception as error:  # noqa: BLE001 - written down, told by the launcher, and the end of this process
        _give_up(run.folder, place.rank, vitals, traceback.format_exc(), error)
    return 0


def _give_up(folder: RunFolder, rank: int, vitals: Vitals, text: str, error: Exception) -> NoReturn:
    """Leaves the reason for the launcher, which tells the first one once; who was started otherwise tells it here.

    With other ranks waiting or gone, tearing down their C++ threads can hang or abort, and lose the exit code.
    """
    code = error.exit_code if isinstance(error, StageError) else 1
    launched = os.environ.get(RANK_FLAG) == "1"
    try:
        vitals.fail(text, code, consequence=isinstance(error, LostPeerError))
    except OSError:  # the disk that is full is often this one: the launcher finds the words in our output then
        launched = False
    with suppress(OSError):
        sys.stdout.flush()
    if launched:
        with suppress(OSError), open(folder.logs / f"rank-{rank}.log", "a", encoding="utf-8") as log:
            print(text, file=log)
    else:
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
    os._exit(code)


def world_size(role: str, num_local: int, environ: Mapping[str, str]) -> int:
    """How many ranks there will be.

    Raises:
        UsageError: not inside a Slurm job, where one is needed.
    """
    if role == "local":
        return num_local
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        raise UsageError("this is not inside a Slurm job.", "Submit it with `runner submit`.")
    return job.num_nodes * tasks_per_node(job)


def _device(run: Run, role: str, num_local: int, environ: Mapping[str, str]) -> Device | None:
    """The device of a rank on this machine, which in a job is its first node; None: the ranks will see."""
    job = SlurmJobEnvironment.from_environ(environ) if role == "batch" else None
    elsewhere = run.config.environment is not None or (job is not None and run.config.slurm.container)
    return devices.here(tasks_per_node(job) if job else num_local, environ, own_torch=not elsewhere)


def _explain(run: Run, where: str) -> None:
    if lines := told(run.config.explain()):
        print(f"what {run.config.path.name} leaves open, and why it is so{where}:")
        print("\n".join(lines))
    sys.stdout.flush()
