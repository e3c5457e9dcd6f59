"""Made `old/`, with the code of the commit in README.md. Do not run it with newer code.

python -m tests.compat.make FOLDER
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.compat.recipe import DATASET, LARGE, MODEL, large_bytes

# Abraham Lincoln, 1863; in the public domain.
SPEECH = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived
in Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a
great civil war, testing whether that nation, or any nation so conceived and so dedicated, can long
endure. We are met on a great battle-field of that war. We have come to dedicate a portion of that
field, as a final resting place for those who here gave their lives that that nation might live. It
is altogether fitting and proper that we should do this. But, in a larger sense, we can not dedicate
-- we can not consecrate -- we can not hallow -- this ground. The brave men, living and dead, who
struggled here, have consecrated it, far above our poor power to add or detract. The world will
little note, nor long remember what we say here, but it can never forget what they did here. It is
for us the living, rather, to be dedicated here to the unfinished work which they who fought here
have thus far so nobly advanced.
"""
SENTENCES = [
    sentence.strip() + "." for sentence in SPEECH.replace("\n", " ").split(". ") if sentence.strip()
]
MANIFEST = f"""\
format: 1
name: compat
assets:
  tiny-gpt2: {{model: {MODEL}}}
  speech: {{dataset: {DATASET}, config: plain}}
  table: {{path: table.csv, convert: csv}}
  large: {{path: large.bin}}
"""
RUN: dict[str, Any] = {
    "format": 1,
    "task": "causal-lm",
    "model": {"asset": "tiny-gpt2"},
    "dataset": {"asset": "speech", "limit": {"train": 200, "validation": 20}},
    "sequence_length": 16,
    "steps": 4,
    "batch": {"global": 4, "micro": 2},
    # So large that a resume without the weights and moments would show.
    "optimizer": {"lr": 0.02},
    "precision": "fp32",
    "checkpoint": {"every": 2, "keep": 3},
}
# Rank 0 kills itself, as a node that fails, just before the checkpoint of step 4 gets its name.
KILL = """
import os, signal, sys
def hook(name, arguments):
    own = name == "os.rename" and os.environ.get("RANK") == "0"
    if own and str(arguments[0]).endswith("step-4.tmp"):
        os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("KILL"):
    sys.addaudithook(hook)
"""


def model_files(folder: Path) -> dict[str, bytes]:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    shape = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(fast), bos_token_id=0, eos_token_id=0, **shape, **still)
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def dataset_files() -> dict[str, bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    card = "---\nlicense: pddl\nconfigs:\n- config_name: plain\n  data_files:\n"
    card += "".join(
        f"  - split: {split}\n    path: plain/{split}-*\n" for split in ("train", "validation")
    )
    files = {"README.md": f"{card}---\n# A speech\n".encode()}
    for split, texts in (("train", SENTENCES * 20), ("validation", SENTENCES)):
        sink = io.BytesIO()
        pq.write_table(pa.table({"text": texts}), sink)
        files[f"plain/{split}-00000-of-00001.parquet"] = sink.getvalue()
    return files


def command(folder: Path, *words: str, code: int = 0, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == code, done.returncode


def main() -> None:
    old = Path(sys.argv[1])
    laptop, cluster = old / "laptop", old / "cluster"
    laptop.mkdir(parents=True)
    (laptop / "compat.yaml").write_text(MANIFEST)
    (laptop / "table.csv").write_text("name,number\nMüller,1\nnobody,\n")
    (laptop / "large.bin").write_bytes(large_bytes())
    scratch = old / "scratch"
    with LoopbackHub(scratch / "hub") as hub:
        hub.repositories.commit("models", MODEL, model_files(scratch / "model"))
        hub.repositories.commit("datasets", DATASET, dataset_files())
        command(
            laptop, "stage", "fetch", "compat.yaml", "-o", "../bundle", "--endpoint", hub.endpoint
        )
    command(old, "stage", "verify", "bundle", "--json")
    cluster.mkdir()
    (scratch / "sitecustomize.py").write_text(KILL)
    root = Path(__file__).parents[2]
    kill = {"KILL": "1", "PYTHONPATH": f"{scratch}:{root}"}
    for name, engine, code, more in (
        ("finished", {"name": "ddp"}, 0, {}),
        ("killed-ddp", {"name": "ddp"}, 5, kill),
        ("killed-deepspeed", {"name": "deepspeed", "zero": 2}, 5, kill),
    ):
        settings = {**RUN, "name": name, "engine": engine}
        (cluster / f"{name}.yaml").write_text(
            "".join(f"{k}: {json.dumps(v)}\n" for k, v in settings.items())
        )
        train = ["train", f"{name}.yaml", "--bundle", "../bundle", "--processes", "2"]
        command(cluster, "runner", *train, code=code, OMP_NUM_THREADS="1", **more)
    shutil.rmtree(scratch)
    shutil.rmtree(cluster / "output" / ".stores")
    (laptop / "large.bin").unlink()
    (old / "bundle" / LARGE).unlink()


if __name__ == "__main__":
    main()
