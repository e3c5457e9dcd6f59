"""`runner train` of a command, on a machine without Slurm: what it gets, leaves, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runner.exec.command_task import _has_rank, topmost
from runner.from_stage import UsageError
from runner.run_folder.missing import add_to_manifest
from tests.remedies.obeyed import obeys
from tests.runner.conftest import Cluster
from tests.support.commands import run_file, write_project

FAILS = """\
import sys
print("a step")
def step():
    raise ValueError("the batch has no rows")
step()
"""
MISSING = """\
from huggingface_hub import hf_hub_download
hf_hub_download("acme/tiny-bert", "config.json")
for name in ("acme/not-there", "acme/not-there", "acme/nor-this"):
    try:
        hf_hub_download(name, "config.json")
    except Exception as error:
        print(type(error).__name__)
"""
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@pytest.fixture
def project(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    bin_folder = str(Path(sys.executable).parent)  # as in an activated environment
    monkeypatch.setenv("PATH", bin_folder, prepend=os.pathsep)
    write_project(cluster.folder)
    return cluster


def train(
    cluster: Cluster, command: str | list[str], *words: str, code: int = 0, **keys: Any
) -> str:
    """Writes run.yaml, trains it, and returns what was printed."""
    run_file(cluster.folder, "run", command, **keys)
    done = cluster.run("train", "run.yaml", *words)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


def ask(cluster: Cluster, *words: str) -> str:
    """What `status` or `logs` print."""
    done = subprocess.run(
        [*cluster.command("rank")[:-1], *words],
        cwd=cluster.folder, env=cluster.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(cluster: Cluster) -> str:
    return ask(cluster, "status", "output/run")


def work(cluster: Cluster, name: str = "work") -> Path:
    return cluster.output("run") / name


def wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def started(cluster: Cluster, command: str, sign: str, **keys: Any) -> subprocess.Popen[str]:
    """Starts a command that writes the file `sign` when it works."""
    run_file(cluster.folder, "run", command, **keys)
    process = cluster.start("train", "run.yaml")
    wait(lambda: (work(cluster) / sign).exists())
    return process


def test_a_command_runs_once_and_anew_when_its_project_has_changed(project: Cluster) -> None:
    said = train(project, "python train.py --output_dir out")
    out = work(project) / "out"
    assert json.loads((out / "rank-0.json").read_text())["loss"] == 0.25
    assert "rank 0 step 3 loss 0.25" in said
    assert not (project.folder / "out").exists(), "it writes into its own copy"
    shown = status(project)
    assert "finished" in shown and "checkpoint-3/trainer_state.json" in shown, shown
    assert "rank 0 step 3 loss 0.25" in ask(project, "logs", "output/run")
    before = (out / "rank-0.json").stat().st_mtime_ns
    assert "ended with exit code 0" in train(project, "python train.py --output_dir out")
    assert (out / "rank-0.json").stat().st_mtime_ns == before, "nothing was started"
    (project.folder / "local" / "numbers.py").write_text("def loss(step, lr):\n    return 7\n")
    train(project, "python train.py --output_dir out")
    assert json.loads((out / "rank-0.json").read_text())["loss"] == 7
    kept = work(project, "work-1") / "out" / "rank-0.json"
    assert json.loads(kept.read_text())["loss"] == 0.25


def test_a_failure_is_in_status_with_its_place_and_its_words(project: Cluster) -> None:
    (project.folder / "fails.py").write_text(FAILS)
    said = train(project, "python fails.py", code=1)
    place = re.search(r"error: (\S+\.log):(\d+): the command ended with exit code 1", said)
    assert place, said
    line = Path(place[1]).read_text().splitlines()[int(place[2]) - 1]
    assert line == "ValueError: the batch has no rows"
    shown = status(project)
    assert "it ended with exit code 1: ValueError: the batch has no rows" in shown, shown
    assert f"{place[1]}:{place[2]}" in shown and "-> " in shown
    document = json.loads(ask(project, "status", "output/run", "--json"))
    text = json.dumps(document)
    assert "the batch has no rows" in text and '"code": 1' in text, text
    train(project, "python fails.py", code=1)
    shown = status(project)
    again = re.search(r"\.log:(\d+)", shown)
    assert again, shown
    assert Path(place[1]).read_text().splitlines()[int(again[1]) - 1] == line
    assert int(again[1]) > int(place[2]), "the line of the second start"


def test_another_exit_code_is_that_of_the_command(project: Cluster) -> None:
    said = train(project, ["bash", "-c", "echo no space for that; exit 37"], code=37)
    assert "exit code 37: no space for that" in said
    assert "exit code 37" in status(project)


def test_where_its_end_cannot_be_recorded_it_is_printed(project: Cluster) -> None:
    """As on a disk that the command has filled."""
    ends = "rm ../environment.json; mkdir ../environment.json; echo the last words; exit 3"
    said = train(project, ["bash", "-c", ends], code=3)
    assert "the last words" in said.partition("exit code 3")[2], said
    assert "environment.json: the end is not recorded: Is a directory" in said, said


def test_a_program_that_is_not_there_is_refused_in_words(project: Cluster) -> None:
    said = train(project, "pyhton train.py", code=2)
    assert "run.yaml:2: `command` starts `pyhton`" in said and "Did you mean `python`?" in said
    assert not project.output("run").exists()


def test_paths_folders_and_values_mean_what_they_meant(project: Cluster) -> None:
    sub = project.folder / "sub"
    sub.mkdir()
    (sub / "x.py").write_text(
        "import os, sys\nopen('../made', 'w').write(' '.join([os.getcwd(), os.environ['PWD'], "
        "*sys.argv[1:]]))\nassert open('../train.py').read()\n"
    )
    train(project, "cd sub && python x.py --lr ${lr} --text ${text}",
          values={"lr": 0.5, "text": "two words"})  # fmt: skip
    made = (work(project) / "made").read_text()
    there = work(project) / "sub"
    assert made == f"{there} {there} --lr 0.5 --text two words"


def test_its_programs_are_those_of_the_environment_where_path_has_others(
    project: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)  # as in a container: the PATH of its image
    assert "/bin/python\n" in train(
        project, "python -c 'import runner, sys; print(sys.executable)'"
    )


def test_what_is_not_in_the_bundle_is_kept_as_the_manifests_lines(project: Cluster) -> None:
    (project.folder / "missing.py").write_text(MISSING)
    train(project, "python missing.py")
    kept = (project.output("run") / "missing.yaml").read_text()
    assert "acme/not-there" in kept and "acme/nor-this" in kept and "tiny-bert" not in kept
    shown = status(project)
    assert shown.count("acme/not-there") == 1 and shown.count("acme/nor-this") == 1, shown
    assert "acme/nor-this" in ask(project, "status", "output/run", "--json")


def test_what_was_missed_before_a_requeue_is_kept(project: Cluster) -> None:
    """A start that goes on asks only for what it needs from there."""
    asks = "from huggingface_hub import hf_hub_download\nhf_hub_download('acme/{}', 'a')\n"
    missing = project.output("run") / "missing.yaml"
    run_file(project.folder, "run", "python missing.py")
    kept = []
    for restart, name in (
        (0, "not-there"),
        (1, "nor-this"),
        (0, "nor-this"),
    ):  # the last: a new job
        (project.folder / "missing.py").write_text(asks.format(name))
        assert project.run("train", "run.yaml", SLURM_RESTART_COUNT=str(restart)).returncode == 1
        kept.append(re.findall("model: acme/(.*)", missing.read_text()))
    assert kept == [["not-there"], ["not-there", "nor-this"], ["nor-this"]]


def test_a_command_that_makes_nothing_is_ended_after_hang_after(project: Cluster) -> None:
    began = time.monotonic()
    said = train(project, "bash -c 'echo works; sleep 600'", code=5, hang_after=3)
    assert "nothing was written for 3 s (hang_after)" in said
    assert time.monotonic() - began < 60
    shown = status(project)
    assert "it was ended: neither its log nor a file in work/ changed (hang_after)" in shown
    assert "set a larger hang_after" in shown


def test_a_command_that_writes_is_not_silent(project: Cluster) -> None:
    loop = "for i in 1 2 3 4 5; do sleep 1; echo $i >x.$((i % 2)).bin; done"
    train(project, ["bash", "-c", loop], hang_after=3)


def test_ctrl_c_ends_it_and_says_so(project: Cluster) -> None:
    process = started(project, "bash -c 'echo 1 >there; exec sleep 600'", "there")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5 and "stopped by a signal" in err, (out, err)
    assert "stopped by a signal" in status(project)


def test_a_signal_that_ends_both_at_once_is_no_failure_of_the_command(project: Cluster) -> None:
    """As `scancel` of a job whose command runs beside its launcher."""
    said = train(project, ["bash", "-c", "touch made; kill $PPID $$"], code=5)
    assert "stopped by a signal" in said and "Correct that" not in said, said


def test_what_saves_on_sigterm_and_exits_well_has_not_finished(project: Cluster) -> None:
    process = started(project, "python train.py --sleep_at 2", "out/waits-0.log")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5, (out, err)
    assert (work(project) / "out" / "saved-0").read_text() == "SIGTERM"
    assert "finished" not in status(project)


def test_what_a_shell_script_has_started_gets_the_signal_not_the_shell(project: Cluster) -> None:
    (project.folder / "run.sh").write_text("cd .\npython train.py --sleep_at 2\necho after\n")
    process = started(project, "bash run.sh", "out/waits-0.log", on_limit="TERM")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (work(project) / "out" / "saved-0").read_text() == "SIGTERM"
    assert process.returncode == 5 and out.endswith("after\n"), (out, err)


def test_a_rank_gets_the_signal_and_not_its_workers() -> None:
    script = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    environ = os.environ | {"LOCAL_RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", script], env=environ) as rank:
        try:
            children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")
            wait(lambda: bool(children.read_text()))
            assert topmost(rank.pid, _has_rank) == [rank.pid]
        finally:
            for worker in children.read_text().split():
                os.kill(int(worker), signal.SIGKILL)


@pytest.mark.slow  # 30 s from SIGTERM to SIGKILL
def test_a_command_that_ignores_sigterm_is_killed(project: Cluster) -> None:
    (project.folder / "stubborn.py").write_text(f"{STUBBORN}open('there', 'w')\ntime.sleep(600)\n")
    process = started(project, "python stubborn.py", "there")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 5, (out, err)


def test_a_second_start_beside_the_first_is_refused(project: Cluster) -> None:
    process = started(project, "bash -c 'echo 1 >there; exec sleep 600'", "there")
    try:
        refused = project.run("train", "run.yaml")
        assert refused.returncode in (2, 5), refused.stderr
        assert (work(project) / "there").exists() and "Traceback" not in refused.stderr
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_a_terminal_that_is_gone_does_not_end_it(project: Cluster) -> None:
    loop = "echo 1 >there; until [ -e go ]; do sleep 0.1; done; echo more; echo done; echo 2 >end"
    run_file(project.folder, "run", ["bash", "-c", loop])
    process = project.start("train", "run.yaml")
    wait((work(project) / "there").exists)
    assert process.stdout and process.stderr
    process.stdout.close()
    process.stderr.close()
    (work(project) / "go").touch()
    assert process.wait(timeout=60) == 0
    assert (work(project) / "end").exists()
    assert "finished" in status(project)
    assert (project.output("run") / "logs" / "rank-0.log").read_text().endswith("more\ndone\n")


def test_100_mb_of_output_are_in_the_log(project: Cluster) -> None:
    command = ["bash", "-c", "yes 'a line of thirty-two characters' | head -c 100000000; exit 3"]
    run_file(project.folder, "run", command)
    process = subprocess.run(
        project.command("train", "run.yaml"),
        cwd=project.folder, env=project.environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.returncode == 3, process.stderr
    log = project.output("run") / "logs" / "rank-0.log"
    assert log.stat().st_size > 100_000_000
    assert "exit code 3" in status(project)


def test_a_process_that_it_leaves_behind_does_not_hold_it(project: Cluster) -> None:
    began = time.monotonic()
    train(project, "bash -c 'sleep 41 & echo $! >pid; echo end'")
    took = time.monotonic() - began
    left = int((work(project) / "pid").read_text())
    with suppress(ProcessLookupError):
        os.kill(left, signal.SIGKILL)
    assert took < 35, took


def test_a_launcher_starts_as_many_ranks_as_are_asked_for(project: Cluster) -> None:
    train(project, "torchrun --nproc_per_node=2 train.py", "--processes", "2")
    out = work(project) / "out"
    worlds = [json.loads((out / f"rank-{rank}.json").read_text())["world"] for rank in (0, 1)]
    assert worlds == ["2", "2"]


def test_a_command_that_resumes_keeps_its_results_and_gets_the_words(project: Cluster) -> None:
    keys: dict[str, Any] = {"resumes": True, "on_resume": "--resume_from_checkpoint latest"}
    command = "python train.py --sleep_at 3 --steps 4 --torn_at 9"
    process = started(project, command, "out/waits-0.log", **keys)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    said = train(project, command, **keys)
    assert json.loads((work(project) / "out" / "rank-0.json").read_text())["first"] == 2
    assert "out/checkpoint-9: half-written" in said
    assert "2 starts" in status(project)


def test_settings_alone_are_nothing_to_resume_from(project: Cluster) -> None:
    keys: dict[str, Any] = {"resumes": True, "on_resume": "--resume_from_checkpoint latest"}
    fails = 'mkdir -p out; echo {} >out/args.json; echo "$@" >out/words.log; exit 1'
    for _ in range(2):
        train(project, ["bash", "-c", fails, "x"], code=1, **keys)
    assert (work(project) / "out" / "words.log").read_text() == "\n"


def test_a_dry_run_starts_nothing(project: Cluster) -> None:
    said = train(project, "python train.py", "--dry-run")
    assert "dry run: nothing was started" in said and not work(project).exists()


MANIFEST = """\
# ours
format: 1
assets:
    tiny-bert: {model: acme/tiny-bert}   # small
    # the last one

# what follows
name: tiny
"""


def test_what_was_missed_is_added_to_the_manifest_as_its_lines(project: Cluster) -> None:
    (project.folder / "missing.py").write_text(MISSING)
    (project.folder / "m.yaml").write_text(MANIFEST)
    train(project, "python missing.py", manifest="m.yaml")
    said = project.run("check", "run.yaml", "--add")
    assert said.returncode == 0, said.stderr
    assert "added to m.yaml: not-there, nor-this" in said.stdout
    assert f"next: stage fetch m.yaml -o {project.bundle}" in said.stdout
    assert (project.folder / "m.yaml").read_text() == MANIFEST.replace(
        "assets:\n",
        "assets:\n"
        "    not-there:\n      model: acme/not-there\n"
        "    nor-this:\n      model: acme/nor-this\n",
    )
    assert "m.yaml has all of it" in project.run("check", "run.yaml", "--add").stdout
    (project.folder / "m.yaml").unlink()
    refused = project.refused("check", "run.yaml", "--add")
    assert "m.yaml is not here" in refused and "model: acme/nor-this" in refused


@obeys("runner/run_folder/missing.py", "Add by hand:")
@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("format: 1\nassets:\n", "format: 1\nassets:\n  a:\n    model: x/a\n"),
        ("assets:\n  b:\n    path: b", "assets:\n  a:\n    model: x/a\n  b:\n    path: b\n"),
        ("assets:\n  a: {path: b}\n", "assets:\n  a: {path: b}\n"),
        ("assets:\n  b: {model: x/a}\n", "assets:\n  b: {model: x/a}\n"),
        ("assets: {b: {path: b}}\n", None),
        ("format: 1\n", None),
    ],
)
def test_a_manifest_keeps_its_form_or_is_left_alone(
    tmp_path: Path, text: str, becomes: str | None
) -> None:
    manifest = tmp_path / "m.yaml"
    manifest.write_text(text)
    if becomes is None:
        with pytest.raises(UsageError, match="model: x/a") as refused:
            add_to_manifest("  a:\n    model: x/a", manifest)
        assert manifest.read_text() == text
        by_hand = refused.value.remedy.partition("Add by hand:\n")[2]
        becomes = f"assets:\n  b: {{path: b}}\n{by_hand}\n"
        manifest.write_text(becomes)
    add_to_manifest("  a:\n    model: x/a", manifest)
    assert manifest.read_text() == becomes


@obeys("runner/cli/tools.py", "Start it as it is: {}; or try it on the nodes")
def test_a_rehearsal_here_is_refused_with_what_to_do_instead(project: Cluster) -> None:
    run_file(project.folder, "run", "python train.py")
    refused = project.refused("rehearse", "run.yaml")
    assert "--job" in refused
    train_it = re.search(r"runner (train .*) --bundle .*;", refused)
    assert train_it and project.run(*train_it[1].split()).returncode == 0


@obeys("runner/config/run_config.py", "runner check {} and runner submit {} are for both.")
def test_what_is_for_trainings_alone_names_what_is_for_both(project: Cluster) -> None:
    run_file(project.folder, "run", "python train.py")
    assert "runner check run.yaml" in project.refused("evaluate", "run.yaml")
    assert project.run("check", "run.yaml").returncode == 0


@obeys(
    "runner/job/checks/command.py", "Where the job needs one, write in the run file: include: [N"
)
def test_a_private_file_stays_here_unless_it_is_asked_for(project: Cluster) -> None:
    (project.folder / ".env").write_text("TOKEN=x\n")
    said = train(project, "test ! -e .env")
    assert "private files stay here: `.env`" in said and "include: [NAME]" in said
    assert "private files" not in train(project, "test -e .env", include=[".env"])


@pytest.mark.parametrize(
    "lines",
    [
        ("path: /home/me/.ssh",),
        ("url: http://x/y", "sha256: " + "0" * 64),
        ("model: x/a", "path: ~/secrets"),
        ("model: x/a", "allow_code: true"),
        ("environment: ../environment.yml",),
        ("dataset: x/a", "script: run.py"),
    ],
)
def test_an_entry_that_no_job_asks_for_is_not_added(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """The text comes from a cluster: by it, files of the laptop could be sent there."""
    manifest, text = tmp_path / "m.yaml", "assets:\n  b: {path: b}\n"
    manifest.write_text(text)
    entry = "\n".join(("  trick:", *(f"    {line}" for line in lines)))
    with pytest.raises(UsageError, match="no job asks for an entry such as `trick`"):
        add_to_manifest(f"  a:\n    model: x/a\n{entry}", manifest)
    assert manifest.read_text() == text
    metric = "  accuracy:\n    metric: accuracy\n    allow_code: true"
    assert add_to_manifest(metric, manifest) == ["accuracy"]


def test_a_run_that_has_ended_well_is_not_written_over_by_another(project: Cluster) -> None:
    """A stranger changed one line: the old result was resumed, and overwritten without a word."""
    keys: dict[str, Any] = {"resumes": True, "on_resume": "--resume_from_checkpoint latest"}
    train(project, "python train.py", **keys)
    result = work(project) / "out/rank-0.json"
    before = result.read_bytes()
    assert "ended with exit code 0" in train(project, "python train.py", **keys)
    said = train(project, "python train.py --steps 9", code=2, **keys)
    assert "would go on in these results" in said and "another name (--set name=NAME" in said
    assert result.read_bytes() == before
