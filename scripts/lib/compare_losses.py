"""Trains a tiny model at two revisions, and compares losses and weights bit for bit.

    python -m scripts.lib.compare_losses REVISION [REVISION]

The second revision is HEAD by default: what is not committed is not compared. Two ranks on the CPU,
in fp32, with each engine: four steps, then the same command again, which resumes, up to eight. The
commands are a user's: `stage fetch`, `runner train`. Both revisions run with the packages of this
Python. Exit code 1: something differs; 2: a command failed. Takes some ten minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from scripts.lib.demo.repositories import paragraphs
from scripts.lib.gpu_check.materials import Workload, make_model

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {f"zero {stage}": f"{{name: deepspeed, zero: {stage}}}" for stage in range(4)}
ENGINES |= {"fsdp": "{name: fsdp}", "ddp": "{name: ddp}"}
HALF, ALL = 4, 8
SHAPE = {"vocab_size": 6144, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
KEYS = ("loss", "grad_norm", "lr", "validation_loss")
MANIFEST = """\
format: 1
name: twin
assets:
  model: {path: ./model}
  texts: {path: ./texts.jsonl, convert: jsonl}
"""
RUN = """\
format: 1
name: twin
task: causal-lm
model: {asset: model}
dataset: {asset: texts, validation: 5%}
sequence_length: 32
steps: STEPS
batch: {global: 8, micro: 2}
optimizer: {lr: 0.003}
schedule: {name: constant, warmup: 0}
precision: fp32
engine: ENGINE
checkpoint: {every: 4, keep: 2}
"""


class Trained(NamedTuple):
    """What a training left: its numbers, step by step, and the digest of the exported weights."""

    numbers: list[str]
    weights: str


def make_materials(folder: Path) -> None:
    """A GPT-2 of two layers with dropout, its tokenizer and 300 paragraphs; once for both."""
    texts = [text for _, text in paragraphs()["train"]][:300]
    make_model(folder / "model", Workload("model", "causal-lm", 32, 2, SHAPE))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text(rows, encoding="utf-8")


def call(command: list[str], **options: Any) -> None:
    """Runs a command.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-20:]
        raise RuntimeError("\n".join([" ".join(command), *said]))


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """The files of a revision, in a worktree that goes again."""
    git = ["git", "-C", str(ROOT), "worktree"]
    call([*git, "add", "--detach", str(folder), revision])
    try:
        yield folder
    finally:
        call([*git, "remove", "--force", str(folder)])


def run(code: Path, folder: Path, module: str, *arguments: str) -> None:
    """Runs `stage` or `runner` of a revision in `folder`, with a user's variables."""
    dropped = ("SLURM_", "HF_", "TRANSFORMERS_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    variables |= {
        "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "AIRLIFT_STORE": "none", "XDG_STATE_HOME": str(folder / "state"),
    }  # fmt: skip
    call([sys.executable, "-m", module, *arguments], cwd=folder, env=variables)


def stage(code: Path, folder: Path, materials: Path) -> None:
    """Makes the folder of a revision, with its own bundle."""
    folder.mkdir()
    for name in ("model", "texts.jsonl"):
        (folder / name).symlink_to(materials / name)
    (folder / "twin.yaml").write_text(MANIFEST, encoding="utf-8")
    run(code, folder, "stage", "fetch", "twin.yaml", "-o", "bundle")


def train(code: Path, folder: Path, engine: str) -> Trained:
    """Trains half of the steps, and the rest from the checkpoint."""
    output = folder / engine.replace(" ", "-")
    for steps in (HALF, ALL):
        text = RUN.replace("STEPS", str(steps)).replace("ENGINE", ENGINES[engine])
        (folder / "run.yaml").write_text(text, encoding="utf-8")
        run(
            code, folder, "runner", "train", "run.yaml", "--bundle", "bundle", "--processes", "2",
            "--output", str(output),
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


def compare(engine: str, one: Trained, other: Trained) -> bool:
    """Prints a line of the table, with the first number that differs; returns whether all agree."""
    found = [line for line in one.numbers if ": loss" in line]
    pairs = zip([*one.numbers, "end"], [*other.numbers, "end"], strict=False)
    first = next((f"{a} | {b}" for a, b in pairs if a != b), "")
    same = one == other and len(found) == ALL
    print(
        f"{engine:8} {len(found)} steps, {found[-1]:35} weights {one.weights[:12]} "
        f"{other.weights[:12]}  {'equal' if same else 'DIFFERENT'}  {first}",
        flush=True,
    )
    return same


def main(revisions: list[str]) -> int:
    """Compares two revisions; returns the exit code."""
    if len(revisions) not in (1, 2) or revisions[0].startswith("-"):
        print(__doc__)
        return 2
    both = (revisions[0], revisions[1] if len(revisions) == 2 else "HEAD")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-losses-")))
        make_materials(folder)
        try:
            places = []
            for number, revision in enumerate(both):
                code = stack.enter_context(checked_out(revision, folder / f"code-{number}"))
                stage(code, folder / str(number), folder)
                places.append((code, folder / str(number)))
            same = [compare(name, *(train(*place, name) for place in places)) for name in ENGINES]
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
