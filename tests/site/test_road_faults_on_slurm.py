"""Faults of a login node, made for real: their words, exit code and remedy, which is tried.

Those of the connection are in tests/stage/carry/test_ssh.py.
"""

from __future__ import annotations

import re

import pytest

from tests.site.conftest import Site
from tests.site.road import Laptop
from tests.site.test_road_on_slurm import SUBMIT, hold
from tests.site.test_road_on_slurm import laptop as laptop

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.timeout(900)]
# What root does on the login node in the cluster's folder, "$1"; what is said; the exit code; and
# the remedy: what root does then.
FAULTS = {
    "a folder of somebody else": (
        'mkdir "$1"',
        "cannot be made|cannot be written|Permission denied",
        5,
        'chown alice "$1"',
    ),
    "a full disk": (
        'mkdir "$1" && mount -t tmpfs -o size=64k,mode=777 none "$1"',
        "are left. Nothing was sent",
        5,
        'umount "$1" && rmdir "$1"',
    ),
    "another bundle in the folder": (
        'mkdir -p "$1/bundle" && cd "$1/bundle" && touch bagit.txt && '
        'printf \'%s\\n\' { \'"name": "other"\' } >stage.lock && chown -R alice "$1"',
        "another bundle is there: `other`(.|\\n)*another `folder:` in clusters.yaml",
        2,
        'rm -r "$1/bundle"',
    ),
    "no rsync": (
        "mount --bind /dev/null /usr/bin/rsync",
        "there is no rsync there",
        2,
        "umount /usr/bin/rsync",
    ),
    "no sbatch": (
        "mount --bind /dev/null /usr/bin/sbatch",
        "there is no sbatch there",
        2,
        "umount /usr/bin/sbatch",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_said_and_its_remedy_helps(laptop: Laptop, site: Site, fault: str) -> None:
    make, words, code, mend = FAULTS[fault]

    def as_root(script: str) -> None:
        site.control("exec", "sh", "-c", script, "sh", str(laptop.work), cwd=laptop.folder)

    hold(site, True)
    try:
        as_root(make)
        try:
            said = laptop.run(*SUBMIT, code=code)
        finally:
            as_root(mend)
        assert re.search(words, said) and laptop.jobs("my") == [], said
        job = site.job_number(laptop.run(*SUBMIT))
        assert laptop.jobs("my") == [job]
    finally:
        hold(site, False)
