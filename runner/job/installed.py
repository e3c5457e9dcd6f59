"""What of the extra `train` is installed here, and the compilers that a run needs; what to install.

The light installation (`pip install .`) is for a login node: it has neither torch nor transformers.
`check` and `submit` work with it and leave some checks to the ranks; what trains or tokenises is
refused, in one message.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path

from runner.config.job_config import JobConfig
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError, install_command, quoted
from runner.inputs import JobInputs, check_site, environments, running_tree
from runner.job.findings import Finding, note, warning
from runner.tasks import task_named
from stage.environment.check import imports

PIP_NAMES = {"PIL": "pillow"}
PREFIX = "~/envs"
SILENT = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@dataclass(frozen=True)
class Packages:
    """The packages that a run imports, by the names that are imported.

    Attributes:
        of_ranks: what the ranks import.
        of_launcher: what it prepares the data with, where the ranks have another Python.
        of_tokenizer: what turns the files of a tokenizer into a fast one.
    """

    of_ranks: tuple[str, ...]
    of_launcher: tuple[str, ...]
    of_tokenizer: tuple[str, ...] = ()


def is_installed(package: str) -> bool:
    """Whether a package can be imported. It is not imported.

    Not `importlib.util.find_spec`: it says no for the torch that `leave_torch_alone` blocks.
    """
    found = PathFinder.find_spec(package)
    return found is not None and found.origin is not None


def _missing(packages: Iterable[str]) -> list[str]:
    return [PIP_NAMES.get(name, name) for name in packages if not is_installed(name)]


def lacking() -> str:
    """The packages without which this Python cannot train or tokenise; empty: all are here."""
    return _listed(_missing(("torch", "transformers", "numpy")))


def is_light() -> bool:
    """Whether this Python cannot train or tokenise: packages of `train` are missing."""
    return bool(lacking())


def leave_torch_alone() -> None:
    """Makes transformers, imported after this call, work without torch.

    This saves seconds, and minutes on a slow shared disk. It is for processes that do not train:
    the launcher, and the process that tokenises. A torch that is already imported stays. `None` in
    sys.modules is Python's own way to say that a module cannot be imported (Language Reference,
    5.3.1). transformers 5 has no option for it (USE_TORCH ended with version 4): it only looks
    whether torch can be found.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment] # `import` fails then
    before = os.environ.get(SILENT)
    os.environ[SILENT] = "1"
    try:
        import transformers  # noqa: F401 - it warns once that torch is missing: silenced here
    except ModuleNotFoundError:  # the light installation: nothing here imports it
        return
    finally:
        if before is None:
            del os.environ[SILENT]


def to_prepare(config: RunConfig) -> list[str]:
    """Returns the packages that turn the data of a run into a store."""
    return ["numpy", "pyarrow", "transformers" if task_named(config.task).has_tokens else "PIL"]


def to_train(config: RunConfig) -> list[str]:
    """Returns the packages that the launcher and the ranks of a run need."""
    lora, bits = config.lora is not None, config.quantization is not None
    chosen = {
        "deepspeed": config.engine.name == "deepspeed",
        "peft": lora,
        "bitsandbytes": bits or config.optimizer.name.endswith("8bit"),
        "wandb": config.wandb,
    }
    always = ["torch", "transformers", "safetensors", "tensorboard", *to_prepare(config)]
    return list(dict.fromkeys([*always, *(name for name, used in chosen.items() if used)]))


def for_tokenizer(names: Iterable[str]) -> list[str]:
    """Returns the packages that turn the files of a tokenizer into a fast one, if that is needed.

    Args:
        names: the files of the model.
    """
    names = set(names)
    if "tokenizer.json" in names or "tekken.json" in names:
        return []
    found = ["sentencepiece"] if any(name.endswith(".model") for name in names) else []
    return ["tiktoken"] if any(name.endswith(".tiktoken") for name in names) else found


def check_installed(
    config: JobConfig, inputs: JobInputs, packages: Sequence[str], what: str
) -> None:
    """Refuses work for which this environment is not the right one.

    Args:
        config: the run file.
        inputs: its bundle may hold an environment.
        packages: what the work needs, by the names that are imported.
        what: the work, for the message: "training".

    Raises:
        UsageError: as for `check_packages`; or the site's own torch, on which this environment was
            made, is another one by now.
    """
    check_site()
    check_packages(config, inputs, packages, what)


def check_packages(
    config: JobConfig, inputs: JobInputs, packages: Sequence[str], what: str
) -> None:
    """Refuses work for which packages are missing here. Arguments: as for `check_installed`.

    Raises:
        UsageError: some are missing; names them, and what to install.
    """
    if missing := _missing(packages):
        light = " (a light installation, without the extra `train`)" if is_light() else ""
        raise UsageError(
            f"{config.path}: {what} needs {_listed(missing)}, not installed for "
            f"{sys.executable}{light}.",
            how_to_install(environments(inputs.bundle))
            if light
            else f"pip install {' '.join(missing)}",
        )


def check_environment(config: JobConfig, inputs: JobInputs, packages: Packages) -> None:
    """Refuses an environment of the bundle that lacks a package which the run needs.

    Raises:
        UsageError: it lacks some; names them.
    """
    environment = inputs.environment
    if environment is None or not environment.packages:
        return
    wanted = (*packages.of_ranks, *packages.of_tokenizer)
    names = [PIP_NAMES.get(name, name) for name in wanted]
    have = imports.importable(environment.packages, names)
    if missing := [name for name in names if name not in have]:
        raise UsageError(
            f"{config.path}: the environment `{environment.asset}` of the bundle lacks "
            f"{_listed(missing)}, and the run needs {'it' if len(missing) == 1 else 'them'}.",
            f"On the laptop, add {_listed(missing)} to its environment.yml, and fetch again.",
        )


def how_to_install(folders: Sequence[Path]) -> str:
    """What gives this machine the extra `train`: an environment of the bundle, or the index.

    Args:
        folders: those of the environments in the bundle.
    """
    online = f"Where a package index can be reached: {install_command('train')}"
    if not folders:
        return (
            f"{online}. Else stage an environment with the bundle (in the manifest: "
            "`train-env: {environment: ENVIRONMENT.yml, profile: PROFILE.yml}`)."
        )
    prefix = f"{PREFIX}/{folders[0].name}"
    return (
        f"Once, without network: sh {quoted(folders[0] / 'bootstrap.sh')} {prefix}; then: . "
        f"{prefix}/activate "
        f"and the same command. {online}"
    )


def python_of_ranks(config: JobConfig, inputs: JobInputs) -> tuple[str, ...] | None:
    """The words that start the Python of the ranks on this machine.

    Returns:
        Empty: it is this one. None: it cannot be started here.
    """
    if words := config.slurm.around_ranks:
        return (*words, sys.executable) if shutil.which(words[0]) else None
    environment = inputs.environment
    return () if environment is None or running_tree() == environment.tree else None


def check_fsdp(config: RunConfig, kind: str) -> None:
    """Refuses FSDP2 on CPUs with a torch that has it for GPUs only.

    Before torch 2.7, `fully_shard` uses streams that `torch.cpu` does not have.

    Raises:
        UsageError: this torch cannot do it on a device of this kind (`cuda` or `cpu`).
    """
    if config.engine.name != "fsdp" or kind != "cpu":
        return
    found = version("torch")
    if tuple(int(part) for part in found.split(".")[:2]) < (2, 7):
        raise UsageError(
            f"{config.place('engine.name')}: "
            f"engine.name: fsdp on CPUs needs torch 2.7 or newer; this is {found}.",
            "Set engine: {name: deepspeed} or {name: ddp}.",
        )


def note_for_job(config: JobConfig, inputs: JobInputs, packages: Packages) -> Finding | None:
    """What to know of the Python of the job, if this one cannot train; None: it can."""
    if not is_light():
        return None
    if config.slurm.setup:
        what = "the job runs the `runner` that slurm.setup puts on PATH: this one cannot train"
        return note(what)
    if config.manifest and config.environment and not shutil.which("sbatch"):
        what = f"the job runs in `{config.environment.asset}`"
        return note(f"{what}: `runner submit --to` makes it on the cluster")
    if not packages.of_ranks:  # a command's own packages are looked up by its imports
        return None
    lacks = f"the job runs {sys.executable}, which lacks {_listed(_missing(packages.of_ranks))}"
    if config.slurm.modules:
        return note(f"{lacks}: slurm.modules must bring them, else it ends at once")
    return warning(
        f"{lacks}, so it would end at once.",
        "Activate an environment that has them: "
        f"slurm: {{setup: ['. {PREFIX}/NAME/activate']}}. "
        f"{how_to_install(environments(inputs.bundle))}",
    )


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


COMPILE_TIMEOUT_S = 20.0  # a few lines; only a busy network disk makes it longer
NVIDIA, CUDA = Path("/dev/nvidia0"), Path("/usr/local/cuda")
_LIBAIO = "#include <libaio.h>\nint main(void) { return io_queue_init(1, 0); }\n"
_HEADER = "#include <Python.h>\nint main() { return 0; }\n"
_STANDARD = "#if __cplusplus < 201703L\n#error old\n#endif\nint main() { return 0; }\n"


def check_tools(config: JobConfig, missing: Sequence[tuple[str, str]]) -> None:
    """Refuses a run that compiles on this machine, where it cannot.

    Args:
        missing: what is, as for `missing_tools`.

    Raises:
        UsageError: something is missing.
    """
    for what, remedy in missing:
        raise UsageError(f"{config.path}: {what} on this machine.", remedy)


def find_tools(config: JobConfig, missing: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Finds what is missing here for a job on other nodes, which often have the same.

    Nothing if the job gets its tools by `modules`, `setup`, a container or an environment.
    """
    slurm = config.slurm
    if slurm.modules or slurm.setup or slurm.around_ranks or config.environment is not None:
        return
    for what, remedy in missing:
        where = f"{config.path}: {what} on this machine; the job's nodes may lack it, too."
        yield warning(where, remedy)


def missing_tools(config: RunConfig) -> list[tuple[str, str]]:
    """Returns what a training compiles with and is missing here, each with what fixes it."""
    found = []
    if config.compile and (lacks := _lacks_for_compile()):
        found.append(
            (
                f"compile: true needs {lacks}, and there is none",
                "Load a module that has it (gcc, or one with Python's headers): slurm.modules: "
                f"{json.dumps([*config.slurm.modules, 'gcc'])}; or set compile: false.",
            )
        )
    if config.engine.offload == "nvme" and (missing := _lacks_for_nvme()):
        found.append(
            (
                f"engine.offload: nvme compiles with {', '.join(missing)}, and there is none",
                "Set engine.offload: cpu and remove engine.nvme_path, or load a module that has it "
                "(slurm.modules).",
            )
        )
    return found


def _lacks_for_compile() -> str:
    """Returns what torch.compile lacks; empty: nothing."""
    named = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)]
    compiler = next((n for n in (*named, "g++", "c++", "clang++") if shutil.which(n)), None)
    if compiler is None:
        return "a C++ compiler"
    if not _compiles(compiler, _STANDARD, "-std=c++17"):
        return f"a C++ compiler that knows C++17 ({compiler} does not)"
    folder = sysconfig.get_path("include")
    if _compiles(compiler, _HEADER, f"-I{folder}"):
        return ""
    return f"the headers of Python ({folder}/Python.h)"


def _lacks_for_nvme() -> list[str]:
    """Returns what DeepSpeed's asynchronous files lack."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if "g++" not in missing and not _compiles("g++", _LIBAIO, "-laio"):
        missing.append("libaio (packages libaio-devel or libaio-dev)")
    # async_io of DeepSpeed takes CUDA's headers where torch has CUDA, and looks where torch does
    # (torch.utils.cpp_extension, `_find_cuda_home`). Without a GPU this says nothing.
    if NVIDIA.exists() and not (
        os.environ.get("CUDA_HOME")
        or os.environ.get("CUDA_PATH")
        or shutil.which("nvcc")
        or CUDA.exists()
    ):
        missing.append("CUDA's toolkit (nvcc)")
    return missing


def _compiles(compiler: str, text: str, option: str) -> bool:
    """Whether a small program compiles and links. True where this cannot be found out in time."""
    command = [compiler, "-x", "c++", "-", "-o", os.devnull, option]
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode == 0
