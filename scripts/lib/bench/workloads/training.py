"""What `runner train` and `runner prepare` cost beside what people write today: two CPU ranks.

Every candidate trains the same model on the same text. Programs report the seconds of their steps
themselves, without their start: it is what a long run consists of.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.lib.bench.workload import ROOT, BenchError, Candidate, Workload
from scripts.lib.demo.repositories import model_folder, paragraphs

PROGRAMS = Path(__file__).with_name("training_peers.py")
RANKS = 2
UNIT = 100_000  # real tokens
WARM_UP = 3
LENGTH, BATCH, PADDED_BATCH, PAD_TO = 128, 8, 4, 512
STEPS = 16
REPEAT = 40  # the text is short for a tokenizer
NOTE = (
    "BERT with 6 layers of 384 (22.7 M parameters), masked language modelling of the first "
    "volume of Pride and Prejudice, in lines like those of WikiText (a third is empty, the mean "
    "is 58 tokens), two ranks with one thread each over gloo. Seconds are those of the steps for "
    f"{UNIT:,} real tokens: padding does not count, nor does the start. Wanted beside the faster "
    "of ours: the script that pads at least 18 (bf16: 24), Trainer at least 1.6."
)
PADDED, TRAINER = "script that pads to 512", "transformers' Trainer (as run_mlm.py)"
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # of x86 and of ARM
RUN_FILE = """\
format: 1
name: bench
task: masked-lm
model: {asset: minilm}
dataset: {asset: text, text: text}
sequence_length: LENGTH
steps: STEPS
batch: {global: GLOBAL, micro: BATCH}
optimizer: {lr: 1.0e-4}
precision: PRECISION
engine: ENGINE
checkpoint: {every: 1000, keep: 1}
evaluation: {every: 1000}
seed: 1
"""
ENGINES = {"runner train, ddp": "{name: ddp}", "runner train, deepspeed": "{zero: 2}"}


@contextmanager
def training_workloads(folder: Path) -> Iterator[list[Workload]]:
    """All workloads; the bundle is made when the context is entered."""
    texts = lines_like_wikitext(text for part in paragraphs().values() for text in part)
    (folder / "texts.json").write_text(json.dumps(texts))
    make_bundle(folder, texts)
    precisions = ("fp32", "bf16") if _computes_bf16() else ("fp32",)
    yield [
        *(_training(folder, one) for one in precisions),
        _loop(folder),
        _preparing(folder, texts),
    ]


def _computes_bf16() -> bool:
    """Whether this processor has instructions for bf16; without them a step takes minutes."""
    words = Path("/proc/cpuinfo").read_text().split()
    return any(flag in words for flag in BF16_FLAGS)


def lines_like_wikitext(paragraphs: Iterable[tuple[str, str]]) -> list[str]:
    """(chapter, paragraph) as WikiText has its lines: an empty one, a heading, an empty one, texts.

    The tutorials pad each line to 512 tokens. So their time depends on the lines: a third of those
    of WikiText-2 is empty, their mean is about 60 tokens. Here it is 58.
    """
    texts: list[tuple[str, str]] = []
    words: list[str] = []
    for chapter, paragraph in paragraphs:
        words += paragraph.split()
        if len(words) >= 40:
            texts.append((chapter, " ".join(words)))
            words = []
    lines: list[str] = []
    for begin in range(0, len(texts), 3):
        section = texts[begin : begin + 3]
        lines += ["", f" = {section[0][0]} = ", "", *(text for _, text in section)]
    return lines


def make_bundle(folder: Path, texts: list[str]) -> None:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(rows)
    (folder / "long.jsonl").write_text(rows * REPEAT)
    shutil.copytree(model_folder(), folder / "minilm")
    _make_small(folder)
    (folder / "manifest.yaml").write_text(
        "format: 1\nname: bench\nassets:\n  minilm: {path: minilm}\n  small: {path: small}\n"
        "  text: {path: text.jsonl, convert: jsonl}\n  long: {path: long.jsonl, convert: jsonl}\n"
    )
    stage = [sys.executable, "-m", "stage", "fetch", "-q", "manifest.yaml", "-o", "bundle"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if subprocess.run(stage, cwd=folder, env=environment).returncode:
        raise BenchError("the bundle could not be staged")


def _make_small(folder: Path) -> None:
    """A BERT whose step takes about 50 ms, most of it not arithmetic."""
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    small = folder / "small"
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "minilm"))
    tokenizer.save_pretrained(small)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=2,
        num_hidden_layers=4,
    )
    BertForMaskedLM(config).save_pretrained(small)


def _training(folder: Path, precision: str) -> Workload:
    ours = [_ours(folder, name, engine, precision, "tokens") for name, engine in ENGINES.items()]
    theirs = [
        _theirs(folder, "script that pads to 512", "padded", precision),
        _theirs(folder, "transformers' Trainer (as run_mlm.py)", "trainer", precision),
    ]
    title = f"Training a small BERT in {precision}"
    return Workload(title, NOTE, UNIT, [*ours, *theirs], unit="tokens/s", per=1)


def _loop(folder: Path) -> Workload:
    """The same module, batches and engine: what the loop itself costs."""
    size: dict[str, Any] = {"length": 32, "batch": 2, "steps": 60, "model": "small"}
    ours = [_ours(folder, name, engine, "fp32", "step", **size) for name, engine in ENGINES.items()]
    theirs = [
        _theirs(folder, f"bare loop, {engine}", f"bare-{engine}", "fp32", **size)
        for engine in ("ddp", "deepspeed")
    ]
    note = (
        "The same module, batches and fused AdamW, two ranks, steps of about 50 ms; seconds "
        "are those of one step. The bare loops read no data, log nothing and can not be stopped. "
        "Wanted: each of ours at most 1.03 of its bare loop."
    )
    title = "The loop beside a bare one"
    return Workload(title, note, 1, [*ours, *theirs], unit="steps/s", per=1)


def _preparing(folder: Path, texts: list[str]) -> Workload:
    size = sum(len(text.encode()) for text in texts) * REPEAT
    settings = write_settings(folder, "prepare", "fp32", dataset="long")
    note = (
        "`runner prepare` reads parquet, tokenises, packs and writes a store; its peer only "
        "tokenises texts that are in memory and writes the ids. Seconds of the child process that "
        "does it, without its start and imports. Wanted: ours at most 1.05 of its peer."
    )
    ours = _program("runner prepare", "prepare", settings)
    theirs = _theirs(folder, "encode_batch_fast alone", "encode", "fp32", ranks=1)
    return Workload("Tokenising text", note, size, [ours, theirs])


def _ours(
    folder: Path, name: str, engine: str, precision: str, measured: str, **size: Any
) -> Candidate:
    key = f"{measured}-{precision}-{engine.strip('{}').replace(': ', '-')}"
    settings = write_settings(folder, key, precision, engine=engine, measured=measured, **size)
    return _program(name, "train", settings)


def _program(name: str, program: str, settings: Path) -> Candidate:
    """A program of this module, in this environment."""
    command = (sys.executable, "-m", "scripts.lib.bench.workloads.training", program, str(settings))
    return Candidate(name, command, _environment(), settings.with_suffix(".answer"))


def _theirs(
    folder: Path, name: str, program: str, precision: str, *, ranks: int = RANKS, **size: Any
) -> Candidate:
    settings = write_settings(folder, f"{program}-{precision}", precision, **size)
    start = (
        ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        if ranks > 1
        else ()
    )
    command = (sys.executable, *start, str(PROGRAMS), program, str(settings))
    return Candidate(name, command, _environment(), settings.with_suffix(".answer"))


def _environment() -> dict[str, str]:
    return {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def write_settings(
    folder: Path,
    key: str,
    precision: str,
    *,
    engine: str = "{name: ddp}",
    measured: str = "tokens",
    dataset: str = "text",
    length: int = LENGTH,
    batch: int = BATCH,
    steps: int = STEPS,
    model: str = "minilm",
) -> Path:
    """Writes the settings of a program, and its run file. The key is the name of both."""
    run_file = folder / f"{key}.yaml"
    text = RUN_FILE.replace("LENGTH", str(length)).replace("STEPS", str(steps))
    text = text.replace("GLOBAL", str(batch * RANKS)).replace("BATCH", str(batch))
    text = text.replace("PRECISION", precision).replace("ENGINE", engine)
    text = text.replace("asset: minilm", f"asset: {model}")
    run_file.write_text(text.replace("asset: text", f"asset: {dataset}"))
    path = folder / f"{key}.json"
    document = {
        "answer": str(path.with_suffix(".answer")),
        "batch": batch,
        "bundle": str(folder / "bundle"),
        "length": length,
        "measured": measured,
        "model": str(folder / model),
        "output": str(folder / "output" / key),
        "pad_to": PAD_TO,
        "padded_batch": PADDED_BATCH,
        "precision": precision,
        "predictions": batch * length * 0.15,
        "repeat": REPEAT,
        "run_file": str(run_file),
        "steps": steps,
        "task": "masked-lm",
        "texts": str(folder / "texts.json"),
        "unit": UNIT,
    }
    path.write_text(json.dumps(document))
    return path


def opened_stores(run: Any) -> Any:
    """The prepared training data of a run."""
    from runner.data.prepare import store_path
    from runner.data.recipe import recipes
    from runner.data.store import Store, Stores

    (recipe,) = recipes(run.config, run.inputs, run.config.sequence_length)["train"]
    return Stores([Store(store_path(recipe, run.folder.stores))])


def train(settings: dict[str, Any]) -> float:
    """Runs `runner train` from its beginning; the median of what its metrics say."""
    output = Path(settings["output"])
    shutil.rmtree(output, ignore_errors=True)
    command = ["train", settings["run_file"], "--bundle", settings["bundle"]]
    command += ["--output", str(output), "--processes", str(RANKS)]
    subprocess.run([sys.executable, "-m", "runner", *command], check=True)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line][WARM_UP:]
    if settings["measured"] == "step":
        return float(statistics.median(line["step_s"] for line in steps))
    return float(settings["unit"] / statistics.median(line["tokens_per_s"] for line in steps))


def prepare(settings: dict[str, Any]) -> float:
    """Prepares from the beginning, in this process."""
    import time

    from runner.data.prepare import prepare as prepare_recipe
    from runner.data.recipe import recipes
    from runner.job.training_run import TrainingRun

    output = Path(settings["output"])
    run = TrainingRun.load(Path(settings["run_file"]), Path(settings["bundle"]), output, ())
    shutil.rmtree(run.folder.stores, ignore_errors=True)
    (recipe,) = recipes(run.config, run.inputs, settings["length"])["train"]
    from transformers import AutoTokenizer  # noqa: F401  # imports, also torch's, are not compared

    began = time.perf_counter()
    prepare_recipe(recipe, run.folder.stores, print)
    return time.perf_counter() - began


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[2]).read_text())
    result = {"train": train, "prepare": prepare}[sys.argv[1]](asked)
    Path(asked["answer"]).write_text(json.dumps({"seconds": result}))
