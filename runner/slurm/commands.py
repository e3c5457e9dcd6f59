"""Runs Slurm's commands."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Mapping

from runner.errors import IncompleteError


def ask(
    *command: str, timeout_s: float = 120, without: Collection[str] = ()
) -> subprocess.CompletedProcess[str] | None:
    """Runs one of Slurm's commands and returns its output; None if it is not installed.

    Args:
        timeout_s: seconds that it may take.
        without: variables that it does not get.

    Raises:
        IncompleteError: it does not answer within `timeout_s` seconds.
    """
    try:
        return subprocess.run(
            list(command),
            env={n: v for n, v in clean(os.environ).items() if n not in without},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise IncompleteError(
            f"{command[0]} did not answer in {timeout_s:.0f} seconds", "Try again later."
        ) from None


def job_number(output: str) -> str:
    """The number that `sbatch --parsable` printed; a site's own sbatch may print a greeting before.

    Empty: there is none.
    """
    numbers = re.findall(r"^(\d+)(?:;\S+)?$", output, re.MULTILINE)
    return numbers[-1] if numbers else ""


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Removes the variables of the job around us: sbatch would pass them to the new job."""
    keep = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("SLURM_") or name in keep
    }
