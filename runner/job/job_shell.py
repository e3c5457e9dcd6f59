"""The job's own shell, tried before the queue: modules, setup, and what its Python imports.

`Attempt` runs the first lines of the batch script (`runner.slurm.script.shell_lines`) in a login
shell, and then the Python of the ranks, which imports what the run needs. This takes seconds, so
the other checks are done meanwhile; `Attempt.found` waits for the end and explains it. It is done
where the job is submitted: the compute nodes can still have other modules.

Lines that only a job can run, or that copy or remove files, are left out and printed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runner.config.job_config import JobConfig
from runner.from_stage import UsageError, human_count, state_folder
from runner.inputs import JobInputs, environments, running_tree
from runner.job import node_local
from runner.job.devices import asks_for_gpus, gpus_of_job, hides_all
from runner.job.findings import Finding, attempt, errors_of, fact_line, note, warning
from runner.job.installed import PIP_NAMES, Packages, how_to_install, is_light
from runner.job.partition import NodeShape
from runner.slurm.jobs import clean
from runner.slurm.script import SbatchRequest, shell_lines
from stage.environment.check import imports
from stage.environment.check.torch_builds import runs_on

LIMIT_S = 20.0
"""A check takes no longer for this. A busy network disk can need minutes for `import torch`."""

OLDEST_PYTHON = (3, 10)  # as in pyproject.toml
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

# Words of a shell -> the remedy. {source FILE}: the user's lists, with that line before the one
# that fails.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"\\r'|\^M|\r(\n|$|[':])",
     "A file that this line reads has the line ends of Windows: sed -i 's/\\r$//' FILE"),
    (
        r"properly configured to use .conda activate|conda init. before .conda activate",
        "A batch script never reads what `conda init` wrote. Set "
        "{source $(conda info --base)/etc/profile.d/conda.sh}",
    ),
    (r"EnvironmentNameNotFound|EnvironmentLocationNotFound|Could not find conda environment",
     "`conda env list` shows the environments; correct it in slurm.setup."),
    (r"(?<!module: )(conda|mamba|micromamba): command not found",
     "Give its whole path; `type conda` shows CONDA where it works. Set "
     "{source CONDA/etc/profile.d/conda.sh}"),
    (r"lmod: No such file|module: command not found|module: not found",
     "A login shell here has no `module`: look with `bash -lc 'type module'`. Where it is made by "
     "a file, source that: {source FILE}"),
    (r"module\(s\) are unknown|nable to locate a modulefile|odulefile .*not found|cannot be loaded",
     "`module avail` and `module spider NAME` show what there is here; correct slurm.modules."),
    (r"activate: No such file or directory",
     "Correct the path in slurm.setup, or create that environment first."),
    (r"unbound variable",
     "`set -u` ends scripts of conda and of modules: remove it from slurm.setup, or write `set +u` "
     "in the line before."),
)  # fmt: skip
_SILENT = r"nable to locate a modulefile|ModuleCmd_Load.*ERROR"


class Attempt:
    """A shell that runs beside the other checks: the lines before the job's command, then the
    Python that imports.

    Args:
        request: the job's.
        packages: what its Python imports.
        python: the words that start the ranks' Python here, as `python_of_ranks` says.
        nodes: those of the partition.
        overrides: the `--set` texts.
        environ: variables of this shell.
    """

    def __init__(
        self,
        request: SbatchRequest,
        config: JobConfig,
        inputs: JobInputs,
        packages: Packages,
        python: tuple[str, ...] | None,
        nodes: Sequence[NodeShape],
        overrides: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        self._request, self._config, self._inputs = request, config, inputs
        self._nodes, self._overrides = nodes, overrides
        self._started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="airlift-check-")
        where = Path(self._folder.name)
        self._answers, self._said = where / "answers", where / "said"
        self._answers.touch()
        self._lines, self._left_out = list[tuple[str, str]](), list[str]()
        self._words, activate, names, self._leaves = _python(config, inputs, packages, python)
        self._names = [*names, *(packages.of_tokenizer if names else ())]
        text = "\n".join([*self._shell(), *self._probe(activate), ""])
        (where / "shell").write_text(
            text.replace("ANSWERS", shlex.quote(str(self._answers))), encoding="utf-8"
        )
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                ["bash", "-l", str(where / "shell")],
                env={**handed_over(config, environ), "LANGUAGE": "C"},  # words in `_REMEDIES`
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def _shell(self) -> list[str]:
        """The lines before the job's command; `ANSWERS` stands for the file with the answers."""
        head = [
            "__n=0",
            'trap \'printf "{\\"shell\\": %d, \\"line\\": %d}\\n" $? $__n >>ANSWERS\' EXIT',
            "set -e",
        ]
        for key, line in shell_lines(self._request):
            if key and (_ONLY_IN_A_JOB.search(line) or _CHANGES_FILES.search(line)):
                self._left_out.append(line)
            else:
                head += [f"__n={len(self._lines)}", line]
                self._lines.append((key, line))
        return [*head, "trap - EXIT", "set +e", "echo '{\"shell\": 0}' >>ANSWERS"]

    def _probe(self, activate: Path | None) -> list[str]:
        """The lines that start the Python of the ranks."""
        lines = [f". {shlex.quote(str(activate))}"] if activate else []
        lines += [] if self._words else [_OF_RUNNER]
        python = shlex.join(self._words) if self._words else '"$airlift_python"'
        words = [shlex.quote(word) for word in (_BOOT, str(imports.PROBE))]
        # Failures are never kept: they are tried again each time.
        kept = shlex.quote(str(state_folder(os.environ) / "imports"))
        command = f"exec {python} -c {' '.join(words)} --keep {kept} ANSWERS"
        return [*lines, " ".join([command, *self._names])]

    def found(self) -> Iterator[Finding]:
        """Waits for the end, `LIMIT_S` after the start at the latest, and explains it."""
        code: int | None = None  # not in time
        try:
            left = max(0.1, LIMIT_S - (time.monotonic() - self._started))
            code = self._process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # also what it started in the background
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        # As bytes: with the line ends of Windows.
        text, said = (
            p.read_bytes().decode("utf-8", "replace") for p in (self._answers, self._said)
        )
        self._folder.cleanup()
        yield from self._explain(text, said, code)
        yield from _check_nv(self._config)

    def _explain(self, text: str, said: str, code: int | None) -> Iterator[Finding]:
        """Explains how the shell ended.

        Args:
            text: the answers.
            said: what it printed.
            code: its exit code; None: it did not end in time.
        """
        if self._leaves:
            yield fact_line(self._leaves)
        if self._left_out:
            left = "; ".join(self._left_out)
            yield fact_line(f"not tried here, only in the job: {left} (slurm.setup)")
        answers = imports.read_answers(text)
        found = list(attempt(self._faults, answers, text, said, code))
        for finding in found:
            # What fails after a line that was left out could be a consequence of it.
            is_less = finding.level == "error" and self._left_out
            yield warning(finding.message, finding.remedy) if is_less else finding
        if code == 0 and not any(finding.level == "error" for finding in found):
            yield fact_line(self._works(answers))

    def _faults(
        self, answers: imports.Answers, text: str, said: str, code: int | None
    ) -> Iterator[Finding]:
        """Finds why the shell or its Python would end the job. Arguments as for `_explain`."""
        ended = re.search(r'\{"shell": (\d+)(?:, "line": (\d+))?\}', text)
        if ended is None and code is None:
            yield note(_too_slow("the lines of slurm.modules and slurm.setup"))
        elif ended is None or ended[2]:
            number = int(ended[2]) if ended else 0
            raise self._line_failed(said, ended[1] if ended else str(code), number)
        else:
            silent = re.search(rf".*({_SILENT}).*", said)
            if silent and self._config.slurm.modules:
                yield warning(
                    f"{self._config.path}: slurm.modules: a module is not found, and the job would "
                    f"go on without it: {_short(silent[0])}",
                    "`module avail` shows what there is here; correct slurm.modules.",
                )
            yield from self._check_python(answers, text, said, code)
            if answers.python:
                yield from self._check_imports(answers, code)

    def _works(self, answers: imports.Answers) -> str:
        """What was tried, where all of it works."""
        slurm = self._config.slurm
        numbers = {"module": slurm.modules, "line": slurm.setup}
        tried = [human_count(len(lines), what) for what, lines in numbers.items() if lines]
        shell = " and ".join(tried) + (" of setup; " if slurm.setup else "; ")
        what = ", ".join(PIP_NAMES.get(name, name) for name in self._names)
        python = f"{answers.python.get('python')} imports {what}" if what else "its Python starts"
        kept = " (tried earlier today; nothing has changed)" if answers.kept else ""
        return f"the job's shell works here: {shell if tried else ''}{python}{kept}"

    def _line_failed(self, said: str, code: str, number: int) -> UsageError:
        key, line = self._lines[number]
        by_set = any(text.startswith(f"{key}=") for text in self._overrides)
        theirs = f" (with --to: `{key[6:]}:` of clusters.yaml)" if by_set else ""
        where = f"{self._config.path}: {key or 'slurm.setup'}{theirs}: `{line}`"
        if code == "0":
            return UsageError(
                f"{where} ends the shell with exit code 0: the job would end at once, as if all "
                "were well.",
                "A file for terminals (~/.bashrc) may have an `exit`. Source what the job needs "
                "instead of it.",
            )
        known = next((remedy for text, remedy in _REMEDIES if key and re.search(text, said)), "")
        if base := os.environ.get("CONDA_EXE", "").rpartition("/bin/")[0]:
            known = re.sub(r"\$\(conda info --base\)|CONDA", lambda _: base, known)
        remedy = re.sub(r"{(source .*)}", lambda its: self._with_line(its[1], key, line), known)
        return UsageError(
            f"{where} fails in a login shell here, and would end the job: "
            f"{_short(said) or f'exit code {code}'}",
            remedy or f"Correct it; to try it: bash -lc {shlex.quote(line)}",
        )

    def _with_line(self, new: str, key: str, line: str) -> str:
        """The lists as they should stand in the run file, with a new line before one of theirs."""
        slurm, is_module = self._config.slurm, key == "slurm.modules"
        loads = (f"module load {shlex.quote(name)}" for name in slurm.modules if is_module)
        lines = [*loads, *slurm.setup]
        at = lines.index(line)
        # conda.sh defines `conda` alone: after it, `mamba activate` ends with the same words.
        lines[at : at + 1] = [new, re.sub(r"^mamba\b", "conda", line)]
        lists = f"slurm.setup: {json.dumps(lines, ensure_ascii=False)}"
        return f"slurm.modules: [] and {lists}" if is_module else lists

    def _check_python(
        self, answers: imports.Answers, text: str, said: str, code: int | None
    ) -> Iterator[Finding]:
        """Refuses a job without a Python that can run `runner`. Arguments as for `_explain`."""
        where = self._config.path
        if '{"runner": null}' in text:
            raise UsageError(
                f"{where}: after slurm.modules and slurm.setup there is no `runner` on PATH: "
                "the job would end at once.",
                "Activate an environment that has airlift in slurm.setup. "
                f"{how_to_install(environments(self._inputs.bundle))}",
            )
        if not answers.python and code is None:
            yield note(_too_slow("the start of the job's Python"))
        elif not answers.python and len(self._words) > 1:  # the nodes may have what it needs
            yield warning(
                f"{where}: the Python of slurm.container does not start here: "
                f"{_short(said) or f'exit code {code}'}",
                f"To see why: {shlex.join([*self._words, '-c', 'import runner, torch'])}",
            )
        elif not answers.python:
            raise UsageError(
                f"{where}: the job's Python does not start in a login shell here: "
                f"{_short(said) or f'exit code {code}'}",
                "Look at LD_LIBRARY_PATH and PYTHONHOME after your modules: bash -lc 'module load "
                "...; env'",
            )
        elif answers.version < OLDEST_PYTHON:
            raise UsageError(
                f"{where}: the job would run {answers.python['python']}, Python "
                f"{answers.python['version']}: "
                f"airlift needs {'.'.join(map(str, OLDEST_PYTHON))} or newer.",
                "Activate the environment that has airlift in slurm.setup.",
            )

    def _check_imports(self, answers: imports.Answers, code: int | None) -> Iterator[Finding]:
        """Finds packages that the job's Python does not import, and a torch without its GPUs."""
        config, inputs = self._config, self._inputs
        for fault in imports.faults(answers, code):
            if not fault.known_here:
                yield note(f"not known here: {fault.message}")
                continue
            remedy = fault.remedy
            if remedy.startswith("pip install ") and len(self._words) > 1:
                remedy = f"Build the image of slurm.container with it: {remedy}"
            elif remedy.startswith("pip install "):
                remedy = how_to_install(environments(inputs.bundle))
            yield from errors_of(UsageError(f"{config.path}: in the job, {fault.message}", remedy))
        if code is None:
            what = f"`import {answers.unfinished or 'torch'}` by {answers.python['python']}"
            yield note(_too_slow(what))
        hidden = answers.python.get("devices")
        hides = hidden is not None and hides_all({"CUDA_VISIBLE_DEVICES": hidden})
        if asks_for_gpus(config.slurm) and not hides:
            yield from _check_torch(config, self._nodes, answers)


def handed_over(config: JobConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that sbatch hands over from this shell: all, or with `export: NONE`
    those of a new login.
    """
    export = str(config.slurm.options.get("export", environ.get("SBATCH_EXPORT", "ALL")))
    if export.upper() not in ("NONE", "NIL"):
        return clean(environ)
    kept = {name: environ[name] for name in ("HOME", "USER", "LOGNAME", "SHELL") if name in environ}
    return {**kept, "PATH": "/usr/local/bin:/usr/bin:/bin"}


def _python(
    config: JobConfig, inputs: JobInputs, packages: Packages, python: tuple[str, ...] | None
) -> tuple[tuple[str, ...], Path | None, Sequence[str], str]:
    """The words that start the Python to try (none: that of `runner` on PATH), the script that
    activates it, the packages to import, and what is left to the ranks.
    """
    environment, own = inputs.environment, (sys.executable,)
    if config.slurm.around_ranks:
        if python:
            return python, None, packages.of_ranks, ""
        return own, None, [], "left to the ranks: what the container's Python imports"
    if environment is not None:
        below = node_local.prefix_below(node_local.node_root(os.environ), environment.tree)
        for prefix in (Path(sys.prefix), below):
            if running_tree(prefix) == environment.tree and (prefix / "activate").is_file():
                inside = str(prefix / "bin" / "python")
                return (inside,), prefix / "activate", packages.of_ranks, ""
        left = f"left to the ranks: what `{environment.asset}` imports (it is not unpacked here)"
        return own, None, [] if is_light() else packages.of_launcher, left
    if is_light() and config.slurm.setup:
        return (), None, packages.of_ranks, ""
    if is_light() and not config.slurm.modules:
        return own, None, [], ""  # `python_of_job` says that this one cannot train
    return own, None, packages.of_ranks, ""


def _check_nv(config: JobConfig) -> Iterator[Finding]:
    """Finds a container started without the option that brings the GPUs' driver into it."""
    slurm, words = config.slurm, config.slurm.container
    starts = {"apptainer", "singularity"} & {Path(word).name for word in words}
    by_shell = r"\b(SINGULARITY|APPTAINER)_(NV|NVCCLI|ROCM)="
    brings = {"--nv", "--nvccli", "--rocm"} & set(words) or re.search(
        by_shell, "\n".join(slurm.setup)
    )
    if starts and asks_for_gpus(slurm) and not brings:
        yield warning(
            f"{config.path}: slurm.container has no --nv, so the container's torch sees no GPU "
            "(unless the site sets it for all).",
            f"slurm.container: [{', '.join((*words[:2], '--nv', *words[2:]))}]",
        )


def _too_slow(what: str) -> str:
    return (
        f"{what} did not end within {LIMIT_S:.0f} s here (a busy disk, or a question that waits "
        "for an answer): left to the job"
    )


def _check_torch(
    config: JobConfig, nodes: Sequence[NodeShape], answers: imports.Answers
) -> Iterator[Finding]:
    """Finds a torch that cannot use the GPUs that are asked for."""
    torch = answers.torch
    if not torch or torch.get("hip"):
        return
    version, python = torch.get("version"), answers.python["python"]
    lines = [*config.slurm.setup, "export CUDA_VISIBLE_DEVICES="]
    if torch.get("cuda") is None:
        raise UsageError(
            f"{config.path}: the job asks for GPUs, and torch {version} of {python} is a build "
            "without CUDA: its ranks refuse to start.",
            "Install a torch with CUDA (stage env lock with this cluster's profile chooses "
            "one). To train on the CPU all the same, one line more: in the run file, "
            f"slurm.setup: {json.dumps(lines, ensure_ascii=False)} (with --to, that replaces "
            "`setup:` of clusters.yaml: the line may be there as well)",
        )
    flags = answers.imported.get("torch", {}).get("architectures")
    gpus = [g for g in gpus_of_job(config.slurm, nodes) if g.capability is not None]
    if not flags or not gpus:
        return
    compiled = imports.architectures(flags)
    lacking = [gpu for gpu in gpus if not runs_on(compiled, f"{gpu.capability:.1f}")]
    if not lacking:
        return
    names = ", ".join(f"{gpu.name} ({gpu.capability:.1f})" for gpu in lacking)
    message = (
        f"{config.path}: torch {version} (CUDA {torch['cuda']}) of {python} has no code for "
        f"{names}, only for {', '.join(compiled)}."
    )
    remedy = (
        "Install a torch that has it: `stage env check` names those that do, or ask "
        "for another partition or GPU (slurm.options gres)."
    )
    if len(lacking) == len(gpus):
        raise UsageError(message, remedy)
    yield warning(message, remedy)


def _short(text: str) -> str:
    """The last words that a program printed, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-WORDS:]
