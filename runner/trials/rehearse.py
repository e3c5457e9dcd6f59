"""A rehearsal: check, cut, prepare, two starts of two ranks, and the exported model.

Its folder is beside the run folder, on the same disk, and gone afterwards (`hidden_folder`).

What ends a stage is the error of the run itself, with the remedy that the run would print.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner import offline
from runner.child import in_child
from runner.config.run_config import RunConfig
from runner.errors import FULL_DISK
from runner.from_stage import (
    IncompleteError,
    StageError,
    UsageError,
    human_count,
    human_size,
)
from runner.inputs import ModelInput, running_tree
from runner.job.check import check_run
from runner.job.findings import in_order, raise_errors
from runner.job.installed import check_fsdp, check_installed, leave_torch_alone, to_train
from runner.job.run import Asked, Run
from runner.job.shapes import Device
from runner.job.training_run import TrainingRun
from runner.launch.ranks import Start
from runner.launch.resolved import Resolved
from runner.launch.train import prepare_offline, set_up
from runner.processes import is_alive
from runner.run_folder.heartbeat import read_failures
from runner.run_folder.layout import read_metrics
from runner.slurm.jobs import clean
from runner.trials.apart import start_apart
from runner.trials.small_run import (
    LEAST,
    RANKS,
    SmallRun,
    counted,
    cut,
    memory_here,
    memory_needed,
    number_of_layers,
    small_run,
    with_rows,
    write_small_model,
)

Say = Callable[[str], None]


LAST_LINES = 15


LOG = "ranks.log"


STARTS = ("train", "resume")
"""The ranks are started twice: each makes a step, evaluates, saves and exports."""


MORE_ROWS, MOST_ROWS = 16, 256
"""The first rows can be shorter than the others, or too long for a sample: then 16 times as many
are read, and again.
"""


_MEMORY = "Try a machine with more memory; -9 is often too little of it."


def rehearse(run: TrainingRun, environ: Mapping[str, str], stages: Stages) -> None:
    """Rehearses a run on this machine's CPU.

    Args:
        run: the user's.
        environ: the environment variables.
        stages: where each stage is noted.

    Raises:
        StageError: the run would fail; says in which stage.
    """
    set_up(os.environ, stages.say)
    check_installed(run.config, run.inputs, to_train(run.config), "a rehearsal")
    _check_engine(run.config)
    if note := _other_packages(run):
        stages.say(f"note: {note}")
    with stages.of("check") as stage:
        device, ranks = _examine(run, environ, stages.say)
        stage.words = f"as `runner check`, for {human_count(ranks, 'rank')}, as in the job"
    zero = counted(run).on(device, ranks).plan.zero if device is not None else None
    try:
        with hidden_folder(run.folder.root) as hidden:
            _in_folder(run, hidden, zero, environ, stages)
    except OSError as error:
        raise _no_folder(error, run) from None


def _check_engine(config: RunConfig) -> None:
    """Refuses a rehearsal that this torch cannot do on a CPU, while the run itself may work.

    Raises:
        UsageError: it cannot.
    """
    try:
        check_fsdp(config, "cpu")
    except UsageError as error:
        raise UsageError(
            f"{error.message.rstrip('.')}. Only the rehearsal needs that: the run may work on "
            "GPUs.",
            "Rehearse with a newer torch; or try the nodes: runner rehearse ... --job",
        ) from None


def _other_packages(run: TrainingRun) -> str:
    """That the job runs other packages than this process; empty: it does not."""
    environment = run.inputs.environment
    if environment is not None and running_tree() != environment.tree:
        what = f"the environment `{environment.asset}` of the bundle"
    elif run.config.slurm.around_ranks:
        what = "what slurm.srun and slurm.container bring"
    else:
        return ""
    return f"rehearsed with the packages of {sys.prefix}; the job runs {what}"


def _examine(run: TrainingRun, environ: Mapping[str, str], say: Say) -> tuple[Device | None, int]:
    """Checks the whole run, as it is; returns the device of a rank in its job, and the ranks."""
    run = replace(run, asked=Asked(), environ=environ)
    found = check_run(run)
    raise_errors(found)
    for finding in in_order(found):
        if not finding.is_line:
            say(str(finding))
    return run.known(Run.device), run.ranks.world_size


def _in_folder(
    run: TrainingRun, hidden: Path, zero: int | None, environ: Mapping[str, str], stages: Stages
) -> None:
    with stages.of("model") as stage:
        model, stage.words = _small_model(run, hidden)
        small = small_run(run, hidden, model, zero)
        _check_memory(small.run, environ)
    with stages.of("data") as stage:
        small, stage.words = _prepare(run, small)
    for choice in small.changes:
        stages.say(f"  {choice.key}: {choice.value}  ({choice.reason})")
    small.run.folder.make()
    for steps, name in enumerate(STARTS, start=1):
        with stages.of(name) as stage:
            stage.words = _train(run, small.run, steps, environ)
    with stages.of("load back") as stage:
        stage.words = in_child(_load_export, (small.run,), "loading the exported model", _MEMORY)


def _small_model(run: TrainingRun, hidden: Path) -> tuple[ModelInput, str]:
    """The model that is rehearsed, and how much of the whole one it has."""
    config, whole = run.config, run.inputs.model
    small = cut(whole.settings)
    if small is None:
        of = number_of_layers(whole.settings)
        why = (
            f"it has {human_count(of, 'layer')}" if of else "config.json names no number of layers"
        )
        return whole, f"the whole model  ({why})"
    source = None if config.model.init == "scratch" else config.model.folder or whole.path
    model = write_small_model(whole, small, hidden / "model", source)
    if problem := _config_problem(model.path):
        why = f"transformers does not read it with fewer layers: {problem}"
        return whole, f"the whole model  ({why})"
    why = "all widths as they are"
    if small.layers > LEAST:
        why += "; fewer would not show each kind of layer"
    return model, f"{small.layers} of {small.of} layers  ({why})"


def _check_memory(small: TrainingRun, environ: Mapping[str, str]) -> None:
    """Refuses a rehearsal that this machine's free memory does not hold.

    Raises:
        IncompleteError: it does not.
    """
    free, needed = memory_here(environ), memory_needed(small)
    if needed > free:
        raise IncompleteError(
            f"{small.config.path}: a rehearsal of `{small.config.model.asset}` needs "
            f"{human_size(needed)} of memory, and {human_size(free)} are free here.",
            "Rehearse on a machine with more memory, or in an allocation: salloc, then "
            "srun --pty runner rehearse ...",
        )


def _config_problem(folder: Path) -> str:
    """Why transformers, without torch, does not read a config.json; empty: it does."""
    leave_torch_alone()
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # noqa: BLE001 - whatever the model's own class raises
        return str(error).strip().partition("\n")[0]
    return ""


def _load_export(run: TrainingRun) -> str:
    from runner.trials.children import load_export

    return load_export(run)


def _prepare(run: TrainingRun, small: SmallRun) -> tuple[SmallRun, str]:
    """Prepares enough rows of the data, in a child process without network.

    Returns:
        The run with as many rows as were enough; and what was prepared.

    Raises:
        StageError: as for `runner prepare`; or the tokenizer fails.
    """
    reads, limited = 1, with_rows(small, 1)
    while True:
        try:
            words = in_child(_prepare_offline, (run, limited.run), "preparing the data", _MEMORY)
            return limited, words
        except UsageError:
            reads *= MORE_ROWS
            more = with_rows(small, reads)
            if reads > MOST_ROWS or more.changes == limited.changes:  # all rows were read
                raise
            limited = more


def _prepare_offline(run: TrainingRun, small: TrainingRun) -> str:
    printed: list[str] = []
    try:
        prepare_offline(small, printed.append)
    except StageError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises
        raise _not_encoded(run, error) from None
    # What `prepare` prints, without the rehearsal's paths.
    return "; ".join(line.partition(" (")[0].replace("prepared ", "") for line in printed)


def _not_encoded(run: TrainingRun, error: Exception) -> StageError:
    return StageError(
        f"the rows cannot be prepared for `{run.config.model.asset}`: "
        f"{type(error).__name__}: {error}",
        "Stage the tokenizer's files that belong to this model, with the version of tokenizers "
        "that is installed here.",
        exit_code=1,
    )


def _train(run: TrainingRun, small: TrainingRun, steps: int, environ: Mapping[str, str]) -> str:
    """Starts the ranks once, which train up to a step, save and export, as in any training.

    Returns:
        What they did.

    Raises:
        StageError: a rank failed; as the run itself would print it.
    """
    hidden, folder = small.folder.root.parent, small.folder
    resolved = Resolved.of(replace(small, config=replace(small.config, steps=steps)))
    variables = {**clean(environ), **offline.VARIABLES, "CUDA_VISIBLE_DEVICES": ""}
    code = start_apart(resolved, "train", Start(RANKS), hidden / LOG, variables)
    if code:
        raise _failure(run, small, code)
    lines = list(read_metrics(folder.metrics))
    found = {key: value for line in lines for key, value in line.items() if "loss" in key}
    said = [f"{key.replace('_', ' ')} {value:.4g}" for key, value in found.items()]
    if steps == 1:
        files = (path for path in folder.checkpoints.rglob("*") if path.is_file())
        return f"{', '.join(said)}; step-1, {human_size(sum(f.stat().st_size for f in files))}"
    if not any("resumed from step-1" in line for line in _tail(hidden / LOG)):
        raise StageError(
            "it did not resume from step 1.",
            "Rehearse again; if it ends the same way, report it with this message.",
            exit_code=1,
        )
    names = ", ".join(sorted(path.name for path in folder.model.iterdir()))
    return f"from step-1; {', '.join(said)}; {names}"


def _failure(run: TrainingRun, small: TrainingRun, code: int) -> StageError:
    """The error of the rank that failed first, as the run itself would print it."""
    hidden = small.folder.root.parent
    first = next(iter(read_failures(small.folder.logs)), None)
    shown = _tail(hidden / LOG) if first is None else first.text.strip().splitlines()
    if first is None:
        text, remedy = f"the ranks ended with {code}: {shown[-1] if shown else 'no word'}", _MEMORY
    else:
        (text, remedy), code = first.message_and_remedy(), first.code
    if first is None or not first.text.startswith("error: "):
        print("\n".join(shown[-LAST_LINES:]), file=sys.stderr)
        remedy = remedy or "The run would end there too; the lines above show where."
    for theirs, ours in ((small.folder.root, run.folder.root), (hidden, run.folder.root.parent)):
        text, remedy = (part.replace(str(theirs), str(ours)) for part in (text, remedy))
    return StageError(text, remedy, exit_code=code if 0 < code <= 5 else 1)


def _tail(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return []


def _no_folder(error: OSError, run: TrainingRun) -> StageError:
    """The error of a disk on which the rehearsal's own files cannot be written."""
    path = Path(os.fsdecode(error.filename)) if error.filename else run.folder.root.parent
    remedy = "Choose an --output in a folder of yours"
    if error.errno in FULL_DISK:
        remedy = "Free space or quota there, or choose another --output"
    return IncompleteError(f"rehearsal: {path}: {error.strerror or error}.", f"{remedy}.")


@dataclass
class Stage:
    """A stage under way; its words are printed when it has ended."""

    words: str = ""


@dataclass
class Stages:
    """All stages so far. Each is printed when it ends.

    Attributes:
        say: prints a line.
        names: of those that have ended.
    """

    say: Say
    names: list[str] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the first stage began."""
        return time.monotonic() - self._began

    def end(self, name: str, words: str = "") -> None:
        """Notes that a stage has ended, which began when the one before ended."""
        now = time.monotonic()
        self.say(f"  {name:<9} {now - self._since:6.1f} s  {words}".rstrip())
        self.names.append(name)
        self._since = now

    @contextmanager
    def of(self, name: str) -> Iterator[Stage]:
        """A stage that ends with the block; an error says in which stage it was.

        Raises:
            StageError: the block raised it.
        """
        stage = Stage()
        try:
            yield stage
        except StageError as error:
            said = f"rehearsal, {name}: {error.message}"
            found = type(error)(said, error.remedy, error.exit_code)
            found.parts = error.parts
            raise found from None
        self.end(name, stage.words)


TRIES, PAUSE_S = 50, 0.1
"""Ranks that are being killed may still write for a moment."""


@contextmanager
def hidden_folder(run_folder: Path) -> Iterator[Path]:
    """Makes a folder beside the run folder, and removes it however the block ends.

    Folders above it that had to be made are removed too, and what killed rehearsals left.

    Args:
        run_folder: need not exist.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f".{run_folder.name}.rehearsal-{platform.node()}-"
    _remove_abandoned(run_folder.parent, prefix)
    folder = run_folder.parent / f"{prefix}{os.getpid()}"
    made = [above for above in folder.parents if not above.exists()]
    try:
        folder.mkdir(mode=0o700, parents=True)
        yield folder
    finally:
        _remove(folder)
        for above in made:  # the innermost first
            with suppress(OSError):  # something else is in it now
                above.rmdir()


def _remove(folder: Path) -> None:
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(PAUSE_S)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what rehearsals of this machine left that were killed."""
    for left in parent.glob(f"{prefix}*"):
        process = left.name.removeprefix(prefix)
        if process.isdecimal() and not is_alive(int(process)):
            _remove(left)
