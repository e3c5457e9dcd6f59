"""`--to`, where nothing may be fetched or sent: by a real sshd on a login node without Slurm."""

from __future__ import annotations

from pathlib import Path

from tests.runner.remote.conftest import Laptop

TO = ("--to", "far")


def slurm(programs: Path) -> list[Path]:
    """An sbatch that no test here reaches; and a queue that is empty."""
    for name in ("sbatch", "squeue"):
        (programs / name).write_text("#!/bin/sh\nexit 0\n")
        (programs / name).chmod(0o755)
    return [programs / "sbatch", programs / "squeue"]


def test_a_cluster_without_slurm_and_one_without_a_runner(laptop: Laptop, programs: Path) -> None:
    said = laptop.runner("submit", "runs/my.yaml", *TO, code=2)
    assert "there is no sbatch there" in said and "lock  " not in said
    made = slurm(programs)
    laptop.clusters("  setup: [cd /nowhere]\n")
    said = laptop.runner("submit", "runs/my.yaml", *TO, code=2)
    assert "has no environment asset" in said and "/nowhere" in said and "lock  " not in said
    assert not laptop.there.exists() and laptop.sshd.logins == 1
    for path in made:
        path.unlink()
    shown = laptop.runner("submit", "runs/my.yaml", *TO, "--dry-run")
    for line in ("lock         stage lock manifests/small.yaml", "stage fetch ", "stage push "):
        assert line in shown
    assert "runner submit runs/my.yaml --bundle bundle" in shown and not laptop.there.exists()


def test_what_does_not_go_with_to_is_refused_with_what_does(laptop: Laptop) -> None:
    for words, said in (
        (("submit", "runs/my.yaml", *TO, "--output", "x"), "set name=NAME"),
        (("submit", "runs/my.yaml", "--bundle", "bundle", "--logout"), "go with --to"),
        (("exec", *TO, "--bundle", "bundle", "--", "python", "x.py"), "srun runner exec"),
        (("submit", "runs/my.yaml", "--to", "fat"), "far"),
        (("status", *TO), "nothing was submitted there yet"),
        (("logs", "runs/my.yaml", *TO), "nothing was submitted there yet"),
    ):
        assert said in laptop.runner(*words, code=2), words
