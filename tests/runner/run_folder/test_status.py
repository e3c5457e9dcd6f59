"""`runner status` and `runner logs` on a login node: the state, why it waits, the last lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from runner.cli import main
from runner.run_folder import logs
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import hold_run_folder
from runner.run_folder.status import format_duration
from runner.slurm import jobs
from tests.first_job.harness import programs
from tests.remedies.obeyed import in_it, obeys
from tests.runner.folders import hostile_folder, line, run_folder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A login node whose squeue, sacct and scontrol say what the test wants."""

    def answers(**said: str) -> None:
        for name in ("squeue", "sacct", "scontrol"):
            body = f"cat <<'END'\n{said[name]}\nEND" if name in said else "exit 1"
            programs(tmp_path / "bin", **{name: body})

    monkeypatch.setenv("PATH", programs(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return answers


def shown(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def queued(folder: Path, state: str, reason: str = "None") -> str:
    return (
        f"17|{state}|{reason}|gpu[1-2]|1:02:03|22:57:57|2026-11-22T10:00:00|{folder}/submit.sbatch"
    )


def test_a_running_job_tells_its_step_its_checkpoint_and_when_it_ends(
    tmp_path: Path, slurm: Callable[..., None]
) -> None:
    folder = run_folder(tmp_path / "output" / "made", steps=30)
    slurm(squeue=queued(folder, "RUNNING"))
    said = shown("status", folder)
    parts = (
        f"made: running  ({folder})\n",
        "job 17: running on gpu[1-2], for 1:02:03, 22:57:57 left\n",
        "step 30 of 40: loss 5.5000, lr 1.00e-03, 1000 tokens/s, 1.61 GB; ",
        "validation at step 30: loss 3.2500\n",
        "checkpoint: step-20 (1 kept)\n",
        "most memory of a rank: device: train 2.15 GB",
        "most memory of a rank: host: load 1.07 GB, train 3.22 GB\n",
        "about 20 s to go",  # ten steps of two seconds
    )
    assert [part for part in parts if f"\n  {part}" not in f"\n  {said}"] == [], said
    assert [*map(format_duration, (9.4, 60, 299, 300, 3599.6, 12000, 180000))] == [
        "9 s", "1 min 0 s", "4 min 59 s", "5 min", "1 h 0 min", "3 h 20 min", "2 d 2 h",
    ]  # fmt: skip
    assert json.loads(shown("status", folder, "--json")) == {
        "run_folder": str(folder),
        "state": "running",
        "job": {
            "id": 17,
            "state": "RUNNING",
            "words": "job 17: running on gpu[1-2], for 1:02:03, 22:57:57 left",
        },
        "step": 30,
        "num_steps": 40,
        "seconds_left": 20.0,
        "last": line(30),
        "last_validation": {
            "step": 30,
            "epoch": 1.0,
            "validation_loss": 3.25,
            "validation_perplexity": 25.8,
        },
        "memory": {"load": {"host": 1.0}, "train": {"device": 2.0, "host": 3.0}},
        "last_checkpoint": 20,
        "warnings": [],
    }


def test_status_lists_all_runs_with_their_jobs(tmp_path: Path, slurm: Callable[..., None]) -> None:
    home = tmp_path
    made = run_folder(home / "output" / "made", steps=30)
    run_folder(home / "output" / "older", steps=3)
    sweep = home / "output" / "sweep"
    run_folder(sweep / "seed=1", steps=4)
    (sweep / "submit.sbatch").write_text("#!/bin/bash\n")
    shutil.copytree(made, home / "output" / "made-bench" / "ddp-micro1")
    (home / "output" / "made-bench" / "results.json").write_text("{}")
    script = f"{made}/submit.sbatch"
    slurm(squeue=f"17|RUNNING|None|gpu1|1:02|58:00|2026-11-22T10:00:00|{script}")
    lines = shown("status").splitlines()
    rows = {row.split()[0]: row.split(maxsplit=4)[1:] for row in lines}
    assert rows == {
        "run": ["state", "step", "loss", "job"],
        "made": ["running", "30/40", "5.5000", "17: running on gpu1, for 1:02, 58:00 left"],
        "older": ["stopped", "3/40", "6.8500", "-"],
        "sweep/seed=1": ["stopped", "4/40", "6.8000", "-"],
    }, "trials of a bench are no runs"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "other jobs have a higher priority"),
        ("(ReqNodeNotAvail, UnavailableNodes:gpu1)", "down, drained or reserved"),
        ("QOSMaxGRESPerUser", "as many GPUs as this QOS allows"),
        ("PartitionTimeLimit", "will never start"),
        ("SomethingNew", "Slurm says SomethingNew"),
    ],
)
def test_why_a_job_waits_is_said_in_words(
    tmp_path: Path, slurm: Callable[..., None], reason: str, words: str
) -> None:
    folder = tmp_path / "output" / "made"
    folder.mkdir(parents=True)
    (folder / "submit.sbatch").write_text("#!/bin/bash\n")  # submitted, and nothing ran yet
    slurm(squeue=queued(folder, "PENDING", reason))
    said = shown("status", folder)
    assert (
        "made: waiting" in said and words in said and "expected start 2026-11-22T10:00:00" in said
    )


def test_a_job_that_is_over_is_looked_up_in_the_accounts(
    tmp_path: Path, slurm: Callable[..., None]
) -> None:
    folder = run_folder(tmp_path / "output" / "made", steps=30)
    (folder / "logs" / "slurm-17.out").write_text("0: x\n")
    slurm(squeue="", sacct="17|OUT_OF_MEMORY|01:00:00|gpu1\n17.batch|FAILED|01:00:00|gpu1")
    said = shown("status", folder)
    assert "made: out of memory" in said and "job 17: out_of_memory, it needed more memory" in said
    assert "start it again by the same `runner train RUN`   (it resumes from its last" in said


def test_settings_that_were_refused_are_corrected_before_it_is_submitted_again(
    tmp_path: Path, slurm: Callable[..., None]
) -> None:
    folder = run_folder(tmp_path / "output" / "made", steps=30)
    (folder / "submit.sbatch").write_text("")
    refusal = "error: step-20: made with batch.global 32.\n  -> Resume with batch.global 32.\n"
    (folder / "logs" / "slurm-17.out").write_text(f"step 30\n{refusal}")
    for sacct in ("17|FAILED|00:00:02|gpu1|2:0", ""):  # the second keeps no accounts
        slurm(squeue="", sacct=sacct)
        said = shown("status", folder)
        assert "batch.global 32.\n  -> Resume with batch.global 32.\n  after that, submit" in said
    slurm(squeue="", sacct="17|FAILED|00:00:02|gpu1|1:0")
    assert "-> Resume" not in shown("status", folder)
    assert json.loads(shown("status", folder, "--json"))["state"] == "failed"


def test_a_job_number_leads_to_its_run(tmp_path: Path, slurm: Callable[..., None]) -> None:
    folder = run_folder(tmp_path / "elsewhere" / "made")
    found = f"JobId=17 JobName=made Command={folder}/submit.sbatch WorkDir=/home/me"
    slurm(squeue=queued(folder, "RUNNING"), scontrol=found)
    assert json.loads(shown("status", "17", "--json"))["run_folder"] == str(folder)
    slurm(squeue="", scontrol="JobId=17 Command=/home/me/other.sh WorkDir=/home/me")
    done = CliRunner().invoke(main, ["status", "17"])
    assert done.exit_code == 2 and "`runner submit` did not write" in done.output
    assert "-> What Slurm knows of it: scontrol show job 17\n" in done.output
    slurm(scontrol="JobId=17 Command=/home/me/a b.sh WorkDir=/home/me StdOut=/home/me/17.out")
    done = CliRunner().invoke(main, ["logs", "17"])
    assert "-> Its log: /home/me/17.out\n" in done.output


@obeys("runner/run_folder/logs.py", "runner logs {}{} (or of {})")
def test_each_run_of_a_sweep_has_its_own_state_and_log(
    tmp_path: Path, slurm: Callable[..., None]
) -> None:
    sweep = tmp_path / "output" / "sweep"
    sweep.mkdir(parents=True)
    script = sweep / "submit.sbatch"
    cases = [f"{n}) set -- --output '{sweep}/seed={n}' --set seed={n} ;;\n" for n in range(4)]
    script.write_text(f'case "$SLURM_ARRAY_TASK_ID" in\n{"".join(cases)}esac\n')
    run_folder(sweep / "seed=0")
    run_folder(sweep / "seed=1", steps=24)
    (sweep / "logs").mkdir()
    rows = (("15_2-3%1", "PENDING"), ("16_1", "RUNNING"))
    live = [f"{job}|{state}|None|n1|1:02|58:00|N/A|{script}" for job, state in rows]
    slurm(squeue="\n".join(live))
    for words in ((), (sweep,)):
        lines = [line.split()[:2] for line in shown("status", *words).splitlines()[1:]]
        states = {name.removeprefix("sweep/"): state for name, state in lines}
        assert states == {
            "seed=0": "stopped", "seed=1": "running", "seed=2": "waiting", "seed=3": "waiting"
        }  # fmt: skip
    (sweep / "logs/slurm-15_1.out").write_text("of seed 1\n")
    for what in ("15", sweep):
        done = CliRunner().invoke(main, ["logs", str(what)])
        assert done.exit_code == 2 and "a sweep, where each run has a log" in done.output
        assert shown(*in_it(done.output, "(?<=-> runner ).*").split()).endswith("of seed 1\n")
    (sweep / "pulled.json").write_text("{}")
    said = shown("report", *sweep.glob("*"), "-o", tmp_path / "page.html")
    assert "submit.sbatch" in said and said.endswith("page.html\n") and "pulled.json" in said
    assert shown("logs", "15_1").endswith("of seed 1\n")
    known = f"JobId=16 ArrayJobId=15 ArrayTaskId=1 JobName=sweep Command={script} WorkDir=/"
    slurm(squeue="\n".join(live), scontrol=known)
    assert shown("status", "16").startswith("made: running")


def test_a_run_on_this_machine_is_running_while_its_launcher_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    folder = run_folder(tmp_path / "run", steps=10)
    with hold_run_folder(RunFolder(folder), {}):
        assert json.loads(shown("status", folder, "--json"))["state"] == "running"
    assert json.loads(shown("status", folder, "--json"))["state"] == "stopped"


def test_what_is_no_run_is_refused_in_words(tmp_path: Path, slurm: Callable[..., None]) -> None:
    slurm(squeue="")
    (tmp_path / "tiny.yaml").write_text(
        "format: 1\ntask: masked-lm\nmodel: {asset: a}\ndataset: {asset: b}\n"
    )
    for what in ("nothing", "99", str(tmp_path / "bin"), "tiny.yaml"):
        done = CliRunner().invoke(main, ["status", what])
        assert done.exit_code == 2 and done.output.startswith("error: "), done.output
    run_folder(tmp_path / "output" / "tiny")
    assert str(tmp_path / "output" / "tiny") in shown("status", "tiny.yaml")


def test_logs_show_the_last_lines_of_the_newest_job_or_of_a_rank(
    tmp_path: Path, slurm: Callable[..., None]
) -> None:
    folder = run_folder(tmp_path / "run")
    slurm(squeue="")
    (folder / "logs" / "rank-1.log").write_text("one\n\x1b[31mred\x1b[0m\x1b[K\x07\n")
    (folder / "logs" / "slurm-9.out").write_text("old\n")
    (folder / "logs" / "slurm-10.out").write_text("".join(f"{n}\n" for n in range(100)))
    assert shown("logs", folder, "--lines", "2").endswith("98\n99\n")
    assert shown("logs", folder, "--rank", "1").endswith("one\nred\\x07\n")
    done = CliRunner().invoke(main, ["logs", str(folder), "--rank", "5"])
    assert (
        done.exit_code == 2
        and "There are: without --rank the log of job 10, --rank 1." in done.output
    )


def test_a_followed_log_is_told_to_its_end_and_no_letter_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK_EVERY_S", 0.0)
    path, umlauts = tmp_path / "log", "gr\u00fc\u00dfe\n".encode()
    path.write_bytes(b"before\n")
    parts = [b"last, without an end", umlauts[3:], umlauts[:3]]

    def is_over() -> bool:
        with open(path, "ab") as file:
            file.write(parts.pop() if parts else b"")
        return not parts

    assert "".join(logs.follow(path, 7, is_over)) == "gr\u00fc\u00dfe\nlast, without an end"


def test_a_run_folder_that_the_nodes_lack_is_said_by_status_and_logs(
    tmp_path: Path, slurm: Callable[..., None]
) -> None:
    """Slurm starts nothing where it cannot open the log: no log says so."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "submit.sbatch").write_text("")
    (folder / "submitted").write_text("17\n")
    ended = "JobId=17 JobState=FAILED Reason=RaisedSignal:53(Real-time_signal_19) "
    slurm(squeue="", scontrol=f"{ended}ExitCode=0:53 RunTime=00:00:01 NodeList=n2")
    for said in (
        shown("status", folder),
        CliRunner().invoke(main, ["logs", str(folder)]).output,
    ):
        assert "job 17: failed, on n2 Slurm could not open its log (exit code 0:53)" in said
        assert "the run folder is not there" in said
    assert "never began" in shown("status", folder)


def test_a_hostile_folder_is_told_with_what_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = shown("status", hostile_folder(tmp_path / "bad"))
    assert "damaged lines omitted" in said and "\u202e" not in said
    json.loads(shown("status", tmp_path / "bad", "--json"))


def test_slurms_own_words_for_the_end_of_a_job_are_all_known() -> None:
    assert jobs.Job(1, "COMPLETED").is_over and not jobs.Job(1, "COMPLETING").is_over
