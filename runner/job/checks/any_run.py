"""What can end any run that Slurm starts from a bundle, whatever it does.

The checks read the facts of `Run` alone: nothing here knows what a training is. The tables at the
end give the order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from runner.from_stage import PolicyError, quoted
from runner.inputs import NO_BUNDLE
from runner.job import node_local
from runner.job.access import check_quota, check_writable, find_private_places, nearest_folder
from runner.job.devices import leaves_gpus, notes_of_job, torch_without_gpus
from runner.job.findings import Finding, after, attempt, fact_line, needs, note, warning
from runner.job.installed import check_tools, find_tools, note_for_job
from runner.job.run import Run
from runner.job.submit import check_srun, find_short_time, ranks_on_node
from runner.slurm.environment import notes_on_variables
from runner.slurm.script import sbatch_script
from stage.environment.check import on_site


@needs(Run.accelerators)
def accelerators(run: Run) -> Iterator[Finding]:
    """Accelerators of this machine that are requested and cannot be used."""
    yield from map(fact_line, run.accelerators)


@needs(Run.site)
def site(run: Run) -> Iterator[Finding]:
    """An environment on a site's own torch that finds another one by now."""
    if whose := on_site.whose_torch(run.site):
        yield fact_line(whose)


@needs(Run.verification)
def verified(run: Run) -> Iterator[Finding]:
    """A bundle that cannot be read, is damaged, or is not verified where the run asks for it."""
    if run.bundle == NO_BUNDLE:
        yield fact_line("no bundle: the command gets nothing of a Hub")
        return
    known, bundle, wanted = run.verification, run.inputs.bundle, run.config.bundle
    command = f"stage verify {quoted(bundle)}{f' --id {wanted.id}' if wanted.id else ''}"
    if not known.holds and wanted.verified == "required":
        raise PolicyError(
            f"{run.config.place('bundle.verified')}: "
            f"`bundle.verified: required`, and {bundle} is not: {known.text}.",
            command,
        )
    state = known.text if known.holds else f"{known.text} ({command} reads every byte)"
    yield fact_line(f"bundle {run.inputs.bundle_id[:12]}: {state}")


@needs()
def writable(run: Run) -> Iterator[Finding]:
    """Folders in which the run cannot make files."""
    for path in {nearest_folder(path) for path in (run.folder.stores, run.folder.root)}:
        yield from attempt(check_writable, path)


@needs(Run.mounts, Run.disk_needed)
def quota(run: Run) -> Iterator[Finding]:
    """A quota that is too small for what the run writes."""
    yield from attempt(check_quota, run.folder.root, run.disk_needed, run.mounts)


@needs()
def environment(run: Run) -> Iterator[Finding]:
    """An environment of the bundle that cannot be unpacked, or that is not the one of the job."""
    wanted, found = run.config.environment, run.inputs.environment
    if wanted is not None and found is not None:
        yield fact_line(node_local.preview(wanted.node_local, found))


@needs()
def gpus_of_job(run: Run) -> Iterator[Finding]:
    """Accelerators that the job asks for and no rank can use."""
    slurm = run.config.slurm
    yield from map(fact_line, notes_of_job(slurm, ranks_on_node(slurm)))


@needs(Run.packages)
def python(run: Run) -> Iterator[Finding]:
    """The job's Python, where this one cannot train."""
    config = run.config
    is_own = config.environment is None and not config.slurm.around_ranks
    is_tried = run.known(Run.queue) is not None  # `shell` examines the torch of that Python
    if is_own and not is_tried and (torch := torch_without_gpus(config.slurm)):
        yield warning(
            f"torch {torch} is installed here, which is for CPUs: in a job with GPUs its ranks "
            "refuse to start.",
            "Install a torch with CUDA in this environment, or stage one for the cluster "
            "(`environment:` and `profile:` in the manifest).",
        )
    elif about := note_for_job(config, run.inputs, run.packages):
        yield about


@needs(Run.has_own_torch, Run.missing_tools)
def tools_here(run: Run) -> Iterator[Finding]:
    """A compiler or library that the ranks need and that is missing on this machine."""
    if run.has_own_torch:
        yield from attempt(check_tools, run.config, run.missing_tools)


@needs(Run.missing_tools)
def tools(run: Run) -> Iterator[Finding]:
    """A compiler or library that is missing here: the job's nodes may lack it, too."""
    if run.asked.processes is None:
        yield from find_tools(run.config, run.missing_tools)
    elif run.config.environment is None:
        yield from attempt(check_tools, run.config, run.missing_tools)


@needs()
def srun(run: Run) -> Iterator[Finding]:
    """`slurm.srun` where this Python cannot be that of the ranks."""
    yield from attempt(check_srun, run.config)


@needs(Run.request)
def time_to_start(run: Run) -> Iterator[Finding]:
    """A time limit in which a start alone may not end."""
    yield from find_short_time(run.config, run.request)


@needs(Run.slurm_answer)
def slurm(run: Run) -> Iterator[Finding]:
    """A job that Slurm refuses."""
    answer = run.slurm_answer
    yield fact_line(answer.line)
    if answer.warning:
        yield warning(answer.warning, "Or choose another slurm.partition.")


@needs(Run.request, Run.over)
def variables(run: Run) -> Iterator[Finding]:
    """Variables of this shell that mean something to a job, and were meant for another."""
    yield from map(note, notes_on_variables(sbatch_script(run.request), run.environ))
    for error in run.over:
        yield warning(f"{error.message}.", error.remedy)


@needs(Run.mounts)
def folders(run: Run) -> Iterator[Finding]:
    """Folders that this node has and the job's nodes may not have."""
    known = {"the run folder": run.folder.root, "the bundle": run.inputs.bundle}
    if run.config.environment is None and not run.config.slurm.around_ranks:
        known["this command's environment"] = Path(sys.prefix)
    yield from find_private_places(known, run.mounts)


@needs(Run.queue)
def unused_gpus(run: Run) -> Iterator[Finding]:
    """GPUs that each node of the partition has and the job does not ask for."""
    if gpus := leaves_gpus(run.config, run.queue, run.environ):
        yield warning(
            f"{run.config.path}: the job asks for no GPU, and each node of partition "
            f"{run.queue.name} has some: it would train on the CPU, and end with exit code "
            "0.",
            f"In the run file: slurm.gpus_per_node: {gpus}; or 0, to train on the CPU.",
        )


@needs(Run.shell)
def shell(run: Run) -> Iterator[Finding]:
    """Lines of the job's own shell that fail, and packages that its Python does not import."""
    yield from run.shell.found()


@needs(Run.held)
def held(run: Run) -> Iterator[Finding]:
    """A launcher that trains in the run folder now."""
    if run.held:
        yield fact_line(run.held)


ANYWHERE = (accelerators, *after((Run.starts,), tools_here), site, verified, writable)
"""What ends any run, wherever it starts."""
IN_A_JOB = after(
    (Run.ahead, Run.site),  # on another torch of the site than its own, no Python here means much
    gpus_of_job, python, tools, srun, time_to_start, slurm,
    *after((Run.queue,), variables, folders, unused_gpus), shell, held,
)  # fmt: skip
"""What ends a job before its first line, or what the job does not find on its nodes."""
