"""`runner check` asks transformers once, by the ranks' Python: a verdict without fault is kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner import child
from runner.from_stage import StageError
from tests.runner.conftest import Cluster


def ageless(text: str) -> str:
    """The output of a command, without how long ago the bundle was verified."""
    return re.sub(r"verified .+? ago", "verified", text)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_second_check_starts_no_child(cluster: Cluster, kind: str) -> None:
    cluster.write(
        task="masked-lm" if kind == "bert" else "causal-lm", model={"asset": f"tiny-{kind}"},
        dataset={"asset": "reference"},
    )  # fmt: skip
    first = cluster.run("check", "tiny.yaml", "--processes", "2")
    assert first.returncode == 0, first.stderr
    done = cluster.run("check", "tiny.yaml", "--processes", "2", PYTHONPROFILEIMPORTTIME="1")
    assert (done.returncode, ageless(done.stdout)) == (0, ageless(first.stdout)), done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "runner.job.check" in imported and not {"transformers", "torch"} & imported


def container(folder: Path, body: str) -> str:
    """A program that starts another one somewhere else; a real one closes pipes and prints, too."""
    program = folder / "container"
    program.write_text(f"#!/bin/bash\necho INFO: mounting\n{body}\n")
    program.chmod(0o755)
    return str(program)


def test_in_a_container_its_own_python_tries_weights_and_tokenizer(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    program = container(
        tmp_path, f'echo "$@" >>{log}; for n in {{3..50}}; do eval "exec $n>&-"; done; exec "$@"'
    )
    cluster.write(model={"asset": "tiny-bert"}, slurm={"container": [program]})
    done = cluster.run("check", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert "runner.child" in log.read_text() and "INFO" not in done.stdout + done.stderr
    assert "warning" not in done.stdout and "not checked here" not in done.stdout
    again = cluster.run("check", "tiny.yaml")
    assert ageless(again.stdout) == ageless(done.stdout)
    assert len(log.read_text().splitlines()) == 2


def test_a_container_that_waits_for_an_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "FOREIGN_S", 0.5)
    waiting = child.Child(print, (), ("sh", "-c", "echo Pull the image?; sleep 600"))
    with pytest.raises(StageError, match="the check ended with -9"):
        waiting.answer("the check", "Look at the container.")


def test_a_container_that_does_not_start_is_a_warning(cluster: Cluster, tmp_path: Path) -> None:
    cluster.write(slurm={"container": [container(tmp_path, "exit 255")]})
    done = cluster.run("check", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    for what in ("model", "tokenizer"):
        assert f"warning: not checked: the check of the {what} ended with 255" in done.stdout
    cluster.write(slurm={"container": ["nowhere-apptainer", "exec"]})
    said = cluster.run("check", "tiny.yaml").stdout
    assert "not checked here: they run another environment than this command" in said
