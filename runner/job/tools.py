"""Compilers and headers that a run compiles with: `compile: true`, and files of NVMe offload."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.job.findings import Finding

COMPILE_TIMEOUT_S = 20.0
_LIBAIO = "#include <libaio.h>\nint main(void) { return io_queue_init(1, 0); }\n"
_HEADER = "#include <Python.h>\nint main() { return 0; }\n"
_STANDARD = "#if __cplusplus < 201703L\n#error old\n#endif\nint main() { return 0; }\n"


def check_tools(config: RunConfig) -> None:
    """Refuses a run that compiles on this machine, where it cannot.

    Raises:
        UsageError: something is missing.
    """
    for what, remedy in _missing(config):
        raise UsageError(f"{config.path}: {what} on this machine.", remedy)


def find_tools(config: RunConfig) -> list[Finding]:
    """Finds what is missing here for a job on other nodes, which often have the same.

    Nothing if the job gets its tools by `modules`, `setup`, a container or an environment.
    """
    slurm = config.slurm
    if slurm.modules or slurm.setup or slurm.around_ranks or config.environment is not None:
        return []
    return [
        Finding(
            "warning",
            f"{config.path}: {what} on this machine; the job's nodes may lack it, too.",
            remedy,
        )
        for what, remedy in _missing(config)
    ]


def _missing(config: RunConfig) -> list[tuple[str, str]]:
    """Returns what is missing, and what fixes it."""
    found = []
    if config.compile and (lacks := _lacks_for_compile()):
        found.append(
            (
                f"compile: true needs {lacks}, and there is none",
                "Load a module that has it (slurm.modules: [gcc], or one with Python's headers), "
                "or set compile: false.",
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
    compiler = _compiler()
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
    return missing


def _compiler() -> str | None:
    named = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)]
    return next((n for n in (*named, "g++", "c++", "clang++") if shutil.which(n)), None)


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
