"""Keeps a bundle and a run folder as this version writes them: `python -m tests.compat.record`.

They land in tests/compat/<version>/, small but of every kind: a model, a dataset and a file of a
laptop, a converted table, a signature; checkpoints, an exported model, logs. Later versions must
read them (test_compat.py). Run it once a version, before its format may be relied on.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.lib.hub.loopback_hub import LoopbackHub
from stage import __version__
from tests.support.training.models import tiny_tokenizer

FOLDER = Path(__file__).resolve().parent
MANIFEST = """\
format: 1
name: small
assets:
  bert: {model: acme/bert}
  lines: {dataset: acme/lines}
  table: {path: my.csv, convert: csv}
  notes: {path: notes}
"""
RUN = """\
format: 1
name: run
manifest: small.yaml
task: masked-lm
model: {asset: bert}
dataset: {asset: lines}
sequence_length: 16
steps: 4
batch: {global: 4, micro: 2}
optimizer: {lr: 1.0e-3}
precision: fp32
engine: {name: ddp}
checkpoint: {every: 2, keep: 1}
"""


def bert(folder: Path) -> dict[str, bytes]:
    """A model repository: BERT, one layer of 8."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")
    }
    tokenizer = tiny_tokenizer(special, 256, wordpiece=True)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(
        vocab_size=len(tokenizer), intermediate_size=8, max_position_embeddings=32, **size
    )
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines() -> dict[str, bytes]:
    """A dataset repository: two splits of short lines."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {}
    for split in ("train", "validation"):
        sink = io.BytesIO()
        pq.write_table(
            pa.table({"text": [f"the {n} of {split} was here" for n in range(30)]}), sink
        )
        files[f"data/{split}-00000-of-00001.parquet"] = sink.getvalue()
    return files


def record(work: Path, to: Path) -> None:
    """Stages, signs and trains in `work`; copies what is kept to `to`."""
    (work / "small.yaml").write_text(MANIFEST)
    (work / "run.yaml").write_text(RUN)
    (work / "my.csv").write_text("text,label\nfew things,0\nmany things,1\n")
    (work / "notes").mkdir()
    (work / "notes/no spaces are needed.txt").write_text("ein Überblick\n", encoding="utf-8")
    home = {"HOME": str(work), "XDG_STATE_HOME": str(work / "state"), "AIRLIFT_STORE": "none"}
    environment = os.environ | home

    def run(*command: str) -> None:
        subprocess.run(command, cwd=work, env=environment, check=True)

    with LoopbackHub(work / "hub") as hub:
        hub.repositories.commit("models", "acme/bert", bert(work / "model"))
        hub.repositories.commit("datasets", "acme/lines", lines())
        fetch = ("stage", "fetch", "small.yaml", "-o", "bundle", "--endpoint", hub.endpoint)
        run(sys.executable, "-m", *fetch)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "me@laptop", "-f", "key")
    run(sys.executable, "-m", "stage", "sign", "bundle", "--key", "key")
    signer = (work / "key.pub").read_text()
    (work / "allowed_signers").write_text(f"me@laptop {signer}")
    run(sys.executable, "-m", "stage", "verify", "bundle")
    train = ("runner", "train", "run.yaml", "--bundle", "bundle", "--processes", "2")
    run(sys.executable, "-m", *train)
    for name in ("small.yaml", "run.yaml", "allowed_signers"):
        shutil.copy(work / name, to)
    shutil.copytree(work / "bundle", to / "bundle")
    shutil.copytree(work / "output/run", to / "run", ignore=shutil.ignore_patterns("tensorboard"))
    environment_json = to / "run/environment.json"
    text = environment_json.read_text().replace(str(Path(sys.executable).parent), "/venv/bin")
    environment_json.write_text(text)


def main() -> int:
    to = FOLDER / __version__
    if to.exists():
        print(f"{to} is there: a version is kept once", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="airlift-") as work:
        to.mkdir()
        record(Path(work), to)
    files = [path for path in to.rglob("*") if path.is_file()]
    print(json.dumps({"files": len(files), "bytes": sum(path.stat().st_size for path in files)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
