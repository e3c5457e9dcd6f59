"""What can end a training, beside what can end any run: its model, data, plan and checkpoints.

The checks read the facts of `TrainingRun`. The table at the end gives the order.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.fields import choice_lines, of_ds_config
from runner.from_stage import UsageError, human_count, human_size
from runner.job.access import check_disk
from runner.job.checks.any_run import quota
from runner.job.devices import check_precision_on
from runner.job.findings import (
    Finding,
    after,
    attempt,
    fact_line,
    needs,
    note,
    usage_error,
    warning,
)
from runner.job.host_memory import check_at_load
from runner.job.installed import (
    check_environment,
    check_fsdp,
    check_packages,
    is_light,
    lacking,
)
from runner.job.memory import describe_state, state_needed
from runner.job.plan import (
    check_batch,
    check_micro,
    check_step,
    find_odd_settings,
    find_other_accumulation,
    zero_of,
)
from runner.job.run_data import check_data, describe_dataset
from runner.job.shapes import describe_new_tokens, human_parameters
from runner.job.training_run import TrainingRun, note_changes
from runner.tasks import task_named
from stage.carry.clusters import profiles


@needs(TrainingRun.python_of_ranks, TrainingRun.packages)
def packages(run: TrainingRun) -> Iterator[Finding]:
    """Packages that the ranks need and that are missing here."""
    if run.python_of_ranks == () and not is_light():
        yield from attempt(
            check_packages, run.config, run.inputs, run.packages.of_ranks, "training"
        )


@needs(TrainingRun.packages)
def environment(run: TrainingRun) -> Iterator[Finding]:
    """An environment of the bundle that lacks a package."""
    yield from attempt(check_environment, run.config, run.inputs, run.packages)


@needs()
def patience(run: TrainingRun) -> Iterator[Finding]:
    """A run that may end early and has nothing to evaluate on."""
    config, is_held_out = run.config, any(data.validation for data in run.inputs.datasets)
    if config.evaluation.patience is not None and not is_held_out:
        yield usage_error(
            f"{config.place('evaluation.patience')}: "
            "evaluation.patience needs a validation split, and none is read.",
            "Set dataset.validation to a split of the dataset, or to a share of the training split "
            "(validation: 5%); or remove evaluation.patience.",
        )


@needs(TrainingRun.device, TrainingRun.python_of_ranks)
def fsdp(run: TrainingRun) -> Iterator[Finding]:
    """FSDP2 on CPUs with a torch that has it for GPUs only."""
    if run.python_of_ranks == () and not is_light():
        yield from attempt(check_fsdp, run.config, run.device.kind)


@needs(TrainingRun.model_faults)
def model_files(run: TrainingRun) -> Iterator[Finding]:
    """A model that is not for the task, or whose files are not all there."""
    yield from run.model_faults


@needs(TrainingRun.ranks)
def batch(run: TrainingRun) -> Iterator[Finding]:
    """A batch that does not divide among the ranks."""
    yield from attempt(check_batch, run.config, run.ranks.world_size)


@needs(TrainingRun.plan, TrainingRun.decided, TrainingRun.shape, TrainingRun.device)
def memory(run: TrainingRun) -> Iterator[Finding]:
    """A model or a micro batch that does not fit into the memory of the node or of a GPU."""
    config, shape, plan, device = run.decided, run.shape, run.plan, run.device
    on_node = -(-plan.world_size // config.slurm.nodes)
    check_at_load(config, shape, plan, device, on_node)
    if device.kind == "cuda" and isinstance(config.batch.micro, int):
        yield from check_micro(config, shape, plan, device)


@needs(TrainingRun.history, TrainingRun.resumes, TrainingRun.finished)
def checkpoint(run: TrainingRun) -> Iterator[Finding]:
    """A checkpoint of another run, or settings that have changed since it was written."""
    if run.resumes and not run.finished:  # of a run that is finished, the command says so
        yield from note_changes(run.config, run.inputs, run.history)


@needs(TrainingRun.shape, TrainingRun.disk_needed)
def disk(run: TrainingRun) -> Iterator[Finding]:
    """A disk that is too small for checkpoints and model."""
    yield from attempt(check_disk, run.config, run.folder, run.shape, run.disk_needed)


@needs(TrainingRun.shape)
def model(run: TrainingRun) -> Iterator[Finding]:
    """Says which model and data the run reads."""
    config, shape, about = run.config, run.shape, run.inputs.model
    yield fact_line(
        f"model {about.asset}: {about.settings.get('model_type')}, "
        f"{human_parameters(shape.num_parameters)}, init {config.model.init}"
    )
    if tokens := describe_new_tokens(shape, about):
        yield fact_line(tokens)


@needs()
def datasets(run: TrainingRun) -> Iterator[Finding]:
    """Says which rows are read, and how documents become sequences."""
    chosen, documents = run.known(TrainingRun.chosen_length), run.known(TrainingRun.documents)
    length = chosen[0] if chosen else 0
    for data in run.inputs.datasets:
        yield fact_line(describe_dataset(run.config, data, length))
    if task_named(run.config.task).has_tokens and documents is not None:
        yield fact_line(f"packing.documents: {documents.value}  ({documents.reason})")


@needs(TrainingRun.shape, TrainingRun.disk_needed)
def state(run: TrainingRun) -> Iterator[Finding]:
    """Says how much disk the run needs, and how much memory the model's state takes."""
    shape, ranks = run.shape, run.known(TrainingRun.ranks)
    if not shape.num_parameters:
        yield fact_line(
            "memory and disk: not checked, because transformers has not counted the parameters "
            "here; the ranks count them"
        )
        return
    config = run.known(TrainingRun.decided) or run.config
    yield Finding(
        "detail",
        f"disk: up to {human_size(run.disk_needed)} for "
        f"{human_count(config.checkpoint.keep, 'checkpoint')} and the model",
    )
    if ranks is None:
        return
    sizes = state_needed(config, shape, ranks.world_size)
    by = ", by ZeRO stage,"
    listed = ", ".join(f"{zero}: {human_size(size)}" for zero, size in sizes.items())
    if config.engine.name != "deepspeed":
        by, listed = "", human_size(sizes[zero_of(config.engine)])
    elif len({*sizes.values()}) == 1:  # one rank: there is nothing to choose
        by, listed = "", human_size(sizes[0])
    yield Finding(
        "detail",
        f"model state per rank{by} on {human_count(ranks.world_size, 'rank')} "
        f"({describe_state(config, shape)}): {listed}",
    )


@needs(TrainingRun.plan, TrainingRun.device)
def plan(run: TrainingRun) -> Iterator[Finding]:
    """Says that the memory fits, and what else is decided for the devices."""
    config, device, decided = run.config, run.device, run.plan
    zero = config.engine.name == "deepspeed"
    engine = f"ZeRO stage {decided.zero}" if zero else config.engine.name
    yield fact_line(
        f"the memory fits: {device.name}, {human_size(device.memory)} per rank; "
        f"{decided.precision}, {engine}, micro batch {decided.micro}"
    )
    if device.limit:
        each = device.memory if device.kind == "cpu" else device.host_memory
        yield fact_line(f"memory of the node: {human_size(each)} per rank: {device.limit}")
    if device.kind == "cpu" and config.quantization is not None:
        yield fact_line(
            "quantised weights are unpacked for each product on a CPU: slow, for trials only"
        )
    if config.engine.config is not None:
        told = ("engine.zero", "batch.global", "accumulation")
        chosen = choice_lines(choice for choice in decided.choices if choice.key in told)
        yield from map(fact_line, chosen)


@needs(TrainingRun.resumes, TrainingRun.finished)
def resumed(run: TrainingRun) -> Iterator[Finding]:
    """Says from which checkpoint the run resumes."""
    if run.resumes and not run.finished:
        yield fact_line(run.resumes)


@needs()
def settings(run: TrainingRun) -> Iterator[Finding]:
    """Settings that are probably not meant."""
    config = run.known(TrainingRun.decided) or run.config
    yield from find_odd_settings(run.config, run.inputs.model.settings, config.precision)


@needs(TrainingRun.ranks)
def accumulation(run: TrainingRun) -> Iterator[Finding]:
    """Another accumulation in the user's ds_config.json than the run will have."""
    config, chosen = run.config, run.known(TrainingRun.plan)
    total = chosen.total if chosen else config.batch.total
    micro = chosen.micro if chosen else config.batch.micro
    if isinstance(total, int) and isinstance(micro, int):
        yield from find_other_accumulation(config, total, micro, run.ranks.world_size)


@needs(TrainingRun.recipes)
def data(run: TrainingRun) -> Iterator[Finding]:
    """Splits without rows, and labels, tags and roles that are not known."""
    yield from check_data(run.config, run.recipes, _total(run))


def _total(run: TrainingRun) -> int | None:
    """Sequences of a step; None: not known."""
    chosen, total = run.known(TrainingRun.plan), run.config.batch.total
    if chosen is not None:
        return chosen.total
    return total if isinstance(total, int) else None


@needs(TrainingRun.texts_answer)
def texts(run: TrainingRun) -> Iterator[Finding]:
    """A tokenizer that does not fit the model, and rows that cannot be written as samples."""
    yield from run.texts_answer.findings


@needs(TrainingRun.step_of_data)
def steps(run: TrainingRun) -> Iterator[Finding]:
    """A step that has each sequence of a small dataset many times."""
    if (total := _total(run)) is not None:
        yield from check_step(run.config, run.step_of_data, total)


@needs(TrainingRun.model_answer)
def weights(run: TrainingRun) -> Iterator[Finding]:
    """A model that transformers does not build, or weights that do not fit it."""
    yield from run.model_answer.findings


@needs(TrainingRun.python_of_ranks, TrainingRun.why_not_here)
def unchecked(run: TrainingRun) -> Iterator[Finding]:
    """Says what is not checked here, because packages are missing."""
    task, lacks = task_named(run.config.task), lacking()
    left = ["whether transformers builds the model and its weights fit"]
    left += ["whether its tokenizer loads"] if task.has_tokens else []
    left += ["how samples are written"] if task.writes_chats else []
    if lacks and not run.python_of_ranks:  # else the ranks' Python checks all of it
        yield warning(
            f"not checked here ({lacks} not installed): {', '.join(left)}",
            "Run the check in the environment of the job, or leave it to the ranks.",
        )
    elif run.asked.ahead and run.why_not_here:
        yield note(f"whether its weights fit the model is not checked here: {run.why_not_here}")


@needs()
def precision(run: TrainingRun) -> Iterator[Finding]:
    """A precision that no GPU has of the clusters of clusters.yaml."""
    if run.known(TrainingRun.device) is not None or run.asked.processes is not None:
        return
    try:
        check_precision_on(run.config, profiles(run.config.path))
    except UsageError as error:
        yield warning(
            f"{error.message} No cluster of clusters.yaml has a better one. Only "
            "`submit --to` refuses it: this check does not know to which cluster the run goes.",
            error.remedy,
        )


@needs()
def ds_config(run: TrainingRun) -> Iterator[Finding]:
    """Says what is decided about the user's ds_config.json that it does not ask for."""
    yield from map(fact_line, of_ds_config(run.config.notes, run.config.explain()))


@needs()
def held_out(run: TrainingRun) -> Iterator[Finding]:
    """Nothing is held out to measure the loss on."""
    if not any(data.validation for data in run.inputs.datasets):
        yield note(
            "nothing is held out: no loss is measured on rows that the model does not train on, "
            "so you cannot see whether it generalises",
            "Below `dataset:` write: validation: 10%   (a tenth of the training rows)",
        )


ANYWHERE = after(
    (TrainingRun.verification, TrainingRun.reads_tables),
    packages, environment, patience, fsdp, model_files, batch, memory, checkpoint, disk, quota,
    model, datasets, state, plan, resumed, settings, accumulation,
    *after((TrainingRun.ahead,), data), texts, steps, weights, unchecked,
)  # fmt: skip
"""What ends a training, wherever it starts."""
IN_A_JOB = after((TrainingRun.ahead,), precision, ds_config, held_out)
"""What only a check before the start looks at."""
