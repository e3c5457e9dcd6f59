"""`runner init`: a run file from an example of runner/examples, with what is in a bundle.

task, bundle -> `new_run_file` -> the text of a run file, and lines that explain its choices.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.config.chats import Naming
from runner.config.data import DatasetConfig
from runner.data.table import classes_of
from runner.data.tokenizing import has_tokenizer
from runner.from_stage import UsageError, as_shown, hash_file, quoted, read_value, scalar
from runner.inputs import SplitInput, environments, remedy_as_published, split_input
from runner.inputs.clusters import has_gpus
from runner.job.shapes import ModelShape
from runner.tasks import TASKS, Task, has_model
from stage.bundle.bundle import Bundle
from stage.environment.check import on_site

_STEPS_OF_AN_EPOCH = 20  # with fewer, the batch of an example is too large
_ENOUGH_ROWS = 40
"""With fewer, none are held out to validate."""

_VALIDATION = ("validation", "valid", "val", "dev", "test")


@dataclass(frozen=True)
class _Model:
    name: str
    kind: str
    settings: Mapping[str, Any]
    has_weights: bool
    why_not: Mapping[str, str]
    """Task -> why it is not for that task; in a few words, or none: its type says it."""


@dataclass(frozen=True)
class _Data:
    """A dataset: key of the run file -> its value; comments; the rows of the training split.

    `unusual`: the keys whose column does not have a usual name. `unread`: the columns that the
    task does not read -> their Arrow types. `doubt`: why its classes cannot be learned, or none.
    """

    keys: Mapping[str, str]
    comments: Mapping[str, str]
    rows: int
    unusual: tuple[str, ...]
    unread: Mapping[str, str]
    doubt: str


def new_run_file(task: str, path: Path, bundle: Path | None) -> tuple[str, list[str]]:
    """Returns the text of a new run file, and lines that explain it.

    Args:
        task: as in the run file.
        path: the file that will be written.
        bundle: whose assets are used; None: those of the example.

    Raises:
        UsageError: the bundle has no model or no dataset for the task.
        DamageError: the bundle's lock is damaged.
    """
    example = Path(__file__).parents[1] / "examples" / TASKS[task].example
    blocks = _blocks(example.read_text(encoding="utf-8"))
    where = "BUNDLE" if bundle is None else str(bundle)
    head = (
        f"# Next: runner check {quoted(path)} --bundle {quoted(where)}   "
        "(it prints the other keys, too)\n"
    )
    name = re.sub(r"[^\w.+-]+", "-", path.stem).lstrip(".+-") or "run"
    blocks["name"] = f"name: {name}\n"
    if bundle is not None and (manifest := _manifest(path, bundle)):
        blocks["name"] += f"manifest: {scalar(manifest)}   # for runner submit --to CLUSTER\n"
    slurm = read_value(blocks["slurm"])["slurm"]
    blocks["slurm"] = _as_examples(slurm)
    if bundle is None:
        said = [f"its assets are those of the example runs/{example.name}: no bundle is here"]
        return head + "".join(blocks.values()), said
    opened = Bundle.open(bundle)
    (model, others), data = _model(task, opened), _data(TASKS[task], opened)
    _adapt(blocks, model)
    init, why = "pretrained", "init: scratch trains from config.json alone"
    if not model.has_weights:
        init, why = "scratch", "no weights of it are in the bundle"
    blocks["model"] = (
        f"model: {{asset: {scalar(model.name)}, init: {init}}}   # {why}{_also(others)}\n"
    )
    lines = [
        f"  {key}: {value}" + (f"   # {data.comments[key]}" if data.comments.get(key) else "")
        for key, value in data.keys.items()
    ]
    blocks["dataset"] = "\n".join(["dataset:", *lines, ""])
    _shrink_batch(blocks, data.rows)
    why = "the only one that fits the task"
    if others:
        why = f"the first that fits the task; also: {', '.join(others)}"
    said = [f"model {model.name}: {why}", *_describe(TASKS[task], data)]
    gpus, nodes, torch = has_gpus(path), "clusters.yaml names the profile of nodes", ""
    environment = next((folder.name for folder in environments(bundle)), "")
    if environment:
        torch = on_site.provided(opened.asset_path(environment)).get("torch", "")
        gpus, nodes = _is_for_gpus(opened, environment), "the environment is for nodes"
        on_it = f", on the site's torch {torch}: each job needs its module" if torch else ""
        said.append(f"environment {environment}: the ranks run in it{on_it}")
    if gpus is False:
        said.append(f"slurm.gpus_per_node: 0: {nodes} without a GPU")
        slurm["gpus_per_node"] = 0
    blocks["slurm"] = _as_examples(slurm, torch)
    if environment:
        blocks["slurm"] = f"environment: {{asset: {scalar(environment)}}}\n{blocks['slurm']}"
    return head + "".join(blocks.values()), said


def _manifest(path: Path, bundle: Path) -> str | None:
    """The manifest near a run file whose lock is the bundle's, relative to the run file."""
    wanted = Bundle.open(bundle).id
    for folder in dict.fromkeys((Path(), Path("manifests"), path.parent, bundle.parent)):
        for lock in sorted(folder.glob("*.lock")):
            manifest = lock.with_suffix(".yaml")
            if manifest.is_file() and hash_file(lock).sha256 == wanted:
                return os.path.relpath(manifest, path.parent)
    return None


def _blocks(text: str) -> dict[str, str]:
    """Key -> its lines and the comments above it; those above the first key are omitted."""
    blocks: dict[str, str] = {}
    key = above = ""
    for line in text.splitlines(keepends=True):
        if found := re.match(r"([a-z_]+):", line):
            blocks[found[1]] = (above if key else "") + line
            key, above = found[1], ""
        elif line.startswith("#"):
            above += line
        else:
            blocks[key] += line
    return blocks


def _adapt(blocks: dict[str, str], model: _Model) -> None:
    """Removes from an example what fits its own model only."""
    length = ModelShape.of(model.settings).longest
    found = re.match(r"sequence_length: (\d+)", blocks.get("sequence_length", ""))
    if found and length and length < int(found[1]):
        blocks["sequence_length"] = f"sequence_length: {length}   # tokens: all that it takes\n"
    if model.name == read_value(blocks["model"])["model"]["asset"]:
        return
    if "lora" in blocks:
        blocks["lora"] = re.sub(r", targets: \[[^]]*\]", "", blocks["lora"])
    if "quantization" in blocks:
        blocks["quantization"] = f"# {blocks['quantization'].rstrip()}   # needs a GPU\n"
        blocks["optimizer"] = blocks["optimizer"].replace("paged_adamw_8bit", "adamw")


def _as_examples(slurm: Mapping[str, Any], torch: str = "") -> str:
    """The block `slurm`: what every site names in its own way is only an example, in comments.

    Args:
        torch: the version of the site's own, whose module each job loads; empty: there is none.
    """
    lines = ["# Yours to fill in: `sinfo -s` lists partitions and GPUs, `module avail` modules."]
    lines.append("slurm:")
    loaded = [*filter(None, os.environ.get("LOADEDMODULES", "").split(":"))] if torch else []
    values: dict[str, Any] = {**slurm}
    values.setdefault("modules", ["nvidia/cuda/12.2"])
    if torch:
        values["modules"] = loaded or ["pytorch"]
    for key, value in values.items():
        written = value if key == "partition" else json.dumps(value, ensure_ascii=False)
        is_loaded = key == "modules" and bool(loaded)
        unset = "# " if key in ("partition", "modules") and not is_loaded else ""
        why = f"as loaded here, for torch {torch}" if is_loaded else "an example"
        lines.append(f"  {unset}{key}: {written}   # {why}")
    return "\n".join([*lines, ""])


def _shrink_batch(blocks: dict[str, str], rows: int) -> None:
    """Leaves the batch to Airlift where the example's would be a large part of the data."""
    batch = read_value(blocks["batch"])["batch"]
    if rows < _STEPS_OF_AN_EPOCH * batch["global"]:
        blocks["batch"] = (
            f"batch: {{global: auto, micro: auto}}   # sequences per step; the example has "
            f"{batch['global']}, for more data than these {rows} rows\n"
        )


def _model(task: str, bundle: Bundle) -> tuple[_Model, list[str]]:
    """The model for a task, and the names of others that fit as well.

    Raises:
        UsageError: there is none.
    """
    models = _models(bundle)
    # Of a type that no task has, a newer transformers may know more.
    known = TASKS[task].model_types
    rank = {m.name: (not m.has_weights, m.kind not in known) for m in models}
    found = [m for m in models if task not in m.why_not]
    if not found:
        have = ", ".join(
            f"{m.name} ({m.kind}{m.why_not[task] and ': ' + m.why_not[task]})" for m in models
        )
        fit = [other for other in TASKS if any(other not in m.why_not for m in models)]
        raise UsageError(
            f"{bundle.root}: no model in this bundle fits the task {task}.",
            f"Its models: {have or 'none'}. "
            + (f"Tasks that they fit: {', '.join(fit)}. " if fit else "")
            + "Or add one below `assets:` of the manifest, `my-model: {path: FOLDER}` or "
            "`my-model: {model: ORG/NAME}`, and run `stage fetch` again.",
        )
    best = min(found, key=lambda m: rank[m.name])
    return best, [m.name for m in found if rank[m.name] == rank[best.name] and m is not best]


def _models(bundle: Bundle) -> list[_Model]:
    found = []
    for name, asset in bundle.lock.assets.items():
        path = bundle.asset_path(name) / "config.json"
        if asset.kind not in ("model", "files") or not path.is_file():
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
            kind = str(settings["model_type"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        files = [file.path.removeprefix(f"{asset.folder}/") for file in asset.files]
        has_weights = any(file.endswith(".safetensors") for file in files)
        reasons = {name: _why_not(task, settings, files) for name, task in TASKS.items()}
        why_not = {task: why for task, why in reasons.items() if why is not None}
        found.append(_Model(name, kind, settings, has_weights, why_not))
    return found


def _why_not(task: Task, settings: Mapping[str, Any], files: Sequence[str]) -> str | None:
    """Why `check` refuses a model for a task: as in `_Model`; None: it does not."""
    if not has_model(task, str(settings["model_type"])):
        return ""
    if task.sees_ahead(settings):
        return "an encoder"
    return "no tokenizer" if task.has_tokens and not has_tokenizer(files) else None


def _data(task: Task, bundle: Bundle) -> _Data:
    found, lists = [], dict[str, str]()
    for name, asset in bundle.lock.assets.items():
        for config, splits in asset.configs.items():
            train = "train" if "train" in splits else next(iter(splits), None)
            if train is None:
                continue
            split = split_input(bundle, asset, train, splits[train])
            columns, (chosen, more, unusual) = split.columns, task.choose(split)
            lists |= {f"{name}: {c}": kind for c, kind in columns.items() if _is_of_structs(kind)}
            if chosen:
                comments = {key: _also(names).removeprefix("; ") for key, names in more.items()}
                if naming := Naming.of(columns.get(chosen.get("messages", ""), ""), {}, {}):
                    shape = f"lists of {{{naming.role}, {naming.content}}}"
                    comments["messages"] = f"{shape}{_also(more['messages'])}"
                held_out = "10%" if split.rows >= _ENOUGH_ROWS else "null"
                validation = next((v for v in _VALIDATION if v in splits and v != train), held_out)
                keys = {"asset": scalar(name)}
                keys |= {"config": scalar(config)} if len(asset.configs) > 1 else {}
                keys |= {key: scalar(column) for key, column in chosen.items()}
                keys["train"] = scalar(train)
                keys["validation"] = validation if validation == held_out else scalar(validation)
                comments["validation"] = {
                    "10%": "a share of train is held out, to measure the model",
                    "null": "5%: holds out a share of train",
                }.get(validation, "null: none")
                guessed = (key for key in unusual if key in task.ambiguous)
                comments |= {key: f"a guess{_also(more[key])}" for key in guessed}
                settings: dict[str, Any] = {**chosen}
                read = task.columns(DatasetConfig(asset=name, **settings)).values()
                unread = {c: kind for c, kind in columns.items() if c not in read}
                doubt = _doubt(split, chosen.get(task.class_key))
                found.append(_Data(keys, comments, split.rows, unusual, unread, doubt))
    if not found:
        wanted = " and ".join(task.chosen)
        datasets = [asset for asset in bundle.lock.assets.values() if asset.kind == "dataset"]
        have = [asset.name for asset in datasets]
        problem = f"no dataset in this bundle has columns for the task {task.name} ({wanted})"
        if published := [asset.name for asset in datasets if asset.is_as_published]:
            raise UsageError(
                f"{bundle.root}: {problem}; the files of {', '.join(published)} travel as "
                "published, not as parquet.",
                remedy_as_published(published[0]),
            )
        if "messages" in task.reads and lists:
            held = "; ".join(f"{column} holds {kind}" for column, kind in lists.items())
            raise UsageError(
                f"{bundle.root}: {problem}. {as_shown(held)}.",
                "Where a talk is in two columns, join them to one list, `messages`, and fetch "
                f"again. Where its messages have other keys: `runner init {quoted(task.name)}`, "
                "without --bundle, and in its `dataset:` write messages: COLUMN, "
                "fields: {role: KEY, content: KEY}",
            )
        raise UsageError(
            f"{bundle.root}: {problem}.",
            f"Its datasets: {', '.join(have) or 'none'}; `stage show {quoted(bundle.root)}` "
            "lists columns.",
        )
    best = min(found, key=lambda data: (bool(data.doubt), len(data.unusual)))
    others = [data.keys["asset"] for data in found if data is not best]
    comments = {**best.comments, "asset": _also(others).removeprefix("; ")}
    return replace(best, comments=comments)


def _is_of_structs(kind: str) -> bool:
    return re.match(r"(large_)?list<\w+: struct<", kind) is not None


def _doubt(split: SplitInput, column: str | None) -> str:
    """Why `check` will refuse the classes of a split; empty: it will not."""
    try:
        if column is not None:
            classes_of(split, column)
    except UsageError as error:
        return error.message
    return ""


def _describe(task: Task, data: _Data) -> list[str]:
    keys = {key: value for key, value in data.keys.items() if key != "asset"}
    what = ", ".join(f"{key}: {value}" for key, value in keys.items())
    also = data.comments["asset"] and f" ({data.comments['asset']})"
    guessed = [f"dataset.{key}" for key in data.unusual if key in task.ambiguous]
    said = [f"dataset {data.keys['asset']}{also}: {what}"]
    said += [f"warning: `runner check` refuses it: {data.doubt}"] * bool(data.doubt)
    if guessed:
        doubt = "a guess, as no column has a usual name: set what is right"
        said.append(f"{' and '.join(guessed)}: {doubt}")
    if "format" in keys:
        said.append("`format` takes the place of the model's chat template, if it has one")
    if "messages" in task.reads and data.unread:
        unread = " ".join(as_shown(", ".join(data.unread)).split())
        said.append(f"columns that are not read, and not learned: {unread}")
        said += [
            f"{as_shown(name)} holds {kind}: if it is the talk, set messages: {as_shown(name)}, "
            "fields: {role: KEY, content: KEY}"
            for name, kind in data.unread.items()
            if _is_of_structs(kind) and Naming.of(kind, {}, {}) is None
        ]
    return said


def _is_for_gpus(bundle: Bundle, asset: str) -> bool:
    """Whether the profile that an environment was solved for has a driver of GPUs."""
    locked = bundle.lock.assets[asset].environment
    return locked is None or "__cuda" in locked.virtual_packages


def _also(others: Sequence[str]) -> str:
    """The other possible values, for the end of a line: names can hold line breaks."""
    return f"; also: {' '.join(as_shown(', '.join(others)).split())}" if others else ""
