"""Imports the large packages of a finished environment once, on the laptop, in a sandbox.

The sandbox (`stage.sandbox`) has no network. `import_probe.py` runs in it; here is what its answers
mean: Python's own last line, and what helps.

A lock can be solvable and still hold two packages that do not go together: numpy 2 with an older
torch, flash-attn or torchvision for another torch, a transformers that wants another tokenizers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stage.errors import UsageError
from stage.progress import Reporter
from stage.sandbox import OFFLINE, close_network

PROBE = Path(__file__).with_name("import_probe.py")
SHOWN = 300  # letters of a library's message

_OTHER_NUMPY = "{package} was compiled with NumPy 1, and NumPy 2 is installed"
_OLDER_NUMPY = "Ask for `numpy<2`, or for a newer {package}."
_OTHER_BUILD = "it was built for another version than torch {torch}"
_SAME_BUILD = (
    "Install the {package} that was built for it (the file names of its releases say which torch, "
    "CUDA and Python), or remove it from the environment."
)
_NOT_TOGETHER = "{package} and {0} do not go together"
_SAME_TIME = "Ask for versions of {package} and {0} of the same time, and lock again."

TABLE = (
    (
        r"compiled using NumPy 1|umpy is not available|_ARRAY_API|numpy.dtype size"
        r"|multiarray failed|No module named 'numpy\.",
        _OTHER_NUMPY,
        _OLDER_NUMPY,
    ),
    (r"undefined symbol|operator torchvision::\w+ does not exist", _OTHER_BUILD, _SAME_BUILD),
    (
        r"No module named '(\w+)",
        "{package} needs `{0}`, which is not installed for {python}",
        "Add `{0}` to the environment, or ask for a {package} that does without.",
    ),
    (
        r"(\S*lib(?:stdc\+\+|gcc_s)\S*): version [`'](?:GLIBCXX|CXXABI|GCC)_[\d.]+' not found",
        "it finds another C++ library first, {0} (LD_LIBRARY_PATH has {library_path})",
        "Remove the module that sets LD_LIBRARY_PATH (gcc, cuda, anaconda), or put the "
        "environment's own first, by one line more in slurm.setup: `export "
        "LD_LIBRARY_PATH={prefix}/lib:$LD_LIBRARY_PATH`",
    ),
    (
        r"version [`']GLIBC_([\d.]+)' not found",
        "{package} was built for glibc {0} or newer, and this system's is older",
        "Lock the environment for this cluster's profile: stage env lock ENV.yml --profile "
        "PROFILE.yml",
    ),
    (
        r"CUDA_HOME does not exist|CUDA_HOME environment variable is not set",
        "{package} looks for a CUDA toolkit while it is imported, and CUDA_HOME names none",
        "Load the module of CUDA {cuda} (slurm.modules), set CUDA_HOME in slurm.setup, or ask for "
        "a newer {package}, which needs none to be imported.",
    ),
    (r"lib(?:cuda|nvidia-ml)\.so|libnvrm", "this machine has no GPU driver", ""),
    (
        r"libmpi\S*: cannot open shared object file",
        "no MPI library is found",
        "Load the site's MPI in slurm.modules, or remove mpi4py: airlift needs none.",
    ),
    (
        r"(lib(?:cu|nccl|nvrtc)\S*): cannot open shared object file",
        "{package} needs {0}, a library of CUDA (torch here has CUDA {cuda})",
        "Install the {package} of torch's own CUDA, or load that CUDA's module.",
    ),
    (
        r"(\S+): cannot open shared object file",
        "{package} needs {0}, which is not found",
        "Load the module that has it (slurm.modules), or install its package.",
    ),
    (
        r"has libraries for CUDA",
        "it does not go with this torch",
        "Install a newer {package}, or a torch with one of those CUDA versions.",
    ),
    (
        r"([\w.-]+ *(?:[<>=!~]=?[^ ,]+,?)+) is required for a normal functioning",
        "{package} refuses a package that is installed",
        "Ask for `{0}`, or for another {package}.",
    ),
    (
        r"cannot import name '\w+' from (?:partially initialized module )?'(\w+)",
        _NOT_TOGETHER,
        _SAME_TIME,
    ),
    (r"module '(\w+)[\w.]*' has no attribute", _NOT_TOGETHER, _SAME_TIME),
    (r"MemoryError|annot allocate memory|bad_alloc", "this machine gives too little memory", ""),
)
"""Pattern in Python's last line -> cause and remedy; without a remedy, this machine cannot tell."""


@dataclass(frozen=True)
class Fault:
    """One import that failed.

    Attributes:
        package: the package that was imported.
        message: Python's last line, and the cause if it is known.
        remedy: what to change; empty: this machine cannot tell, such as one without a driver.
    """

    package: str
    message: str
    remedy: str

    @property
    def known_here(self) -> bool:
        """Whether the same import fails on each machine."""
        return bool(self.remedy)


@dataclass(frozen=True)
class Answers:
    """What the probe wrote.

    Attributes:
        python: executable, version, prefix, LD_LIBRARY_PATH and CUDA_VISIBLE_DEVICES; empty: the
            probe never ran.
        torch: version, cuda and hip, as torch/version.py has them; empty: there is no torch.
        imported: package -> its facts.
        failed: package -> kind, text and the name of a missing module.
        unfinished: the package whose import did not end; empty: none.
        kept: whether it answered what was found earlier, without an import.
    """

    python: Mapping[str, str] = field(default_factory=dict)
    torch: Mapping[str, str | None] = field(default_factory=dict)
    imported: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unfinished: str = ""
    kept: bool = False

    @property
    def version(self) -> tuple[int, ...]:
        """The version of the Python; empty: the probe never ran."""
        text = self.python.get("version", "")
        return tuple(int(part) for part in text.split(".") if part.isdigit())


def read_answers(text: str) -> Answers:
    """Reads the lines of the probe. A last line that is cut off does not count."""
    answers: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            answers.append(json.loads(line))
        except ValueError:
            continue
    imported = {answer["imported"]: answer["facts"] for answer in answers if "imported" in answer}
    failed = {answer["failed"]: answer for answer in answers if "failed" in answer}
    begun = next((answer["begin"] for answer in reversed(answers) if "begin" in answer), "")
    return Answers(
        python=next((answer for answer in answers if "python" in answer), {}),
        torch=next((answer["torch"] for answer in answers if "torch" in answer), {}),
        imported=imported,
        failed=failed,
        unfinished="" if begun in imported or begun in failed else begun,
        kept=any("kept" in answer for answer in answers),
    )


def faults(answers: Answers, returncode: int | None) -> list[Fault]:
    """Every import that failed.

    Args:
        returncode: of the probe; None: it did not end in time, which is no fault of a package.
    """
    found = [_fault(package, failure, answers) for package, failure in answers.failed.items()]
    if answers.unfinished and returncode is not None:
        found.append(_killed(answers.unfinished, returncode))
    return found


def _fault(package: str, failure: Mapping[str, Any], answers: Answers) -> Fault:
    python = answers.python.get("python", "python")
    if (failure["missing"] or "").partition(".")[0] == package:
        return Fault(package, f"{package} is not installed for {python}", f"pip install {package}")
    last_line = f"{failure['kind']}: {' '.join(str(failure['text']).split())[:SHOWN]}"
    message = f"`import {package}` fails: {last_line}"
    facts = {
        "package": package,
        "python": python,
        "prefix": answers.python.get("prefix", ""),
        "library_path": answers.python.get("library_path") or "nothing",
        "torch": answers.torch.get("version") or "here",
        "cuda": answers.torch.get("cuda") or "that torch has",
    }
    for pattern, cause, remedy in TABLE:
        if match := re.search(pattern, f"{failure['kind']}: {failure['text']}"):
            cause = cause.format(*match.groups(), **facts)
            return Fault(package, f"{message}: {cause}", remedy.format(*match.groups(), **facts))
    return Fault(package, message, f"All of it is printed by: {python} -c 'import {package}'")


def _killed(package: str, returncode: int) -> Fault:
    number = -returncode if returncode < 0 else returncode - 128
    name = next((s.name for s in signal.Signals if s.value == number), f"exit code {returncode}")
    message = f"`import {package}` ended Python with {name}"
    if name == "SIGILL":
        return Fault(package, f"{message}: this machine's processor lacks its instructions", "")
    if name == "SIGKILL":
        return Fault(package, f"{message}: this machine gives it too little memory, or time", "")
    return Fault(
        package,
        message,
        f"Compiled parts of two packages do not fit each other: install {package} again, with the "
        "versions of one release.",
    )


def importable(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Returns those of `wanted` (`module` or `module:name`) that an environment has.

    Args:
        names: of its packages, as pip or conda writes them.
    """
    have = {re.sub(r"[-_.]+", "_", name.lower()) for name in names}
    if "pytorch" in have:
        have.add("torch")
    return [module for module in wanted if module.partition(":")[0] in have]


def architectures(flags: Sequence[str]) -> tuple[str, ...]:
    """Turns torch's flags into capabilities: `sm_86` is 8.6, `compute_90` is 9.0+PTX."""
    found = []
    for flag in flags:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)\w?", flag):
            ptx = "+PTX" if match[1] == "compute" else ""
            found.append(f"{match[2]}.{match[3]}{ptx}")
    return tuple(found)


WANTED = (
    "numpy", "torch", "torchvision", "torchaudio", "flash_attn", "xformers",
    "transformers:PreTrainedModel", "deepspeed", "peft", "accelerate", "bitsandbytes", "datasets",
)  # fmt: skip
"""Packages whose versions depend on each other; those that an environment has are imported."""
TIMEOUT_S = 600.0  # a first import compiles nothing (-B), but reads gigabytes from a slow disk


def check_imports(
    asset: str, root: Path, names: Sequence[str], platform: str, reporter: Reporter
) -> None:
    """Imports packages by the Python of an environment, and reports what cannot work.

    Args:
        asset: its name.
        root: its files, which are not changed.
        names: of its packages, as in the lock.
        platform: such as `linux-64`.

    Raises:
        UsageError: an import fails, for a reason that is the same on each machine; the caller names
            the asset.
    """
    from stage.environment.spec.profile import MACHINES  # the runner starts without it

    wanted = importable(names, WANTED)
    if not wanted:
        return
    shown = ", ".join(name.partition(":")[0] for name in wanted)
    machine = os.uname().machine
    if not sys.platform.startswith("linux") or MACHINES[platform] != machine:
        reporter.note(
            f"{asset}: not tried whether {shown} can be imported together: it is for {platform}, "
            f"and this machine is {sys.platform} {machine}"
        )
        return
    answers, code, last_line = try_imports(root.absolute(), wanted)
    found = faults(answers, code)
    unknown = [fault.message for fault in found if not fault.known_here]
    if not answers.python:
        unknown = [f"its Python does not start here: {last_line or code}"]
    elif code is None:
        unknown.append(f"`import {answers.unfinished}` took more than {TIMEOUT_S:.0f} s")
    for text in unknown:
        reporter.note(f"{asset}: not known here: {text}")
    if refused := [fault for fault in found if fault.known_here]:
        listed = "\n".join(f"  {fault.message}\n    {fault.remedy}" for fault in refused)
        raise UsageError(
            f"packages of this environment do not go together:\n{listed}",
            "Change the environment file, then fetch again. To take it as it is: "
            "--no-offline-check",
        )
    if not unknown:
        reporter.note(f"{asset}: {shown} can be imported, without network")


def try_imports(
    root: Path, wanted: Sequence[str], site: Mapping[str, str] = MappingProxyType({})
) -> tuple[Answers, int | None, str]:
    """The answers, the exit code (None: out of time), and the last line that was printed.

    Args:
        site: variables that the site's own torch may need.
    """
    with tempfile.TemporaryDirectory(prefix="airlift-imports-") as folder:
        path, printed = Path(folder, "answers"), Path(folder, "printed")
        path.touch()
        environ = {
            **site,
            **OFFLINE,
            "PATH": f"{root / 'bin'}:{site.get('PATH', '/usr/bin:/bin')}",
            "HOME": folder,
            "LANG": "C.UTF-8",
        }
        # -B: compiled files would become part of the environment. -I: nothing of this user.
        command = [str(root / "bin/python"), "-I", "-B", str(PROBE), str(path), *wanted]
        code: int | None = None
        with printed.open("wb") as output:
            try:
                code = subprocess.run(
                    command,
                    env=environ,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=TIMEOUT_S,
                    preexec_fn=close_network,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                pass
            except OSError as error:  # such as a musl Python here
                return Answers(), None, error.strerror or ""
        lines = printed.read_text(encoding="utf-8", errors="replace").split("\n")
        last_line = next((line for line in reversed(lines) if line.strip()), "")
        return read_answers(path.read_text(encoding="utf-8")), code, last_line
