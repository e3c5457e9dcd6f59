"""Remedies of models and data that need files of a person's own: whoever obeys goes on."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from runner.data.recipe import recipes
from runner.data.tokenizing import load_tokenizer
from runner.inputs import EnvironmentInput, unreadable
from runner.job import installed, model_probe
from runner.job import submit as submission
from runner.job.devices import notes_of_job
from runner.job.findings import Finding, raise_errors
from runner.job.host_memory import check_at_load
from runner.job.installed import note_for_job
from runner.job.model_probe import look_with_torch
from runner.job.node_local import arrange
from runner.job.partition import Partition
from runner.job.run_data import check_data
from runner.job.shapes import Device, _check_names, weight_shapes
from runner.job.submit import _bytes_of, check_srun, ranks_on_node, submit
from runner.tasks import task_named
from runner.training.engines.native import blocks_of
from runner.training.weights import _check_numbers
from tests.first_job.harness import run_stage
from tests.remedies.rows import Row, World, obey
from tests.runner.conftest import bundle
from tests.runner.job.test_node_local import JOB, TREE
from tests.support.once import once
from tests.support.plans import decide

__all__ = ["bundle"]
INPUTS = "runner/inputs/__init__.py"
TREE_FILE = f'{{"tree": "{TREE}"}}'
CHECK = "runner check mine.yaml --processes 2"
LAYERS = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 2, enable_nested_tensor=False)
DEVICES = "runner/job/devices.py"
CHILD = "runner/job/model_probe.py"
ROWS = "text,label,kind\na film,good,0\nanother,{}\n"
FILES = {
    "d/train.csv": ROWS.format("good,1"),
    "d/test.csv": ROWS.format("bad,1"),
    "one/train.csv": "text\na film\n",
    "one/test.csv": "text\na film\n",
    "none/train.csv": "text\n",
    "none/test.csv": "text\na film\n",
}
CSV = {"convert": "csv"}
ASSETS: dict[str, dict[str, str]] = {
    "m": {"path": "m"},
    "bare": {"path": "bare"},
    "d": {"path": "d", **CSV},
    "one": {"path": "one", **CSV},
    "none": {"path": "none", **CSV},
    "plain": {"path": "d"},  # the last one: a row adds a line
}
OWN = {"model": {"asset": "m"}, "dataset": {"asset": "d"}}
CLASSIFY = {**OWN, "task": "text-classification"}
CHAT: dict[str, Any] = {"task": "instruction", "model": {"asset": "tiny-gpt2"}}
RENAME = f"{sys.executable} -c \"from safetensors.numpy import *; F = 'm.safetensors'; "
WRAP = "save_file({'module.' + k: v for k, v in load_file(F).items()}, F, {'format': 'pt'})"
QUEUE = {
    "bin/squeue": '#!/bin/sh\n[ -e gone ] || echo "17|PENDING|None||0:00|1:00|N/A|$PWD/'
    'output/mine/submit.sbatch"',
    "bin/sbatch": "#!/bin/sh\necho 18",
    "bin/scancel": "#!/bin/sh\ntouch gone",
}


def stage_own(folder: Path, bundle: Path) -> None:
    """A bundle of files of a person's own, beside them and their manifest."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("m", "bare", "broken", "gpt2"):
        of = bundle / "data/models" / ("tiny-gpt2" if name == "gpt2" else "tiny-bert")
        shutil.copytree(of, folder / name, ignore=shutil.ignore_patterns("README.md"))
    (folder / "bare/model.safetensors").unlink()
    (folder / "broken/config.json").write_text("{,")
    manifest = {"format": 1, "name": "m", "assets": ASSETS}
    (folder / "m.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))
    done = run_stage(folder, "fetch", "m.yaml", "-o", "bundle", "--no-offline-check")
    assert done.code == 0, done.err


def data_of(world: World) -> list[Finding]:
    """What `check` says of the data."""
    config = world.config()
    found = list(check_data(config, recipes(config, world.inputs(), 32), None))
    raise_errors(found)
    return found


def samples_of(world: World) -> list[Finding]:
    """What `check` says of the first samples."""
    config = world.config()
    wanted = recipes(config, world.inputs(), int(config.sequence_length or 0))
    return list(model_probe._write_samples(config, wanted["train"][0]))


def tokenizer_of(world: World) -> list[Finding]:
    """Whether a model goes with the tokenizer of another asset."""
    model = world.inputs().model
    rows = int(world.environ.get("ROWS", model.settings["vocab_size"]))
    task = task_named("masked-lm")
    tokenizer = load_tokenizer(model)
    found = list(model_probe.compare(task, model, tokenizer, rows, "vocab_size"))
    raise_errors(found)
    return found


def weights_of(world: World) -> None:
    """The names of the weights in a person's own file."""
    model = world.inputs().model
    own = {"m.safetensors": ""}
    _check_names(model, weight_shapes(replace(model, path=Path.cwd(), digests=own)) or {})


def memory_of(world: World) -> None:
    """Whether the memory that is asked for is enough."""
    config = world.config()
    shape = world.run_itself().shape
    memory = _bytes_of(str(config.slurm.options.get("mem", "1K")))
    device = Device("cpu", "CPU", 2**40, True, True)
    check_at_load(
        config, shape, decide(config, shape, device, 1), replace(device, memory=memory), 1
    )


def queued(world: World) -> None:
    """A job of this run is in the queue until `scancel`."""
    world.patch.setenv("PATH", f"{Path.cwd()}/bin", prepend=":")
    submit(world.run_itself().request, Partition("default"))


def devices_of(world: World) -> None:
    """The GPUs that the job asks for."""
    slurm = world.config().slurm
    notes_of_job(slurm, ranks_on_node(slurm))


def closed(_: World) -> None:
    """What somebody without rights is told of a file; the tests may read all."""
    if not Path("closed").stat().st_mode & stat.S_IROTH:
        raise unreadable(Path("closed"), os.strerror(errno.EACCES))


def light(world: World) -> object:
    """What is said of a job whose Python is this one, where it cannot train."""
    world.patch.setattr(installed, "is_light", lambda: True)
    run = world.run_itself()
    return [note_for_job(run.config, run.inputs, run.packages)]


def nodes_of(world: World) -> None:
    """An environment on two nodes, one of which does not answer."""
    wanted, own = world.config().environment, EnvironmentInput("e", Path("e"), TREE, 1, 1)
    assert wanted is not None
    arrange(wanted.node_local, own, world.environ, print, prefix=Path("prefix"))


def numbers(world: World) -> None:
    """A weight that is too large for 16 bits."""
    narrow = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    _check_numbers(torch.tensor([70_000.0]).to(narrow[world.config().precision]), "w")


def decided(world: World) -> None:
    """Whether a model fits on small GPUs, as many as the command line says."""
    config, small = world.config(), Device("cuda", "A", 400_000, True, True, host_memory=1)
    decide(config, world.run_itself().shape, small, int(world.tail or 1))


OF_OWN_FILES = (
    Row(INPUTS, "Its bytes are those that were fetched: correct the file at its source, then stage",
        (("correct the file at its source", "run cp m/config.json broken/config.json",
         "stage fetch MANIFEST --update ASSET -o BUNDLE", "run"),),
        {"model": {"asset": "broken"}, "dataset": {"asset": "d"}},
        given="printf '  broken:\\n    path: broken\\n' >> m.yaml\n"
        "stage fetch m.yaml -o bundle --no-offline-check",
        fill={"MANIFEST": "m.yaml", "ASSET": "broken"}),
    Row(INPUTS, "On the laptop, add `convert: {}` to its entry in the manifest, and fetch again.",
        (("convert: csv", "run printf '    {}\\n' >> m.yaml",
         "fetch again", "run stage fetch m.yaml -o bundle"),),
        {**OWN, "dataset": {"asset": "plain"}}),
    Row(INPUTS, "Set validation: null, or another split (`stage show BUNDLE` lists them).",
        (("validation: null", "edit dataset.{}"), ("stage show BUNDLE", "run",
         r"\btest\b", "edit dataset.validation: {}")),
        {**OWN, "dataset": {"asset": "one", "validation": "50%"}}),
    Row("runner/data/table.py", "Look at the column (`stage show BUNDLE` lists them), or choose",
        (("stage show BUNDLE", "run", r"\bkind\b", "edit dataset.label: {}"),
         ("another split", "edit dataset.train: test")),
        CLASSIFY, data_of),
    Row("runner/job/run_data.py", "Set another split in the run file (`stage show BUNDLE` lists",
        (("stage show BUNDLE", "run", r"\btest\b", "edit dataset.train: {}"),),
        {**OWN, "dataset": {"asset": "none"}}, data_of),
    Row("runner/job/shapes.py", "Set model.init: scratch, or stage the weights.",
        (("model.init: scratch", "edit"), ("stage the weights", "edit model.asset: m")),
        {**OWN, "model": {"asset": "bare"}}, World.check_model),
    Row("runner/job/examples.py", "Its models: {}. Tasks that they fit: {}.",
        (("(?<=Tasks that they fit: )[a-z-]+",
          "instead runner init {} --bundle bundle -o y.yaml"),),
        does="runner init causal-lm --bundle bundle -o x.yaml"),
    Row("runner/job/examples.py", "Or add one below `assets:` of the manifest, `my-model: {path:",
        ((r"my-model: \{path: FOLDER\}", "run printf '  {}\\n' >> m.yaml",
         "stage fetch", "run {} m.yaml -o bundle"),),
        does="runner init causal-lm --bundle bundle -o x.yaml", fill={"FOLDER": "gpt2"}),
    Row("runner/job/examples.py", "Its datasets: {}; `stage show {}` lists columns.",
        (("stage show [^`]*", "show"),),
        does="runner init token-classification --bundle bundle -o x.yaml"),
)  # fmt: skip

OF_MODELS = (
    Row("runner/tasks/masked_lm.py", "Use `task: causal-lm`, or a model such as BERT.",
        (("task: causal-lm", "edit"), ("a model such as BERT", "edit model.asset: tiny-bert")),
        {"model": {"asset": "tiny-gpt2"}},
        lambda w: task_named(w.config().task).frame(load_tokenizer(w.inputs().model))),
    Row("runner/job/shapes.py", "Save the model again with `save_pretrained` of the model inside",
        ((r"save_file\(.*\)(?=, of safetensors.torch)", f'run {RENAME}{{}}"'),),
        does=weights_of,
        given=f'cp bundle/data/models/tiny-bert/model.safetensors m.safetensors\n{RENAME}{WRAP}"'),
    Row("runner/job/model_probe.py", "Stage config.json and weights again, both from one revision:",
        (("stage show BUNDLE", "run",
         "both from one revision", "run cp bundle/data/models/tiny-bert/config.json m"),),
        does=lambda w: raise_errors(look_with_torch(w.config(), "m", Path() / "m")[0]),
        given="cp -r bundle/data/models/tiny-bert m\n"
        """sed -i 's/"num_hidden_layers": [0-9]*/"num_hidden_layers": 9/' m/config.json"""),
    Row(CHILD, "Tokenizer and model do not belong together: stage both from one repository.",
        (("stage both from one repository", "unset ROWS"),), does=tokenizer_of,
        environ={"ROWS": "10"}),
    Row(CHILD, "If that is not intended: {}{}",
        (("stage both from one repository", "unset ROWS"),), does=tokenizer_of, code=0,
        environ={"ROWS": "1000000"}),
    Row(CHILD, "Look at these rows: in `messages`, the answers need the role `assistant`;",
        (("dataset.too_long: cut", "edit"), ("sequence_length", "edit {}: 64")),
        {**CHAT, "sequence_length": 8, "dataset": {"asset": "numbers", "format": "{text}"}},
        samples_of, code=0),
    Row("runner/job/host_memory.py", "Ask for more: slurm.options: {}, on nodes that have it",
        ((r"slurm\.options: \{.*?\}", "edit"),), does=memory_of),
    Row("runner/job/submit.py", "Let it finish, or `scancel {}` first; or give the run {}.",
        (("--set name=NAME", "words"), (r"(?<=`)scancel \d+", "run bin/{}")), does=queued,
        files=QUEUE, given="chmod +x bin/squeue bin/sbatch bin/scancel"),
    Row("runner/job/host_memory.py", "Write mem: {}G, if these are gigabytes.",
        (("mem: 16G", "edit slurm.options.{}"),), {"slurm": {"options": {"mem": 16}}}, memory_of),
    Row(DEVICES, "Set slurm.tasks_per_node: {} (or omit it), or slurm.gpus_per_node: {}.",
        (("slurm.tasks_per_node: 2", "edit"), ("omit it", "remove slurm.tasks_per_node"),
         ("slurm.gpus_per_node: 4", "edit")),
        {"slurm": {"gpus_per_node": 2, "tasks_per_node": 4}}, devices_of),
    Row(DEVICES, "Ask for those: slurm.gpus_per_node, or slurm.options gres gpu:TYPE:N; or remove",
        (("gpu:TYPE:N", "edit slurm.options.gres: '{}'"),
         ("remove the gres", "remove slurm.options.gres"),
         ("slurm.gpus_per_node", "edit {}: 2", "remove the gres", "remove slurm.options.gres")),
        {"slurm": {"options": {"gres": "npu:4"}}}, devices_of, fill={"TYPE": "a100", "N": "2"}),
    Row("runner/training/engines/native.py", "Its repeated layers: {}. Or set min_params: 1000000.",
        (("(?<=Its repeated layers: )[A-Za-z]+", "edit engine.wrap.layer: {}"),
         ("min_params: 1000000", "remove engine.wrap.layer", "min_params: 1000000",
          "edit engine.wrap: {{}}")),
        {"engine": {"name": "fsdp", "wrap": {"layer": "Linaer"}}},
        lambda w: blocks_of(LAYERS, w.config()) and None),
    Row(INPUTS, "`namei -l {}` shows which right is missing; its owner can add it: chmod a+rX",
        (("(?<=`)namei -l [^`]*", "run", r"chmod a\+rX", "run {} closed"),), does=closed,
        files={"closed": ""}, given="chmod 600 closed"),
    Row("runner/job/installed.py", "Activate an environment that has them: slurm: {setup: ['. {}/",
        ((r"slurm: \{setup: \[.*?\]\}", "edit"),), does=light, code=0),
    Row("runner/job/node_local.py", "Fix that, or set environment.node_local: false, which uses",
        (("environment.node_local: false", "edit"),),
        {"environment": {"asset": "train-env", "node_local": True}}, nodes_of, code=5,
        environ={**JOB, "PATH": "bin:/usr/bin:/bin"}, given="chmod +x bin/srun",
        files={"bin/srun": "#!/bin/sh\necho /scratch/e", "prefix/.airlift/env.json": TREE_FILE}),
    Row("runner/job/checks/training.py", "Below `dataset:` write: validation: 10%",
        (("validation: 10%", "edit dataset.{}"),), {"dataset": {"asset": "numbers"}}, CHECK,
        code=0),
    Row("runner/job/checks/any_run.py", "In the run file: slurm.gpus_per_node: {}; or 0, to",
        (("(?<=; or )0", "edit slurm.gpus_per_node: {}"),), {}, "runner check mine.yaml", code=0,
        files={"bin/sinfo": "#!/bin/sh\necho 'batch*|8|64000|gpu:a100:4|infinite'"},
        given="chmod +x bin/sinfo", environ={"PATH": f"bin:{os.environ['PATH']}"}),
    Row("runner/training/weights.py", "or set precision: bf16 or fp32.",
        (("precision: bf16", "edit"), ("(?<=or )fp32", "edit precision: {}")),
        {"precision": "fp16"}, numbers, code=1),
    Row("runner/job/submit.py", "Let the ranks' own write the script, and submit that: srun --nta",
        (("srun --ntasks=1 .*job.sbatch", "run", "job.sbatch", "show grep SBATCH {}"),),
        {"slurm": {"srun": ["env"]}},
        lambda w: (w.patch.setattr(submission, "is_light", lambda: True), check_srun(w.config())),
        environ={"PATH": f"bin:{os.environ['PATH']}"}, given="chmod +x bin/srun",
        files={"bin/srun": "#!/bin/sh\nshift; exec \"$@\""}, fill={"PREFIX": sys.prefix}),
    Row("runner/job/memory.py", "Add `quantization: {bits: 4}` with engine: {name: deepspeed",
        (("quantization: {bits: 4}", "edit", "engine: {name: deepspeed, zero: 2}", "edit"),
         ("more devices", "words 4")),
        {"task": "causal-lm", "model": {"asset": "tiny-gpt2"}, "lora": {}, "precision": "bf16"},
        decided),
)  # fmt: skip


@pytest.mark.parametrize("row", OF_OWN_FILES, ids=str)
def test_what_a_remedy_of_ones_own_files_says_leads_on(
    row: Row, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    own = once(tmp_path_factory, "own-files", lambda folder: stage_own(folder, bundle))
    shutil.copytree(own, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    obey(row, monkeypatch)


@pytest.mark.parametrize("row", OF_MODELS, ids=str)
def test_what_a_remedy_of_models_says_leads_on(
    row: Row, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bundle").symlink_to(bundle)
    obey(row, monkeypatch)
