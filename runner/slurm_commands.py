"""Asks Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from runner.errors import IncompleteError


def ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Runs one of Slurm's commands; None where it is not installed.

    Raises:
        IncompleteError: it does not answer.
    """
    try:
        return subprocess.run(
            list(command), env=_clean(os.environ), capture_output=True, text=True, timeout=120, check=False
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise IncompleteError(f"{command[0]} did not answer in two minutes", "Try again later.") from None


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of a job we may be in: sbatch would hand them to the new one, which is another."""
    keep = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_") or name in keep}
