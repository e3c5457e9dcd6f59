"""Requests that Slurm refuses or leaves waiting, launchers and ports: J, L and N of the list.

`sbatch` and `sinfo` are programs that answer in Slurm's words; the real ones are in tests/site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.from_stage import UsageError
from runner.job.submit import try_script
from runner.launch.network import locate
from runner.launch.reach import explain_joining
from runner.slurm.jobs import clean
from tests.first_job.harness import (
    Found,
    assert_found,
    programs,
    run_runner,
    torch_of,
    write_run,
)

GPT2 = {"task": "causal-lm", "model": {"asset": "gpt2"}}
FAILED = "sbatch: error: Batch job submission failed: "
ACCOUNT = "Invalid account or account/partition combination specified"
NO_GRES = "Requested GRES option unsupported by configured SelectType plugin"
NO_GPU = "Cannot find GPU specification, you may not submit a job not requesting GPUs"
POLICY = "Job violates accounting/QOS policy (job submit limit, ...)"
MEMORY = "--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive."
# entry -> keys of `slurm:`, what sbatch says, what `check` says
REFUSED: dict[str, tuple[dict[str, Any], str, Found]] = {
    "J1": (
        {"options": {"mem": "900T"}},
        f"{FAILED}Requested node configuration is not available",
        Found(("Requested node configuration is not available",), "sinfo -N"),
    ),
    "J2": (
        {"gpus_per_node": 4},
        f"{FAILED}Invalid generic resource (gres) specification",
        Found(("Invalid generic resource",), "sinfo -o '%P %G'"),
    ),
    "J3": ({"options": {"gpus": 4}}, FAILED + NO_GRES, Found((NO_GRES,), "slurm.gpus_per_node")),
    "J4": ({}, f"sbatch: error: {NO_GPU}", Found((NO_GPU,), "Set slurm.gpus_per_node")),
    "J5": ({"options": {"account": "x"}}, FAILED + ACCOUNT, Found((ACCOUNT,), "sacctmgr show")),
    "J7": (
        {"options": {"mem": "9G", "mem-per-cpu": "1G"}},
        f"sbatch: fatal: {MEMORY}",
        Found(("are mutually exclusive",), "Keep one of mem"),
    ),
    "J20": (
        {},
        f"sbatch: error: Please name a project\nsbatch: error: {FAILED}Unspecified error",
        Found(("Please name a project", "Unspecified error"), "A filter of the site"),
    ),
    "J21": ({}, FAILED + POLICY, Found(("violates accounting",), "squeue --me")),
}


@pytest.mark.parametrize("entry", REFUSED)
def test_what_slurm_refuses_is_told_with_the_way_out(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    slurm, words, found = REFUSED[entry]
    monkeypatch.syspath_prepend(torch_of(tmp_path / "site", "2.10.0", "'12.8'"))
    path = programs(tmp_path / "bin", sbatch=f"echo '{words}' >&2; exit 1", sinfo="exit 1")
    write_run(tmp_path, **GPT2, slurm=slurm)
    assert_found(
        run_runner(tmp_path, "check", "tiny.yaml", "--bundle", str(staged), PATH=path), found
    )


DRAINED = "Requested nodes are busy, or Required nodes are DOWN, drained or reserved"
# entry -> keys of `slurm:`, what sbatch says, what `check` says
TOO_FEW: dict[str, tuple[dict[str, Any], str, Found]] = {
    "J10": ({}, DRAINED, Found(("sbatch accepts the job, and it waits", "sinfo -R"), "", 0)),
    "L7": (
        {"gpus_per_node": 4, "tasks_per_node": 6},
        "",
        Found(("slurm.tasks_per_node: 6 ranks on each node",), "Set slurm.tasks_per_node: 4"),
    ),
}


@pytest.mark.parametrize("entry", TOO_FEW)
def test_nodes_that_are_away_and_gpus_that_are_too_few_are_told(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    slurm, words, found = TOO_FEW[entry]
    monkeypatch.syspath_prepend(torch_of(tmp_path / "site", "2.10.0", "'12.8'"))
    sbatch = f"echo 'allocation failure: {words}' >&2; exit 1" if words else "exit 0"
    path = programs(tmp_path / "bin", sbatch=sbatch, sinfo="exit 1", squeue="exit 0")
    write_run(tmp_path, **GPT2, slurm=slurm)
    said = run_runner(tmp_path, "check", "tiny.yaml", "--bundle", str(staged), PATH=path)
    assert_found(said, found)


GPU_NODES = "for n in 1 2; do echo 'gpu*|64|512000|gpu:a100:4|2-00:00:00'; done"
MEANT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"gpus_per_node": 4}, ""),
    ({"gpus_per_node": 0}, ""),
    ({"setup": ["export CUDA_VISIBLE_DEVICES="]}, ""),
    ({"options": {"exclusive": True}}, ""),
    ({}, "echo 'gpu*|64|512000|(null)|2-00:00:00'"),  # a node without GPUs, too
)


def test_a_job_that_leaves_the_gpus_of_its_nodes_is_told(staged: Path, tmp_path: Path) -> None:
    """Slurm gives it none: it trains on the CPU for a night, and ends with exit code 0."""
    quiet = dict.fromkeys(("sbatch", "squeue"), "exit 0")
    command = ("check", "tiny.yaml", "--bundle", str(staged))
    path = programs(tmp_path / "bin", sinfo=GPU_NODES, **quiet)
    write_run(tmp_path, **GPT2, slurm={})
    said = run_runner(tmp_path, *command, PATH=path)
    assert_found(said, Found(("asks for no GPU", "of partition gpu"), "slurm.gpus_per_node: 4", 0))
    for slurm, nodes in MEANT:
        path = programs(tmp_path / "bin", sinfo=f"{GPU_NODES}; {nodes or 'exit 0'}")
        write_run(tmp_path, **GPT2, slurm=slurm)
        said = run_runner(tmp_path, *command, PATH=path)
        assert "asks for no GPU" not in said.out, slurm


# Other words of sbatch (slurm_errno.c) -> what helps.
WORDS = {
    "Invalid feature specification": "slurm.options.constraint",
    "User's group not permitted to use this partition": "AllowGroups",
    "Requested reservation is invalid": "scontrol show reservation",
    "No partition specified or system default partition": "sinfo -s",
    "Memory specification can not be satisfied": "lower mem",
    "Access/permission denied": "sacctmgr show assoc",
    "Invalid Trackable RESource (TRES) specification": "slurm.gpus_per_node",
    "CPU count per node can not be satisfied": "cpus-per-task",
    "Invalid qos specification": "slurm.options.qos",
    "Invalid license specification": "scontrol show lic",
    "Invalid node name specified": "nodelist or exclude",
    "Job dependency problem": "slurm.options.dependency",
    "Invalid job array specification": "MaxArraySize",
    "Protocol authentication error": "munge",
    "Incompatible versions of client and server code": "another login node",
    "Requested node configuration is not available": "sinfo -N",
    ACCOUNT: "sacctmgr show assoc",
}


@pytest.mark.parametrize("words", WORDS)
def test_every_refusal_of_slurm_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    says = f'echo "{FAILED}{words}" >&2; exit 1'
    path = programs(tmp_path / "bin", sbatch=says, sinfo="echo batch; echo gpu; echo gpu")
    monkeypatch.setenv("PATH", path)
    with pytest.raises(UsageError) as refused:
        try_script(tmp_path / "submit.sbatch")
    assert words in refused.value.message and WORDS[words] in refused.value.remedy
    assert ("There are: batch, gpu." in refused.value.remedy) == (WORDS[words] == "sinfo -s")


# What no setting helps against: the exit code says "later" (slurm_errno.c) -> what helps.
LATER = {
    "J18": ("I/O error writing script/environment to file", "disk of Slurm's controller"),
    "J19": ("Socket timed out on send/recv operation", "scontrol ping"),
    "no controller": ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
    "no answer": ("Zero Bytes were transmitted or received", "Tell the site"),
}


@pytest.mark.parametrize("entry", LATER)
def test_what_only_the_site_can_repair_is_not_blamed_on_the_run_file(
    staged: Path, tmp_path: Path, entry: str
) -> None:
    words, helps = LATER[entry]
    path = programs(tmp_path / "bin", sbatch=f"echo '{FAILED}{words}' >&2; exit 1", sinfo="exit 1")
    write_run(tmp_path, **GPT2, slurm={})
    said = run_runner(tmp_path, "check", "tiny.yaml", "--bundle", str(staged), PATH=path)
    assert_found(said, Found((words,), helps, 5))


NEVER_MET = {"N9": "is not an address on gpu1", "L6": "port 29500 is in use"}


def test_a_master_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"MASTER_ADDR=192\.0\.2\.7") as refused:
        locate("192.0.2.7", ["gpu1", "gpu2"], 2, is_first=True)
    assert NEVER_MET["N9"] in refused.value.message and "MASTER_ADDR" in refused.value.remedy


def test_a_port_of_ones_own_that_is_taken_is_named() -> None:
    error = RuntimeError(
        "The server socket has failed to listen: EADDRINUSE, Address already in use"
    )
    problem = explain_joining(error, 0, "gpu1", 29500)
    assert problem is not None and NEVER_MET["L6"] in problem.message
    assert "MASTER_PORT" in problem.remedy


def test_a_time_without_quotes_is_what_it_says(staged: Path, tmp_path: Path) -> None:
    """YAML 1.1 reads 12:00:00 as 43200, which are minutes for Slurm."""
    run = write_run(tmp_path, **GPT2)
    run.write_text(run.read_text() + "slurm:\n  time: 12:00:00\n")
    said = run_runner(tmp_path, "submit", "tiny.yaml", "--bundle", str(staged), "--print")
    assert "#SBATCH --time=12:00:00\n" in said.out
    run.write_text(run.read_text().replace("12:00:00", "12"))
    said = run_runner(tmp_path, "submit", "tiny.yaml", "--bundle", str(staged), "--print")
    assert_found(said, Found(("`slurm.time` must be text", "`12`"), 'time: "12"'))


def test_variables_of_a_job_around_us_are_not_passed_on() -> None:
    """srun calls SLURM_MEM_PER_NODE beside --mem-per-cpu mutually exclusive, and GPUs likewise."""
    outer = {"SLURM_MEM_PER_NODE": "4096", "SLURM_GPUS": "4", "SLURM_CONF": "/etc/s", "HOME": "/h"}
    assert clean(outer) == {"SLURM_CONF": "/etc/s", "HOME": "/h"}
