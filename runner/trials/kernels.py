"""Every GPU of a node computes once. Runs in a child process: a GPU that fails ends only that."""

from __future__ import annotations

import torch

from runner.errors import StageError


def run_kernels() -> tuple[int, str]:
    """Runs one kernel on each GPU that torch sees.

    Returns:
        How many there are, and the first one's name.

    Raises:
        StageError: torch has no kernels for a GPU, or the GPU does not work.
    """
    number = torch.cuda.device_count()
    for index in range(number):
        try:
            torch.ones(8, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            name = torch.cuda.get_device_name(index)
            raise StageError(
                f"GPU {index} ({name}): {str(error).splitlines()[0]} torch {torch.__version__} is "
                f"compiled for {' '.join(torch.cuda.get_arch_list())}.",
                "Stage an environment for this device: `stage env probe` prints its profile here.",
                exit_code=1,
            ) from None
    return number, torch.cuda.get_device_name(0) if number else ""
