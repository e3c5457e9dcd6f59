"""A user's own project for tests: a script that saves as transformers' Trainer does, without torch.

It knows nothing of Airlift. `write_project` writes it; `TRAIN` is its script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRAIN = '''\
"""Each rank computes; rank 0 saves checkpoints as transformers' Trainer does."""
import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from local.numbers import loss

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--sleep_at", type=int, help="wait for the signal there, on the first start")
parser.add_argument("--torn_at", type=int, help="which checkpoint to leave half-written then")
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--gloo", action="store_true")
parser.add_argument("--resume_from_checkpoint")
options = parser.parse_args()
rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
out = options.output_dir
out.mkdir(exist_ok=True)
ranks = 1
if options.gloo:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    ranks = int(total.item())
first = 0
if options.resume_from_checkpoint:
    assert options.resume_from_checkpoint == "latest"
    first = max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    json.loads((out / f"checkpoint-{first}" / "trainer_state.json").read_text())
if options.gloo:
    dist.barrier()


def save(step, is_whole=True):
    folder = out / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    for name in ("training_args.bin", "model.bin"):
        (folder / name).write_bytes(b"PK\\x03\\x04PK\\x05\\x06" + bytes(18))
    if is_whole:
        (folder / "trainer_state.json").write_text(json.dumps({"step": step}))


def stop(number, frame):
    (out / f"saved-{rank}").write_text(signal.Signals(number).name)
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
for step in range(first + 1, options.steps + 1):
    print(f"rank {rank} step {step} loss {loss(step, options.lr)}", flush=True)
    if step == options.sleep_at and not first:
        if options.torn_at and rank == 0:
            save(options.torn_at, is_whole=False)
        (out / f"waits-{rank}.log").touch()
        time.sleep(600)
    if rank == 0:
        save(step)
facts = {"ranks": ranks, "host": socket.gethostname(), "first": first, "lr": options.lr,
         "world": os.environ.get("WORLD_SIZE"), "loss": loss(options.steps, options.lr)}
(out / f"rank-{rank}.json").write_text(json.dumps(facts))
'''
NUMBERS = "def loss(step, lr):\n    return 1 / (1 + step * lr)\n"


def write_project(folder: Path, **files: str) -> Path:
    """The project, with more files: `run_sh="..."` is run.sh."""
    (folder / "local").mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "local" / "__init__.py").touch()
    (folder / "local" / "numbers.py").write_text(NUMBERS)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def run_file(folder: Path, name: str, command: str | list[str], /, **keys: Any) -> Path:
    """A run file in a folder."""
    path = folder / f"{name}.yaml"
    settings: Mapping[str, Any] = {"format": 1, "command": command, **keys}
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    return path
