"""How a user's command starts on the nodes of its job: the words, and real launchers that meet."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Literal

import pytest

from runner.from_stage import UsageError, WrongValueError
from runner.job.commands import LAUNCHERS, Command, options_of
from runner.job.launchers import Launch, Node, Places, as_words, plan_launch, words_on_node
from tests.remedies.obeyed import in_it, obeys

Asked = Literal["auto", "rank", "node", "once"]
FILE = "runner/job/launchers.py"
BIN = Path(sys.executable).parent
ONE_MACHINE = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nmixed_precision: bf16\n"
FILES = {
    "no.yaml": f"{ONE_MACHINE}distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: false\n",
    "plain-no.yaml": f"{ONE_MACHINE}distributed_type: NO\nnum_processes: 1\nuse_cpu: false\n",
    "gpus.yaml": f"{ONE_MACHINE}distributed_type: MULTI_GPU\nnum_processes: 8\nuse_cpu: false\n"
    "machine_rank: 0\nmain_process_ip: 192.0.2.7\nmain_process_port: 1\ngpu_ids: '4,5'\n",
    "cpus.yaml": f"{ONE_MACHINE}distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n",
    "fsdp.yaml": f"{ONE_MACHINE}distributed_type: FSDP\nnum_processes: 2\nuse_cpu: false\n",
    "ds.yaml": f"{ONE_MACHINE}distributed_type: DEEPSPEED\nnum_processes: 2\nuse_cpu: false\n"
    "deepspeed_config: {zero_stage: 2, deepspeed_multinode_launcher: pdsh}\n",
    "run.sh": "#!/bin/bash\npython prepare.py\n",
    "srun.sh": "#!/bin/bash\nsrun python train.py\n",
    "torchrun.sh": "#!/bin/bash\n# srun x\nexport A=1\nA=2 torchrun \\\n"
    "  --nproc_per_node 4 t.py a\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with configs and scripts; nothing of this machine's user is read."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def planned(
    command: str | list[str],
    folder: Path,
    nodes: int = 2,
    gpus: int = 4,
    tasks: int | None = None,
    asked: Asked = "auto",
) -> Launch:
    places = Places(nodes=nodes, gpus=gpus, tasks=tasks)
    return plan_launch(as_words(command), places, asked, folder)


def node_of(launch: Launch, nodes: int, number: int = 1) -> Node:
    return Node(
        number=number, nodes=nodes, processes=launch.processes, master="n1", port=777, job="7"
    )


def line_on(
    command: str, folder: Path, nodes: int = 2, gpus: int = 4, asked: Asked = "auto"
) -> str:
    """The line of the last node, as a shell would show it."""
    launch = planned(command, folder, nodes, gpus, asked=asked)
    variables, words = words_on_node(
        as_words(command), launch, node_of(launch, nodes, nodes - 1), folder
    )
    return shlex.join([*(f"{name}={value}" for name, value in variables.items()), *words])


MEET = "--nnodes=2 --node_rank=1 --master_addr=n1 --master_port=777"
MACHINES = (
    "--num_machines=2 --machine_rank=1 --main_process_ip=n1 --main_process_port=777 "
    "--rdzv_backend=static --deepspeed_multinode_launcher=standard --num_processes={}"
)
DS_ON_NODE = "-m deepspeed.launcher.launch --world_info={} " + MEET.removeprefix("--nnodes=2 ")
BY_VARIABLES = "NNODES=2 NODE_RANK=1 MASTER_ADDR=n1 MASTER_PORT=777 NPROC_PER_NODE={}"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("torchrun x.py --a 1", f"torchrun {MEET} --nproc_per_node=4 x.py --a 1"),
        (
            "torchrun --standalone --nproc-per-node=2 x.py --standalone",
            f"torchrun {MEET} --nproc_per_node=2 x.py --standalone",
        ),
        (
            "torchrun --nnodes 1 --node-rank 0 --rdzv_backend c10d --rdzv-endpoint=h:1 --rdzv_id 7 "
            "--master_addr localhost --master-port=1 --tee 3 -r3 -m pkg.a -m b",
            f"torchrun {MEET} --nproc_per_node=4 --tee 3 -r3 -m pkg.a -m b",
        ),
        ("torchrun --nproc_per=3 x.py", f"torchrun {MEET} --nproc_per_node=3 x.py"),
        (
            "python -u -m torch.distributed.launch --use_env --nproc_per_node gpu x.py",
            "python -u -m torch.distributed.launch "
            f"{MEET} --nproc_per_node=4 --use_env x.py",
        ),
        ("env A=1 torchrun x", f"env A=1 torchrun {MEET} --nproc_per_node=4 x"),
        (
            "A=1 MASTER_PORT=3 CUDA_VISIBLE_DEVICES=4,5 nohup torchrun x",
            f"env A=1 torchrun {MEET} --nproc_per_node=2 x",
        ),
        ("time torchrun x.py", f"torchrun {MEET} --nproc_per_node=4 x.py"),
        ("accelerate launch x.py", f"accelerate launch {MACHINES.format(8)} --multi_gpu x.py"),
        (
            "accelerate launch --num_machines 2 --num-processes=4 --main_process_ip h x.py --cpu",
            f"accelerate launch {MACHINES.format(4)} --multi_gpu x.py --cpu",
        ),
        (
            "accelerate launch --num_processes 8 --multi-gpu x.py",
            f"accelerate launch {MACHINES.format(8)} --multi_gpu x.py",
        ),
        (
            "accelerate launch --config_file gpus.yaml --mixed_precision fp16 x.py",
            f"accelerate launch {MACHINES.format(8)} --gpu_ids=all --config_file gpus.yaml "
            "--mixed_precision fp16 x.py",
        ),
        (
            "accelerate launch --config_file $CONFIGS/one.yaml x.py",
            f"bash -c 'exec accelerate launch {MACHINES.format(8)} --config_file "
            "$CONFIGS/one.yaml x.py'",
        ),
        (
            "accelerate-launch --config-file=fsdp.yaml x.py",
            f"accelerate-launch {MACHINES.format(8)} --config-file=fsdp.yaml x.py",
        ),
        (
            "python -m accelerate.commands.launch --cpu --num_processes=3 -m pkg",
            "ACCELERATE_USE_CPU=true python -m accelerate.commands.launch "
            f"{MACHINES.format(6)} --multi_gpu -m pkg",
        ),
        (
            "deepspeed --hostfile=h --num_gpus 2 --no_local_rank x.py --deepspeed ds.json",
            f"python -u {DS_ON_NODE} --no_local_rank x.py --deepspeed ds.json",
        ),
        (
            "/e/bin/deepspeed -i localhost:2,3 --master_port 1 --module pkg.a",
            f"/e/bin/python -u {DS_ON_NODE} --module pkg.a",
        ),
        (
            "FORCE_TORCHRUN=1 NNODES=4 NODE_RANK=0 llamafactory-cli train x.yaml lr=1",
            f"{BY_VARIABLES.format(4)} FORCE_TORCHRUN=1 env FORCE_TORCHRUN=1 llamafactory-cli "
            "train x.yaml lr=1",
        ),
        ("lmf train x.yaml", f"{BY_VARIABLES.format(4)} FORCE_TORCHRUN=1 lmf train x.yaml"),
        (
            "NPROC_PER_NODE=2 swift sft --model x",
            f"{BY_VARIABLES.format(2)} FORCE_TORCHRUN=1 swift sft --model x",
        ),
        ("megatron sft --a", f"{BY_VARIABLES.format(4)} FORCE_TORCHRUN=1 megatron sft --a"),
        (
            "trl dpo --model_name_or_path a/b --num_processes 2 --accelerate_config zero3 --x",
            f"trl dpo {MACHINES.format(4)} --model_name_or_path a/b --accelerate_config zero3 --x",
        ),
        (
            "trl sft --config c.yaml --accelerate_config single_gpu",
            f"trl sft {MACHINES.format(8)} --multi_gpu --config c.yaml "
            "--accelerate_config single_gpu",
        ),
        (
            "fabric run --accelerator=cuda --devices 0,1 --node_rank 0 x.py --devices 3",
            "fabric run --num-nodes=2 --node-rank=1 --main-address=n1 --main-port=777 "
            "--devices=2 --accelerator=cuda x.py --devices 3",
        ),
        (
            "torchrun --nnodes=$SLURM_NNODES --nproc_per_node=$G "
            "--rdzv_endpoint=\"$MASTER_ADDR:2\" x.py --out \"$OUT/a b\" 'c d' *.txt",
            shlex.join([
                "bash",
                "-c",
                f"exec torchrun {MEET} --nproc_per_node=4 x.py --out \"$OUT/a b\" 'c d' *.txt",
            ]),
        ),
        (
            "accelerate launch --num_processes $((2 * SLURM_NNODES)) x.py $A",
            f"bash -c 'exec accelerate launch {MACHINES.format(8)} --multi_gpu x.py $A'",
        ),
    ],
)  # fmt: skip
def test_a_launcher_is_given_the_words_by_which_it_meets_those_of_the_other_nodes(
    project: Path, command: str, line: str
) -> None:
    got = line_on(command, project)
    if "{}" in line:
        info = in_it(got, "(?<=world_info=)[^ ']*")
        world = json.loads(urlsafe_b64decode(info))
        assert [len(gpus) for gpus in world.values()] == [2, 2]
        got = re.sub(f"'?--world_info={info}'?", "--world_info={}", got)
    assert got == line


def test_on_one_node_the_number_of_processes_follows_slurm(project: Path) -> None:
    """torchrun's own number is 1, and that of accelerate's file is the laptop's."""
    meet = "--nnodes=1 --node_rank=0 --master_addr=n1 --master_port=777"
    assert line_on("torchrun x.py", project, 1) == f"torchrun {meet} --nproc_per_node=4 x.py"
    line = line_on("accelerate launch --config_file no.yaml x.py", project, 1)
    assert "--num_processes=4 --multi_gpu" in line
    # It refuses --multi_gpu for one process.
    line = line_on("accelerate launch --config_file no.yaml --multi_gpu x.py", project, 1, 1)
    assert "--num_processes=1" in line and "multi_gpu" not in line
    assert line_on("swift sft --a", project, 1, 1) == "swift sft --a"
    assert line_on("llamafactory-cli train x", project, 1, 0) == "llamafactory-cli train x"
    launch = planned("torchrun --nproc_per_node cpu x.py", project, 1, 0)
    assert launch.processes == 0
    assert line_on("torchrun --nproc_per_node cpu x.py", project, 1, 0) == (
        f"torchrun {meet} --nproc_per_node cpu x.py"
    )


@pytest.mark.parametrize(
    ("command", "nodes", "gpus", "tasks", "asked", "mode", "processes", "note"),
    [
        ("torchrun x.py", 2, 4, None, "auto", "node", 4, "4 processes on each node, one per GPU"),
        ("torchrun x.py", 2, 1, 1, "auto", "node", 1, ""),
        ("torchrun --nproc_per_node 1 x.py", 1, 4, None, "auto", "node", 1, "idle on each node: 3"),
        ("torchrun --standalone x.py", 1, 1, None, "auto", "node", 1, "`--standalone`: replaced"),
        ("accelerate launch --config_file gpus.yaml x", 1, 4, None, "auto", "node", 4,
         "`num_processes num_machines main_process_ip`: replaced"),
        ("python x.py", 1, 4, None, "auto", "once", 0, "`command: torchrun x.py`"),
        ("python -u -m pkg.a b", 1, 4, None, "auto", "once", 0, "`command: torchrun -m pkg.a b`"),
        ("python x.py", 1, 1, None, "auto", "once", 1, ""),
        ("lm_eval --model hf", 1, 4, 1, "auto", "once", 0, "`lm_eval` starts one process"),
        ("deepspeed --autotuning run x.py", 1, 4, None, "auto", "once", 0, ""),
        ("python x.py", 2, 4, 4, "auto", "rank", 4, "4 tasks on each node"),
        ("python x.py --d $D", 2, 4, 4, "auto", "rank", 4, "4 tasks on each node"),
        ("python x.py", 2, 4, 1, "auto", "rank", 1, "idle on each node: 3"),
        ("python x.py", 1, 2, 8, "auto", "rank", 8, "8 tasks share the 2 GPUs"),
        ("./x --n 2", 1, 0, 2, "auto", "rank", 2, ""),
        ("bash run.sh", 2, 4, None, "auto", "once", 0, "no `srun` is in run.sh"),
        ("bash run.sh", 2, 4, 4, "auto", "rank", 4, "run.sh starts 4 times on each node"),
        ("./srun.sh a", 2, 4, None, "auto", "once", 0, ""),
        ("./srun.sh", 2, 4, 4, "auto", "once", 0, ""),
        ("bash -l torchrun.sh", 1, 4, None, "auto", "once", 0, "runs as it is"),
        ("cd x && python y.py", 1, 1, None, "auto", "once", 0, ""),
        ("python x.py", 2, 4, None, "rank", "rank", 4, ""),
        ("python x.py", 2, 4, None, "once", "once", 0, "on the first of 2 nodes alone"),
        ("mpirun -np 4 x", 1, 4, None, "once", "once", 0, ""),
        ("axolotl train x", 2, 4, None, "node", "node", 4, "NPROC_PER_NODE is 4"),
        ("torchrun --nnodes $NNODES x", 2, 4, None, "node", "node", 4, ""),
    ],
)  # fmt: skip
def test_how_a_command_is_started_and_which_choice_is_told(
    project: Path,
    command: str,
    nodes: int,
    gpus: int,
    tasks: int | None,
    asked: Asked,
    mode: str,
    processes: int,
    note: str,
) -> None:
    launch = planned(command, project, nodes, gpus, tasks, asked)
    assert (launch.mode, launch.processes) == (mode, processes), launch
    assert launch.tasks_per_node == (processes if mode == "rank" else 1)
    assert note in " ".join(launch.notes) and "\n" not in "".join(launch.notes)
    if mode != "node":
        variables, words = words_on_node(as_words(command), launch, node_of(launch, nodes), project)
        assert variables == {} and (words[0] == "bash" or words == command.split())


def test_with_launch_node_the_command_is_itself_on_each_node(project: Path) -> None:
    line = line_on("torchrun --nnodes $NNODES x.py", project, asked="node")
    assert line == f"{BY_VARIABLES.format(4)} bash -c 'torchrun --nnodes $NNODES x.py'"


@pytest.mark.parametrize(
    ("command", "nodes", "tasks", "said", "line"),
    [
        ("torchrun --nproc_per_nodes 4 x.py", 1, None, "no option `--nproc_per_nodes`",
         "`--nproc_per_node`"),
        ("torchrun --confg a x.py", 1, None, "no option `--confg`", "after its name"),
        ("accelerate launch --num_proceses 4 x.py", 1, None, "`--num_proceses`",
         "`--num_processes`"),
        ("deepspeed --num_gpu=a --num-gpuss 4 x.py", 1, None, "`--num-gpuss`", "`--num_gpus`"),
        ("torchrun --nproc_per_node 4", 1, None, "is given no script", "after the options"),
        ("env A=1", 1, None, "starts nothing", "program"),
        ("torchrun --nproc_per_node 8 x.py", 1, None, "8 processes", "{gpus_per_node: 8}"),
        ("accelerate launch --num_processes 6 x.py", 2, None, "6 processes", "or 4 in"),
        ("torchrun x.py", 2, 4, "start `torchrun` 4 times on each node", "Omit `tasks_per_node`"),
        ("bash torchrun.sh", 1, 4, "would start ranks 4 times",
         "`command: torchrun --nproc_per_node 4 t.py a`"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_refused_with_the_line_that_can(
    project: Path, command: str, nodes: int, tasks: int | None, said: str, line: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as error:
        planned(command, project, nodes, 4, tasks)
    assert line in error.value.remedy


@pytest.mark.parametrize(
    ("command", "line", "tasks"),
    [
        ("python -u x.py --a", "torchrun x.py --a", None),
        ("bash torchrun.sh", "torchrun --nproc_per_node 4 t.py a", None),
        ("cd x && A=1 torchrun --nproc_per_node 4 y.py 2>&1 | tee log",
         "torchrun --nproc_per_node 4 y.py", None),
        ("srun -N 2 python x.py --n 4", "python x.py --n 4", 4),
        ("srun --ntasks=2 --cpu-bind=none torchrun x.py", "torchrun x.py", None),
        ("mpirun -np 8 -x A python x.py", "python x.py", 4),
        ("horovodrun -np 4 train.py", "python train.py", 2),
        ("sbatch --time 3 srun.sh a", "bash srun.sh a", None),
        ("srun -N 2 ./my_program --x 1", "./my_program --x 1", 4),
        ("uv run --extra gpu torchrun x.py", "torchrun x.py", None),
        ("poetry run torchrun train.py", "torchrun train.py", None),
        ("conda run -n x accelerate launch x.py", "accelerate launch x.py", None),
    ],
)  # fmt: skip
@obeys(FILE, "One process per GPU: ", "Write that line in the run file: ", "Write `command: ")
def test_the_line_of_a_refusal_starts_on_all_nodes(
    project: Path, command: str, line: str, tasks: int | None
) -> None:
    with pytest.raises(UsageError) as error:
        planned(command, project)
    remedy = error.value.remedy
    assert in_it(remedy, "(?<=`command: )[^`]*") == line
    given = re.search(r"slurm: {tasks_per_node: (\d)}`\.$", remedy)
    assert (int(given[1]) if given else None) == tasks
    planned(line, project, tasks=tasks)


@obeys("runner/job/commands.py", "Options of the script come after its name")
@obeys(FILE, "{gpus_per_node: ", "A script that reads SLURM_PROCID or RANK itself: ")
def test_each_other_way_of_a_refusal_starts_on_all_nodes(project: Path) -> None:
    with pytest.raises(UsageError, match="`lm_eval` is one process") as error:
        planned("lm_eval --model hf", project)
    for way in ("slurm: {tasks_per_node: 4}", "launch: node", "slurm: {nodes: 1}"):
        assert f"`{way}`" in error.value.remedy
    assert planned("lm_eval --model hf", project, tasks=4).mode == "rank"
    assert planned("lm_eval --model hf", project, asked="node").mode == "node"
    assert planned("lm_eval --model hf", project, nodes=1).mode == "once"
    assert planned("bash torchrun.sh", project, asked="node").mode == "node"
    assert planned("torchrun --new_option 3 x.py", project, asked="node").mode == "node"
    for command in ("torchrun --nproc_per_node 8 x.py", "deepspeed --num_gpus 8 x.py"):
        with pytest.raises(UsageError, match="asks for 4 GPUs") as error:
            planned(command, project)
        assert "{gpus_per_node: 8}" in error.value.remedy
        assert planned(command, project, gpus=8).processes == 8
        assert planned(command.replace("8", "4"), project).processes == 4


def test_the_file_of_this_machine_is_told_of_because_it_does_not_travel(project: Path) -> None:
    default = project / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text(FILES["gpus.yaml"])
    notes = planned("accelerate launch x.py", project).notes
    assert any(f"{default} is of this machine" in note for note in notes)


def test_deepspeed_takes_the_gpus_that_slurm_gave_to_the_job(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,GPU-a,7")
    line = line_on("deepspeed --num_gpus 3 x.py", project)
    world = json.loads(urlsafe_b64decode(in_it(line, "(?<=world_info=)[^ ']*")))
    assert world == {"0": ["2", "3", "GPU-a"], "1": ["2", "3", "GPU-a"]}


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("torchrun x.py --a 'b c' \"d e\"", ["torchrun", "x.py", "--a", "b c", "d e"]),
        ("A=1 B='2 3' python x.py", ["env", "A=1", "B=2 3", "python", "x.py"]),
        (["A=1", "python", "a b"], ["env", "A=1", "python", "a b"]),
        ("torchrun \\\n  --standalone \\\n  x.py\n", ["torchrun", "--standalone", "x.py"]),
        ("torchrun \\ --standalone \\ x.py", ["torchrun", "--standalone", "x.py"]),  # YAML's >
        ("x 'a | b' \"c && d\" e\\;f 5$ '$A'", ["x", "a | b", "c && d", "e;f", "5$", "$A"]),
        ("swift sft --dataset a#20 --x b=[1,2]",
         ["swift", "sft", "--dataset", "a#20", "--x", "b=[1,2]"]),
        ("nohup python x.py &", ["nohup", "python", "x.py"]),
        ("x > log 2>&1 &", ["bash", "-c", "x > log 2>&1"]),
        ("x \"it's\" 'say \"a\"'", ["x", "it's", 'say "a"']),
        *((text, ["bash", "-c", text]) for text in (
            "python a.py | tee b", "cd x && y", "a; b", "a > b", "a < b", "a $(b)", "a `b`", "a\nb",
            'a "$B"', "a $B", 'a "x${B}"', "a *.txt", "a ~/b", "a --x=~/b", "a & b", "a # b",
            'x "$(pwd)"', "a $((1 + 2))",
        )),
    ],
)  # fmt: skip
def test_a_command_is_read_as_a_shell_reads_it(typed: str | list[str], words: list[str]) -> None:
    assert as_words(typed) == tuple(words)


@pytest.mark.parametrize("typed", ["torchrun 'x.py", 'a "b', "a 'b\" c", "", "  ", []])
def test_a_command_that_no_shell_reads_is_a_wrong_value(typed: str | list[str]) -> None:
    with pytest.raises(WrongValueError, match=r"quote|is empty"):
        as_words(typed)


def _parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of the installed launcher."""
    if name == "torchrun":
        parser = importlib.import_module("torch.distributed.run").get_args_parser()
    elif name == "accelerate":
        parser = importlib.import_module("accelerate.commands.launch").launch_command_parser()
    else:
        with pytest.MonkeyPatch.context() as patch:
            seen: list[argparse.ArgumentParser] = []
            patch.setattr(
                argparse.ArgumentParser, "parse_args", lambda self, args: seen.append(self)
            )
            importlib.import_module("deepspeed.launcher.runner").parse_args([])
        parser = seen[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed"])
def test_the_options_that_we_know_are_those_of_the_installed_launcher(name: str) -> None:
    actions = [action for action in _parser_of(name)._actions if action.option_strings]
    for action in actions:
        takes = action.nargs != 0
        for spelled in action.option_strings:
            typed = (spelled, "1", "x.py") if takes else (spelled, "x.py")
            command = Command(is_line=False, front=(), launcher=name, own=(name,), rest=typed)
            options, script = options_of(command)
            assert (script, options[0].value) == (["x.py"], "1" if takes else ""), spelled
    known = {word for action in actions for word in action.option_strings}
    ours = [*LAUNCHERS[name].ours.split(), LAUNCHERS[name].count]
    dashes = {word.replace("_", "-") for word in known}
    older = {"elastic-training", "min-elastic-nodes", "max-elastic-nodes"}
    assert {f"--{one}" for one in ours if one not in older} <= dashes


RANKS = """
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
dist.barrier()
os.write(1, f"RANK {dist.get_rank()} OF {dist.get_world_size()} SUM {total.item()}\\n".encode())
dist.destroy_process_group()
"""
LOCAL_RANK = RANKS + "import sys; os.write(1, (' '.join(sys.argv[1:]) + '\\n').encode())\n"


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --standalone --nproc-per-node=2 ranks.py",
        # Each takes ten seconds and more: the other launchers are nightly.
        pytest.param("accelerate launch --config_file no.yaml ranks.py", marks=pytest.mark.slow),
        pytest.param("python -m torch.distributed.run --nproc_per_node 2 ranks.py",
                     marks=pytest.mark.slow),
        pytest.param("accelerate launch --cpu --num_processes 2 ranks.py", marks=pytest.mark.slow),
        pytest.param("accelerate launch ranks.py $NOTHING", marks=pytest.mark.slow),
        pytest.param("accelerate launch --config_file gpus.yaml --num_processes 2 ranks.py",
                     marks=pytest.mark.slow),
        pytest.param("accelerate launch --config_file cpus.yaml ranks.py", marks=pytest.mark.slow),
        pytest.param("accelerate launch --config_file ds.yaml ranks.py", marks=pytest.mark.slow),
        pytest.param("deepspeed --num_gpus 2 local.py --a b", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_real_launchers_of_two_nodes_meet_once(project: Path, command: str) -> None:
    """Two groups of processes on this machine stand for the nodes."""
    (project / "ranks.py").write_text(RANKS)
    (project / "local.py").write_text(LOCAL_RANK)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = planned(command, project, nodes=2, gpus=0)
    started = []
    for number in (0, 1):
        node = Node(
            number=number,
            nodes=2,
            processes=launch.processes,
            master="127.0.0.1",
            port=port,
            job="7",
        )
        variables, words = words_on_node(as_words(command), launch, node, project)
        environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                words,
                cwd=project,
                env={**environ, "DS_ACCELERATOR": "cpu", **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    printed = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    size = 2 * launch.processes
    said = sorted(re.findall(r"RANK \d OF \d SUM \d+", " ".join(out for out, _ in printed)))
    total = size * (size + 1) // 2
    assert said == [f"RANK {rank} OF {size} SUM {total}" for rank in range(size)], printed
    if "local.py" in command:
        out = printed[0][0] + printed[1][0]
        assert out.count("--local_rank=0 --a b") == out.count("--local_rank=1 --a b") == 2
