"""`runner exec`, `runner status` and `runner logs` in and around jobs of a real Slurm."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.site.conftest import REPOSITORY, RUNNER, Site

pytestmark = pytest.mark.site

HERE = (
    "env",
    f"PYTHONPATH={REPOSITORY}",
    *RUNNER,
)  # this checkout's runner, whichever is installed
ASK = """\
import os, socket
from huggingface_hub import HfApi, hf_hub_download
HfApi().model_info("acme/tiny-bert")
size = os.path.getsize(hf_hub_download("acme/tiny-bert", "config.json"))
print("ASKED", os.environ["SLURM_PROCID"], size > 0,
      os.path.dirname(os.environ["HF_HUB_CACHE"]), flush=True)
"""

TRAIN = """\
import json, os
import torch
from accelerate import Accelerator
from datasets import load_dataset
from huggingface_hub import hf_hub_download
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM, AutoTokenizer

if os.environ.get("DS_ACCELERATOR") == "cpu":  # or DeepSpeed compiles for minutes
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
accelerator = Accelerator()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
tokenizer = AutoTokenizer.from_pretrained("acme/tiny-bert")
model = AutoModelForMaskedLM.from_pretrained("acme/tiny-bert")
shard = "chapters/train-00000-of-00002.parquet"
shard = hf_hub_download("acme/reference", shard, repo_type="dataset")
rows = load_dataset("parquet", data_files=shard, split=f"train[:{ranks * 32}]")
rows = rows.shard(ranks, rank)  # without a GPU, Accelerate with DeepSpeed does not


def collate(batch):
    words = tokenizer([row["text"] for row in batch], truncation=True, padding="max_length",
                      max_length=16, return_tensors="pt")
    return {**words, "labels": words["input_ids"]}


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for batch in DataLoader(rows, batch_size=8, collate_fn=collate):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
weights = [parameter.double().sum().item() for parameter in model.parameters()]
with open(f"rank-{rank}.json", "w") as file:
    json.dump({"kind": type(model).__name__, "ranks": torch.distributed.get_world_size(),
               "node": os.environ["SLURMD_NODENAME"], "losses": losses, "weights": weights}, file)
accelerator.end_training()
"""
# Files as `accelerate config` writes them for one machine with two GPUs.
ON_ONE_MACHINE = """\
compute_environment: LOCAL_MACHINE
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""
ZERO_2 = """\
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: zero_stage2.json
  zero3_init_flag: false
"""
ZERO_2_JSON = """\
{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8,
 "gradient_accumulation_steps": 1}
"""


def test_each_task_of_a_step_on_two_nodes_finds_the_bundle_and_nothing_stays(
    site: Site, bundle: Path
) -> None:
    (site.home / "ask.py").write_text(ASK)
    command = f"{' '.join(HERE)} exec --bundle {bundle} -- {sys.executable} ask.py"
    (site.home / "ask.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --output=ask.out --time=5\n"
        f"srun --ntasks=4 {command}\necho LEFT; srun --ntasks-per-node=1 --ntasks=2 sh -c "
        '\'pgrep -f "[s]tage serve" && echo SERVER; '
        "ls -d /tmp/airlift-*-$SLURM_JOB_ID/exec && echo CACHES; true'\n"
    )
    number = int(site.run("sbatch", "--parsable", "ask.sbatch").stdout.split(";")[0])
    assert site.wait_for_end(number)["JobState"] == "COMPLETED", (site.home / "ask.out").read_text()
    asked, _, left = (site.home / "ask.out").read_text().partition("LEFT")
    answers = sorted(line.split() for line in asked.splitlines() if line.startswith("ASKED"))
    assert [words[1:3] for words in answers] == [[str(rank), "True"] for rank in range(4)], asked
    assert asked.count("runner exec: bundle") == 1  # by the first task alone
    assert "SERVER" not in left and "CACHES" not in left, left


@pytest.mark.parametrize(
    ("tasks", "command", "said"),
    [
        ("--nodes=1 --ntasks=4", "torchrun --nproc_per_node=2 envs.py", "Write a run file"),
        ("--nodes=2 --ntasks-per-node=2", "python envs.py", "trains alone in each task"),
    ],
)
def test_tasks_that_do_not_know_of_each_other_are_told_of_a_run_file(
    site: Site, bundle: Path, tasks: str, command: str, said: str
) -> None:
    """A launcher in each of them is refused; a script may read Slurm's own variables."""
    (site.home / "envs.py").write_text(
        "import os\n"  # one write: lines of several ranks stay apart
        "os.write(1, b'TASK %s\\n' % os.environb[b'SLURM_PROCID'])\n"
    )
    (site.home / "once.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH {tasks} --output=once.out --time=5\n"
        f"export PYTHONPATH={REPOSITORY} PATH={Path(sys.executable).parent}:$PATH\n"
        f"srun runner exec --bundle {bundle} -- {command} || true\n"
    )
    number = int(site.run("sbatch", "--parsable", "once.sbatch").stdout.split(";")[0])
    ended = site.wait_for_end(number)
    printed = (site.home / "once.out").read_text()
    assert ended["JobState"] == "COMPLETED", printed
    assert printed.count("srun started ") == 1, printed  # said once, by the first task
    assert printed.count(said) == 1, printed
    started = sorted(line for line in printed.splitlines() if line.startswith("TASK"))
    ran = [] if command.startswith("torchrun") else [f"TASK {rank}" for rank in range(4)]
    assert started == ran, printed


def test_accelerate_launch_trains_on_two_nodes_with_a_config_file_for_one(
    site: Site, bundle: Path
) -> None:
    """Typed by hand, behind `srun runner exec`; a run file writes such a line itself."""
    folder = site.home / "zero-2"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "default.yaml").write_text(ON_ONE_MACHINE + ZERO_2)
    (folder / "zero_stage2.json").write_text(ZERO_2_JSON)
    launch = (
        "accelerate launch --config_file default.yaml "
        "--num_machines $SLURM_NNODES --machine_rank $SLURM_NODEID "
        "--num_processes $((SLURM_NNODES * 2)) "
        '--main_process_ip "$MASTER_ADDR" --main_process_port 29500 '
        "--deepspeed_multinode_launcher standard train.py"
    )
    (folder / "train.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=train.out --time=5\n"
        f"export DS_ACCELERATOR=cpu PATH={Path(sys.executable).parent}:$PATH\n"
        f"srun {' '.join(HERE)} exec --bundle {bundle} -- sh -c '{launch}'\n"
    )
    owner = site.home.stat()
    os.chown(folder, owner.st_uid, owner.st_gid)
    sent = site.run("sbatch", "--parsable", "--chdir", str(folder), str(folder / "train.sbatch"))
    ended = site.wait_for_end(sent.stdout.split(";")[0].strip())
    assert ended["JobState"] == "COMPLETED", (folder / "train.out").read_text()
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [(rank["kind"], rank["ranks"]) for rank in ranks] == [("DeepSpeedEngine", 4)] * 4
    assert [rank["node"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    # Each rank has rows of its own, so only averaged gradients give all of them the same weights.
    assert len({rank["losses"][0] for rank in ranks}) == 4
    assert all(rank["weights"] == ranks[0]["weights"] for rank in ranks)
    assert all(rank["losses"][-1] < rank["losses"][0] - 0.3 for rank in ranks)
