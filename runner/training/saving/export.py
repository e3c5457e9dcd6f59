"""The exported model: safetensors, config, tokenizer and card, or an adapter in peft's layout.

The card (`model/README.md`) says where the model comes from, how it was trained, its results, and
how to load it. It is made of the run file, the bundle, the plan, `environment.json` and
`metrics.jsonl`. Its head is the metadata of the Hub's cards (huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from runner.config.engine import LoraConfig
from runner.config.fields import every_key, unused_keys
from runner.config.job_config import NO_RESULT
from runner.config.run_config import RunConfig
from runner.data.recipe import documents_of
from runner.data.tokenizing import read_tokenizer
from runner.from_stage import dotted, human_count, keys_of
from runner.inputs import DatasetInput, Inputs, ModelInput, SplitInput, read_checked
from runner.job.plan import TrainingPlan
from runner.run_folder.layout import EXPORTED, WEIGHTS_OF
from runner.tasks import task_named
from runner.training.loading import merged, write_adapter

UNSTATED = "not stated"


def model_card(
    config: RunConfig,
    inputs: Inputs,
    plan: TrainingPlan,
    record: Mapping[str, Any],
    metrics: Iterable[Mapping[str, Any]],
    origin: Sequence[str] = (),
) -> str:
    """The text of a model's README.md.

    Args:
        config: the run file.
        inputs: the bundle's model and datasets.
        plan: of the ranks that exported it.
        record: the run's `environment.json`.
        metrics: the objects of its `metrics.jsonl`.
        origin: how an earlier run made the first weights.
    """
    parts = [
        f"---\n{_metadata(config, inputs, origin)}\n---\n\n# {config.name}",
        f"{_origin(config, inputs.model)} Trained by `runner train` of Airlift, which also wrote "
        "this card.",
        "## How to load it\n\n" + loading_code(config, inputs.model),
        "## Where it comes from\n\n"
        + _table(("what", "is", "licence"), _provenance(config, inputs, origin)),
        "Licences are as the sources state them. What they mean for this model was not checked.",
        "## How it was trained\n\n"
        + _table(("setting", "value"), (*_settings(config, inputs, plan), *_weights(record))),
        "## On what\n\n" + _table(("what", "is"), _machine(record)),
        "## How well it does\n\n" + _results(list(metrics)),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(config: RunConfig, inputs: Inputs, origin: Sequence[str]) -> str:
    """The metadata for the Hub, as YAML. It names only repositories of the Hub."""
    adapter = config.lora is not None and not config.lora.merge
    has_base = inputs.model.commit and config.model.init != "scratch"
    relation = "adapter" if adapter else "finetune"
    # `stage show` prints the first weights and the data where the model is staged again.
    sources = [
        f"{what}: {text.replace('`', '')}"
        for what, text, _ in _provenance(config, inputs, origin)
        if what not in ("bundle", "validation data")
    ]
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        base_model=inputs.model.source if has_base else None,
        base_model_relation=relation if has_base else None,
        datasets=list(dict.fromkeys(d.source for d in inputs.datasets if d.commit)) or None,
        pipeline_tag=task_named(config.task).pipeline,
        tags=["airlift", config.task],
        airlift={"run": config.name, "bundle": inputs.bundle_id, "made_from": sources},
    )
    return data.to_yaml()


def _origin(config: RunConfig, model: ModelInput) -> str:
    if config.model.init == "scratch":
        return (
            f"A {config.task} model with the architecture of `{model.source}`, "
            "all weights random before training."
        )
    if config.model.folder is not None:
        return (
            f"A {config.task} model trained further from another run's export of `{model.source}`."
        )
    if config.lora is not None:
        how = "merged into it" if config.lora.merge else "this folder has the adapter alone"
        return f"A LoRA adapter of `{model.source}` for {config.task}; {how}."
    return f"`{model.source}`, fine-tuned for {config.task}."


def loading_code(config: RunConfig, model: ModelInput) -> str:
    """The lines of Python that load the exported model, as Markdown."""
    auto, reads = task_named(config.task).auto, "AutoTokenizer"
    if not task_named(config.task).has_tokens:
        reads = "AutoImageProcessor" if model.preprocessing else ""
    lines = [f"from transformers import {', '.join(filter(None, (auto, reads)))}"]
    places = "`.` is this folder."
    if config.lora is not None and not config.lora.merge:
        lines += ["from peft import PeftModel", ""]
        base, revision, first = "BASE", "", config.model.folder
        if first is not None:
            where = f"`model` of the run `{first.parent.name}`"
        elif model.commit:
            base, revision = model.source, f', revision="{model.commit}"'
        else:
            staged = "/".join(model.path.parts[-3:])
            where = f"`{model.source}` of the manifest, and `{staged}` of the bundle"
        if base == "BASE":
            places += f" `BASE` is {where}. With `lora.merge: true` a run exports a whole model."
        lines += [
            f'base = {auto}.from_pretrained("{base}"{revision})',
            'model = PeftModel.from_pretrained(base, ".")',
        ]
    else:
        lines += ["", f'model = {auto}.from_pretrained(".")']
    if reads:
        name = reads.removeprefix("Auto").removeprefix("Image").lower()
        lines.append(f'{name} = {reads}.from_pretrained(".")')
    return "\n".join(["```python", *lines, "```", "", places])


def _provenance(
    config: RunConfig, inputs: Inputs, origin: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    yield "bundle", f"`{inputs.bundle_id}`", ""
    model = inputs.model
    what = "architecture and tokenizer" if config.model.init == "scratch" else "first weights"
    yield what, _at(model.source, model.commit), model.licence or UNSTATED
    if config.model.folder is not None:
        yield "trained further from", f"`{'/'.join(config.model.folder.parts[-2:])}`", ""
    for text in origin:
        yield "before that", text.removeprefix("before that: "), ""
    for data in inputs.datasets:
        for role, split in (("training data", data.train), ("validation data", data.validation)):
            if split is not None:
                yield role, _data(data, split, role), data.licence or UNSTATED


def _at(source: str, commit: str | None) -> str:
    return f"`{source}` at `{commit}`" if commit else f"`{source}`"


def _data(data: DatasetInput, split: SplitInput, role: str) -> str:
    limit = data.settings.limit.get("train" if role.startswith("train") else "validation")
    some = limit is not None and limit < split.rows
    rows = human_count(split.rows, "row")
    rows = f"the first {limit:,} of {rows}" if some else rows
    if split.part is not None:
        rows += f" (validation_seed {split.part.seed})"
    weight = (
        f", weight {data.settings.weight:g}"
        if role.startswith("train") and data.settings.weight != 1
        else ""
    )
    digest = (
        f", sha256 of its files `{'`, `'.join(d[:16] for d in split.digests[:4])}`"
        if not data.commit
        else ""
    )
    return (
        f"{_at(data.source, data.commit)}, config `{data.config}`, split `{split.name}`, "
        f"{rows}{weight}{digest}"
    )


def _settings(
    config: RunConfig, inputs: Inputs, plan: TrainingPlan
) -> Iterator[tuple[str, object]]:
    """Every key that means something, without those on files and Slurm; as they were decided."""
    decided: dict[str, object] = {
        "batch.global": plan.total,
        "batch.micro": f"{plan.micro} on each of {human_count(plan.world_size, 'rank')}",
        "precision": plan.precision,
        "engine.zero": plan.zero,
    }
    if task_named(config.task).has_tokens:
        decided["sequence_length"] = plan.sequence_length
        documents = documents_of(config, inputs.model, plan.sequence_length)
        decided["packing.documents"] = documents.value
    unused, keys = {where for where, _, _ in unused_keys(config)}, keys_of(RunConfig)
    omitted = {"model", *(name for name, key in keys.items() if key.decides == NO_RESULT)}
    for where, _, value in every_key(config):
        name = dotted(where)
        if where not in unused and where[0] not in omitted:
            value = decided.get(name, value)
            if value not in (None, "", (), {}):
                yield name, value


def _weights(record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Whose step the weights are, where an earlier one than the last was the best."""
    step, last = record.get(WEIGHTS_OF), record.get(EXPORTED)
    if step not in (None, last):
        yield (
            "weights",
            f"of step {step}, the lowest validation loss; not of the last step, {last}",
        )


def _machine(record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield "device", f"{record.get('world_size')} x {record.get('device')}"
    versions = {"python": record.get("python"), **dict(record.get("versions") or {})}
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if record.get("environment_tree"):
        yield "environment", f"`{record['environment_tree']}`"


def _results(metrics: list[Mapping[str, Any]]) -> str:
    evaluations = [line for line in metrics if "validation_loss" in line]
    steps = [line for line in metrics if "loss" in line]
    ends = steps if len(steps) < 2 else [steps[0], steps[-1]]
    rows = [(f"loss of step {line['step']}", _number(line["loss"])) for line in ends]
    if evaluations:
        best = min(evaluations, key=lambda line: float(line["validation_loss"]))
        chosen = {int(line["step"]): line for line in (best, evaluations[-1])}
        for step, line in sorted(chosen.items()):
            names = [key for key in line if key.startswith("validation_")]
            mark = " (the best)" if line is best else ""
            rows += [(f"{name} after step {step}{mark}", _number(line[name])) for name in names]
    note = "" if evaluations else "\n\nIt was not evaluated: the run had no validation split."
    return _table(("measure", "value"), rows) + note


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.6g}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


# `save_pretrained` writes some of these itself; others are the base model's weights.
NOT_KEPT = (
    ".safetensors", ".index.json", ".md", "config.json",
    ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".tflite", ".npz",
)  # fmt: skip
# As endings: `processor_config.json` includes preprocessor_config.json.
KEPT = ("tokenizer_config.json", "processor_config.json")
TEMPLATES = "additional_chat_templates/"


def read_companions(source: ModelInput) -> dict[str, bytes]:
    """Reads the staged files that are exported unchanged: tokenizer, chat templates, processor,
    licence.

    This happens before the first step, so that a damaged file costs no training.

    Returns:
        Name -> content.

    Raises:
        DamageError: a file cannot be read, or is not as it was fetched.
    """
    found = {
        name: read_checked(source.path / name, digest)
        for name, digest in source.digests.items()
        if _is_companion(name)
    }
    return found | _with_new_tokens(source)


def _with_new_tokens(source: ModelInput) -> dict[str, bytes]:
    """The files of a tokenizer that has the tokens which the run adds; empty: it adds none."""
    if not (source.new_tokens or source.new_special_tokens):
        return {}
    tokenizer = read_tokenizer(source.path, source.new_tokens, source.new_special_tokens)
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).glob("*.*")}


def read_origin(model: Path) -> tuple[str, ...]:
    """What an earlier run's card says of the weights in this folder; empty if no run made them.

    `model_card` writes it as `airlift:` in the metadata of README.md.
    """
    try:
        text = (model / "README.md").read_text(encoding="utf-8", errors="replace")
        head = text.split("---\n", 2)[1] if text.startswith("---\n") else ""
        metadata = yaml.safe_load(head)
    except (OSError, IndexError, yaml.YAMLError):
        return ()
    found = metadata.get("airlift") if isinstance(metadata, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("made_from"), list):
        return ()
    made_by = f"run {found.get('run')} in bundle {found.get('bundle')}"
    return (made_by, *map(str, found["made_from"]))


def export(
    model: Any,
    weights: Mapping[str, Any],
    lora: LoraConfig | None,
    companions: Mapping[str, bytes],
    card: str,
    folder: Path,
) -> None:
    """Writes a model folder for `from_pretrained` or `PeftModel.from_pretrained`, whole or not at
    all.

    Args:
        model: the transformers model.
        weights: its weights, by its own names. With LoRA at least the trained ones; all, where they
            are merged into weights that are not quantised.
        lora: the run file's settings.
        companions: what `read_companions` read before the first step.
        card: the text of its README.md.
        folder: is replaced.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if lora is not None and not lora.merge:
        write_adapter(model, dict(weights), temporary)
    else:
        whole, complete = merged(model, weights) if lora else (model, dict(weights))
        types = (tensor.dtype for tensor in complete.values() if tensor.is_floating_point())
        whole.config.dtype = next(types)
        whole.save_pretrained(temporary, state_dict=complete)
    for name, content in companions.items():
        path = temporary / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    for path in temporary.rglob("*"):
        # safetensors writes files with mode 0600; colleagues need to read them.
        path.chmod(0o755 if path.is_dir() else 0o644)
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    temporary.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def _is_companion(name: str) -> bool:
    """Whether a file is exported unchanged: top-level files, but not weights and
    `save_pretrained`'s own.

    Image preprocessing files and additional chat templates count; so do licences.
    """
    if name.startswith(TEMPLATES):
        return name.count("/") == 1 and name.endswith(".jinja")
    return "/" not in name and (name.endswith(KEPT) or not name.endswith(NOT_KEPT))
