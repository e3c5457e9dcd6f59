"""`runner submit --to` on a real Slurm: whenever it is killed, the next one ends with one job."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stage.bundle.bundle import verify
from tests.site.conftest import Site
from tests.site.road import Laptop, laptop_of
from tests.site.test_road_on_slurm import SUBMIT, hold

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.timeout(3600)]
SEED, KILLS = 39, 10


@contextmanager
def road(site: Site, staged: Path, folder: Path) -> Iterator[Laptop]:
    with laptop_of(site, staged, folder, folder.name) as laptop:
        laptop.write()
        yield laptop
        for job in laptop.jobs("my"):
            site.run("scancel", str(job), check=False)


def kill_9(process: subprocess.Popen[str]) -> None:
    """The command, and the rsync that it began. The connection is in a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_killed_at_ten_moments_there_is_one_job(site: Site, staged: Path, tmp_path: Path) -> None:
    """One of the kills is between sbatch's acceptance of the job and its answer."""
    chance = random.Random(SEED)
    accepted = site.home / "accepted"
    slow = site.home / "slow"
    slow.mkdir()
    (slow / "sbatch").write_text(
        '#!/bin/sh\ncase $* in *--parsable*) said=$(/usr/bin/sbatch "$@"); : >~/accepted; sleep 5\n'
        'echo "$said"; exit ;; esac\nexec /usr/bin/sbatch "$@"\n'
    )
    slow.joinpath("sbatch").chmod(0o755)
    hold(site, True)
    try:
        with road(site, staged, tmp_path / "undisturbed") as laptop:
            began = time.monotonic()
            laptop.run(*SUBMIT)
            takes = time.monotonic() - began
            bundle_id = verify(laptop.work / "bundle").bundle_id
        for number in range(KILLS):
            with road(site, staged, tmp_path / f"broken-{number}") as laptop:
                laptop.cluster(*[f"export PATH={slow}:$PATH"] * (number == 0))
                first = laptop.start(*SUBMIT)
                if number == 0:
                    site.wait(accepted.exists)
                else:
                    with suppress(subprocess.TimeoutExpired):
                        first.wait(chance.uniform(0, takes))
                kill_9(first)
                said = first.communicate(timeout=300)[0]
                job = site.job_number(laptop.run(*SUBMIT))
                assert laptop.jobs("my") == [job], said
                found = verify(laptop.work / "bundle")
                assert found.ok and found.bundle_id == bundle_id
    finally:
        hold(site, False)
