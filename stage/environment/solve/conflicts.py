"""A solver's message without a solution -> an error with that message and a hint. Pure.

A solver knows a cluster's driver and glibc only as the virtual packages `__cuda` and `__glibc`. The
hint names the machine that they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from packaging.requirements import Requirement

from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile
from stage.errors import UsageError

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
