"""Remedies of run files and of `runner`'s command line: whoever does what they say goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.data.prepare import prepare
from runner.data.recipe import recipes
from runner.job.checks.training import patience
from runner.job.findings import raise_errors
from runner.job.installed import check_fsdp
from runner.trials.rehearse import _check_engine
from tests.remedies.rows import PRINT, Row, World, obey
from tests.runner.conftest import bundle

__all__ = ["bundle"]
INPUTS = "runner/inputs/__init__.py"
OVERRIDES = "runner/config/fields.py"
HALF = {"asset": "reference", "validation": "500%"}
CHAT: dict[str, Any] = {"task": "instruction", "model": {"asset": "tiny-gpt2"}}
NUMBERS = {"asset": "numbers", "format": "{text}"}
NVME = {"name": "fsdp", "offload": "nvme", "nvme_path": "/tmp"}
OLD_TORCH = {
    "torch-2.6.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n"
}


def load(world: World) -> None:
    """What each command does first: the run file, its assets, the length of a sequence."""
    assert world.run_itself().length


def prepared(world: World) -> None:
    """The data that the ranks read."""
    config = world.config()
    recipe = recipes(config, world.inputs(), int(config.sequence_length or 0))["train"][0]
    prepare(recipe, Path() / "stores", lambda _line: None)


COMMAND_LINE = (
    Row(OVERRIDES, "For instance: --set batch.micro=4", (("--set batch.micro=4", "words"),),
        tail="--set batch.micro"),
    Row(OVERRIDES, "Put text in two pairs of quotes: --set '{}=\"...\"'",
        (("--set '.*?'", "words"),), tail="--set 'name=[mine'", fill={"...": "mine"}),
    Row("runner/cli/__init__.py", "`{}` is a key of the run file: write it there, or --set {}=",
        (("--set steps=VALUE", "words"), ("steps(?=` is a key)", "edit {}: 5")),
        tail="--steps 5", fill={"VALUE": "5"}),
    Row("runner/cli/__init__.py", "{} --help. The bundle is an option (--bundle FOLDER), and a",
        (("--bundle FOLDER", "words"), ("runner submit --help", "show")),
        tail="bundle", fill={"FOLDER": "bundle"}),
    Row("runner/cli/options.py", "Give it: --bundle {}; or set it once: export {}=FOLDER",
        (("--bundle [^;]*", "words"), ("(?<=export )[A-Z_]+=FOLDER", "export")),
        given="ln -s bundle another", fill={"FOLDER": "bundle"}),
    Row("runner/cli/options.py", "Keep one: --bundle {}. One bundle can hold all: list the",
        (("--bundle bundle", "words"),), tail="--bundle other --bundle bundle"),
    Row("runner/cli/run.py", "runner submit RUN --to CLUSTER; without: runner submit RUN",
        (("runner submit RUN --bundle BUNDLE", "instead {} --print"),), does=f"{PRINT} --logout"),
    Row("runner/slurm/script.py", "For instance: --array",
        (("--array [^ ]*=1e-4,3e-4", "words"),), tail="--array optimizer.lr"),
    Row("runner/slurm/script.py", "List all its values in one: --array KEY=A,B,C.",
        (("--array KEY=A,B,C", "words"),), tail="--array seed=1 --array seed=2,3",
        fill={"KEY": "seed", "A,B,C": "1,2,3"}),
    Row("runner/slurm/script.py", "runner submit RUN --array KEY=VALUE,VALUE gives each its own.",
        (("--array KEY=VALUE,VALUE", "words", "slurm.options", "remove {}"),),
        {"slurm": {"options": {"array": "0-3"}}}, fill={"KEY=VALUE,VALUE": "seed=1,2"}),
    Row("stage/lock/reader.py", "Give one. Several are several runs: {}",
        (("runner submit RUN --array [^ ]*", "instead {} --print",
         "optimizer.lr", "remove {}"),),
        {"optimizer": {"lr": "1e-4,3e-4"}}, fill={"A,B": "1e-4,3e-4"}),
    Row("runner/job/submit.py", "Run it on the cluster's login node; `runner submit --print` shows",
        (("runner submit --print", "instead {} mine.yaml --bundle bundle"),),
        does="runner submit mine.yaml --bundle bundle", environ={"PATH": "/nowhere"}),
    Row(INPUTS, "Give an --output outside the bundle.", (("--output", "words {} elsewhere/mine"),),
        tail="--output bundle/output"),
    Row("stage/file_kinds.py", "`runner init TASK --bundle BUNDLE` writes a run file; that of",
        (("runner init TASK --bundle BUNDLE", "run {} -o begun.yaml",
         "runner init", "instead runner submit begun.yaml --print"),),
        files={"empty.yaml": ""}, does="runner submit empty.yaml --print",
        fill={"TASK": "masked-lm"}),
)  # fmt: skip

RUN_FILES = (
    Row("runner/config/held_out.py", "For instance: validation: 5%. Without validation:",
        (("validation: 5%", "edit dataset.{}"), ("validation: null", "edit dataset.{}")),
        {"dataset": HALF}),
    Row("runner/config/job_config.py", "Write it into slurm.options",
        ((r"slurm: \{.*\}\}", "edit", "slurm.setup", "remove {}"),),
        {"slurm": {"setup": ["#SBATCH --mem=64G"]}}),
    Row("runner/tasks/instruction.py", "Give one of: {prompt: COLUMN, response: COLUMN}, {mess",
        ((r"\{prompt: .*?\}", "edit dataset: {}"), (r"\{messages: .*?\}", "edit dataset: {}"),
         (r"\{format: '.*?'\}", "edit dataset: {}")),
        {**CHAT, "dataset": {"asset": "numbers"}}, World.config),
    Row("runner/config/data.py", "Write columns in braces: {User}.",
        ((r"\{User\}", "edit dataset.format: 'text: {}'"),),
        {**CHAT, "dataset": NUMBERS | {"format": "no column"}}, fill={"User": "text"}),
    Row("runner/config/engine.py", "Set engine.name: deepspeed, or engine.offload: none without",
        (("engine.name: deepspeed", "edit"), ("engine.offload: none", "edit",
         "(?<=without )nvme_path", "remove engine.{}")), {"engine": NVME}),
    Row("stage/lock/reader.py", "Write a list: [{}]", ((r"\[.*?\]", "edit lora.targets: {}"),),
        {"lora": {"targets": "*.query"}}),
    Row("stage/lock/reader.py", "For instance: {}", ((r"\[0.*?\]", "edit optimizer.betas: {}"),),
        {"optimizer": {"betas": 0.9}}),
    Row("runner/job/plan.py", "Set sequence_length: {} or less",
        ((r"sequence_length: \d+", "edit"),), {"sequence_length": 10_000}, load),
    Row(INPUTS, "Write `{}`, the asset's name: {} is its repository.",
        (("(?<=Write `)[^`]*", "edit model.asset: {}"),), {"model": {"asset": "acme/tiny-bert"}}),
    Row(INPUTS, "`stage show BUNDLE` lists the assets with their kinds.",
        (("stage show BUNDLE", "run", r"\bnumbers\b", "edit dataset.asset: {}"),),
        {"dataset": {"asset": "tiny-bert"}}),
    Row("runner/job/checks/training.py", "Set dataset.validation to a split of the dataset, or to",
        (("validation: 5%", "edit dataset.{}"),
         ("dataset.validation", "edit {}: validation"),
         ("(?<=remove )evaluation.patience", "remove {}")),
        {"dataset": {"asset": "reference", "validation": None},
         "evaluation": {"every": 1, "patience": 2}},
        lambda w: raise_errors(patience.find(w.run_itself()))),
    Row("runner/job/shapes.py", "Set task: {}", (("task: [a-z-]+", "edit"),), {"task": "causal-lm"},
        World.check_model),
    Row("runner/job/installed.py", "Set engine: {name: deepspeed} or {name: ddp}.",
        ((r"engine: \{name: deepspeed\}", "edit"), (r"\{name: ddp\}", "edit engine: {}")),
        {"engine": {"name": "fsdp"}},
        lambda w: (w.patch.syspath_prepend(Path()), check_fsdp(w.config(), "cpu")),
        files=OLD_TORCH),
    Row("runner/trials/rehearse.py", "Rehearse with a newer torch; or try the nodes: runner",
        (("newer torch", "run sed -i s/2.6.0/2.7.0/ torch-*/METADATA"),),
        {"engine": {"name": "fsdp"}},
        lambda w: (w.patch.syspath_prepend(Path()), _check_engine(w.config())), files=OLD_TORCH),
    Row("runner/data/sequences.py", "Look at the columns, set a larger sequence_length, `too_long",
        (("sequence_length", "edit {}: 64"), ("too_long: cut", "edit dataset.{}")),
        {**CHAT, "sequence_length": 8, "dataset": NUMBERS | {"limit": {"train": 4}}}, prepared),
    Row("runner/data/sequences.py", "raise dataset.limit",
        (("dataset.limit", "edit {}: {train: 10}"),),
        {**CHAT, "dataset": NUMBERS | {"limit": {"train": 2}}}, prepared),
)  # fmt: skip


ENGINE = "runner/config/engine.py"
LORA = "runner/config/engine.py"
KEYS = "runner/config/fields.py"


def only_for(key: str, of: str, **settings: Any) -> Row:
    """A key that means nothing beside the value of another, which the remedy names."""
    way = (f"(?<=or set ){of}: [^ ]*[a-z0-9]", "edit")
    ways = (("Remove it", f"remove {key}"), way)
    return Row(KEYS, "Remove it, or set {}: {}.{}", ways, settings, World.config)


SETTINGS = (
    only_for("schedule.decay", "schedule.name", schedule={"decay": 0.5}),
    only_for("optimizer.momentum", "optimizer.name", optimizer={"momentum": 0.5}),
    only_for("engine.zero", "engine.name", engine={"name": "ddp", "zero": 2}),
    only_for("engine.offload", "engine.name", engine={"name": "ddp", "offload": "cpu"}),
    only_for("quantization.double", "quantization.bits", lora={},
             quantization={"bits": 8, "double": False}),
    only_for("whole_words", "task", task="causal-lm", whole_words=True),
    Row(ENGINE, "Set engine.zero: 1.", (("engine.zero: 1", "edit"),),
        {"engine": {"zero": 0, "offload": "cpu"}}, World.config),
    Row(ENGINE, "Set engine.name: {}, or optimizer.name: adamw.",
        (("engine.name: [a-z]+", "edit"), ("optimizer.name: adamw", "edit")),
        {"optimizer": {"name": "adamw_8bit"}}, World.config),
    Row(ENGINE, "Write wrap: {layer: GPT2Block}, or wrap: {min_params: 1000000}.",
        ((r"wrap: (\{layer.*?\})", "remove engine.wrap", "wrap: {layer.*?}", "edit engine.{}"),
         (r"wrap: \{min_params.*?\}", "remove engine.wrap", "wrap: {min_.*?}", "edit engine.{}")),
        {"engine": {"name": "fsdp", "wrap": {"layers": "Block"}}}, World.config),
    Row(ENGINE, "For instance: every: 500, every: 10 min, or every: epoch",
        (("every: 500", "edit checkpoint.{}"), ("every: 10 min", "edit checkpoint.{}"),
         ("every: epoch", "edit checkpoint.{}")),
        {"checkpoint": {"every": "often"}}, World.config),
    Row(LORA, "Add `lora: {rank: 8}`: matrices beside them are trained. Or remove `quantization`.",
        (("lora: {rank: 8}", "edit"), ("(?<=Or remove `)quantization", "remove")),
        {"quantization": {"bits": 4}}, World.config),
    Row(LORA, "Set engine: {name: ddp}, or engine: {name: deepspeed, zero: 2}:",
        (("(?<=Set )engine", "remove {}", "engine: {name: ddp}", "edit"),
         ("engine: {name: deepspeed, zero: 2}", "edit")),
        {"engine": {"zero": 3}, "lora": {}, "quantization": {"bits": 4}}, World.config),
    Row(LORA, "Remove `lora`, or set model.init: pretrained.",
        (("(?<=Remove `)lora", "remove"), ("model.init: pretrained", "edit")),
        {"model": {"asset": "tiny-gpt2", "init": "scratch"}, "lora": {}}, World.config),
    Row("runner/config/chats.py", "For instance: fields: {role: from, content: value}",
        (("fields: {.*?}", "remove dataset.fields", "fields: {.*?}", "edit dataset.{}"),),
        {**CHAT, "dataset": {"asset": "chats", "messages": "m", "fields": {"rolle": "from"}}},
        World.config),
)  # fmt: skip


@pytest.mark.parametrize("row", (*COMMAND_LINE, *RUN_FILES, *SETTINGS), ids=str)
def test_what_a_remedy_of_a_run_says_leads_on(
    row: Row, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bundle").symlink_to(bundle)
    obey(row, monkeypatch)
