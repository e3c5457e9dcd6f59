"""The job's own shell, tried before the queue: modules, setup, and what its Python imports.

`start` runs the first lines of the batch script (`runner.slurm.script.shell_lines`) in a login
shell, and then the Python of the ranks, which imports what the run needs. This takes seconds, so
the other checks are done meanwhile; `Attempt.add_to` waits for the end and explains it. It is done
where the job is submitted: the compute nodes can still have other modules.

Lines that only a job can run, or that copy or remove files, are left out and printed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.config.run_config import RunConfig
from runner.errors import UsageError, human_count
from runner.inputs import environments, imports, running_tree, runs_on, state_folder
from runner.job import node_local
from runner.job.devices import NodeShape, asks_for_gpus, gpus_of_job
from runner.job.findings import Finding, Findings
from runner.job.gpus import hides_all
from runner.job.installed import (
    PIP_NAMES,
    for_tokenizer,
    how_to_install,
    is_light,
    to_prepare,
    to_train,
)
from runner.job.job import Job
from runner.job.submit import node_shapes, request
from runner.slurm.commands import clean
from runner.slurm.jobs import inside_job
from runner.slurm.script import shell_lines

LIMIT_S = 20.0
"""A check takes no longer for this. A busy network disk can need minutes for `import torch`."""

OLDEST_PYTHON = (3, 10)
WORDS = 300  # letters of a program's message

_ONLY_IN_A_JOB = re.compile(
    r"\bSLURM_\w+|\$\{?TMPDIR\b|\b(srun|sbcast|scontrol|nvidia-smi|nvidia-cuda-mps-control)\b"
)
_CHANGES_FILES = re.compile(r"(^|[;&|(]\s*)(rm|mv|cp|rsync|tar|dd|ln|mkdir|unzip)\b")

# Isolated as a rank is (`runner.isolation`), then the probe. For any Python 3.
_BOOT = """\
import os, runpy, sys
sys.path[:] = [path for path in sys.path if path]
try:
    from runner.isolation import isolate
    isolate(os.environ, lambda line: None)
except Exception as error:
    print(error, file=sys.stderr)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_OF_RUNNER = """\
airlift_runner=$(command -v runner) || { echo '{"runner": null}' >>ANSWERS; exit 3; }
read -r airlift_python <"$airlift_runner"; airlift_python=${airlift_python#\\#!}
case $airlift_python in */python*) ;; *) airlift_python=$(dirname "$airlift_runner")/python ;; esac
"""

# Words of a shell -> the remedy. {line} is the line of the run file.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"\\r'|\^M|\r(\n|$|[':])",
     "A file that this line reads has the line ends of Windows: sed -i 's/\\r$//' FILE"),
    (
        r"properly configured to use .conda activate|conda init. before .conda activate",
        "A batch script never reads what `conda init` wrote. Set slurm.setup: "
        "['source {conda}/etc/profile.d/conda.sh', '{line}']",
    ),
    (r"EnvironmentNameNotFound|EnvironmentLocationNotFound|Could not find conda environment",
     "`conda env list` shows the environments; correct it in slurm.setup."),
    (r"(?<!module: )(conda|mamba|micromamba): command not found",
     "Give its whole path: slurm.setup: ['source CONDA/etc/profile.d/conda.sh', '{line}']; "
     "`type conda` shows it where it works."),
    (r"lmod: No such file|module: command not found|module: not found",
     "A login shell here has no `module`: look with `bash -lc 'type module'`. Where it is made by "
     "a file, source that in slurm.setup, and load the modules there too."),
    (r"module\(s\) are unknown|nable to locate a modulefile|odulefile .*not found|cannot be loaded",
     "`module avail` and `module spider NAME` show what there is here; correct slurm.modules."),
    (r"activate: No such file or directory",
     "Correct the path in slurm.setup, or create that environment first."),
    (r"unbound variable",
     "`set -u` ends scripts of conda and of modules: remove it from slurm.setup, or write `set +u` "
     "in the line before."),
)  # fmt: skip
_SILENT = re.compile(r"nable to locate a modulefile|ModuleCmd_Load.*ERROR")


@dataclass(frozen=True)
class Shell:
    """The script that is tried.

    Attributes:
        text: for bash; `ANSWERS` stands for the path of the file with the answers.
        lines: number of a line -> its key in the run file and its text.
        left_out: lines of the run file that are not tried.
        python: whose Python it is, for messages.
        names: the packages that are imported.
        leaves: one line on what is left to the ranks; empty: nothing.
    """

    text: str
    lines: Mapping[int, tuple[str, str]]
    left_out: tuple[str, ...]
    names: tuple[str, ...]
    leaves: str = ""


@dataclass
class Outcome:
    """How a shell ended: the answers, what it printed, its exit code (None: not in time)."""

    answers: str
    said: str
    code: int | None


@dataclass
class Attempt:
    """A shell that runs beside the other checks; without one, there is nothing to try."""

    run: Job
    shell: Shell | None = None
    shapes: Sequence[NodeShape] = ()
    process: subprocess.Popen[bytes] | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def is_under_way(self) -> bool:
        """Whether a shell was started."""
        return self.process is not None

    def add_to(self, found: Findings) -> None:
        """Waits for the end, `LIMIT_S` after the start at the latest, and adds what is found."""
        if self.shell is None or self.process is None or self.folder is None:
            return
        code: int | None = None
        try:
            left = max(0.1, LIMIT_S - (time.monotonic() - self.started))
            code = self.process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # also what it started in the background
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        where = Path(self.folder.name)
        outcome = Outcome(_text(where / "answers"), _text(where / "said"), code)
        self.folder.cleanup()
        explained = explain(self.run, self.shell, outcome, self.shapes)
        explained.others += without_nv(self.run.config)
        found.errors += explained.errors
        found.others += explained.others
        found.lines += explained.lines


def start(run: Job, environ: Mapping[str, str]) -> Attempt:
    """Begins to try the shell of a run's job; nothing where no job is submitted from here.

    Without a queue `runner train` itself says the same at once.
    """
    slurm = run.config.slurm
    shapes = [] if inside_job(environ) else node_shapes(slurm.partition)
    if not shapes:
        return Attempt(run)
    shell = shell_of(run)
    folder = tempfile.TemporaryDirectory(prefix="airlift-check-")
    answers, script = Path(folder.name, "answers"), Path(folder.name, "shell")
    script.write_text(shell.text.replace("ANSWERS", shlex.quote(str(answers))), encoding="utf-8")
    with Path(folder.name, "said").open("wb") as said:
        process = subprocess.Popen(
            ["bash", "-l", str(script)],
            env={**handed_over(run.config, environ), "LANGUAGE": "C"},  # the words in `_REMEDIES`
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    return Attempt(run, shell, shapes, process, folder)


def handed_over(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that sbatch hands over from this shell: all, or with `export: NONE`
    those of a new login.
    """
    export = str(config.slurm.options.get("export", environ.get("SBATCH_EXPORT", "ALL")))
    if export.upper() not in ("NONE", "NIL"):
        return clean(environ)
    kept = {name: environ[name] for name in ("HOME", "USER", "LOGNAME", "SHELL") if name in environ}
    return {**kept, "PATH": "/usr/local/bin:/usr/bin:/bin"}


def shell_of(run: Job) -> Shell:
    """Builds the shell: the lines before the job's command, then the Python that imports."""
    config = run.config
    head = [
        "trap 'airlift_before=$airlift_line airlift_line=$LINENO' DEBUG",
        # In most cases the line above has run once more, for this command: then LINENO was 1.
        'trap \'printf "{\\"shell\\": %d, \\"lines\\": [%d, %d]}\\n" $? ${airlift_before:-0} '
        "${airlift_line:-0} >>ANSWERS' EXIT",
        "set -e",
    ]
    lines: dict[int, tuple[str, str]] = {}
    left_out = []
    for key, line in shell_lines(request(config, run.bundle, run.folder.root, run.overrides)):
        if key and (_ONLY_IN_A_JOB.search(line) or _CHANGES_FILES.search(line)):
            left_out.append(line)
            continue
        head.append(line)
        lines[len(head)] = (key, line)
    python, activate, names, leaves = _python(run)
    if names and config.task != "image-classification":
        names += for_tokenizer(run.inputs.model.digests)
    head += ["trap - DEBUG EXIT", "set +e", "echo '{\"shell\": 0}' >>ANSWERS"]
    head += [f". {shlex.quote(str(activate))}"] if activate else []
    if python is None:
        head += [*_OF_RUNNER.splitlines()]
    else:
        head.append(f"airlift_python={shlex.quote(str(python))}")
    words = [shlex.quote(word) for word in (_BOOT, str(imports.PROBE))]
    # Failures are never kept: they are tried again each time.
    kept = shlex.quote(str(state_folder(os.environ) / "imports"))
    command = f'exec "$airlift_python" -c {" ".join(words)} --keep {kept} ANSWERS'
    head.append(" ".join([command, *names]))
    return Shell("\n".join([*head, ""]), lines, tuple(left_out), tuple(names), leaves)


def _python(run: Job) -> tuple[Path | None, Path | None, list[str], str]:
    """The Python to try (None: that of `runner` on PATH), the script that activates it, the
    packages to import, and what is left to the ranks.
    """
    config, environment = run.config, run.inputs.environment
    own = Path(sys.executable)
    if config.slurm.container:
        return own, None, [], "left to the ranks: what the container's Python imports"
    if environment is not None:
        below = node_local.prefix_below(node_local.node_root(os.environ), environment.tree)
        for prefix in (Path(sys.prefix), below):
            if running_tree(prefix) == environment.tree and (prefix / "activate").is_file():
                return prefix / "bin" / "python", prefix / "activate", to_train(config), ""
        left = f"left to the ranks: what `{environment.asset}` imports (it is not unpacked here)"
        return own, None, [] if is_light() else to_prepare(config), left
    if is_light() and config.slurm.setup:
        return None, None, to_train(config), ""
    if is_light() and not config.slurm.modules:
        return own, None, [], ""  # `python_of_job` says that this one cannot train
    return own, None, to_train(config), ""


def explain(run: Job, shell: Shell, outcome: Outcome, shapes: Sequence[NodeShape] = ()) -> Findings:
    """Explains how a shell ended. Pure, but for the folders of environments in the bundle.

    Args:
        shapes: the nodes of the partition.
    """
    found = Findings()
    if shell.leaves:
        found.lines.append(shell.leaves)
    if shell.left_out:
        found.lines.append(
            f"not tried here, only in the job: {'; '.join(shell.left_out)} (slurm.setup)"
        )
    answers = imports.read_answers(outcome.answers)
    ended = re.findall(r'\{"shell": (\d+)(?:, "lines": \[(\d+), (\d+)\])?\}', outcome.answers)
    errors: list[UsageError] = []
    if not ended and outcome.code is None:
        found.others.append(_too_slow("the lines of slurm.modules and slurm.setup"))
    elif not ended or ended[-1][0] != "0" or ended[-1][1]:
        errors.append(_line_failed(run.config, shell, outcome, ended))
    else:
        if _SILENT.search(outcome.said) and run.config.slurm.modules:
            found.others.append(_silent_module(run.config, outcome.said))
        errors += _of_python(run, shell, answers, outcome, shapes, found)
    if shell.left_out:  # what follows could be a consequence of it
        found.others += [Finding("warning", error.message, error.remedy) for error in errors]
    else:
        found.errors += errors
    if not errors and outcome.code == 0:
        what = ", ".join(PIP_NAMES.get(name, name) for name in shell.names)
        kept = " (tried earlier today; nothing has changed)" if answers.kept else ""
        found.lines.append(
            f"the job's shell works here: {_described(run.config)}"
            + (f"{answers.python.get('python')} imports {what}" if what else "its Python starts")
            + kept
        )
    return found


def without_nv(config: RunConfig) -> list[Finding]:
    """A container that is started without the option that brings the GPUs' driver into it."""
    slurm = config.slurm
    words = slurm.container
    programs = [Path(word).name for word in words]
    if not {"apptainer", "singularity"} & set(programs) or not asks_for_gpus(slurm):
        return []
    if {"--nv", "--nvccli", "--rocm"} & set(words):
        return []
    if any(re.search(r"\b(SINGULARITY|APPTAINER)_(NV|NVCCLI|ROCM)=", line) for line in slurm.setup):
        return []
    return [
        Finding(
            "warning",
            f"{config.path}: slurm.container has no --nv, so the container's torch sees no GPU "
            "(unless the site sets it for all).",
            f"slurm.container: [{', '.join((*words[:2], '--nv', *words[2:]))}]",
        )
    ]


def _described(config: RunConfig) -> str:
    parts = []
    if config.slurm.modules:
        parts.append(human_count(len(config.slurm.modules), "module"))
    if config.slurm.setup:
        parts.append(human_count(len(config.slurm.setup), "line") + " of setup")
    return f"{' and '.join(parts)}; " if parts else ""


def _line_failed(
    config: RunConfig, shell: Shell, outcome: Outcome, ended: Sequence[tuple[str, str, str]]
) -> UsageError:
    before, last = map(int, ended[-1][1:]) if ended and ended[-1][1] else (0, 0)
    number = last if last > 1 else before
    key, line = shell.lines.get(number, ("slurm.setup", "a line"))
    words = _short(outcome.said) or f"exit code {ended[-1][0] if ended else outcome.code}"
    if ended and ended[-1][0] == "0":
        return UsageError(
            f"{config.path}: {key or 'slurm.setup'}: `{line}` ends the shell with exit code 0: the "
            "job would end at once, as if all were well.",
            "A file for terminals (~/.bashrc) may have an `exit`. Source what the job needs "
            "instead of it.",
        )
    known = next((remedy for text, remedy in _REMEDIES if re.search(text, outcome.said)), "")
    conda = os.environ.get("CONDA_EXE", "").rpartition("/bin/")[0] or "$(conda info --base)"
    remedy = known.replace("{line}", line).replace("{conda}", conda)
    return UsageError(
        f"{config.path}: {key or 'slurm.setup'}: `{line}` fails in a login shell here, and would "
        f"end the job: {words}",
        remedy or f"Correct it; to try it: bash -lc {shlex.quote(line)}",
    )


def _silent_module(config: RunConfig, said: str) -> Finding:
    line = next(line for line in said.splitlines() if _SILENT.search(line))
    return Finding(
        "warning",
        f"{config.path}: slurm.modules: a module is not found, and the job would go on without it: "
        f"{_short(line)}",
        "`module avail` shows what there is here; correct slurm.modules.",
    )


def _too_slow(what: str) -> Finding:
    return Finding(
        "note",
        f"{what} did not end within {LIMIT_S:.0f} s here (a busy disk, or a question that waits "
        "for an answer): left to the job",
    )


def _of_python(
    run: Job,
    shell: Shell,
    answers: imports.Answers,
    outcome: Outcome,
    shapes: Sequence[NodeShape],
    found: Findings,
) -> list[UsageError]:
    """The errors of the job's Python; notes are added to `found`."""
    config = run.config
    if '{"runner": null}' in outcome.answers:
        return [
            UsageError(
                f"{config.path}: after slurm.modules and slurm.setup there is no `runner` on PATH: "
                "the job would end at once.",
                "Activate an environment that has airlift in slurm.setup. "
                f"{how_to_install(environments(run.inputs.bundle))}",
            )
        ]
    if not answers.python:
        if outcome.code is None:
            found.others.append(_too_slow("the start of the job's Python"))
            return []
        words = _short(outcome.said) or f"exit code {outcome.code}"
        return [
            UsageError(
                f"{config.path}: the job's Python does not start in a login shell here: {words}",
                "Look at LD_LIBRARY_PATH and PYTHONHOME after your modules: bash -lc 'module load "
                "...; env'",
            )
        ]
    python = answers.python["python"]
    if answers.version < OLDEST_PYTHON:
        return [
            UsageError(
                f"{config.path}: the job would run {python}, Python {answers.python['version']}: "
                f"airlift needs {'.'.join(map(str, OLDEST_PYTHON))} or newer.",
                "Activate the environment that has airlift in slurm.setup.",
            )
        ]
    errors = []
    for fault in imports.faults(answers, outcome.code):
        if not fault.known_here:
            found.others.append(Finding("note", f"not known here: {fault.message}"))
            continue
        remedy = fault.remedy
        if remedy.startswith("pip install "):
            remedy = how_to_install(environments(run.inputs.bundle))
        errors.append(UsageError(f"{config.path}: in the job, {fault.message}", remedy))
    if outcome.code is None:
        found.others.append(_too_slow(f"`import {answers.unfinished or 'torch'}` by {python}"))
    if asks_for_gpus(config.slurm) and not hides_all(_devices(answers)):
        errors += _of_torch(config, answers, shapes, found)
    return errors


def _devices(answers: imports.Answers) -> dict[str, str]:
    hidden = answers.python.get("devices")
    return {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}


def _of_torch(
    config: RunConfig,
    answers: imports.Answers,
    shapes: Sequence[NodeShape],
    found: Findings,
) -> list[UsageError]:
    """The errors of a torch that cannot use the GPUs that are asked for."""
    torch = answers.torch
    if not torch or torch.get("hip"):
        return []
    version, python = torch.get("version"), answers.python["python"]
    if torch.get("cuda") is None:
        return [
            UsageError(
                f"{config.path}: the job asks for GPUs, and torch {version} of {python} is a build "
                "without CUDA: its ranks refuse to start.",
                "Install a torch with CUDA (stage env lock with this cluster's profile chooses "
                "one). To train on the CPU all the same: slurm.setup: ['export "
                "CUDA_VISIBLE_DEVICES=']",
            )
        ]
    flags = answers.imported.get("torch", {}).get("architectures")
    gpus = [gpu for gpu in gpus_of_job(config.slurm, shapes) if gpu.capability is not None]
    if not flags or not gpus:
        return []
    compiled = imports.architectures(flags)
    lacking = [gpu for gpu in gpus if not runs_on(compiled, f"{gpu.capability:.1f}")]
    if not lacking:
        return []
    names = ", ".join(f"{gpu.name} ({gpu.capability:.1f})" for gpu in lacking)
    message = (
        f"{config.path}: torch {version} (CUDA {torch['cuda']}) of {python} has no code for "
        f"{names}, only for {', '.join(compiled)}."
    )
    remedy = (
        "Install a torch that has it: `stage env check` names those that do, or ask "
        "for another partition or GPU (slurm.options gres)."
    )
    if len(lacking) < len(gpus):
        found.others.append(Finding("warning", message, remedy))
        return []
    return [UsageError(message, remedy)]


def _short(text: str) -> str:
    """The last words that a program printed, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-WORDS:]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")  # with the line ends of Windows
    except FileNotFoundError:
        return ""
