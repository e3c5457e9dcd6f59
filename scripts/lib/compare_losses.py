"""Trains the tutorials' jobs at two revisions, and compares losses and weights bit for bit.

    python -m scripts.lib.compare_losses REVISION [REVISION] [--only NAME]...

The second revision is HEAD by default: what is not committed is not compared. Each job is a tiny
twin of one that the tutorials train, on two CPU ranks, in fp32: three steps, then the same command
with more steps, which resumes, up to six. Both revisions run with the packages of this Python, on
one bundle that this checkout stages. Exit code 1: something differs; 2: a command failed. Takes
some eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.training import twins

ROOT = Path(__file__).resolve().parents[2]
HALF, ALL = 3, 6
"""Steps of the first start, and of both."""
KEYS = ("loss", "grad_norm", "lr", "validation_loss", "validation_accuracy")
TEXTS = {"asset": "reference", "validation": "validation"}
IMAGES = {"asset": "cifar-10", "validation": "test"}
LORA = {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
PROMPTS = {"asset": "prompts", "prompt": "User", "response": "Prompt", "validation": None}
JOBS: Mapping[str, Mapping[str, Any]] = {
    # BERT with DeepSpeed at each ZeRO stage that it partitions differently.
    **{
        f"bert-zero-{stage}": {
            "task": "masked-lm", "model": {"asset": "still-bert"}, "dataset": TEXTS,
            "sequence_length": 32, "engine": {"name": "deepspeed", "zero": stage},
        }
        for stage in (0, 1, 2, 3)
    },
    "cifar10-ddp": {
        "task": "image-classification", "model": {"asset": "tiny-vit"}, "dataset": IMAGES,
        "engine": {"name": "ddp"},
    },
    "gpt2-fsdp": {
        "task": "causal-lm", "model": {"asset": "gpt2-bare"}, "dataset": TEXTS,
        "sequence_length": 32, "engine": {"name": "fsdp", "sharding": "full"},
    },
    "chat-lora": {
        "task": "instruction", "model": {"asset": "tiny-chat"}, "dataset": PROMPTS,
        "sequence_length": 64, "engine": {"name": "ddp"}, "lora": LORA,
    },
    "bert-mrpc": {
        "task": "text-classification", "model": {"asset": "still-bert"},
        "dataset": {"asset": "glue-mrpc", "text": "sentence1", "pair": "sentence2"},
        "sequence_length": 32, "engine": {"name": "ddp"},
    },
    "bert-conll": {
        "task": "token-classification", "model": {"asset": "still-bert"},
        "dataset": {"asset": "conll2003"}, "sequence_length": 32, "engine": {"name": "ddp"},
    },
}  # fmt: skip
SAME: Mapping[str, Any] = {
    "format": 1,
    "batch": {"global": 8, "micro": 2},
    "optimizer": {"lr": 0.003},
    "schedule": {"name": "constant", "warmup": 0},
    "precision": "fp32",
    "checkpoint": {"every": HALF, "keep": 2},
}


class Trained(NamedTuple):
    """What a training left: its numbers, step by step, and the digest of the exported weights."""

    numbers: list[str]
    weights: str


def call(command: list[str], **options: Any) -> None:
    """Runs a command.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        printed = (done.stdout + done.stderr).strip().splitlines()[-20:]
        raise RuntimeError("\n".join([" ".join(command), *printed]))


@contextmanager
def python_of(revision: str, folder: Path) -> Iterator[str]:
    """The Python of an environment with a revision and the packages of this Python.

    PYTHONPATH would not do: a launcher keeps it from its ranks, which would then run this checkout.
    """
    code, environment = folder / "code", folder / "environment"
    git = ["git", "-C", str(ROOT), "worktree"]
    call([*git, "add", "--detach", str(code), revision])
    try:
        venv.create(environment)
        packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
        # What a .pth adds is a plain folder: the one of this checkout in it is not followed.
        folders = f"{code}\n{sysconfig.get_path('purelib')}\n"
        Path(packages, "revision.pth").write_text(folders, encoding="utf-8")
        yield str(environment / "bin" / "python")
    finally:
        call([*git, "remove", "--force", str(code)])


def train(python: str, bundle: Path, folder: Path, name: str) -> Trained:
    """Trains half of the steps by the Python of a revision, and the rest from the checkpoint.

    Raises:
        RuntimeError: the command failed.
    """
    dropped = (
        "PYTHON",
        "SLURM_",
        "HF_",
        "TRANSFORMERS_",
        "RANK",
        "WORLD_SIZE",
        "MASTER_",
        "LOCAL_",
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    output, run = folder / name, folder / f"{name}.yaml"
    for steps in (HALF, ALL):
        # JSON is YAML.
        run.write_text(json.dumps({**SAME, **JOBS[name], "name": name, "steps": steps}))
        call(
            [
                python, "-m", "runner", "train", str(run), "--bundle", str(bundle),
                "--processes", "2", "--output", str(output),
            ],
            cwd=folder, env=kept | ours | {"XDG_STATE_HOME": str(folder / "state")},
        )  # fmt: skip
    return Trained(numbers(output / "metrics.jsonl"), digest(output / "model"))


def numbers(path: Path) -> list[str]:
    """Step, name and value of each number that must be the same; JSON keeps every bit of it."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        f"step {one['step']}: {key} {one[key]!r}" for one in lines for key in KEYS if key in one
    ]


def digest(model: Path) -> str:
    """The sha256 of all exported weights: names, types, shapes and bytes."""
    from safetensors.numpy import load_file

    whole = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        for name, array in sorted(load_file(path).items()):
            whole.update(f"{name} {array.dtype} {array.shape}\n".encode())
            whole.update(array.tobytes())
    return whole.hexdigest()


def compare(name: str, one: Trained, other: Trained) -> bool:
    """Prints a line of the table, with the first number that differs; returns whether all agree."""
    losses = [line for line in one.numbers if ": loss" in line]
    pairs = zip([*one.numbers, "end"], [*other.numbers, "end"], strict=False)
    first = next((f"{a} | {b}" for a, b in pairs if a != b), "")
    same = one == other and len(losses) == ALL
    print(
        f"{name:12} {len(losses)} steps, {losses[-1]:32} weights {one.weights[:12]} "
        f"{other.weights[:12]}  {'equal' if same else 'DIFFERENT'}  {first}",
        flush=True,
    )
    return same


def main() -> int:
    """Compares two revisions; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("revisions", nargs="+", metavar="REVISION")
    parser.add_argument("--only", action="append", choices=JOBS, help="Default: all of them.")
    asked = parser.parse_args()
    both = [*asked.revisions, "HEAD"][:2]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-losses-")))
        (folder / "laptop").mkdir()
        twins.stage_twins(folder / "laptop")
        bundle, places = folder / "laptop" / "bundle", []
        try:
            for number, revision in enumerate(both):
                (folder / str(number)).mkdir()
                python = stack.enter_context(python_of(revision, folder / str(number)))
                places.append((python, bundle, folder / str(number)))
            same = [
                compare(name, *(train(*place, name) for place in places))
                for name in asked.only or JOBS
            ]
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
