"""A laptop, and a real sshd on the login node of the site: what tests of `--to` share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.site import ssh_to
from tests.site.conftest import RUN, Site

PROGRAMS = Path(sys.executable).parent


@dataclass
class Laptop:
    """A folder with a manifest, its lock and bundle, and a run file; `ssh` reaches the site.

    Attributes:
        folder: where commands run.
        site: whose login node is `cluster`.
        work: the cluster's folder.
        keys: of sshd and of the user.
    """

    folder: Path
    site: Site
    work: Path
    keys: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.keys}/bin:{PROGRAMS}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.keys),
            **self.variables,
        }

    @property
    def logins(self) -> int:
        """How many authentications sshd has accepted."""
        log = self.keys / "log"
        return log.read_text().count("Accepted ") if log.exists() else 0

    def write(self, name: str = "my", **slurm: object) -> Path:
        """A run file that names its manifest."""
        path = self.folder / "runs" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        text = RUN.replace("name: tiny\n", f"name: {name}\nmanifest: ../tiny.yaml\n")
        text = text[: text.index("slurm:")]
        path.write_text(f"{text}slurm: {{nodes: 2, tasks_per_node: 1, time: '00:10:00'}}\n")
        return path

    def cluster(self, *setup: str, more: str = "") -> None:
        """clusters.yaml, with the Python of the tests as what `setup` brings."""
        lines = [f"export PATH={PROGRAMS}:$PATH", "export OMP_NUM_THREADS=1", *setup]
        listed = "".join(f"    - {line}\n" for line in lines)
        self.folder.joinpath("runs").mkdir(exist_ok=True)
        (self.folder / "runs/clusters.yaml").write_text(
            f"site:\n  host: cluster\n  folder: {self.work}\n  partition: batch\n{more}"
            f"  setup:\n{listed}"
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`runner WORDS`, in a session of its own, which can be killed as a whole."""
        return subprocess.Popen(
            [str(PROGRAMS / "runner"), *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, code: int = 0) -> str:
        """The same, to its end; returns what it printed."""
        done = self.start(*words)
        said, _ = done.communicate(timeout=300)
        assert done.returncode == code, said
        return said

    def jobs(self, name: str) -> list[int]:
        """The jobs that Slurm ever had of a run."""
        shown = self.site.run("squeue", "--states=all", "-h", "-o", "%A|%o").stdout
        rows = [line.split("|", 1) for line in shown.splitlines()]
        ours = f"{self.work}/output/{name}/submit.sbatch"
        return [int(job) for job, script in rows if script == ours]


@contextmanager
def laptop_of(site: Site, staged: Path, folder: Path, work: str) -> Iterator[Laptop]:
    """A laptop with a copy of the staged bundle, beside the manifest that it was fetched from."""
    home = folder / "laptop"
    shutil.copytree(staged.parent / "bundle", home / "bundle")
    for name in ("tiny.yaml", "tiny.lock"):
        shutil.copy2(staged.parent / name, home)
    os.utime(home / "tiny.lock")
    with ssh_to(site.folder) as keys:
        laptop = Laptop(home, site, site.home / work, keys)
        laptop.cluster()
        yield laptop
