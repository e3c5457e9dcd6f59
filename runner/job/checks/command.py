"""What can end the run of a command, beside what can end any run: its words, its project, its code.

The checks read the facts of `CommandRun`. The table at the end gives the order.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from runner.errors import OTHER_DISK, OTHER_RUN
from runner.from_stage import IncompleteError, UsageError, human_count, human_size
from runner.job.access import nearest_folder
from runner.job.command_run import CommandRun
from runner.job.findings import Finding, after, errors_of, fact_line, needs, note
from runner.job.own_code import CommandJob, findings
from runner.job.reached_code import OwnCode


@needs(CommandRun.program, CommandRun.launch, CommandRun.places)
def launch(run: CommandRun) -> Iterator[Finding]:
    """Words that cannot be started on the nodes of the job."""
    nodes, launch = run.places.nodes, run.launch
    starts = {
        "rank": f"{nodes * launch.tasks_per_node} times, once for each rank",
        "node": f"once per node, on {human_count(nodes, 'node')}",
        "once": "once",
    }
    ranks = ""
    if launch.mode == "node" and launch.processes:
        ranks = f", with {human_count(launch.processes, 'rank')} each"
    yield fact_line(f"command: {' '.join(run.words)}")
    yield fact_line(f"it starts {starts[launch.mode]}{ranks}")
    yield from map(note, launch.notes)


@needs(CommandRun.project)
def project(run: CommandRun) -> Iterator[Finding]:
    """A project that cannot travel, and what of it stays here."""
    found = run.project
    size = human_size(sum(found.files.values()))
    at = f", commit {found.commit[:12]}" if found.commit else ""
    dirty = " with changes" if found.is_dirty else ""
    yield fact_line(
        f"project {found.root}{at}{dirty}: {human_count(len(found.files), 'file')}, {size}"
    )
    yield from map(note, found.notes)
    if found.omitted:
        yield note(
            f"private files stay here: {', '.join(found.omitted)}",
            "Where the job needs one, write in the run file: include: [NAME]",
        )


@needs(CommandRun.disk_needed)
def disk(run: CommandRun) -> Iterator[Finding]:
    """A disk that is too small for the project."""
    free = shutil.disk_usage(nearest_folder(run.folder.root)).free
    # Where an earlier start has unpacked the project, it is there already.
    if free < run.disk_needed and not run.folder.work.exists():
        yield from errors_of(
            IncompleteError(
                f"{run.folder.root}: the project needs {human_size(run.disk_needed)}, as it "
                f"travels and as it is used; {human_size(free)} are free.",
                f"Free space there, or choose {OTHER_DISK}",
            )
        )


@needs(CommandRun.project, CommandRun.words)
def not_over_results(run: CommandRun) -> Iterator[Finding]:
    """A run that has ended well, and would go on in its results as another one."""
    has_ended = bool(run.earlier) and run.earlier[-1].get("kind") == "done"
    if has_ended and run.config.resumes and not run.known(CommandRun.finished):
        raise UsageError(
            f"{run.folder.root}: the command has ended with exit code 0 there. Its words, its "
            "project or the bundle is another now, and with `resumes: true` it would go on in "
            "these results and write over them.",
            f"Give the run {OTHER_RUN}",
        )
    yield from ()


@needs(CommandRun.project, CommandRun.words)
def own_code(run: CommandRun) -> Iterator[Finding]:
    """What the code and the words ask for, and the job has not."""
    if not run.asked.tries_shell:  # the runs of a sweep have one project, which is read once
        return
    files = frozenset(run.project.files)
    # The words of a later start are as wrong at the first one.
    words = (*run.words, *run.config.on_resume)
    code = OwnCode(run.root, files, words, run.start_folder)
    is_here = run.known(CommandRun.queue) is not None
    gpus = run.config.slurm.gpus_per_node or None
    yield from findings(code, CommandJob(run.job_python, run.served, gpus, is_here))
    if run.job_python.words is None and not run.job_python.packages:
        yield note(
            "not checked here: what the code imports, because slurm.setup brings the job's Python. "
            "`submit --to` checks it there; by hand: those lines, then runner check, in one shell"
        )


ANYWHERE = (launch, project, disk, not_over_results, *after((CommandRun.verification,), own_code))
"""What ends a command, wherever it starts."""
