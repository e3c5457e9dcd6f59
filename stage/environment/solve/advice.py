"""Advice where a solver finds no solution, or PyPI has a package not in the requested form. Pure.

Most of such packages are CUDA extensions, published as source only. Such a wheel fits one torch,
one CUDA and one Python. A laptop has no compiler for them, so they come from their authors'
releases or from conda-forge.

A solver knows a cluster's driver and glibc only as the virtual packages `__cuda` and `__glibc`. The
hint names the machine that they stand for.

Sources: the releases of Dao-AILab/flash-attention, Dao-AILab/causal-conv1d and state-spaces/mamba;
conda-forge's pages of `flash-attn`, `causal-conv1d`, `nvidia-apex` and `transformer-engine-torch`;
data.pyg.org.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile
from stage.errors import UsageError


@dataclass(frozen=True)
class Target:
    """The properties that a wheel has to fit.

    Attributes:
        python: "3.10" or "3.10.13".
        machine: `uname -m`.
        torch: version of torch in the same lock; None: not known.
    """

    python: str
    machine: str
    torch: str | None = None


def _released(name: str, repository: str, conda: str | None, without: str, target: Target) -> str:
    tag = "cp" + "".join(target.python.split(".")[:2])
    torch = ".".join(target.torch.split(".")[:2]) if target.torch else "TORCH"
    file = f"{name.replace('-', '_')}-VERSION+cu12torch{torch}cxx11abi...-{tag}-{tag}-linux_"
    file += f"{target.machine}.whl"
    also = f"Or take conda-forge's `{conda}` with conda-forge's `pytorch`. " if conda else ""
    return (
        f"Its authors release wheels at https://github.com/{repository}/releases: find {file} "
        f"there and write `{name} @ ADDRESS`. {also}{without}"
    )


def advice_for(name: str, target: Target) -> str | None:
    """Advice for a package that must be compiled, or has another name on PyPI; None: not known."""
    name = canonicalize_name(name)
    match name:
        case "flash-attn":
            return _released(
                name,
                "Dao-AILab/flash-attention",
                "flash-attn",
                'Or omit it: `attn_implementation="sdpa"` in `from_pretrained` takes torch\'s own, '
                "and a V100 cannot run it at all (it needs compute capability 8.0).",
                target,
            )
        case "causal-conv1d":
            return _released(name, "Dao-AILab/causal-conv1d", "causal-conv1d", "", target).strip()
        case "mamba-ssm":
            return _released(name, "state-spaces/mamba", None, "", target).strip()
        case "apex" | "nvidia-apex":
            return (
                "PyPI's `apex` is another project, and NVIDIA publishes no wheel of its own. Omit "
                "it: torch has `torch.amp`, `torch.optim.AdamW(fused=True)` and "
                "`torch.nn.LayerNorm`. Or take conda-forge's `nvidia-apex` with conda-forge's "
                "`pytorch`."
            )
        case "transformer-engine" | "transformer-engine-torch" | "transformer-engine-jax":
            return (
                "The part of transformer-engine that needs torch is published as source only. Take "
                "conda-forge's `transformer-engine-torch` with conda-forge's `pytorch`; or omit "
                "it: its FP8 needs compute capability 8.9 or newer."
            )
        case "torch-scatter" | "torch-sparse" | "torch-cluster" | "torch-spline-conv" | "pyg-lib":
            torch = target.torch.partition("+")[0] if target.torch else "TORCH"
            return (
                "Its authors publish wheels for each torch: `--find-links "
                f"https://data.pyg.org/whl/torch-{torch}+cuXXX.html` in the pip section, XXX being "
                "torch's CUDA, such as 126."
            )
        case "mpi4py":
            return "Write `mpi4py>=4`, which has wheels; or take conda's `mpi4py`, with an MPI."
        case "pytorch":
            return "The package is called `torch` there."
        case "sklearn":
            return "The package is called `scikit-learn` there."
        case _:
            return None


def compiled_advice(name: str, target: Target) -> str:
    """Advice for a package that must be compiled, whatever it is."""
    return advice_for(name, target) or (
        "Take a version that has a wheel for the cluster, or its conda package; or make a wheel of "
        "it on the cluster (pip wheel --no-deps NAME), and write `--find-links FOLDER` in the pip "
        "section."
    )


_NETWORK = re.compile(
    r"error sending request|dns error|failed to fetch|CondaHTTPError|ConnectionError"
    r"|Could not (download|connect)|could not find subdir|Request failed after"
    r"|HTTP status (client|server) error|timed? ?out|Connection refused|invalid peer certificate",
    re.IGNORECASE,
)


def is_network_problem(message: str) -> bool:
    """Whether a solver failed because a server did not answer, not because there is no solution."""
    return bool(_NETWORK.search(message)) and "No solution found" not in message


def conda_conflict(message: str, spec: EnvironmentSpec, profile: Profile) -> UsageError:
    """The error for a conda half without a solution.

    Args:
        message: the message of rattler, libmamba or conda.
    """
    cuda = f"the driver of {profile.name} has CUDA {profile.cuda}"
    machine = {
        "__cuda": cuda if profile.cuda else f"{profile.name} has no GPU",
        "__glibc": f"{profile.name} has glibc {profile.glibc}",
    }
    hints = [f"`{k}`: {text}" for k, text in machine.items() if re.search(rf"\b{k}\b", message)]
    hint = f"{'; '.join(hints)}. Ask for versions that such a node runs." if hints else ""
    return UsageError(
        f"{spec.path}: the conda packages conflict on {profile.name}:\n{message.strip()}",
        hint or f"Loosen or drop one of them in {spec.path}.",
    )


def uv_conflict(
    message: str,
    spec: EnvironmentSpec,
    provided: Mapping[str, str],
    own_requirements: tuple[str, ...],
) -> UsageError:
    """The error for a pip half without a solution.

    Args:
        message: the message of uv.
        provided: name -> a sentence on what conda or the site provides.
        own_requirements: those of airlift, which uv calls "your requirements" too.
    """
    named = re.split(r"[^A-Za-z0-9._-]+", message.lower().replace("_", "-"))
    notes = [origin for name, origin in sorted(provided.items()) if name in named]
    if ours := [text for text in own_requirements if Requirement(text).name.lower() in named]:
        notes.append(f"airlift, which is in every environment, requires {', '.join(ours)}.")
    listed = [f"`{r.text}` ({r.place})" for r in spec.pip.requirements if r.name in named][:6]
    # uv's hints are about options of uv that the user cannot set here.
    said = re.split(r"\n\s*\n?hint:", message)[0].strip()
    one = f"one of: {', '.join(listed)}" if listed else f"one of them in {spec.path}"
    return UsageError(
        f"{spec.path}: the Python packages conflict:\n{said}",
        " ".join([*notes, f"Loosen or drop {one}."]),
    )
