"""Whether transformers builds a run's model and finds its weights, on torch's meta device.

`look` runs in a child process: it takes no memory for weights, but seconds to import torch. A rank
judges what it loads by the same `judge`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.config.run_config import RunConfig
from runner.errors import shortage
from runner.job.findings import Finding, attempt, fact_line, usage_error, warning
from runner.job.installed import is_installed
from runner.job.plan import TrainingPlan
from runner.tasks import task_named

IN_LAYER = re.compile(r"\.\d+\.")
TOGETHER = "Stage config.json and weights again, both from one revision: see `stage show BUNDLE`."


def look(config: RunConfig, asset: str, path: Path) -> tuple[list[Finding], list[int]]:
    """Builds the model as a rank does, without memory for its weights.

    Args:
        path: the folder with config.json, and the weights if the run begins with some.

    Returns:
        What is wrong, and the number of the model's parameters: of one item if it is built.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = list[Finding]()
    if config.engine.config is not None and is_installed("deepspeed"):
        found += attempt(check_ds_config, config)
    settings: dict[str, Any] = {}
    try:
        settings = json.loads((path / "config.json").read_bytes())
        try:
            known = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        except ValueError:
            return found, []  # the child without torch says why
        made, info = _load(config, path, known)
    except Exception as error:
        if shortage(error):
            raise
        return [*found, _explain(config, path, error, settings)], []
    found += judge(asset, info, settings, _kept_part(config, made))
    if config.engine.name == "fsdp":
        found += attempt(_blocks, config, made)
    return found, [_number_of(made)]


def _blocks(config: RunConfig, made: Any) -> Iterator[Finding]:
    from runner.training.engines.native import blocks_of

    yield fact_line(f"engine.wrap: {blocks_of(made, config)[1]}")


def count(config: RunConfig, path: Path) -> int:
    """Returns the number of parameters of the model that the ranks make.

    Args:
        path: the folder with config.json, and the weights if the run begins with some.
    """
    import transformers

    known = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    return _number_of(_load(config, path, known)[0])


def _number_of(made: Any) -> int:
    return sum(parameter.numel() for parameter in made.parameters())


def check_ds_config(config: RunConfig) -> None:
    """Asks DeepSpeed about the user's ds_config.json, in each precision that a rank may decide.

    Raises:
        UsageError: DeepSpeed refuses it.
    """
    from runner.training.engines.deepspeed import check_settings, ds_config

    logging.disable(logging.WARNING)  # DeepSpeed logs to stdout
    precisions = (config.precision,) if config.precision != "auto" else (*config.half, "fp32")
    zero = 1 if config.engine.zero == "auto" else config.engine.zero
    for precision in precisions:
        # Only the batch of one rank: its numbers are the run's own, and agree by themselves.
        plan = TrainingPlan(1, 1, 1, 1, 1, precision, zero, (), config.engine.offload)
        check_settings(config, ds_config(config, plan))


def _load(config: RunConfig, path: Path, known: Any) -> tuple[Any, Mapping[str, Any]]:
    import torch

    # "eager": whether a faster one works is known only where there is a GPU.
    how = {"attn_implementation": "eager"}
    auto = task_named(config.task).model_class()
    # Imports the model's module now: transformers 5.0 makes tensors while it is imported, and reads
    # them, which cannot be done on the meta device.
    auto._model_mapping.get(type(known), None)
    if config.model.init == "scratch":
        with torch.device("meta"):
            return auto.from_config(known, **how), {}
    loaded: tuple[Any, Mapping[str, Any]] = auto.from_pretrained(
        str(path),
        local_files_only=True,
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **how,
    )
    return loaded


def _kept_part(config: RunConfig, made: Any) -> str:
    """The beginning of the names of weights that must be there: a new head is drawn."""
    return f"{made.base_model_prefix}." if task_named(config.task).has_classes else ""


def judge(
    asset: str,
    info: Mapping[str, Any],
    settings: Mapping[str, Any],
    part: str = "",
) -> Iterator[Finding]:
    """Yields what is wrong with weights, from transformers' own report on loading them.

    What is legal stays silent: a head that is missing or of another size, a pooler, weights that
    are tied or shared.

    Args:
        info: missing, unexpected and mismatched names.
        settings: the content of config.json.
        part: the beginning of the names whose shapes must fit.
    """
    begin = f"`{asset}`: its weights and its config.json differ: "
    misfits = sorted(
        entry for entry in info.get("mismatched_keys", ()) if entry[0].startswith(part)
    )
    if misfits:
        name, theirs, ours = misfits[0]
        wrong = next((b for a, b in zip(theirs, ours, strict=False) if a != b), 0)
        keys = [key for key, value in _flat(settings) if value == wrong and value]
        named = f" ({keys[0]} is {wrong})" if keys else ""
        yield usage_error(
            f"{begin}{name} has shape {list(theirs)}, and by config.json {list(ours)}{named}"
            f"{_more(misfits)}.",
            TOGETHER,
        )
    missing = [name for name in _in_layers(info, "missing_keys") if name.startswith(part)]
    if missing:
        yield usage_error(
            f"{begin}the weights lack {missing[0]}{_more(missing)}, which would be random.",
            TOGETHER,
        )
    unused = _in_layers(info, "unexpected_keys")
    if unused and not missing:
        yield warning(
            f"`{asset}`: its weights have {unused[0]}{_more(unused)}, for which the model of its "
            "config.json has no place: they are not loaded.",
            TOGETHER,
        )


def _in_layers(info: Mapping[str, Any], which: str) -> list[str]:
    return sorted(name for name in info.get(which, ()) if IN_LAYER.search(name))


def _more(names: Sequence[object]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _flat(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The keys and values of config.json, with those inside of mappings."""
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        inner = _flat(value) if isinstance(value, dict) else [("", value)]
        pairs += [(f"{key}.{name}" if name else key, value) for name, value in inner]
    return pairs


def _explain(
    config: RunConfig, path: Path, error: Exception, settings: Mapping[str, Any]
) -> Finding:
    """Explains why transformers does not build a model."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, ImportError):  # of a package for one kind of model
        return warning(
            f"{config.path}: not checked here: whether the weights of {path} fit: {said}",
            "The ranks find out; `runner rehearse` tries it.",
        )
    here = f"{config.path}: transformers {metadata.version('transformers')}"
    what = f"{type(error).__name__}: {said}"
    if isinstance(error, KeyError):  # a name that transformers looks up in a table of its own
        keys = [key for key, value in _flat(settings) if value == error.args[0]]
        what = f"it has no {keys[0]} `{error.args[0]}`" if keys else what
    return usage_error(
        f"{here} cannot build the model of {path / 'config.json'}: {what}.",
        "Stage the model again, with its own config.json unchanged, or correct that key at its "
        "source.",
    )
