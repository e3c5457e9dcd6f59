"""What the answers of `import_probe.py` mean: each fault with its cause and remedy. Pure."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage.errors import says_no_memory

PROBE = Path(__file__).with_name("import_probe.py")
SHOWN = 300  # letters of a library's message
_ONLY_WITH_A_DRIVER = ("libcuda.so", "libnvidia-ml.so", "libnvrm")
_OF_CUDA = re.compile(r"lib(cudart|cublas|cudnn|nccl|cusparse|cusolver|curand|cufft|nvrtc|cupti)")
_NUMPY = ("compiled using NumPy 1", "umpy is not available", "_ARRAY_API", "numpy.dtype size")
_NUMPY_2 = (*_NUMPY, "numpy.core.multiarray failed", "multiarray failed to import")


@dataclass(frozen=True)
class Fault:
    """One import that failed, or would.

    Attributes:
        package: the package that was imported.
        message: the cause.
        remedy: what to change.
        known_here: False: this machine cannot tell, such as one without a GPU's driver.
    """

    package: str
    message: str
    remedy: str
    known_here: bool = True


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
        done: whether the probe came to its end.
        kept: whether it answered what was found earlier, without an import.
    """

    python: Mapping[str, str] = field(default_factory=dict)
    torch: Mapping[str, str | None] = field(default_factory=dict)
    imported: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unfinished: str = ""
    done: bool = False
    kept: bool = False

    @property
    def version(self) -> tuple[int, ...]:
        """The version of the Python; empty: the probe never ran."""
        text = self.python.get("version", "")
        return tuple(int(part) for part in text.split(".") if part.isdigit())


def read_answers(text: str) -> Answers:
    """Reads the lines of the probe. A last line that is cut off does not count."""
    python: dict[str, str] = {}
    torch: dict[str, str | None] = {}
    imported: dict[str, Mapping[str, Any]] = {}
    failed: dict[str, Mapping[str, Any]] = {}
    begun, done, kept = "", False, False
    for line in text.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if "python" in answer:
            python = answer
        elif "torch" in answer:
            torch = answer["torch"]
        elif "begin" in answer:
            begun = answer["begin"]
        elif "imported" in answer:
            imported[answer["imported"]], begun = answer["facts"], ""
        elif "failed" in answer:
            failed[answer["failed"]], begun = answer, ""
        elif "done" in answer:
            done = True
        elif "kept" in answer:
            kept = True
    return Answers(python, torch, imported, failed, begun, done, kept)


def faults(answers: Answers, returncode: int | None) -> list[Fault]:
    """Explains every import that failed.

    Args:
        returncode: of the probe; None: it did not end in time, which is no fault of a package.
    """
    found = [_explain(package, failure, answers) for package, failure in answers.failed.items()]
    if answers.unfinished and returncode is not None:
        found.append(_killed(answers.unfinished, returncode))
    facts = answers.imported.get("torch", {})
    if fault := facts.get("numpy_fault"):
        found.append(_numpy("torch", str(facts["version"]), str(facts["numpy"]), fault))
    found += _bitsandbytes(answers)
    return found


def _bitsandbytes(answers: Answers) -> list[Fault]:
    """bitsandbytes has one library per CUDA version, and needs one of torch's major version."""
    libraries = answers.imported.get("bitsandbytes", {}).get("libraries")
    cuda = answers.torch.get("cuda")
    if not libraries or not cuda:
        return []
    majors = {name[:2] for name in libraries}
    if cuda.partition(".")[0] in majors:
        return []
    have = ", ".join(f"{name[:-1]}.{name[-1]}" for name in libraries)
    version = answers.imported["bitsandbytes"]["version"]
    return [
        Fault(
            "bitsandbytes",
            f"bitsandbytes {version} has libraries for CUDA {have}, and torch "
            f"{answers.torch.get('version')} has CUDA {cuda}",
            f"Install a newer bitsandbytes, or a torch with CUDA {sorted(majors)[-1]}.",
        )
    ]


def _killed(package: str, returncode: int) -> Fault:
    how = f"exit code {returncode}"
    if returncode < 0 or returncode > 128:
        number = -returncode if returncode < 0 else returncode - 128
        how = next((s.name for s in signal.Signals if s.value == number), f"signal {number}")
    by_processor, by_memory = how == "SIGILL", how == "SIGKILL"
    message = f"`import {package}` ended Python with {how}"
    if by_processor:
        message += ": it has instructions that this machine's processor lacks"
    if by_memory:
        message += ": this machine gives it too little memory, or too little time"
    return Fault(
        package,
        message,
        f"Compiled parts of two packages do not fit each other: install {package} again, with the "
        "versions of one release.",
        known_here=not (by_processor or by_memory),
    )


def _numpy(package: str, version: str, numpy: str, text: str) -> Fault:
    return Fault(
        package,
        f"{package} {version} was compiled with NumPy 1, and numpy {numpy} is installed: {text}",
        f"Ask for `numpy<2`, or for a newer {package}.",
    )


def _explain(package: str, failure: Mapping[str, Any], answers: Answers) -> Fault:
    text, kind = str(failure["text"]), str(failure["kind"])
    for pattern, rule in _RULES:
        if match := re.search(pattern, text):
            return rule(package, text, match, answers)
    if kind == "MemoryError" or says_no_memory(text):
        return Fault(
            package,
            f"`import {package}` needs more memory than this machine gives",
            "Look at `ulimit -v`.",
            known_here=False,
        )
    if any(word in text for word in _NUMPY_2):
        numpy = str(answers.imported.get("torch", {}).get("numpy", "2"))
        return _numpy(package, "", numpy, _short(text))
    python = answers.python.get("python", "python")
    return Fault(
        package,
        f"`import {package}` fails: {kind}: {_short(text)}",
        f"Its last lines say why: {python} -c 'import {package}'",
    )


Rule = Callable[[str, str, "re.Match[str]", Answers], Fault]


def _missing(package: str, text: str, match: re.Match[str], answers: Answers) -> Fault:
    module = match[1]
    python = answers.python.get("python", "this python")
    if module.partition(".")[0] == package:
        return Fault(package, f"{package} is not installed for {python}", f"pip install {package}")
    if module.startswith("numpy."):
        return _numpy(package, "", "2", _short(text))
    return Fault(
        package,
        f"{package} needs `{module}`, which is not installed for {python}",
        f"Add `{module.partition('.')[0]}` to the environment, or ask for a {package} that does "
        "without.",
    )


def _foreign_library(package: str, text: str, match: re.Match[str], answers: Answers) -> Fault:
    library, wanted = match[1], match[2]
    prefix, paths = answers.python.get("prefix", ""), answers.python.get("library_path", "")
    folder = library.rpartition("/")[0]
    by_path = bool(folder) and folder in [path.rstrip("/") for path in paths.split(":")]
    cause = f": LD_LIBRARY_PATH has {folder} before the environment's" if by_path else ""
    remedy = f"export LD_LIBRARY_PATH={prefix}/lib:$LD_LIBRARY_PATH"
    return Fault(
        package,
        f"`import {package}` finds another C++ library first, {library}, which lacks "
        f"{wanted}{cause}",
        "Remove the module that sets LD_LIBRARY_PATH (gcc, cuda, anaconda), or add to slurm.setup: "
        f"{remedy}"
        if by_path
        else f"Put the environment's own first, in slurm.setup: {remedy}",
    )


def _old_glibc(package: str, text: str, match: re.Match[str], answers: Answers) -> Fault:
    return Fault(
        package,
        f"{package} was built for glibc {match[1]} or newer, and this system's is older",
        "Lock the environment for this cluster's profile: stage env lock ENV.yml --profile "
        "PROFILE.yml",
    )


def _other_build(package: str, text: str, match: re.Match[str], answers: Answers) -> Fault:
    torch = answers.torch.get("version")
    partner = f"torch {torch}" if torch and package != "torch" else "the libraries that it finds"
    return Fault(
        package,
        f"{package} was built for another version than {partner}: {_short(text)}",
        f"Install the {package} that was built for it (the file names of its releases say which "
        "torch, CUDA and Python), or remove it from the environment.",
    )


def _no_library(package: str, text: str, match: re.Match[str], answers: Answers) -> Fault:
    library = match[1].rpartition("/")[2]
    lacks = f"{package} needs {library}, which is not found"
    if library.startswith(_ONLY_WITH_A_DRIVER):
        return Fault(package, f"{lacks}: this machine has no GPU driver", "", known_here=False)
    remedy = f"Load the module that has {library} (slurm.modules), or install its package."
    if library.startswith("libmpi"):
        remedy = "Load the site's MPI in slurm.modules, or remove mpi4py: airlift needs none."
    elif _OF_CUDA.match(library):
        cuda = answers.torch.get("cuda")
        of_torch = f" (torch here has CUDA {cuda})" if cuda else ""
        remedy = f"Install the {package} of torch's own CUDA{of_torch}, or load that CUDA's module."
    return Fault(package, lacks, remedy)


def _not_together(package: str, text: str, match: re.Match[str], answers: Answers) -> Fault:
    other = match[1].partition(".")[0]
    versions = [
        f"{name} {answers.imported[name].get('version')}" if name in answers.imported else name
        for name in dict.fromkeys((package, other))
    ]
    return Fault(
        package,
        f"{' and '.join(versions)} do not go together: {_short(text)}",
        f"Ask for versions of {package} and {other} of the same time, and lock again.",
    )


def _no_toolkit(package: str, text: str, match: re.Match[str], answers: Answers) -> Fault:
    cuda = answers.torch.get("cuda")
    return Fault(
        package,
        f"{package} looks for a CUDA toolkit while it is imported, and CUDA_HOME names none: "
        f"{_short(text)}",
        f"Load the module of CUDA{f' {cuda}' if cuda else ''} (slurm.modules), set CUDA_HOME in "
        f"slurm.setup, or ask for a newer {package}, which needs none to be imported.",
    )


def _wrong_version(package: str, text: str, match: re.Match[str], answers: Answers) -> Fault:
    return Fault(
        package,
        f"{package} refuses a package that is installed: {_short(text)}",
        f"Ask for {match[1].rstrip(' .,')!r}, or for another {package}.",
    )


_RULES: Sequence[tuple[str, Rule]] = (
    (r"No module named '([\w.]+)'", _missing),
    (r"(\S*libstdc\+\+\S*|\S*libgcc_s\S*): version [`']((?:GLIBCXX|CXXABI|GCC)_[\d.]+)' not found",
     _foreign_library),
    (r"version [`']GLIBC_([\d.]+)' not found", _old_glibc),
    (r"undefined symbol: (\S+)", _other_build),
    (r"operator (torchvision::\w+) does not exist", _other_build),
    (r"CUDA_HOME does not exist|CUDA_HOME environment variable is not set", _no_toolkit),
    (r"(\S+\.so[\w.]*): cannot open shared object file", _no_library),
    (r"([\w.-]+ *(?:[<>=!~]=?[^ ,]+,?)+) is required for a normal functioning", _wrong_version),
    (r"cannot import name '\w+' from (?:partially initialized module )?'([\w.]+)'", _not_together),
    (r"module '([\w.]+)' has no attribute", _not_together),
)  # fmt: skip


def _short(text: str) -> str:
    return " ".join(text.split())[:SHOWN]


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
