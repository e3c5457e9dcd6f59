"""Everything that would end a run, found before a rank starts, without a GPU, in seconds.

`check_everything` is what `train`, `rehearse`, `bench` and `evaluate` ask; `check_ahead`, of
`check` and `submit`, adds what concerns the queue and the job's nodes. Headers, configs and small
files are read here; children ask transformers and the job's own shell meanwhile.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner import kept
from runner.child import Child
from runner.config.explain import choice_lines, of_ds_config
from runner.config.run_config import RunConfig
from runner.config.tasks import task_named
from runner.data.recipe import Recipe, documents_of, recipes
from runner.disks import read_mounts
from runner.errors import (
    DamageError,
    PolicyError,
    StageError,
    UsageError,
    check_libraries,
    human_count,
    human_size,
    join_errors,
    quoted,
)
from runner.inputs import Inputs, check_site, on_site, verification
from runner.inputs.far import profiles
from runner.isolation import isolate
from runner.job import node_local, with_torch, without_torch
from runner.job.access import (
    check_disk,
    check_quota,
    check_readable,
    check_writable,
    disk_needed,
    files_to_read,
    nearest_folder,
)
from runner.job.devices import check_precision_on, leaves_gpus, notes_of_job, torch_without_gpus
from runner.job.findings import FAULTS, Finding, Findings, finding_of
from runner.job.installed import (
    check_environment,
    check_fsdp,
    check_packages,
    check_tools,
    find_tools,
    is_installed,
    is_light,
    lacking,
    note_for_job,
    python_of_ranks,
    to_train,
    why_not_here,
)
from runner.job.job import Job
from runner.job.load_memory import check_at_load
from runner.job.memory import describe_state, state_needed
from runner.job.model import check_files, check_model
from runner.job.places import check_places
from runner.job.plan import (
    DEFAULT_GLOBAL,
    TrainingPlan,
    check_batch,
    decide,
    sequence_length,
    stage_of,
)
from runner.job.resume import check_checkpoint, note_changes
from runner.job.settings import check_accumulation, check_micro, check_settings
from runner.job.shapes import (
    Device,
    ModelShape,
    describe_new_tokens,
    embedding_rows,
    human_parameters,
    shape_of,
    weight_shapes,
)
from runner.job.submit import check as check_request
from runner.job.submit import check_srun, check_start, device_of_job, ranks_on_node, request
from runner.job.surroundings import Attempt
from runner.job.texts import check_data, describe_dataset, examine_step, to_count
from runner.slurm.jobs import over_job
from runner.slurm.script import sbatch_script
from runner.slurm.shell_variables import notes

FORMAT = 1  # of the JSON document


def check_ahead(
    job: Job,
    processes: int | None,
    environ: Mapping[str, str],
    *,
    to_submit: bool = False,
    with_shell: bool = True,
) -> Findings:
    """Finds everything about a run and its job, without submitting it.

    Args:
        processes: the number of ranks to check for; None: as `slurm:` asks for.
        to_submit: `submit` lets Slurm look at the script by itself.
        with_shell: whether the job's shell and its Python are tried, too.
    """
    config, slurm, early = job.config, job.config.slurm, Findings()
    check_site(_path_of_ranks())  # everything else would follow from it
    over = over_job(environ)
    inside = "SLURM_JOB_ID" in environ and over is None
    queues = processes is None and not inside and bool(job.partition.nodes)
    attempt = early.attempt(Attempt, job, environ) if queues and with_shell else None
    device = early.attempt(device_of_job, job, processes, environ)
    ranks = processes or slurm.nodes * ranks_on_node(slurm)
    if device is None and processes is None:
        try:
            check_precision_on(config, profiles(config.path))
        except UsageError as error:
            early.warn(
                f"{error.message} No cluster of clusters.yaml has a better one. Only "
                "`submit --to` refuses it: this check does not know to which cluster the run goes.",
                error.remedy,
            )
    found = check_everything(job, ranks, device, ahead=True)
    found.errors[:0] = early.errors
    found.others += early.others
    found.lines += of_ds_config(config.notes, config.explain())
    if not any(data.validation for data in job.inputs.datasets):
        found.note(
            "nothing is held out: no loss is measured on rows that the model does not train on, "
            "so nobody sees whether it learns more than these by heart",
            "Below `dataset:` write: validation: 10%   (a tenth of the training rows)",
        )
    with found.keeping():
        found.lines += notes_of_job(slurm, ranks_on_node(slurm))
    _check_python(found, job, is_tried=attempt is not None)
    if processes is None:
        found.others += find_tools(config)
    elif config.environment is None:
        found.attempt(check_tools, config)
    found.attempt(check_srun, config)
    wanted = found.attempt(request, job)
    if wanted is not None:
        check_start(found, config, wanted)
    if wanted is not None and not to_submit:
        check_request(found, wanted, job.partition)
    if queues:
        if wanted is not None:
            _check_shell(found, sbatch_script(wanted), environ, over)
        _check_nodes(found, job)
        if gpus := leaves_gpus(config, job.partition, environ):
            found.warn(
                f"{config.path}: the job asks for no GPU, and each node of partition "
                f"{job.partition.name} has some: it would train on the CPU, and end with exit code "
                "0.",
                f"In the run file: slurm.gpus_per_node: {gpus}; or 0, to train on the CPU.",
            )
    if attempt is not None:
        attempt.add_to(found)
    found.lines += [] if to_submit else job.held(environ)
    return found


def check_everything(
    job: Job, ranks: int | None, device: Device | None, *, ahead: bool = False
) -> Findings:
    """Finds everything that can be known about a run before it is launched.

    Args:
        ranks: their number; None: not known.
        device: of each rank; None: not known.
        ahead: whether nothing starts now: then small datasets are prepared, to see whether they
            fill a step, and transformers builds the model.

    Returns:
        Facts, warnings, and errors: UsageError (the run cannot work, or the checkpoint is of
        another run), DamageError (the bundle is known to be damaged), PolicyError (it must be
        verified, and is not), IncompleteError (no space, inodes or quota).
    """
    config, inputs, found = job.config, job.inputs, Findings()
    found.attempt(check_libraries, f"{config.path}: the check of its data", "pyarrow")
    where = _path_of_ranks()
    found.attempt(check_site, where)
    found.attempt(check_readable, files_to_read(inputs))
    if found.errors:
        return found  # a bundle that is closed must not be called damaged
    found.lines += filter(None, [on_site.whose_torch(where)])
    verified = found.attempt(check_verified, config, inputs)
    if any(isinstance(error, DamageError) for error in found.errors):
        return found  # everything else would follow from it
    with found.keeping():
        for path in {nearest_folder(path) for path in (job.folder.stores, job.folder.root)}:
            check_writable(path)
    is_own = python_of_ranks(config, inputs) == () and not is_light()
    if is_own:
        found.attempt(check_packages, config, inputs, to_train(config), "training")
    found.attempt(check_environment, config, inputs)
    found.attempt(_check_patience, config, inputs)
    if device is not None and is_own:
        found.attempt(check_fsdp, config, device.kind)
    found.lines += [verified] if verified else []
    _check_model(found, job, ranks, device, ahead=ahead)
    lacks = lacking()
    if lacks and (left := _unchecked(config, inputs)):
        found.warn(
            f"not checked here ({lacks} not installed): {left}",
            "Run the check in the environment of the job, or leave it to the ranks.",
        )
    elif ahead and (why := why_not_here(config, inputs)):
        found.note(f"whether its weights fit the model is not checked here: {why}")
    if config.environment is not None and inputs.environment is not None:
        with found.keeping():
            wanted = config.environment.node_local
            found.lines.append(node_local.preview(wanted, inputs.environment))
    return found


def _path_of_ranks() -> list[str]:
    where = [*sys.path]
    isolate(dict(os.environ), lambda _: None, where)
    return where


def _unchecked(config: RunConfig, inputs: Inputs) -> str:
    if python_of_ranks(config, inputs):
        return ""  # it checks all of it
    task = task_named(config.task)
    left = ["whether transformers builds the model and its weights fit"]
    left += ["whether its tokenizer loads"] if task.has_tokens else []
    left += ["how samples are written"] if task.writes_chats else []
    return ", ".join(left)


def _check_model(
    found: Findings, job: Job, ranks: int | None, device: Device | None, *, ahead: bool
) -> None:
    """Finds what follows from the model: its files, and with them length, batch and memory."""
    config, model = job.config, job.inputs.model
    before = len(found.errors)
    shape = found.attempt(shape_of, config, model)
    found.attempt(check_model, config, model)
    if shape is None:
        return
    shapes: Mapping[str, Sequence[int]] = {}
    if config.model.init == "pretrained" and config.model.folder is None:
        shapes = weight_shapes(model) or {}
    found.attempt(check_files, config, model, shapes)
    fits = len(found.errors) == before
    wanted = length = None
    with found.keeping():
        length, _ = sequence_length(config, shape)
        wanted = recipes(config, job.inputs, length)
    of_model = _Look.at_model(job) if fits and ahead else None
    of_texts = None
    if fits and wanted is not None:
        rows = embedding_rows(shape, shapes)
        of_texts = _Look.at_texts(job, rows, wanted, ahead=ahead)
    if of_model is not None and not shape.num_parameters:
        shape = shape_of(config, model, *of_model.add_to(found))
        of_model = None
    total = _check_run(found, job, shape, length, ranks, device)
    if ahead and wanted is not None:
        check_data(found, config, wanted, total)
    if of_texts is not None:
        numbers = of_texts.add_to(found)
        if total is not None and numbers and None not in numbers and of_texts.counts_all:
            examine_step(found, config, sum(numbers), total)
    if of_model is not None:
        of_model.add_to(found)


def _as_it_is(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


@dataclass(frozen=True)
class _Look:
    """What a child looks at; its answer is kept where it has no errors."""

    kind: str
    path: Path
    child: Child | None
    counts_all: bool
    remedy: str

    @staticmethod
    def at_model(job: Job) -> _Look | None:
        """Whether transformers builds the model and finds its weights; None: not known here."""
        config, model = job.config, job.inputs.model
        python = python_of_ranks(config, job.inputs)
        if python is None or why_not_here(config, job.inputs):
            return None
        folder = config.model.folder or model.path
        sums = sorted(model.digests.items())
        if config.model.folder is not None:
            sums = [(p.name, _as_it_is(p)) for p in sorted(folder.iterdir())]
        engine = [config.engine.name, config.engine.wrap]
        versions = kept.versions("torch", "transformers", "deepspeed")
        theirs = (dict(config.deepspeed), config.precision, config.engine.zero, config.half)
        basis = ("counted", versions, sums, config.task, config.model.init, engine, theirs)
        arguments = (config, model.asset, folder)
        return _Look.of("model", basis, with_torch.look, *arguments, python=python)

    @staticmethod
    def at_texts(
        job: Job,
        rows: tuple[int, str],
        wanted: Mapping[str, tuple[Recipe, ...]],
        *,
        ahead: bool,
    ) -> _Look | None:
        """What transformers says without torch; None: it is not installed here."""
        config, inputs = job.config, job.inputs
        python = python_of_ranks(config, inputs) or ()
        if not python and not is_installed("transformers"):
            return None
        total = config.batch.total if isinstance(config.batch.total, int) else DEFAULT_GLOBAL
        counted, counts_all = to_count(wanted, job.folder.stores, total) if ahead else ([], False)
        train = wanted["train"] if task_named(config.task).writes_chats else ()
        basis = (
            kept.versions("transformers", "tokenizers"),
            sorted(inputs.model.tokenizer_digests.items()),
            [config.task, config.whole_words, rows],
            [recipe.key for recipe in (*train, *counted)],
        )
        arguments = (config, inputs, rows, train, counted)
        return _Look.of(
            "tokenizer", basis, without_torch.look, *arguments, counts_all=counts_all, python=python
        )

    @staticmethod
    def of(
        kind: str,
        basis: tuple[object, ...],
        work: Any,
        *arguments: Any,
        counts_all: bool = False,
        python: tuple[str, ...] = (),
    ) -> _Look:
        """Starts a child, if there is no kept answer."""
        images = [_as_it_is(Path(word)) for word in python if Path(word).is_file()]
        path = kept.path_of(kind, *basis, [*images, *python])
        child = None if kept.read(path) else Child(work, arguments, python)
        remedy = "Run it where there is more memory."
        if python:
            remedy = f"To see why: {shlex.join([*python, '-c', 'import runner, torch'])}"
        return _Look(kind, path, child, counts_all, remedy)

    def add_to(self, found: Findings) -> list[Any]:
        """Waits for the answer, and adds it; returns the numbers of sequences."""
        if self.child is None:
            answer = kept.read(self.path)
            found.lines += answer["lines"]
            found.others += [Finding(**finding) for finding in answer["findings"]]
            return list(answer["numbers"])
        try:
            looked = self.child.answer(f"the check of the {self.kind}", self.remedy)
        except UsageError as error:
            found.error(error)
            return []
        except StageError as error:
            found.warn(f"not checked: {error.message}", error.remedy)
            return []
        more, numbers = looked if isinstance(looked, tuple) else (looked, [])
        found.add(more)
        if not more.errors:
            findings = [finding.to_json() for finding in more.others]
            kept.keep(self.path, {"lines": more.lines, "findings": findings, "numbers": numbers})
        return list(numbers)


def _check_run(
    found: Findings,
    job: Job,
    shape: ModelShape,
    length: int | None,
    ranks: int | None,
    device: Device | None,
) -> int | None:
    """Finds what follows from the model's shape: batch, memory, checkpoints, disk.

    Returns:
        Sequences of a step; None: not known.
    """
    config, inputs, folder, model = job.config, job.inputs, job.folder, job.inputs.model
    documents = plan = resumed = None
    if length is not None:
        documents = found.attempt(documents_of, config, model, length)
    if device is not None and ranks is not None and length is not None and shape.num_parameters:
        plan = found.attempt(decide, config, shape, device, ranks)
    elif ranks is not None:
        found.attempt(check_batch, config, ranks)
    if plan is not None and device is not None:
        _check_memory(found, config, shape, plan, device)
    if length is not None and documents is not None:
        resumed = found.attempt(check_checkpoint, config, inputs, folder, length, ranks)
        if job.finished():  # whoever asks says so
            resumed = None
        found.others += note_changes(config, inputs, folder) if resumed else []
    needed = disk_needed(config, shape)
    found.attempt(check_disk, config, folder, shape, needed)
    found.attempt(check_quota, folder.root, needed, read_mounts())
    found.lines += [
        f"model {model.asset}: {model.settings.get('model_type')}, "
        f"{human_parameters(shape.num_parameters)}, init {config.model.init}",
        *filter(None, [describe_new_tokens(shape, model)]),
        *(describe_dataset(config, data, length or 0) for data in inputs.datasets),
    ]
    if task_named(config.task).has_tokens and documents is not None:
        found.lines.append(f"packing.documents: {documents.value}  ({documents.reason})")
    if shape.num_parameters:
        found.details.append(
            f"disk: up to {human_size(needed)} for "
            f"{human_count(config.checkpoint.keep, 'checkpoint')} and the model"
        )
        _describe_memory(found, config, shape, plan, device, ranks)
    else:
        found.lines.append(
            "memory and disk: not checked, because transformers has not counted the parameters "
            "here; the ranks count them"
        )
    if plan is not None and config.engine.config is not None:
        told = ("engine.zero", "batch.global", "accumulation")
        found.lines += choice_lines(choice for choice in plan.choices if choice.key in told)
    found.lines += [resumed] if resumed else []
    total, micro = (plan.total, plan.micro) if plan else (config.batch.total, config.batch.micro)
    precision = plan.precision if plan else config.precision
    check_settings(found, config, model.settings, precision)
    if ranks is not None and isinstance(total, int) and isinstance(micro, int):
        check_accumulation(found, config, total, micro, ranks)
    return total if isinstance(total, int) else None


def _check_memory(
    found: Findings, config: RunConfig, shape: ModelShape, plan: TrainingPlan, device: Device
) -> None:
    """Compares the memory of the node and, for a micro batch of the run file, of the GPU."""
    decided = replace(config, precision=plan.precision)  # type: ignore[arg-type]
    on_node = -(-plan.world_size // config.slurm.nodes)
    found.attempt(check_at_load, decided, shape, plan, device, on_node)
    if device.kind == "cuda" and isinstance(config.batch.micro, int) and not found.errors:
        check_micro(found, decided, shape, plan, device)


def _describe_memory(
    found: Findings,
    config: RunConfig,
    shape: ModelShape,
    plan: TrainingPlan | None,
    device: Device | None,
    world_size: int | None,
) -> None:
    if plan is not None:
        config = replace(config, precision=plan.precision)  # type: ignore[arg-type]
    if world_size is not None:
        state = state_needed(config, shape, world_size)
        ranks, by = human_count(world_size, "rank"), ", by ZeRO stage,"
        sizes = ", ".join(f"{stage}: {human_size(size)}" for stage, size in state.items())
        if config.engine.name != "deepspeed":
            by, sizes = "", human_size(state[stage_of(config.engine)])
        elif len({*state.values()}) == 1:  # one rank: there is nothing to choose
            by, sizes = "", human_size(state[0])
        found.details.append(
            f"model state per rank{by} on {ranks} ({describe_state(config, shape)}): {sizes}"
        )
    if plan is not None and device is not None:
        zero = config.engine.name == "deepspeed"
        engine = f"ZeRO stage {plan.zero}" if zero else config.engine.name
        found.lines.append(
            f"the memory fits: {device.name}, {human_size(device.memory)} per rank; "
            f"{plan.precision}, {engine}, micro batch {plan.micro}"
        )
        if device.limit:
            each = device.memory if device.kind == "cpu" else device.host_memory
            found.lines.append(f"memory of the node: {human_size(each)} per rank: {device.limit}")
        if device.kind == "cpu" and config.quantization is not None:
            found.lines.append(
                "quantised weights are unpacked for each product on a CPU: slow, for trials only"
            )


def _check_patience(config: RunConfig, inputs: Inputs) -> None:
    """Checks that a run that may end early has something to evaluate on."""
    if config.evaluation.patience is not None and not any(d.validation for d in inputs.datasets):
        raise UsageError(
            f"{config.place('evaluation.patience')}: "
            "evaluation.patience needs a validation split, and none is read.",
            "Set dataset.validation to a split of the dataset, or to a share of the training split "
            "(validation: 5%); or remove evaluation.patience.",
        )


def check_verified(config: RunConfig, inputs: Inputs) -> str:
    """Checks that the bundle is not known to be damaged, and is verified where that is required.

    Returns:
        A line on it.

    Raises:
        StageError: as for `verification`.
        PolicyError: it must be verified, and is not.
    """
    known = verification(inputs.bundle, os.environ)
    command = (
        "stage verify "
        f"{quoted(inputs.bundle)}{f' --id {config.bundle.id}' if config.bundle.id else ''}"
    )
    if not known.holds and config.bundle.verified == "required":
        raise PolicyError(
            f"{config.place('bundle.verified')}: "
            f"`bundle.verified: required`, and {inputs.bundle} is not: "
            f"{known.text}.",
            command,
        )
    state = known.text if known.holds else f"{known.text} ({command} reads every byte)"
    return f"bundle {inputs.bundle_id[:12]}: {state}"


def _check_python(found: Findings, job: Job, *, is_tried: bool) -> None:
    """Says what is to be known about the job's Python, if this one cannot train.

    Args:
        is_tried: whether `surroundings.Attempt` tries that Python: then it examines its torch.
    """
    config = job.config
    is_own = config.environment is None and not config.slurm.around_ranks
    if is_own and not is_tried and (torch := torch_without_gpus(config.slurm)):
        found.warn(
            f"torch {torch} is installed here, which is for CPUs: in a job with GPUs its ranks "
            "refuse to start.",
            "Install a torch with CUDA in this environment, or stage one for the cluster "
            "(`environment:` and `profile:` in the manifest).",
        )
    elif note := note_for_job(config, job.inputs):
        found.others.append(note)


def _check_shell(
    found: Findings, script: str, environ: Mapping[str, str], over: UsageError | None
) -> None:
    """Finds variables of this shell that mean something to a job, and were meant for another."""
    for line in notes(script, environ):
        found.note(line)
    if over is not None:
        found.warn(f"{over.message}.", over.remedy)


def _check_nodes(found: Findings, job: Job) -> None:
    """Finds folders that this node has and the job's nodes may not have."""
    folders = {"the run folder": job.folder.root, "the bundle": job.inputs.bundle}
    if job.config.environment is None and not job.config.slurm.around_ranks:
        folders["this command's environment"] = Path(sys.prefix)
    found.others += check_places(folders, read_mounts())


def document(found: Findings, lines: Sequence[str] = (), **facts: Any) -> dict[str, Any]:
    """Returns what was found as `runner check --json` prints it.

    Args:
        lines: facts that were found before.
        facts: more keys, such as the run file's path.
    """
    error = join_errors(found.errors, FAULTS) if found.errors else None
    return {
        "format": FORMAT,
        "passes": error is None,
        "exit_code": error.exit_code if error else 0,
        **facts,
        "findings": [
            finding.to_json() for finding in (*map(finding_of, found.errors), *found.others)
        ],
        "facts": [*lines, *found.lines, *found.details],
    }
