"""Variables of this shell that would change a job behind the run file's back. Pure.

sbatch reads options from variables, and they win over the lines of the script (sbatch(1), "INPUT
ENVIRONMENT VARIABLES"). Those that contradict a line are not handed to it. All others stay: many
people set SBATCH_ACCOUNT for all of their jobs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

PREFIX = "SBATCH_"
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
"""The batch script unsets them: left from a trial by hand, they would make it a rank."""

OF_GPUS = ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPUS_PER_SOCKET")
OF_MEMORY = ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")
"""Variables for options of sbatch, without `SBATCH_`."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "time": ("TIMELIMIT",),
    "array": ("ARRAY_INX",),
    "requeue": ("REQUEUE", "NO_REQUEUE"),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), OF_GPUS),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), OF_MEMORY),
}
"""Option -> its variables, where they have other names."""
_NEVER = ("ARRAY_INX", "WAIT", "TEST_ONLY")
"""A copy of the job for each index; an sbatch that waits for the end of the job."""
_LINE = re.compile(r"#SBATCH --([a-z0-9-]+)(?:=(.*))?")


def overriding(script: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that would change what a script asks for.

    Returns:
        Variable -> the option of the script that counts; empty: it has none.
    """
    found = {f"{PREFIX}{name}": "" for name in _NEVER if f"{PREFIX}{name}" in environ}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break  # sbatch reads no options after the first command
        if not (match := _LINE.fullmatch(line)):
            continue
        value = "".join(shlex.split(match[2] or ""))
        for name in _NAMES.get(match[1], (match[1].upper().replace("-", "_"),)):
            theirs = environ.get(f"{PREFIX}{name}")
            if theirs is not None and theirs != value:
                found[f"{PREFIX}{name}"] = f"--{match[1]}{f'={value}' if value else ''}"
    return found


def notes_on_variables(script: str, environ: Mapping[str, str]) -> list[str]:
    """Lines on the variables of this shell that a job does not get, and on options that it does."""
    dropped = overriding(script, environ)
    lines = [
        f"{name}={environ[name]} of this shell is not used"
        + (f": the job asks for {option}" if option else "")
        for name, option in dropped.items()
    ]
    kept = {n: v for n, v in environ.items() if n.startswith(PREFIX) and n not in dropped}
    if kept:
        listed = ", ".join(f"{name}={value}" for name, value in sorted(kept.items()))
        lines.append(f"options of the job from this shell: {listed}")
    if ranks := [name for name in OF_RANKS if name in environ]:
        lines.append(f"the job does not get {', '.join(ranks)} of this shell: srun sets them")
    return lines
