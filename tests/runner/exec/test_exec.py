"""`runner exec`: other people's scripts, unmodified and offline, with their names on the Hub."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from runner.disks import cache_variables
from runner.exec import by_hand
from runner.exec import user_script as exec_module
from runner.exec.user_script import environment, write_hub_cache
from runner.from_stage import UsageError
from runner.job.commands import shell_script
from runner.job.launchers import Launch, Places, as_words, plan_launch
from stage.serve.catalogue import ServedFile, ServedRepository, Version
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster
from tests.runner.launch.test_mpi import open_mpi
from tests.support.waiting import wait_for

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lustre without flock: it is unknown who uses the caches, so no script removes them."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    (tmp_path / "exec").mkdir()
    lock = exec_module._in_use(tmp_path)
    assert "takes no locks" in capsys.readouterr().err
    exec_module._cleaner(tmp_path, lock, {"SLURM_JOB_ID": "7"})()
    assert (tmp_path / "exec").is_dir()
    monkeypatch.undo()
    exec_module._cleaner(tmp_path, lock, {"SLURM_JOB_ID": "7"})()
    assert not (tmp_path / "exec").exists()


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
        return by_hand.note_on_tasks(command, environ, shell_script(command)[1])

    eight = {"SLURM_STEP_NUM_TASKS": "8"}
    assert "trains alone in each task (a run file" in note(["python", "x.py"], eight)
    assert "trains alone in each task" in note(["python", "-c", "1"], eight)
    for command, environ in (
        (["torchrun", "x.py"], eight),
        (["torchrun", "--rdzv-endpoint=n1:29500", "x.py"], eight),
        (["bash", "x.sh"], eight),
        (["python", "x.py"], {**eight, "WORLD_SIZE": "8"}),
        (["python", "x.py"], {"SLURM_STEP_NUM_TASKS": "1"}),
        (["python", "x.py"], {}),
    ):
        assert note(command, environ) == ""


def run_file_in(error: str) -> tuple[str, Launch]:
    """The command of the run file that a refusal prints, and how its job starts it."""
    config = yaml.safe_load(in_it(error, r"(?s)(?<=run.yaml:\n)  format: 1\n.*?}\n"))
    assert set(config) == {"format", "command", "slurm"} and "runner submit run.yaml" in error
    slurm = config["slurm"]
    places = Places(
        nodes=slurm["nodes"],
        gpus=slurm.get("gpus_per_node", 0),
        tasks=slurm.get("tasks_per_node"),
    )
    words = as_words(config["command"])
    return config["command"], plan_launch(words, places, "auto", Path())


@pytest.mark.parametrize(("by", "command", "line"), [
    ("srun", ["torchrun", "--nproc_per_node=2", "x.py"], "torchrun --nproc_per_node=2 x.py"),
    ("srun", ["sh", "-c", "cd .; torchrun --nnodes=$SLURM_NNODES --rdzv-endpoint=$MASTER_ADDR:2 x"],
     "torchrun --nnodes=$SLURM_NNODES --rdzv-endpoint=$MASTER_ADDR:2 x"),
    ("srun", ["bash", "train.sh"], "accelerate launch x.py"),
    ("mpirun", ["torchrun", "--nproc_per_node=2", "x.py"], "torchrun --nproc_per_node=2 x.py"),
])  # fmt: skip
@obeys("runner/exec/by_hand.py", "Write a run file, such as run.yaml:")
def test_a_launcher_in_each_of_several_tasks_is_refused_by_the_first(
    node: Cluster, by: str, command: list[str], line: str
) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "n1",
            "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}  # fmt: skip
    (node.folder / "train.sh").write_text("cd .\n  accelerate launch x.py\n")
    for rank in (0, 1):
        given = open_mpi(rank, 4, 4) if by == "mpirun" else {**step, "SLURM_PROCID": str(rank)}
        process = start(node, *command, offline=False, **given)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        if rank:
            assert err == ""
        else:
            assert "the whole training 4 times" in err
            assert run_file_in(err)[0] == line and run_file_in(err)[1].mode == "node"


TORCHRUN = "import os; print('RANK', os.environ['RANK'], 'OF', os.environ['WORLD_SIZE'])\n"


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --standalone --nproc-per-node=1 envs.py", "torchrun"),
        ("accelerate launch --config_file no.yaml envs.py", "accelerate"),
        ("accelerate launch --cpu envs.py", "accelerate"),
        ("llamafactory-cli train x.yaml", "llamafactory"),
        ("bash job.sh", "torchrun"),
    ],
)
def test_a_launcher_that_knows_of_no_other_node_is_refused_with_the_run_that_trains_once(
    node: Cluster, command: str, launcher: str
) -> None:
    """It was a note: both nodes trained, into one folder."""
    script = node.folder / "job.sh"
    script.write_text("#!/bin/bash\n# --rdzv-endpoint=n1:29500\ncd .\ntorchrun envs.py\n")
    (node.folder / "llamafactory-cli").write_text("#!/bin/sh\necho started\n")
    (node.folder / "llamafactory-cli").chmod(0o755)
    step = {**TWO_NODES, "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "2"}  # fmt: skip
    said = []
    for rank in ("0", "1"):
        words = command.replace("llamafactory-cli", "./llamafactory-cli").split()
        process = start(node, *words, offline=False, **step, SLURM_PROCID=rank, SLURM_NODEID=rank)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        said.append(err)
    assert said[1] == "" and "on each of 2 nodes" in said[0], said
    launch = run_file_in(said[0])[1]
    assert (launch.mode, launch.launcher) == ("node", launcher)


def test_a_job_script_that_starts_ranks_by_srun_is_not_started_once_per_node(
    node: Cluster,
) -> None:
    """Its own remedy started the script on each node, and so the training twice."""
    script = node.folder / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\nFIRST=$(srun --nodes=1 hostname)\n"
        "# srun python old.py\nsrun python -c 'import os'\n"
    )
    script.chmod(0o755)
    process = start(node, "./job.sh", offline=False, **TWO_NODES)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "this job has 2 nodes, and the bundle" in err
    assert yaml.safe_load(in_it(err, "  command: .*")) == {"command": "./job.sh"}
    for line in ("srun python x.py", 'L="srun -n 2"; $L python x.py', "if true; then srun x; fi"):
        process = start(node, "bash", "-c", line, offline=False, **TWO_NODES)
        err = process.communicate(timeout=60)[1]
        assert "`bash` started, on this one alone" in err
        assert run_file_in(err)[1].mode in ("rank", "once")


TWO_NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}


def test_a_task_whose_script_starts_processes_on_other_nodes_is_refused(tmp_path: Path) -> None:
    step = {"SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1",
            "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}  # fmt: skip
    with pytest.raises(UsageError, match="this one alone"):
        by_hand.check_all_nodes(
            ["bash", "x.sh"], tmp_path, {**TWO_NODES, **step}, b"srun python x.py\n"
        )
    by_hand.check_all_nodes(["bash", "x.sh"], tmp_path, {**TWO_NODES, **step}, b"python x.py\n")


@pytest.mark.parametrize(
    ("command", "slurm", "lines"),
    [
        # Words that only a shell reads.
        (["python envs.py"], {}, ["{} -- python envs.py\n"]),
        (["STEPS=3", "python", "envs.py"], {}, ["{} -- env STEPS=3 python envs.py\n"]),
        (["cd x && python a.py"], {}, ["{} -- bash -c 'cd x && python a.py'\n"]),
        (["envs.py", "--x"], {}, ["{} -- python envs.py --x\n"]),
        # It would leave the node; it would run on one of several.
        (
            ["./srun", "python", "x.py"],
            TWO_NODES,
            [
                "this job has 2 nodes",
                '\n  command: "python x.py"\n',
                "tasks_per_node: 1",
            ],
        ),
        (
            ["torchrun", "train.py"],
            TWO_NODES,
            [
                "this job has 2 nodes",
                '\n  command: "torchrun train.py"\n  slurm: {{nodes: 2}}\n',
                "runner submit run.yaml --bundle",
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
