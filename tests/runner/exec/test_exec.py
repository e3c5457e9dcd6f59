"""`runner exec`: other people's scripts, unmodified and offline, with their names on the Hub."""

from __future__ import annotations

import errno
import fcntl
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from runner.disks import cache_variables
from runner.exec import launchers
from runner.exec import user_script as exec_module
from runner.exec.user_script import environment, write_hub_cache
from stage.serve.catalogue import ServedFile, ServedRepository, Version
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster
from tests.runner.launch.test_mpi import open_mpi
from tests.support.waiting import wait_for

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
SRUN = "srun --ntasks-per-node=1 --ntasks=1"
MPIRUN = "mpirun --map-by ppr:1:node --bind-to none -n 1"


@pytest.fixture
def node(tmp_path: Path, bundle: Path) -> Cluster:
    """A user's folder on a compute node, with the user's scripts, and the node's own disk."""
    shutil.copytree(SCRIPTS, tmp_path / "work")
    (tmp_path / "local").mkdir()
    return Cluster(tmp_path / "work", bundle)


def start(
    node: Cluster, *command: str, offline: bool = True, **variables: str
) -> subprocess.Popen[str]:
    """`runner exec ... -- COMMAND`, in a network namespace that has loopback and nothing else."""
    argv = [sys.executable, "-m", "runner", "exec", "--bundle", str(node.bundle), "--", *command]
    if offline:
        if not shutil.which("unshare") or not shutil.which("ip"):
            pytest.skip("needs unshare and ip")
        argv = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *argv]
    environ = node.environment(
        TMPDIR=str(node.folder.parent / "local"), PATH=f"{BIN}:{os.environ['PATH']}", **variables
    )
    return subprocess.Popen(
        argv,
        cwd=node.folder,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(node: Cluster, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    process = start(node, *command, offline=True, **variables)
    out, err = process.communicate("", timeout=500)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def servers(node: Cluster) -> list[int]:
    """The processes that serve this test's bundle: `exec` itself has become the script."""
    shown = subprocess.run(
        ["pgrep", "-f", f"runner exec --bundle {node.bundle}"], capture_output=True, text=True
    ).stdout
    return [int(line) for line in shown.split()]


def test_a_script_for_two_ranks_finds_model_and_dataset_by_their_names(node: Cluster) -> None:
    done = run(
        node, "torchrun", "--standalone", "--nproc_per_node=2", "train_ddp.py", "--steps", "6"
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1  # ten seeds: 0.28 to 0.68 lower
    assert (
        "rank 0 of 2 done" in done.stdout and "rank 1 of 2 done" in done.stdout
    )  # on one line, now and then
    # Weights and parquet are read in the bundle: the caches hold links, and Arrow for the dataset.
    cached = [
        path
        for path in (node.folder.parent / "local").rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    assert not [path for path in cached if path.suffix in (".safetensors", ".parquet")]
    assert any(path.suffix == ".arrow" for path in cached)
    wait_for(lambda: not servers(node))


# What people have in their .bashrc on a cluster, or in a job script, as centres advise it. Each
# would break it.
THEIRS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_ENDPOINT": "https://hf-mirror.com",
    "HF_HUB_CACHE": "/nonexistent/cache",
    "HF_HOME": "/nonexistent/home",
    "http_proxy": "http://proxy.invalid:3128",
    "HTTPS_PROXY": "socks5://proxy.invalid:1080",
    "all_proxy": "socks://proxy.invalid:1080",
    "no_proxy": ".site",
}
JOB = "".join(f"export {name}={value}\n" for name, value in THEIRS.items()) + "python ask.py\n"


@pytest.mark.parametrize("in_script", [False, True])
def test_every_way_to_ask_the_hub_is_answered_whatever_the_shell_sets(
    node: Cluster, in_script: bool
) -> None:
    (node.folder / "ask.py").write_text("""
import json, os
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from datasets import load_dataset
files = sorted(os.listdir(snapshot_download("acme/tiny-gpt2")))
repository = "airlift-demo/pride-and-prejudice"
card = open(hf_hub_download(repository, "README.md", repo_type="dataset")).read()
rows = load_dataset("csv", data_files="mine.csv", split="train")
streamed = next(iter(load_dataset(repository, "chapters", split="validation", streaming=True)))
sha = HfApi().model_info("acme/tiny-bert").sha
print(json.dumps([files, "chapters" in card, rows[0], sorted(streamed), sha]))
""")
    (node.folder / "mine.csv").write_text("User,Prompt\nann,draw a cat\n")
    (node.folder / "job.sh").write_text(JOB)
    done = run(node, "bash", "job.sh") if in_script else run(node, "python", "ask.py", **THEIRS)
    assert done.returncode == 0, done.stderr
    said = re.findall("airlift: .* and put back, .* here: (.*)\n", done.stderr)
    changed = "HF_DATASETS_OFFLINE, HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE, HTTPS_PROXY, "
    assert said == [changed + "TRANSFORMERS_OFFLINE, all_proxy"] * in_script
    files, card, row, columns, sha = json.loads(done.stdout.splitlines()[-1])
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert card and row == {"User": "ann", "Prompt": "draw a cat"} and "text" in columns
    assert re.fullmatch(r"[0-9a-f]{40}", sha)


def test_exit_code_streams_and_arguments_are_the_scripts_own(node: Cluster) -> None:
    code = (
        "import sys; print(sys.argv[1:], sys.stdin.read()); print('e', file=sys.stderr); "
        "sys.exit(42)"
    )
    process = start(node, "python", "-c", code, "--bundle", "x", "-h", offline=False)
    out, err = process.communicate("typed", timeout=120)
    assert (process.returncode, out) == (42, "['--bundle', 'x', '-h'] typed\n")
    told, _, rest = err.partition("\n")
    assert told.startswith("runner exec: bundle ") and rest == "e\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_a_signal_reaches_the_script_itself_and_the_server_goes_with_it(
    node: Cluster, number: signal.Signals
) -> None:
    process = start(node, "sh", "-c", "echo ready; exec sleep 100", offline=False)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert len(servers(node)) >= 1
    process.send_signal(number)
    assert process.wait(30) == -number  # the script is the process: nothing stands between
    wait_for(lambda: not servers(node))
    process.communicate()


def test_stop_signals_to_all_of_a_job_step_leave_the_server_to_the_script(node: Cluster) -> None:
    """Slurm signals each process of a step; the script saves, and may read its tokenizer then."""
    script = (
        "trap 'saving=1' TERM; echo ready; while [ -z \"$saving\" ]; do sleep 0.1; done; "
        "exec python save.py"
    )
    (node.folder / "save.py").write_text(
        "from huggingface_hub import HfApi; print(HfApi().model_info('acme/tiny-bert').id)"
    )
    process = start(node, "sh", "-c", script, offline=False)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for pid in servers(node):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.split() == ["acme/tiny-bert"]


def test_two_scripts_of_one_node_share_its_caches_and_a_job_leaves_nothing(node: Cluster) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    command = ("sh", "-c", "echo $MASTER_ADDR $HF_HUB_CACHE; read line")
    both = [start(node, *command, offline=False, **slurm) for _ in range(2)]
    said = [process.stdout.readline().split() for process in both if process.stdout]
    caches = [cache for address, cache in said if address == "127.0.0.1"]  # a job of one node
    assert caches[0] == caches[1] and "airlift-" in caches[0]
    both[0].communicate("\n", timeout=60)
    time.sleep(1)
    assert Path(caches[0]).is_dir()  # the other still works with it
    both[1].communicate("\n", timeout=60)
    wait_for(lambda: not servers(node))
    wait_for(lambda: not Path(caches[0]).exists())


BUILD = """
import os, time
from torch.utils.file_baton import FileBaton
folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam")
os.makedirs(folder, exist_ok=True)
print("builds" if FileBaton(os.path.join(folder, "lock")).try_acquire() else "waits", flush=True)
time.sleep(100)
"""


def test_a_job_that_is_requeued_to_the_same_node_does_not_wait_for_its_killed_build(
    node: Cluster,
) -> None:
    """torch's lock of the killed start was still there: five restarts without a word."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}

    def begin(**more: str) -> tuple[subprocess.Popen[str], str]:
        process = start(node, "python", "-c", BUILD, offline=False, **slurm, **more)
        assert process.stdout is not None
        return process, process.stdout.readline()

    first, says = begin()
    assert says == "builds\n"
    beside, says = begin()
    assert says == "waits\n"  # the first one lives
    for process in (first, beside):
        process.kill()
        process.communicate()
    again, says = begin(SLURM_RESTART_COUNT="1")
    again.kill()
    assert says == "builds\n", again.communicate()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_disk_without_locks_keeps_the_caches_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Lustre without flock: it is unknown who uses the caches, so no script removes them."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    os.close(exec_module._in_use(tmp_path))
    assert (tmp_path / exec_module.NEVER_CLEANED).exists()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EBADF, "no file")))
    with pytest.raises(OSError, match="no file"):
        exec_module._in_use(tmp_path)


def test_what_is_not_in_the_bundle_is_named_with_the_line_for_the_manifest(node: Cluster) -> None:
    code = (
        "from huggingface_hub import hf_hub_download; hf_hub_download('acme/other', 'config.json')"
    )
    done = run(node, "python", "-c", code)
    assert done.returncode == 1
    assert "model acme/other: not in this bundle; on the laptop, write" in done.stderr
    assert "  other:\n    model: acme/other\n" in done.stderr
    assert "see the line `asked for, not here`" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "call",
    [
        "HfApi(token='hf_x').create_repo('me/mine', exist_ok=True)",
        "HfApi(token='hf_x').upload_file(path_or_fileobj=b'x', path_in_repo='a', repo_id='me/a')",
        "HfApi(token='hf_x').delete_repo('acme/tiny-bert')",
        "HfApi(token='hf_x').create_branch('acme/tiny-bert', branch='b')",
        "create_repo('me/mine')",
    ],
)
def test_what_would_write_to_the_hub_is_told_that_nothing_is_uploaded_from_here(
    node: Cluster, call: str
) -> None:
    """It was a 404, and no word; or the advice to stage the repository."""
    code = f"from huggingface_hub import HfApi, create_repo; {call}"
    done = run(node, "python", "-c", code)
    assert done.returncode == 1
    assert re.search("runner exec: /api/.*: nothing is uploaded from here", done.stderr), (
        done.stderr
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("runner exec: nothing is uploaded from a compute node"), done.stderr
    assert "asked for, not here" not in done.stderr


def test_a_file_that_left_the_bundle_meanwhile_is_named_at_the_end(node: Cluster) -> None:
    """`stage push --delete` into the bundle of a running job."""
    copy = node.folder.parent / "copy"
    shutil.copytree(node.bundle, copy, copy_function=os.link)
    code = (
        "import os; from huggingface_hub import hf_hub_download; "
        f"os.unlink('{copy}/data/models/tiny-bert/config.json'); "
        "hf_hub_download('acme/tiny-bert', 'config.json')"
    )
    done = run(Cluster(node.folder, copy), "python", "-c", code)
    gone = f"the bundle changed since this script began: {copy}/data/models/tiny-bert/config.json"
    assert done.stderr.count(f"runner exec: {gone} is gone. ") == 1  # one request, not five
    assert done.stderr.splitlines()[-1].startswith(f"runner exec: {gone} is gone: start")


def test_a_script_that_sets_the_hub_itself_is_told_at_the_first_name_that_is_not_found(
    node: Cluster,
) -> None:
    (node.folder / "ask.py").write_text(
        "import os, socket\nos.environ['HF_ENDPOINT'] = 'https://hf-mirror.com'\n"
        "try:\n    socket.create_connection(('hf-mirror.com', 443))\nexcept OSError:\n    pass\n"
        "from huggingface_hub import HfApi\nHfApi().dataset_info('a/b')\n"
    )
    done = run(node, "python", "ask.py")
    assert done.stderr.count("asks for hf-mirror.com, and this node finds no such host") == 1
    assert done.stderr.count("take this line out of it") == 2  # there, and after the traceback
    assert "take this line out of it" in done.stderr.splitlines()[-1]


# Entries of docs/first-job-failures.md -> the library's words, and a part of our line after them.
def test_a_logger_does_not_wait_for_a_server_that_no_node_reaches() -> None:
    where = ("http://127.0.0.1:1", Path("/tmp/a/exec/abc"), Path("/tmp/b"))
    theirs = {"no_proxy": " a,localhost", "PYTHONPATH": "/p", "USER": "ann"}
    theirs |= {"HF_DATASETS_CACHE": "/d", "HF_MODULES_CACHE": "/m"}
    assert environment({**theirs, "HF_HUB_OFFLINE": "1"}, *where) == {
        **cache_variables({}, where[2]),
        **theirs,
        "no_proxy": "a,localhost,127.0.0.1",
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONPATH": "/tmp/a/exec/abc/python:/p",
        "HF_ENDPOINT": where[0],
        "AIRLIFT_HUB": '{"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_CACHE": '
        '"/tmp/a/exec/abc/hub", "HUGGINGFACE_HUB_CACHE": "/tmp/a/exec/abc/hub"}',
        "HF_HUB_CACHE": "/tmp/a/exec/abc/hub",
        "HUGGINGFACE_HUB_CACHE": "/tmp/a/exec/abc/hub",
        "HF_DATASETS_CACHE": "/d/airlift-abc",
        "HF_EVALUATE_CACHE": "/tmp/a/exec/abc/evaluate",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "DO_NOT_TRACK": "1",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "TOKENIZERS_PARALLELISM": "true",
    }
    assert environment({"WANDB_MODE": "disabled"}, *where)["WANDB_MODE"] == "disabled"


def test_tasks_that_do_not_know_of_each_other_are_told_of() -> None:
    def note(command: list[str], environ: dict[str, str]) -> str:
        script = launchers.shell_script(command)[1]
        return launchers.note_on_tasks(command, Path("my bundle"), environ, script)

    eight = {"SLURM_STEP_NUM_TASKS": "8"}
    once = "--ntasks=1 runner exec --bundle 'my bundle' -- torchrun --standalone --nproc-per-node=8"
    assert "trains alone in each task" in note(["python", "x.py"], eight)
    assert f"srun --ntasks-per-node=1 {once} x.py" in note(["python", "x.py"], eight)
    assert f"{once} --no-python python -c 1" in note(["python", "-c", "1"], eight)
    two = {**eight, "SLURM_STEP_NUM_NODES": "2"}
    assert f"torchrun {MEET} --nproc-per-node=4 x.py" in note(["python", "x.py"], two)
    for command, environ in (
        (["torchrun", "x.py"], eight),
        (["torchrun", "--rdzv-endpoint=n1:29500", "x.py"], two),
        (["bash", "x.sh"], two),
        (["python", "x.py"], {**eight, "WORLD_SIZE": "8"}),
        (["python", "x.py"], {"SLURM_STEP_NUM_TASKS": "1"}),
        (["python", "x.py"], {}),
    ):
        assert note(command, environ) == ""


MEET = (
    "--nnodes=$SLURM_NNODES --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:29500 "
    "--rdzv-id=$SLURM_JOB_ID"
)
MACHINES = (
    "--num_machines $SLURM_NNODES --machine_rank $SLURM_NODEID --num_processes "
    "$((SLURM_NNODES * {})) --main_process_ip $MASTER_ADDR --main_process_port 29500 "
    "--deepspeed_multinode_launcher standard"
)


# LLaMA-Factory reads these, and starts torchrun itself: in each rank, if torchrun started it.
FACTORY = (
    "FORCE_TORCHRUN=1 NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID MASTER_PORT=29500 "
    "NPROC_PER_NODE=${{NPROC_PER_NODE:-{}}}"
)


@pytest.mark.parametrize(
    ("command", "nodes", "tasks", "line"),
    [
        (
            "accelerate launch --config_file fsdp.yaml x.py", 2, 1,
            f"sh -c 'accelerate launch --config_file fsdp.yaml {MACHINES.format(2)} x.py'",
        ),
        (
            "accelerate launch --num_processes=2 x.py", 2, 1,
            f"sh -c 'accelerate launch --num_processes=2 --multi_gpu {MACHINES.format(2)} x.py'",
        ),
        (
            "python -m accelerate.commands.launch -m pkg", 2, 1,
            "sh -c 'python -m accelerate.commands.launch --multi_gpu "
            f"{MACHINES.format('${SLURM_GPUS_ON_NODE:-1}')} -m pkg'",
        ),
        ("deepspeed --num_gpus=2 x.py", 2, 1, f"sh -c 'torchrun {MEET} --nproc-per-node=2 x.py'"),
        ("deepspeed --num_gpus 4 x.py", 2, 1, f"sh -c 'torchrun {MEET} --nproc-per-node=4 x.py'"),
        ("deepspeed -a 1", 2, 1, "deepspeed -a 1"),
        (
            "python -u x.py -a 1", 2, 1,
            f"sh -c 'torchrun {MEET} --nproc-per-node=${{SLURM_GPUS_ON_NODE:-1}} x.py -a 1'",
        ),
        (
            "torchrun --standalone --nproc-per-node=2 x.py --standalone", 3, 1,
            f"sh -c 'torchrun --nproc-per-node=2 {MEET} x.py --standalone'",
        ),
        ("env A=1 torchrun -m pkg.a", 2, 1, f"sh -c 'env A=1 torchrun {MEET} -m pkg.a'"),
        ("torchrun x.py", 1, 1, "torchrun x.py"),
        ("torchrun --rdzv-endpoint=a x.py", 2, 1, "torchrun --rdzv-endpoint=a x.py"),
        ("python x.py", 2, 4, f"sh -c 'torchrun {MEET} --nproc-per-node=4 x.py'"),
        ("python x.py", 1, 8, "torchrun --standalone --nproc-per-node=8 x.py"),
        (
            "./prog x.py", 2, 1,
            f"sh -c 'torchrun {MEET} --nproc-per-node=${{SLURM_GPUS_ON_NODE:-1}} --no-python "
            "./prog x.py'",
        ),
        ("bash x.sh", 2, 1, "bash x.sh"),
        (
            "llamafactory-cli train x.yaml a=1", 2, 1,
            f"sh -c '{FACTORY.format('${SLURM_GPUS_ON_NODE:-1}')} llamafactory-cli train x.yaml "
            "a=1'",
        ),
        ("env A=1 lmf train x", 2, 4, f"sh -c '{FACTORY.format(4)} env A=1 lmf train x'"),
        ("llamafactory-cli train x", 1, 4, "llamafactory-cli train x"),
    ],
)  # fmt: skip
def test_the_line_for_all_nodes_keeps_the_users_words_and_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, nodes: int, tasks: int, line: str
) -> None:
    """It was `srun --ntasks-per-node=1 ... accelerate launch x.py`: each node trained alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nnum_machines: 1\nnum_processes: 2\n")
    srun = f"srun --ntasks-per-node=1 --ntasks={nodes} runner exec --bundle 'my b' -- "
    assert launchers.on_each_node(command.split(), Path("my b"), nodes, tasks) == srun + line


@pytest.mark.parametrize(("by", "command"), [
    (SRUN, ["torchrun", "--nproc_per_node=2", "x.py"]),
    (SRUN, ["sh", "-c", "cd .; torchrun --nnodes=$SLURM_NNODES --rdzv-endpoint=$MASTER_ADDR:2 x"]),
    (SRUN, ["bash", "train.sh"]),
    (MPIRUN, ["torchrun", "--nproc_per_node=2", "x.py"]),
])  # fmt: skip
def test_a_launcher_in_each_of_several_tasks_is_refused_by_the_first(
    node: Cluster, by: str, command: list[str]
) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "n1",
            "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}  # fmt: skip
    (node.folder / "train.sh").write_text("cd .\n  accelerate launch x.py\n")
    for rank in (0, 1):
        given = open_mpi(rank, 4, 4) if by == MPIRUN else {**step, "SLURM_PROCID": str(rank)}
        process = start(node, *command, offline=False, **given)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        line = f"{by} runner exec --bundle {node.bundle} -- {shlex.join(command)}\n"
        assert not err if rank else line in err and "the whole training 4 times" in err


ONE_MACHINE = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nmixed_precision: bf16\n"
FILES = {
    "no.yaml": f"{ONE_MACHINE}distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: false\n",
    "plain-no.yaml": f"{ONE_MACHINE}distributed_type: NO\nnum_processes: 1\nuse_cpu: false\n",
    "gpus.yaml": f"{ONE_MACHINE}distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: false\n",
    "cpus.yaml": f"{ONE_MACHINE}distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n",
    "ds.yaml": f"{ONE_MACHINE}distributed_type: DEEPSPEED\nnum_processes: 2\nuse_cpu: false\n"
    "deepspeed_config: {zero_stage: 2}\n",
}


@pytest.mark.parametrize(
    ("options", "launcher", "processes", "on_cpu"),
    [
        ("--config_file no.yaml", "multi_gpu_launcher", 2, False),
        ("--config_file plain-no.yaml", "multi_gpu_launcher", 2, False),
        ("--config_file gpus.yaml", "multi_gpu_launcher", 4, False),
        ("--config_file ds.yaml", "deepspeed_launcher", 4, False),
        ("--config_file no.yaml --use_fsdp", "multi_gpu_launcher", 2, False),
        ("--config_file cpus.yaml", "multi_gpu_launcher", 4, True),
        ("--cpu --num_processes 3", "multi_gpu_launcher", 6, True),
        ("", "multi_gpu_launcher", 2, False),
    ],
)
def test_accelerate_itself_starts_the_ranks_of_all_nodes_by_the_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    launcher: str,
    processes: int,
    on_cpu: bool,
) -> None:
    """With `NO` in its file, or without one, it started one process per node, each alone."""
    launch = importlib.import_module("accelerate.commands.launch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "none.yaml"))
    for name, text in FILES.items():
        Path(name).write_text(text)
    once = launchers.on_each_node(
        shlex.split(f"accelerate launch {options} x.py"), Path("b"), nodes=2
    )
    line = shlex.split(once)[-1]
    assert line.startswith("ACCELERATE_USE_CPU=true ") is on_cpu
    words = subprocess.run(
        ["sh", "-c", line.replace("accelerate launch", "printf '%s\\n'", 1)],
        env={"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "192.0.2.1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    chosen: list[tuple[str, int, int]] = []
    for name in [name for name in vars(launch) if name.endswith("_launcher")]:
        monkeypatch.setattr(
            launch,
            name,
            lambda *a, by=name: chosen.append((by, a[-1].num_processes, a[-1].num_machines)),
        )
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    assert chosen == [(launcher, processes, 2)]


TORCHRUN = "import os; print('RANK', os.environ['RANK'], 'OF', os.environ['WORLD_SIZE'])\n"
CLI = """#!/bin/sh
# As llamafactory/launcher.py starts it, on a machine whose GPUs it does not see.
[ "$1 $FORCE_TORCHRUN" = "train 1" ] || exec python envs.py
exec torchrun --nnodes ${NNODES:-1} --node_rank ${NODE_RANK:-0} --nproc_per_node $NPROC_PER_NODE \\
    --master_addr $MASTER_ADDR --master_port $MASTER_PORT envs.py
"""


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --standalone --nproc-per-node=1 envs.py",
        "accelerate launch --config_file no.yaml envs.py",
        # Each takes ten seconds: the other ways to write the line are nightly.
        pytest.param("accelerate launch --cpu envs.py", marks=pytest.mark.slow),
        pytest.param("./llamafactory-cli train x.yaml", marks=pytest.mark.slow),
        pytest.param("bash job.sh", marks=pytest.mark.slow),
    ],
)
@obeys("runner/exec/launchers.py", "All nodes together: ")
def test_a_launcher_that_knows_of_no_other_node_is_refused_with_the_line_that_trains_once(
    node: Cluster, command: str
) -> None:
    """It was a note: both nodes trained, into one folder. The line runs here as on two nodes."""
    for name, text in {**FILES, "envs.py": TORCHRUN, "llamafactory-cli": CLI}.items():
        (node.folder / name).write_text(text)
    (node.folder / "llamafactory-cli").chmod(0o755)
    script = node.folder / "job.sh"
    script.write_text("#!/bin/bash\n# --rdzv-endpoint=n1:29500\ncd .\ntorchrun envs.py\n")
    step = {**TWO_NODES, "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_LOCALID": "0", "HF_HOME": str(node.folder)}  # fmt: skip
    said = []
    for rank in ("0", "1"):
        process = start(
            node, *command.split(), offline=False, **step, SLURM_PROCID=rank, SLURM_NODEID=rank
        )
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        said.append(err)
    assert said[1] == "" and "on each of 2 nodes" in said[0], said
    assert ("cannot start processes on several nodes" in said[0]) is ("--cpu" in command)
    printed_line = in_it(said[0], "(?<=All nodes together: ).*(?=[.] One node only)")
    if printed_line.startswith("there write "):
        line_of_node = printed_line.removeprefix("there write ") + " envs.py"
    else:
        srun = shlex.split(printed_line.partition(" (for CPUs")[0])
        line_of_node = srun[srun.index("-c") + 1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        line_of_node = line_of_node.replace("29500", str(free.getsockname()[1]))
    path = f"{BIN}:{os.environ['PATH']}"
    alone = {**os.environ, "PATH": path, "MASTER_ADDR": "127.0.0.1", "SLURM_NNODES": "2",
             "SLURM_JOB_ID": "7", "HF_HOME": str(node.folder)}  # fmt: skip
    both = [
        subprocess.Popen(
            ["sh", "-c", line_of_node],
            cwd=node.folder,
            env={**alone, "SLURM_NODEID": number},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    printed = [process.communicate(timeout=120) for process in both]
    ranks = sorted(re.findall(r"RANK \d OF \d", " ".join(out for out, _ in printed)))
    assert ranks == ["RANK 0 OF 2", "RANK 1 OF 2"], printed


SRUN_OF_TWO = """#!/bin/sh
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE="1(x2)" SLURM_NTASKS=2
export SLURM_STEP_NODELIST="n[1-2]" SLURM_LOCALID=0
for n in 0 1; do SLURM_NODEID=$n SLURM_PROCID=$n "$@"; done
"""


@obeys("runner/exec/launchers.py", "In that line, write after ")
def test_a_job_script_that_starts_ranks_by_srun_is_not_started_once_per_node(
    node: Cluster, tmp_path: Path
) -> None:
    """Its own remedy started the script on each node, and so the training twice."""
    script = node.folder / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\nFIRST=$(srun --nodes=1 hostname)\n"
        "# srun python old.py\n"
        'srun python -c \'import os; print(os.environ["SLURM_PROCID"], "AIRLIFT_BUNDLE" in '
        "os.environ)'\n"
    )
    script.chmod(0o755)
    process = start(node, "./job.sh", offline=False, **TWO_NODES)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "job.sh:5: `srun` starts processes on 2 nodes" in err
    assert "--ntasks-per-node" not in err
    put, command = re.findall("options: (.*? --)[.] Then start it without: (.*)", err)[0]
    script.write_text(script.read_text().replace("\nsrun ", f"\nsrun {put} "))
    (tmp_path / "srun").write_text(SRUN_OF_TWO)
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
    done = subprocess.run(
        shlex.split(command),
        cwd=node.folder,
        env=node.environment(TMPDIR=str(tmp_path / "local"), PATH=path, **TWO_NODES),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "0 True\n1 True\n", done.stderr
    for line in ("srun python x.py", 'L="srun -n 2"; $L python x.py', "if true; then srun x; fi"):
        process = start(node, "bash", "-c", line, offline=False, **TWO_NODES)
        assert "bash:1: `srun` starts" in process.communicate(timeout=60)[1]


TWO_NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("command", "slurm", "lines"),
    [
        # Words that only a shell reads.
        (["python envs.py"], {}, ["{} -- python envs.py\n"]),
        (["STEPS=3", "python", "envs.py"], {}, ["{} -- env STEPS=3 python envs.py\n"]),
        (["cd x && python a.py"], {}, ["{} -- bash -c 'cd x && python a.py'\n"]),
        (["envs.py", "--x"], {}, ["{} -- python envs.py --x\n"]),
        # It would leave the node; it would run on one of several.
        (["./srun", "python", "x.py"], TWO_NODES, ["srun ... runner exec"]),
        (
            ["torchrun", "train.py"],
            TWO_NODES,
            [
                "this job has 2 nodes",
                "srun --ntasks-per-node=1 --ntasks=2 {} -- sh -c 'torchrun --nnodes=$",
                "srun --nodes=1 --ntasks=1 runner exec",
            ],
        ),
    ],
)
def test_a_command_that_would_not_do_what_is_meant_is_refused_with_the_line_that_works(
    node: Cluster, command: list[str], slurm: dict[str, str], lines: list[str]
) -> None:
    (node.folder / "srun").write_text("#!/bin/sh\necho started\n")
    (node.folder / "srun").chmod(0o755)
    process = start(node, *command, offline=False, **slurm)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, "Traceback" in err) == (2, "", False)
    ours = f"runner exec --bundle {node.bundle}"
    assert [line for line in lines if line.format(ours) not in err] == [], err


def test_a_folder_that_somebody_else_could_write_is_not_used(node: Cluster) -> None:
    folder = node.folder.parent / "local" / f"airlift-{os.getuid()}-local"
    folder.mkdir()
    folder.chmod(0o777)
    process = start(node, "true", offline=False)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "only you can write" in err


def test_an_old_name_without_organisation_and_a_bundle_that_moved_are_found_in_the_cache(
    tmp_path: Path,
) -> None:
    """`bert-large-uncased` and `google-bert/bert-large-uncased` are one; links are absolute."""
    from huggingface_hub import snapshot_download

    commit = "c" * 40
    for place in ("there", "here"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(place)
        contents: dict[str, Path | bytes] = {
            "config.json": tmp_path / place / "config.json",
            "sub/card.md": b"# made\n",
        }
        files = {path: ServedFile(one, 0, "", None, tmp_path) for path, one in contents.items()}
        version = Version(commit, files, {}, frozenset({commit, "main"}))
        for name in ("bert-large-uncased", "google-bert/bert-large-uncased"):
            write_hub_cache(
                {("models", name): ServedRepository("models", name, (version,))}, tmp_path / "hub"
            )
            folder = Path(
                snapshot_download(name, cache_dir=tmp_path / "hub", local_files_only=True)
            )
            assert folder.name == commit
            assert (folder / "config.json").read_text() == place
            assert (folder / "sub" / "card.md").read_text() == "# made\n"
        shutil.rmtree(tmp_path / place)
