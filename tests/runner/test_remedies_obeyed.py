"""Remedies of `runner` that need a bundle: whoever does what they say goes on."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from runner.cli import main as runner
from runner.config.run_config import RunConfig
from runner.data.prepare import prepare
from runner.data.recipe import recipes
from runner.data.tokenizing import load_tokenizer
from runner.errors import StageError, UsageError
from runner.inputs import resolve
from runner.job import installed, with_torch, without_torch
from runner.job.check import _check_patience
from runner.job.findings import Findings
from runner.job.model import check_files, check_model
from runner.job.partition import Partition
from runner.job.plan import sequence_length
from runner.job.shapes import shape_of, weight_shapes
from runner.job.submit import submit
from runner.job.texts import check_data
from runner.trials import rehearse
from tests.first_job.harness import programs
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster
from tests.runner.slurm.test_script import CPU
from tests.support.environ import kept_environment
from tests.support.staging import run_here

OVERRIDES = "runner/config/overrides.py"
INPUTS = "runner/inputs/__init__.py"


def load(cluster: Cluster, *overrides: str, **changes: Any) -> Any:
    """What a command does first: the run file, its assets, the length of a sequence."""
    config = RunConfig.load(cluster.write("mine", **changes), overrides)
    inputs = resolve(config, cluster.bundle)
    sequence_length(config, shape_of(config, inputs.model))
    return config


def remedy_of(cluster: Cluster, *overrides: str, **changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(cluster, *overrides, **changes)
    return caught.value.remedy or str(caught.value)  # several at once


@obeys(OVERRIDES, "For instance: --set batch.micro=4")
def test_an_override_without_a_value_is_written_as_the_example(cluster: Cluster) -> None:
    words = shlex.split(remedy_of(cluster, "batch.micro").partition(": ")[2])
    assert load(cluster, *words[1:]).batch.micro == 4


@obeys(OVERRIDES, "Put text in two pairs of quotes: --set")
def test_text_with_brackets_is_put_into_quotes(cluster: Cluster) -> None:
    line = in_it(remedy_of(cluster, "name=[mine"), r"--set .*")
    _, override = shlex.split(line.replace("...", "[mine"))
    assert override == 'name="[mine"'
    load(cluster, override.replace("[", ""))  # no name may have a bracket


HALF = {"asset": "reference", "validation": "500%"}
# what is wrong, the part of the remedy that says what to write, what is written then
VALUES: dict[str, tuple[dict[str, Any], str, Callable[[str], dict[str, Any]]]] = {
    "a share": (
        {"dataset": HALF},
        r"(?<=validation: )\d+%",
        lambda share: {"dataset": {**HALF, "validation": share}},
    ),
    "an sbatch line": (
        {"slurm": {"setup": ["#SBATCH --mem=64G"]}}, r"slurm: \{.*\}", yaml.safe_load,
    ),
    "too long": ({"sequence_length": 10_000}, r"\d+", lambda n: {"sequence_length": int(n)}),
    "too short": (
        {"sequence_length": 4},
        r"(?<=sequence_length: )\d+",
        lambda n: {"sequence_length": int(n)},
    ),
    "one of two": (
        {"optimizer": {"betas": 0.9}},
        r"\[.*\]",
        lambda both: {"optimizer": {"betas": yaml.safe_load(both)}},
    ),
    "a repository": (
        {"model": {"asset": "acme/tiny-bert"}},
        r"(?<=`)[^`]+",
        lambda name: {"model": {"asset": name}},
    ),
}  # fmt: skip


@obeys("runner/config/held_out.py", "For instance: validation: 5%")
@obeys("runner/config/run_config.py", "Write it into slurm.options")
@obeys("runner/job/plan.py", "Set sequence_length: {} or less")
@obeys(INPUTS, "the asset's name: {} is its repository")
@pytest.mark.parametrize("fault", VALUES)
def test_a_value_is_written_as_its_remedy_says(cluster: Cluster, fault: str) -> None:
    wrong, pattern, right = VALUES[fault]
    load(cluster, **right(in_it(remedy_of(cluster, **wrong), pattern)))


@obeys("runner/run_folder/checkpoints.py", "{} for {} steps or more (--set steps={})")
def test_a_run_that_is_past_its_end_is_asked_for_more_steps(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    cluster.take(trained_at(2))
    shutil.rmtree(cluster.output("zero2") / "model")
    command = ("train", "zero2.yaml", "--processes", "2", "--dry-run", "--set")
    line = in_it(cluster.refused(*command, "steps=4"), r"--set steps=\d+")
    done = cluster.run(*command, line.removeprefix("--set "))
    assert done.returncode == 0, done.stderr


@obeys("runner/trials/evaluate.py", "The exported model: --checkpoint none --set model.init=")
def test_a_run_without_checkpoints_is_measured_by_its_exported_model(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    cluster.take(trained_at(2))
    shutil.rmtree(cluster.output("zero2") / "checkpoints")
    refused = cluster.refused("evaluate", "zero2.yaml")
    for options in re.findall(r"--checkpoint none(?: --set [^;\s]+)?", " ".join(refused.split())):
        done = cluster.run("evaluate", "zero2.yaml", *options.split())
        assert done.returncode == 0, done.stderr


@obeys("runner/exec/run.py", "sed -i 's/\\r$//' {}")
def test_a_script_of_windows_is_repaired(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRLIFT_BUNDLE", str(cluster.bundle))
    script = cluster.folder / "mine.sh"
    script.write_bytes(b"#!/bin/sh\r\necho hello\r\n")
    script.chmod(0o755)
    line = in_it(cluster.run("exec", "--", str(script)).stderr, r"sed -i .*")
    subprocess.run(line, shell=True, check=True)
    assert cluster.run("exec", "--", str(script)).stdout.strip().endswith("hello")


@obeys("runner/exec/run.py", "{}{}runner exec --bundle B -- python {}")
def test_a_python_script_is_given_to_python(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRLIFT_BUNDLE", str(cluster.bundle))
    script = cluster.folder / "mine.py"
    script.write_text("print('hello')\n")
    refused = cluster.run("exec", "--", "mine.py").stderr
    words = shlex.split(in_it(refused, r"-- python \S+"))
    done = cluster.run("exec", *words)
    assert done.returncode == 0 and "hello" in done.stdout, json.dumps([refused, done.stderr])


def staged(cluster: Cluster, files: dict[str, str], **assets: dict[str, str]) -> None:
    """Fetches a bundle with these assets from the user's own files."""
    for name, content in files.items():
        (cluster.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cluster.folder / name).write_text(content)
    shutil.rmtree(cluster.folder / "bundle", ignore_errors=True)
    manifest, output = cluster.folder / "m.yaml", str(cluster.folder / "bundle")
    manifest.write_text(yaml.safe_dump({"format": 1, "name": "m", "assets": assets}))
    (cluster.folder / "m.lock").unlink(missing_ok=True)
    run_here("fetch", str(manifest), "-o", output, "--no-offline-check")
    cluster.bundle = cluster.folder / "bundle"


def own_model(cluster: Cluster, name: str = "tiny-bert") -> Path:
    """A user's copy of a small model."""
    there = cluster.bundle / "data/models" / name
    return Path(shutil.copytree(there, cluster.folder / name, copy_function=shutil.copyfile))


CLASSIFY = {"task": "text-classification", "model": {"asset": "m"}}
LABELLED = "text,label,kind\na film,good,0\nanother,{}\n"


def faults(cluster: Cluster, **changes: Any) -> list[StageError]:
    """What `check` says of the data alone; what it says of the run file is raised."""
    config = load(cluster, **changes)
    found, inputs = Findings(), resolve(config, cluster.bundle)
    found.attempt(_check_patience, config, inputs)
    wanted = recipes(config, inputs, config.sequence_length or 32)
    check_data(found, config, wanted, None)
    return found.errors


def fault(cluster: Cluster, **changes: Any) -> str:
    """The remedy of the one fault."""
    (error,) = faults(cluster, **changes)
    return error.remedy


@obeys("runner/data/classes.py", "Look at the column (`stage show BUNDLE` lists them)")
@obeys("runner/job/check.py", "Set dataset.validation to a split of the dataset, or to a share")
def test_labels_and_splits_that_teach_nothing_are_exchanged(cluster: Cluster) -> None:
    files = {"d/train.csv": LABELLED.format("good,1"), "d/test.csv": LABELLED.format("bad,1")}
    data = {"asset": "d"}
    staged(cluster, files, m={"path": str(own_model(cluster))}, d={"path": "d", "convert": "csv"})
    remedy = fault(cluster, **CLASSIFY, dataset=data)
    show = in_it(remedy, "stage show BUNDLE").replace("BUNDLE", str(cluster.bundle)).split()
    column = in_it(run_here(*show[1:]).output, r"kind(?=: int64)")
    splits = {"dataset": {**data, "train": "test"}}
    for way in (splits, {"dataset": {**data, "label": column}}):
        assert faults(cluster, **CLASSIFY, **way) == []
    patient = {**CLASSIFY, **splits, "evaluation": {"every": 1, "patience": 2}}
    remedy = fault(cluster, **patient)
    share = yaml.safe_load(in_it(remedy, r"validation: \d+%"))["validation"].replace("5%", "50%")
    for validation in ("train", share):
        changed = {**patient, "dataset": {**splits["dataset"], "validation": validation}}
        assert not any("patience" in e.message for e in faults(cluster, **changed))
    assert "remove evaluation.patience" in remedy
    assert faults(cluster, **{**patient, "evaluation": {"every": 1}}) == []


@obeys(INPUTS, "On the laptop, add `convert: {}` to its entry", "Set validation: null, or another")
def test_plain_files_become_a_dataset_and_a_row_is_not_held_out(cluster: Cluster) -> None:
    files = {"d/train.csv": "text\na film\n", "d/test.csv": "text\na film\n"}
    model, entry = {"path": str(own_model(cluster))}, {"path": "d"}
    data = {"asset": "d"}
    staged(cluster, files, m=model, d=entry)
    run = {"task": "masked-lm", "model": {"asset": "m"}}
    convert = yaml.safe_load(in_it(remedy_of(cluster, **run, dataset=data), r"convert: \w+"))
    staged(cluster, files, m=model, d={**entry, **convert})
    load(cluster, **run, dataset=data)
    remedy = remedy_of(cluster, **run, dataset={**data, "validation": "50%"})
    lines = run_here("show", str(cluster.bundle)).output
    for split in (in_it(remedy, "null"), in_it(lines, r"\btest\b")):
        load(cluster, **run, dataset={**data, "validation": yaml.safe_load(split)})


@obeys("runner/job/with_torch.py", "Stage config.json and weights again, both from one revision")
@obeys("runner/job/model.py", "Save the model again with `save_pretrained` of the model inside")
def test_weights_go_with_their_config(cluster: Cluster) -> None:
    from safetensors.torch import load_file, save_file

    model, config = own_model(cluster), RunConfig.load(cluster.write())
    settings = json.loads((model / "config.json").read_text())
    deeper = {**settings, "num_hidden_layers": 9}
    (model / "config.json").write_text(json.dumps(deeper))
    (error,) = with_torch.look(config, "m", model).errors
    assert "both from one revision" in error.remedy
    (model / "config.json").write_text(json.dumps(settings))
    assert with_torch.look(config, "m", model).errors == []

    weights = model / "model.safetensors"
    own = load_file(weights)
    save_file({f"module.{name}": value for name, value in own.items()}, weights)
    inputs = replace(resolve(config, cluster.bundle).model, path=model)
    with pytest.raises(UsageError, match="would find none of them") as caught:
        check_files(config, inputs, weight_shapes(inputs) or {})
    rename = in_it(caught.value.remedy, r"save_file\(.*\)(?=, of safetensors.torch)")
    eval(rename, {"F": str(weights), "load_file": load_file, "save_file": save_file})
    check_files(config, inputs, weight_shapes(inputs) or {})
    assert load_file(weights).keys() == own.keys()


@obeys(
    "runner/data/tokens.py", "Look at the columns, set a larger sequence_length, `too_long: cut`"
)
def test_samples_that_are_all_too_long_are_cut_or_get_room(cluster: Cluster) -> None:
    dataset = {"asset": "numbers", "format": "{text}", "limit": {"train": 2}}
    run: dict[str, Any] = {"task": "instruction", "model": {"asset": "tiny-gpt2"}}

    def made(**changes: Any) -> int:
        config = load(cluster, **{**run, "dataset": dataset, **changes})
        wanted = recipes(config, resolve(config, cluster.bundle), config.sequence_length or 0)
        return len(prepare(wanted["train"][0], cluster.folder / "stores", print))

    with pytest.raises(UsageError, match="nothing to train on: 0 samples") as empty:
        made()
    with pytest.raises(UsageError, match="nothing to train on: 1 sample longer") as caught:
        made(sequence_length=8, dataset={**dataset, "limit": {"train": 4}})
    assert caught.value.remedy == empty.value.remedy
    cut = yaml.safe_load(in_it(caught.value.remedy, "too_long: cut"))
    more = {**dataset, "limit": {"train": 4}}
    assert made(dataset=more) == 1, "the limit was raised, and there is room"
    assert made(sequence_length=8, dataset={**more, **cut}) == 1


@obeys("runner/job/installed.py", "Set engine: {name: deepspeed} or {name: ddp}.")
@obeys("runner/trials/rehearse.py", "Rehearse with a newer torch; or try the nodes")
@obeys("runner/config/engine.py", "Set engine.name: deepspeed, or engine.offload: none without")
@obeys("runner/config/data.py", "Write columns in braces: {User}.")
def test_what_an_engine_and_a_format_cannot_do_is_exchanged(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = cluster.folder / "torch-2.6.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
    monkeypatch.syspath_prepend(cluster.folder)
    with pytest.raises(UsageError, match=r"this is 2\.6\.0") as caught:
        installed.check_fsdp(load(cluster, engine={"name": "fsdp"}), "cpu")
    for engine in re.findall(r"\{.*?\}", caught.value.remedy):
        installed.check_fsdp(load(cluster, engine=yaml.safe_load(engine)), "cpu")
    with pytest.raises(UsageError, match="Only the rehearsal needs that") as caught:
        rehearse._check_engine(load(cluster, engine={"name": "fsdp"}))
    line = in_it(caught.value.remedy, "runner rehearse ... --job").replace("...", "mine.yaml")
    monkeypatch.chdir(cluster.folder)
    monkeypatch.setenv("PATH", programs(cluster.folder / "bin", sbatch="exit 0", sinfo="exit 1"))
    job = called(*line.split()[1:], "--bundle", str(cluster.bundle)).output
    assert "Slurm refuses the job" in job, "it is asked"
    assert "newer torch" in caught.value.remedy
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.0\n")
    rehearse._check_engine(load(cluster, engine={"name": "fsdp"}))

    nvme = {"name": "fsdp", "offload": "nvme", "nvme_path": str(cluster.folder)}
    remedy = remedy_of(cluster, engine=nvme)
    load(cluster, engine={**nvme, "name": in_it(remedy, r"(?<=engine.name: )\w+")})
    without = nvme.pop(in_it(remedy, r"(?<=without )\w+"))
    assert without and load(cluster, engine={**nvme, "offload": in_it(remedy, "none")})

    run = {"task": "instruction", "model": {"asset": "tiny-gpt2"}}
    data = {"asset": "numbers", "format": "no column"}
    column = in_it(remedy_of(cluster, **run, dataset=data), r"\{\w+\}").replace("User", "text")
    load(cluster, **run, dataset={**data, "format": f"the text: {column}"})


@obeys("runner/job/submit.py", "Run it on the cluster's login node; `runner submit --print` shows")
def test_where_there_is_no_slurm_the_script_can_be_shown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="no sbatch on this machine") as caught:
        submit(replace(CPU, run_folder=cluster.output()), Partition("default"))
    assert not cluster.output().exists(), "a run that `runner status` would call stopped"
    words = shlex.split(in_it(caught.value.remedy, "runner submit --print"))
    run = [str(cluster.write()), "--bundle", str(cluster.bundle)]
    shown = CliRunner().invoke(runner, [*words[1:], *run])
    assert shown.exit_code == 0 and shown.stdout.startswith("#!/bin/bash"), shown.output


def called(*words: str) -> Result:
    """`runner` in this process."""
    with kept_environment():
        return CliRunner().invoke(runner, words, prog_name="runner")


@obeys("runner/cli/__init__.py", "`{}` is a key of the run file: write it there, or --set")
@obeys("runner/cli/__init__.py", "{} --help. The bundle is an option (--bundle FOLDER), and a")
@obeys("runner/cli/options.py", "Give it: --bundle {}; or set it once: export {}=FOLDER")
@obeys("stage/lock/reader.py", "For instance: {} | Write a list: [{}]", "Give one. Several are")
@obeys("stage/file_kinds.py", "`runner init TASK --bundle BUNDLE` writes a run file.")
@obeys("runner/config/data.py", "Give one of: {prompt: COLUMN, response: COLUMN}, {messages:")
@obeys(INPUTS, "Give an --output outside the bundle.")
def test_options_and_values_are_written_as_their_remedies_say(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cluster.folder)
    monkeypatch.delenv("AIRLIFT_BUNDLE", raising=False)
    bundle, run, submit = str(cluster.bundle), str(cluster.write()), ("submit", "--print")
    refused = called(*submit, run, "--bundle", bundle, "--steps", "5").output
    override = in_it(refused, r"--set steps=").split()
    assert called(*submit, run, "--bundle", bundle, override[0], f"{override[1]}5").exit_code == 0
    option = in_it(called(*submit, run, bundle).output, r"--bundle(?= FOLDER)")
    assert called(*submit, run, option, bundle).exit_code == 0
    for name in "ab":
        Path(name).symlink_to(cluster.bundle)
    refused = called(*submit, run).output
    first = in_it(refused, r"--bundle \S+?(?=;)").split()
    assert called(*submit, run, *first).exit_code == 0
    monkeypatch.setenv(in_it(refused, r"(?<=export )\w+"), bundle)
    assert called(*submit, run).exit_code == 0
    inside = (*submit, run, "--output")
    outside = in_it(called(*inside, f"{bundle}/output").output, "outside the bundle")
    assert called(*inside, str(cluster.folder / outside)).exit_code == 0

    lists = yaml.safe_load(in_it(remedy_of(cluster, lora={"targets": "*.query"}), r"\[.*\]"))
    RunConfig.load(cluster.write(lora={"targets": lists}))
    several = in_it(remedy_of(cluster, optimizer={"lr": "1e-4,3e-4"}), r"runner submit .*")
    words = several.replace("RUN", run).replace("A,B", "1e-4,3e-4").split()
    assert called(*words[1:], "--print").exit_code == 0

    Path("empty.yaml").write_text("")
    line = in_it(called("check", "empty.yaml").output, "runner init TASK --bundle BUNDLE")
    line = line.replace("TASK", "masked-lm").replace("BUNDLE", bundle)
    begun = called(*line.split()[1:], "-o", "begun.yaml")
    assert begun.exit_code == 0 and RunConfig.load(Path("begun.yaml")), begun.output

    chat = {"task": "instruction", "model": {"asset": "tiny-gpt2"}}
    ways = re.findall(r"\{[^{}]*(?:\{\w+\}[^{}]*)?\}", remedy_of(cluster, **chat))
    assert len(ways) == 3
    for way in ways:
        RunConfig.load(cluster.write(**chat, dataset={"asset": "numbers", **yaml.safe_load(way)}))


@obeys("runner/job/model.py", "Set task: {} | Use another")
@obeys("runner/job/without_torch.py", "Tokenizer and model do not belong together: stage both")
@obeys("runner/job/without_torch.py", "If that is not intended: {}{}", "Look at these rows: in")
def test_a_model_gets_its_task_and_its_tokenizer(cluster: Cluster) -> None:
    def checked(**changes: Any) -> None:
        config = load(cluster, **changes)
        check_model(config, resolve(config, cluster.bundle).model)

    for asset, task in (("tiny-bert", "causal-lm"), ("tiny-gpt2", "masked-lm")):
        run = {"model": {"asset": asset}, "task": task}
        with pytest.raises(UsageError) as caught:
            checked(**run)
        checked(**{**run, "task": in_it(caught.value.remedy, r"(?<=task: )[\w-]+")})

    config = RunConfig.load(cluster.write())
    model = resolve(config, cluster.bundle).model
    tokenizer, found = load_tokenizer(model), Findings()
    without_torch.compare(found, "masked-lm", model, tokenizer, 10, "vocab_size")
    without_torch.compare(found, "masked-lm", model, tokenizer, 10**6, "vocab_size")
    remedies = [error.remedy for error in found.errors] + [one.remedy for one in found.others]
    assert all("both from one repository" in remedy for remedy in remedies) and len(remedies) == 2
    found = Findings()
    rows = model.settings["vocab_size"]
    without_torch.compare(found, "masked-lm", model, tokenizer, rows, "vocab_size")
    assert found.errors == found.others == []

    data = {"asset": "numbers", "format": "{text}"}
    run = {"task": "instruction", "model": {"asset": "tiny-gpt2"}}
    said = samples(cluster, dataset=data, sequence_length=8, **run)
    cut = yaml.safe_load(f"{{{in_it(said, 'too_long: cut')}}}")
    assert samples(cluster, dataset={**data, **cut}, sequence_length=8, **run) == ""
    assert samples(cluster, dataset=data, sequence_length=64, **run) == "", "a longer one"


def samples(cluster: Cluster, **changes: Any) -> str:
    """The remedy for samples of which nothing is learned; empty: there is none."""
    config, found = load(cluster, **changes), Findings()
    wanted = recipes(config, resolve(config, cluster.bundle), config.sequence_length or 0)
    without_torch._write_samples(found, config, wanted["train"][0])
    return "".join(one.remedy for one in found.others)
