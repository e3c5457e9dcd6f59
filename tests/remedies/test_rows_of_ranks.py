"""Remedies of ranks, nodes and run folders: whoever does what they say goes on."""

from __future__ import annotations

import json
import os
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from runner.disks import local_folder
from runner.exec.last_words import advice
from runner.inputs import tag_manifest_digest
from runner.job import access
from runner.job.findings import Finding
from runner.job.job_shell import _check_nv
from runner.job.training_run import TrainingRun
from runner.launch.ranks import RankInfo, Start
from runner.launch.reach import wait_for_rank_0
from runner.run_folder import run_lock
from runner.run_folder.layout import RunFolder
from runner.run_folder.resume import check_before_launch, check_not_past_the_end
from runner.training.components.process_group import RankFacts, check_facts
from runner.trials import rehearse_job
from runner.trials.evaluate import choose
from runner.trials.rehearse_job import RECORD, _collect, wait_for_all
from tests.remedies.rows import Row, World, obey
from tests.runner.conftest import bundle
from tests.runner.launch.test_hang_detector import A800
from tests.runner.launch.test_local import BATCH
from tests.runner.launch.test_mpi import open_mpi
from tests.runner.remote.conftest import RUN as SENT
from tests.runner.remote.test_plan import MANIFEST, road

__all__ = ["bundle"]
PLACE = "runner/launch/ranks.py"
LOOK = "runner/trials/rehearse_job.py"
GROUP = "runner/training/components/process_group.py"
LOCK = "runner/run_folder/run_lock.py"
CHECKPOINTS = "runner/run_folder/resume.py"
STATE: dict[str, Any] = {"step": 6, "world_size": 2, "zero": 2, "precision": "fp32",
         "signature": {"optimizer": "lion"}}  # fmt: skip
STEP = {"output/mine/checkpoints/step-6/state.json": json.dumps(STATE)}
ODD = {name: value for name, value in BATCH.items() if name != "SLURM_NTASKS_PER_NODE"}
NODES = {
    f"{path}.{RECORD}": json.dumps({"host": path[-2:], "lines": [], "findings": []})
    for path in ("apart/n1", "shared/n1", "shared/n2")
}


def ranks_of(world: World) -> None:
    """As many ranks of one node with two GPUs as the command line says."""
    number = int(world.tail.rpartition(" ")[2])
    check_facts([RankFacts(device=A800, host="n1", gpu="ab"[n % 2]) for n in range(number)])


def bundles_of(world: World) -> None:
    """Two nodes, and the bundle of the second."""
    paths = {"n1": Path() / "bundle", "n2": Path(world.environ["ON_N2"])}
    facts = ((host, tag_manifest_digest(path)) for host, path in paths.items())
    check_facts([RankFacts(device=A800, host=host, gpu="", bundle=of) for host, of in facts])


def caches_of(world: World) -> object:
    """A node on which the disk of one folder alone has space."""
    usage = namedtuple("usage", "total used free")

    def of(path: Path) -> usage:
        return usage(2**40, 0, 2**40 if "large" in str(path) else 2**26)

    world.patch.setattr("shutil.disk_usage", of)
    return rehearse_job.check_caches(local_folder(world.environ, "")[0])


def nv_of(world: World) -> list[Finding]:
    """Whether the run's container gets the driver of the GPUs."""
    return list(_check_nv(world.config()))


def chosen(world: World) -> None:
    """What `runner evaluate` measures."""
    choose(TrainingRun.load(world.path, Path("bundle"), None, world.sets), None)


HOLDER = {"pid": 1, "born": None, "host": "n9", "machine": "m", "job": None, "restart": 0}
HELD = json.dumps(HOLDER | {"since": 1.0})


def folder_of(world: World) -> RunFolder:
    return RunFolder(Path() / "output" / world.config().name)


def past_the_end(world: World) -> None:
    """Whether a run has done more steps than it asks for."""
    folder, steps = folder_of(world).checkpoints, world.config().steps
    if folder.is_dir():
        check_not_past_the_end(STATE["step"], steps or 0, folder)


def resumed(world: World) -> None:
    """Whether a checkpoint is this run's."""
    config, folder = world.config(), folder_of(world).checkpoints
    ranks = int(str(config.slurm.tasks_per_node))
    check_before_launch(folder, STATE["signature"], ranks, None, config.engine.name)


def crowded(world: World) -> None:
    """Other processes take the lock all the time."""
    world.patch.setattr(run_lock, "_create", lambda *_: False)
    world.patch.setattr(run_lock, "_TRIES", 1)
    run_lock._take(folder_of(world), folder_of(world).holder, run_lock.RunLock.me({}))


def inodes(world: World) -> None:
    """A disk that is full of small files."""
    found = SimpleNamespace(f_files=9, f_favail=0 if Path("small").exists() else 10**6)
    world.patch.setattr("os.statvfs", lambda _: found)
    access.check_writable(folder_of(world).root)


def begins_on_node(world: World) -> None:
    """The launcher of a rehearsal on a node."""
    world.patch.setattr(rehearse_job, "launch", lambda *_: 0)
    rehearse_job.be_its_launcher(world.config, {rehearse_job.FOLDER: world.tail.split()[1]})  # type: ignore[arg-type]


def other_node(world: World) -> object:
    """The way to another node, which one that sees its folder knows."""
    world.patch.setattr(rehearse_job, "wait_for_all", partial(wait_for_all, wait_s=0.1))
    return rehearse_job._try(Path(world.tail.split()[1]), "n1", "n2")


LAUNCHERS = (
    Row(PLACE, "Submit it with `runner submit`.",
        (("runner submit", "instead {} mine.yaml --bundle bundle --print"),),
        does=lambda w: Start.in_job(w.environ)),
    Row(PLACE, "Write before mpirun: export MASTER_ADDR=FIRST_HOST{}. The first host is the first",
        (("(?<=export )MASTER_ADDR=FIRST_HOST", "export"),),
        does=lambda w: RankInfo.of(w.environ), environ=open_mpi(2, 4, 2),
        fill={"FIRST_HOST": "192.0.2.1"}),
    Row(PLACE, "export {} for each rank, or start the ranks with torchrun; to train on this",
        (("(?<=export ).*(?= for each rank)", "export"), ("(?<=unset )RANK WORLD_SIZE", "unset")),
        does=lambda w: Start.of(w.environ), environ={"RANK": "0", "WORLD_SIZE": "2"},
        fill={"...": "1"}),
    Row(PLACE, "unset {}, then start it with `runner train`.",
        ((r"(?<=unset )\w+", "unset"),),
        does=lambda w: Start.of(w.environ) or RankInfo.of(w.environ),
        environ={"AIRLIFT_RANK": "1"}),
    Row("runner/slurm/environment.py", "Give sbatch --ntasks-per-node instead of --ntasks.",
        (("--ntasks-per-node(?= instead)", "export SLURM_NTASKS_PER_NODE=3"),),
        does=lambda w: Start.in_job(w.environ), environ=ODD | {"SLURM_NTASKS": "5"}),
    Row(GROUP, "One rank per GPU: --processes {}, or slurm.tasks_per_node and gpus_per_node: {}.",
        ((r"--processes \d+", "words"), (r"(?<=gpus_per_node: )\d+", "words --processes {}")),
        does=ranks_of, tail="--processes 3"),
    Row(GROUP, "Give all nodes the same bundle: on each, stage show BUNDLE prints its id.",
        (("stage show BUNDLE", "run", "the same bundle", "export ON_N2=bundle"),),
        does=bundles_of, files={"other/tagmanifest-sha256.txt": "x"},
        environ={"ON_N2": "other"}),
)  # fmt: skip

NODE = (
    Row(LOOK, "unset {} (slurm.setup, ~/.bashrc): the interface of the route is taken then.",
        ((r"(?<=unset )\w+", "unset"),),
        does=lambda w: rehearse_job.check_interfaces(w.environ, ["lo", "eth0"]), code=0,
        environ={"GLOO_SOCKET_IFNAME": "eth10", "HOME": "/nowhere"}),
    Row(LOOK, "Ask the site for `memlock unlimited` in jobs (slurmd's LimitMEMLOCK). Until then:",
        (("(?<=export )NCCL_IB_DISABLE=1", "export"),),
        does=lambda w: rehearse_job.check_locked_memory(Path("ib"), 2**23, w.environ), code=0,
        given="mkdir -p ib/mlx5_0"),
    Row(LOOK, "Name a larger disk of the node by one line more in slurm.setup, `export",
        (("(?<=`export )TMPDIR=/FOLDER(?=`)", "export"),), does=caches_of, code=0,
        given="mkdir large", environ={"SLURM_JOB_ID": "17"}, fill={"/FOLDER": "large"}),
    Row("runner/trials/rehearse_job.py", "Choose an --output on a disk that all nodes share.",
        (("--output", "words {} shared"),), code=0, files=NODES, tail="--output apart",
        does=lambda w: _collect(Path(w.tail.split()[1]), ["n1", "n2"])),
    Row("runner/job/job_shell.py", "slurm.container: [{}]",
        ((r"slurm\.container: \[.*?\]", "edit"),), does=nv_of, code=0,
        settings={"slurm": {"container": ["apptainer", "exec", "me.sif"], "gpus_per_node": 2}}),
    Row("runner/trials/rehearse_job.py", "Choose an --output on a disk that all nodes share.",
        (("--output", "words {} shared"),), does=begins_on_node, tail="--output apart/nodes",
        given="mkdir shared"),
    Row(LOOK, "Choose an --output on a disk that all nodes share; see the",
        (("--output", "words {} shared"),), does=other_node, tail="--output apart", code=0,
        given="mkdir apart",
        files={"shared/n2.address.json": '{"address": "n2.invalid", "port": 9}'}),
    Row("runner/remote/road.py", "Write into it: manifest: ../manifests/YOURS.yaml",
        (("manifest: ../manifests/YOURS.yaml", "run echo '{}' >> far/runs/my.yaml"),),
        does=lambda _: road(Path("far")) and None, fill={"YOURS": "small"},
        files={"far/runs/my.yaml": SENT.replace("manifest", "# manifest"),
               "far/manifests/small.yaml": MANIFEST}),
)  # fmt: skip

FOLDERS = (
    Row(LOCK, "runner status {}; wait for its end, or give the run {}.",
        (("runner status [^;]*", "show"), ("--set name=NAME", "words"),
         ("(?<=`)name:(?=`)", "edit {} another"),
         ("wait for its end", "run rm -r output/mine/running")),
        does=lambda w: run_lock.check_not_held(folder_of(w), {}),
        files={"output/mine/running/holder": HELD}),
    Row(LOCK, "Wait for its end; then see the job: runner status {}",
        (("Wait for its end", "run rm -r output/mine/submitting; touch output/mine/submit.sbatch",
         "runner status [^ ]*", "run"),),
        does=lambda w: run_lock._take(
            folder_of(w), folder_of(w).submitter, run_lock.RunLock.me({})),
        files={"output/mine/submitting/holder": HELD}),
    Row("runner/job/access.py", "Look at it: ls -ld {}; or give the run {}",
        (("ls -ld [^;]*", "show"), ("--set name=NAME", "words")),
        does=lambda w: access.nearest_folder(folder_of(w).root), files={"output/mine": ""}),
    Row(CHECKPOINTS, "{} for {} steps or more (--set steps={}), or {}.",
        ((r"--set steps=\d+", "words"), ("--set name=NAME", "words")),
        does=past_the_end, tail="--set steps=4", files=STEP),
    Row(CHECKPOINTS, "Resume with {} and `engine.zero: {}`; or start again with engine.name: fsdp",
        ((r"Resume with \d ranks", "edit slurm.tasks_per_node: 2",
         r"engine.zero: \d", "edit"),
         ("engine.name: fsdp", "edit", "start again", "run rm -r output/mine/checkpoints")),
        {"slurm": {"tasks_per_node": 4}, "optimizer": {"name": "lion"}}, resumed,
        files=STEP),
    Row("runner/trials/evaluate.py", "Name a split of the dataset: --set dataset.validation=NAME.",
        (("--set dataset.validation=NAME", "words"), ("validation: 5%", "edit dataset.{}")),
        {"dataset": {"asset": "reference", "validation": None}}, chosen,
        fill={"NAME": "validation"}),
    Row("runner/trials/evaluate.py", "Name another split: --set dataset.validation=NAME; or train",
        (("--set dataset.validation=NAME", "words"),
         ("train a run", "edit name: another")),
        {"dataset": {"asset": "reference", "validation": "5%"}}, chosen,
        files={"output/mine/config.yaml": "dataset: {validation: validation}"},
        fill={"NAME": "validation"}),
    Row(LOCK, "runner status {}", (("(?<=-> )runner status [^ ]*", "show"),),
        does=crowded, files={"output/mine/config.yaml": ""}),
    Row("runner/run_folder/status.py", "Give the run folder: runner status output/<name>{}",
        (("runner status output/<name>", "instead"),), does="runner status 99",
        files={"output/mine/config.yaml": ""}, environ={"PATH": "/nowhere"},
        fill={"<name>": "mine"}),
    Row("runner/job/access.py", "Remove many small files there (du --inodes -s * | sort -n shows",
        ((r"du --inodes -s \* \| sort -n", "run", "Remove many small files", "run rm -r small"),),
        does=inodes, files={"small/file": ""}, code=5),
)  # fmt: skip


PROBE = """import os, sys
from runner.from_stage import StageError
from runner.launch.ranks import RankInfo, Start
os.environ["LSB_MCPU_HOSTS"] = "n1 4 n2 4"  # of the job; mpirun itself would ask its hosts
try:
    print(Start.of(os.environ) or RankInfo.of(os.environ))
except StageError as error:
    sys.exit(print(error) or 2)
"""


def meet(world: World) -> list[str]:
    """What `runner exec` says of a script whose ranks do not meet."""
    world.patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in world.environ.items():
        world.patch.setenv(name, value)
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        return [advice(error)]
    dist.destroy_process_group()
    return []


EXEC = f"{sys.executable} -m runner exec --bundle bundle --"
LAST = f'eval "$BEFORE"; exec {sys.executable} -c "from runner.exec import last_words; '
LAST += 'last_words.install(); import os, socket; {}"'
PORT = "used = socket.create_server(('', 0)); port = os.environ.get('MASTER_PORT'); "
PORT += "socket.create_server(('', int(port or used.getsockname()[1])))"
HUB = "python -c \"from huggingface_hub import hf_hub_download as d; d('$ASKED', 'config.json')\""
WORDS = "runner/exec/last_words.py"
SCRIPTS = (
    Row("runner/exec/user_script.py", "sed -i 's/\\r$//' {}", (("sed -i [^ ]+ [^ ]+", "run"),),
        does=f"{EXEC} ./mine.sh", files={"mine.sh": "#!/bin/sh\r\necho hello\r\n"},
        given="chmod +x mine.sh"),
    Row(WORDS, "a limit of this node: `ulimit -n $(ulimit -Hn)` before runner exec for open files;",
        (("(?<=`)ulimit -n [^`]*", "export BEFORE='{}'"),), code=1,
        does="ulimit -Sn 30; " + LAST.format("files = [open('/dev/null') for _ in range(60)]")),
    Row(WORDS, "another program on this node uses that port, or torchrun's ends do not find each",
        ((r"export MASTER_PORT=\$\(\(.*?\)\)", "export BEFORE='{}'"),), code=1,
        does=LAST.format(PORT)),
    Row(WORDS, "the bundle has nothing under that name: see the line `asked for, not here`, and",
        (("stage show BUNDLE", "run", "acme/tiny-bert", "export ASKED={}"),), code=1,
        does=f"{EXEC} {HUB}", environ={"ASKED": "acme/other"}),
    Row(PLACE, "Start one process for each rank: mpirun -np RANKS runner train RUN --bundle",
        (("mpirun -np RANKS runner train RUN --bundle BUNDLE", "instead"),),
        does=f"{sys.executable} place.py", files={"place.py": PROBE},
        environ={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        fill={"RANKS": "2", "runner train RUN --bundle BUNDLE": "python place.py"}),
    Row(WORDS, "GLOO_SOCKET_IFNAME names no interface of this node: unset it",
        (("[A-Z_]+(?= names no interface)", "unset"),), does=meet, code=0,
        environ={"GLOO_SOCKET_IFNAME": "eth99"}),
)  # fmt: skip

STATUS = "runner/run_folder/status.py"
JOB = {
    "bin/scontrol": "#!/bin/sh\necho JobId=17 JobState=RUNNING Command=/me/a.sh StdOut=its.log",
    "its.log": "hello",
}
FAILED = {"rank": 0, "host": "n1", "code": 1, "time": 9e9, "text": "x", "consequence": False}
SHOWN = (
    Row(STATUS, "Give a run folder: runner status FOLDER{}; or begin one: runner submit RUN{}{}",
        (("runner submit RUN", "instead {} --bundle bundle --print"),
         ("runner status FOLDER", "run mkdir -p elsewhere/logs; touch elsewhere/metrics.jsonl",
          "runner status FOLDER", "instead")),
        does="runner status", fill={"FOLDER": "elsewhere"}),
    Row(STATUS, "runner submit {}, or runner train {}; or give its --output folder.",
        (("runner submit mine.yaml", "instead {} --bundle bundle --print"),
         ("runner train mine.yaml", "instead {} --bundle bundle --processes 2 --dry-run")),
        does="runner status mine.yaml"),
    Row(STATUS, "Its log: {}", (("(?<=Its log: )[^ ]+", "show cat {}"),), does="runner status 17",
        files=JOB, given="chmod +x bin/scontrol", environ={"PATH": "bin:/usr/bin:/bin"}),
    Row("runner/config/job_config.py", "`stage show BUNDLE` prints it.",
        (("stage show BUNDLE", "run",
          "(?<=bundle id )[0-9a-f]{64}", "edit bundle.id: {}"),), {"bundle": {"id": "abc"}}),
    Row("runner/config/ds_config.py", "Look at it: ls -l {}",
        (("ls -l [^ ]+", "run", "ds.json", "run rmdir {}; printf '{%s}' '' > {}"),),
        {"engine": {"name": "deepspeed", "config": "ds.json"}}, given="mkdir ds.json"),
    Row("runner/launch/reach.py", "See rank 0's output, or its log: {}",
        (("(?<=or its log: )[^ ]+", "show cat {}"),), code=1,
        does=lambda _: wait_for_rank_0(1, "127.0.0.1", 9, Path("logs"), started=0.0),
        files={"logs/rank-0.failure": json.dumps(FAILED), "logs/rank-0.log": "its error"}),
)  # fmt: skip


@pytest.mark.parametrize("row", (*LAUNCHERS, *NODE, *FOLDERS, *SCRIPTS, *SHOWN), ids=str)
def test_what_a_remedy_of_ranks_says_leads_on(
    row: Row, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bundle").symlink_to(bundle)
    obey(row, monkeypatch)
