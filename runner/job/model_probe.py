"""Children that look at the model and the texts by the ranks' Python, while other checks are done.

`look_with_torch`: whether transformers builds the model and finds its weights, on torch's meta
device. It takes no memory for weights, but seconds to import torch. A rank judges what it loads by
the same `judge`. `look_without_torch`: what transformers says about config.json, the tokenizer and
the first rows. It has no network and cannot import torch: that saves seconds.

An answer without errors is kept for the next command.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from runner import kept, offline
from runner.child import Child
from runner.config.run_config import RunConfig
from runner.data.recipe import Recipe
from runner.data.tokenizing import load_tokenizer
from runner.from_stage import StageError, UsageError, shortage
from runner.inputs import Inputs, ModelInput
from runner.job.findings import (
    Finding,
    attempt,
    errors_in,
    errors_of,
    fact_line,
    usage_error,
    warning,
)
from runner.job.installed import is_installed, leave_torch_alone
from runner.job.plan import TrainingPlan
from runner.job.shapes import IN_A_LAYER, newer_transformers
from runner.tasks import Task, task_named


class LookResult(NamedTuple):
    """What a child has found.

    Attributes:
        findings: what it found.
        numbers: what it counted; an item is None where that failed; empty: nothing is known.
    """

    findings: list[Finding]
    numbers: Sequence[int | None] = ()


class Look:
    """What a child looks at.

    Args:
        kind: what it looks at, for messages.
        basis: all that its answer follows from, beside the Python.
        work: what the child does; returns findings and numbers.
        arguments: of `work`.
        python: the words that start its Python; empty: this one.
    """

    def __init__(
        self,
        kind: str,
        basis: Sequence[object],
        work: Callable[..., LookResult],
        arguments: tuple[object, ...],
        python: tuple[str, ...],
    ) -> None:
        self._kind, self._python = kind, python
        images = [_as_it_is(Path(word)) for word in python if Path(word).is_file()]
        self._path = kept.path_of(kind, *basis, [*images, *python])
        self._child = None if kept.read(self._path) else Child(work, arguments, python)

    def answer(self) -> LookResult:
        """Waits for the answer."""
        if self._child is None:
            known = kept.read(self._path)
            return LookResult([Finding(**one) for one in known["findings"]], known["numbers"])
        remedy = "Run it where there is more memory."
        if self._python:
            remedy = f"To see why: {shlex.join([*self._python, '-c', 'import runner, torch'])}"
        try:
            answer: LookResult = self._child.answer(f"the check of the {self._kind}", remedy)
        except UsageError as error:
            return LookResult([*errors_of(error)])
        except StageError as error:
            return LookResult([warning(f"not checked: {error.message}", error.remedy)])
        if not errors_in(answer.findings):
            plain = [finding.to_json() for finding in answer.findings]
            kept.keep(self._path, {"findings": plain, "numbers": answer.numbers})
        return answer


def look_at_model(config: RunConfig, model: ModelInput, python: tuple[str, ...]) -> Look:
    """Whether transformers builds the model and finds its weights; it counts its parameters."""
    folder = config.model.folder or model.path
    sums = sorted(model.digests.items())
    if config.model.folder is not None:
        sums = [(path.name, _as_it_is(path)) for path in sorted(folder.iterdir())]
    engine = [config.engine.name, config.engine.wrap]
    versions = kept.versions("torch", "transformers", "deepspeed")
    theirs = (dict(config.deepspeed), config.precision, config.engine.zero, config.half)
    basis = ("findings", versions, sums, config.task, config.model.init, engine, theirs)
    return Look("model", basis, look_with_torch, (config, model.asset, folder), python)


def look_at_texts(
    config: RunConfig,
    inputs: Inputs,
    rows: tuple[int, str],
    train: Sequence[Recipe],
    counted: Sequence[Recipe],
    python: tuple[str, ...],
) -> Look:
    """What transformers says without torch: of the tokenizer, of first rows, of small datasets.

    Args:
        rows: of the embedding (0: not known), and where that is written.
        train: what is trained on, where its first rows are written as samples.
        counted: splits whose sequences are counted.
    """
    basis = (
        "findings",
        kept.versions("transformers", "tokenizers"),
        sorted(inputs.model.tokenizer_digests.items()),
        [config.task, config.whole_words, rows],
        [recipe.key for recipe in (*train, *counted)],
    )
    arguments = (config, inputs, rows, train, counted)
    return Look("tokenizer", basis, look_without_torch, arguments, python)


def _as_it_is(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


TOGETHER = "Stage config.json and weights again, both from one revision: see `stage show BUNDLE`."


def look_with_torch(config: RunConfig, asset: str, path: Path) -> LookResult:
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
            return LookResult(found)  # the child without torch says why
        made, info = _load(config, path, known)
    except Exception as error:
        if shortage(error):
            raise
        return LookResult([*found, _explain(config, path, error, settings)])
    # Of weights with a new head only those below it must be there.
    part = f"{made.base_model_prefix}." if task_named(config.task).has_classes else ""
    found += judge(asset, info, settings, part)
    if config.engine.name == "fsdp":
        found += attempt(_blocks, config, made)
    return LookResult(found, [_number_of(made)])


def _blocks(config: RunConfig, made: Any) -> Iterator[Finding]:
    from runner.training.engines.native import blocks_of

    yield fact_line(f"engine.wrap: {blocks_of(made, config)[1]}")


def count_parameters(config: RunConfig, path: Path) -> int:
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
    return sorted(name for name in info.get(which, ()) if IN_A_LAYER.search(name))


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


NAMED = 3  # at most so many tokens are named in a message
FEW = 0.5  # a tokenizer with less than this share of the embedding's rows is worth a line
SPECIAL = ("bos", "eos", "unk", "cls", "sep", "mask")
"""Tokens that training itself may write. Not the padding: a batch here is filled with others."""


def look_without_torch(
    config: RunConfig,
    inputs: Inputs,
    rows: tuple[int, str],
    train: Sequence[Recipe],
    counted: Sequence[Recipe],
) -> LookResult:
    """Loads what the ranks will load of a model's small files.

    Args:
        rows: of the embedding (0: not known), and where that is written.
        train: what is trained on, where `Task.writes_chats`: its first rows are written as samples.
        counted: splits that are so small that they may not fill a step.

    Returns:
        What was found; and for each of `counted` its sequences.
    """
    leave_torch_alone()
    offline.close_network()
    found, numbers = [*attempt(check_config, config, inputs.model)], list[int | None]()
    if task_named(config.task).has_tokens:
        found += attempt(_look_at_tokenizer, config, inputs, rows)
    if not errors_in(found):
        for recipe in train:
            found += attempt(_write_samples, config, recipe)
    if errors_in(found):
        return LookResult(found)
    for recipe in counted:
        try:
            numbers.append(sum(1 for _ in task_named(recipe.task).samples(recipe)))
        except StageError as error:
            found += errors_of(error)
            numbers.append(None)
    return LookResult(found, numbers)


def check_config(config: RunConfig, model: ModelInput) -> None:
    """Refuses a config.json that the installed transformers does not read, with its words."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(model.path), local_files_only=True, trust_remote_code=False)
    except ImportError:
        return  # of torch, or of a package for one kind of model: the ranks have it
    except Exception as error:
        if shortage(error):
            raise
        said = " ".join(str(error).split())[:300] or type(error).__name__
        wanted, here = newer_transformers(model), metadata.version("transformers")
        remedy = "Stage the model again, with its own config.json unchanged, or use another model."
        if wanted:
            remedy = (
                f"transformers {wanted} wrote it: pip install -U 'transformers>={wanted}', in the "
                "environment of the job too."
            )
        raise UsageError(
            f"{config.path}: transformers {here} does not read "
            f"{model.path / 'config.json'}: {said}",
            remedy,
        ) from None


def _look_at_tokenizer(
    config: RunConfig, inputs: Inputs, rows: tuple[int, str]
) -> Iterator[Finding]:
    model, task = inputs.model, task_named(config.task)
    tokenizer = load_tokenizer(model)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers makes an empty one of the class that config.json names.
        raise UsageError(
            f"`{config.model.asset}` has no tokenizer: none of its files (tokenizer.json, "
            "vocab.txt, vocab.json, a SentencePiece model) is in the bundle, or they hold no "
            "tokens.",
            "Stage the tokenizer's files with the model, from the same repository.",
        )
    if rows[0]:
        yield from compare(task, model, tokenizer, *rows)
    yield from map(fact_line, task.check_tokenizer(config, inputs, tokenizer))


def compare(
    task: Task, model: ModelInput, tokenizer: Any, rows: int, where: str
) -> Iterator[Finding]:
    """Compares the ids of a tokenizer with the rows of an embedding.

    An id beyond them reads past their end: on a GPU an assertion in CUDA, on a CPU an index error
    or nan. The opposite is normal: embeddings are padded to a multiple of 64 or more. A token that
    was added beyond them and never appears in a text does no harm (Gemma 3 1B has one).
    """
    asset, new = f"`{model.asset}`: its tokenizer", {*model.new_tokens, *model.new_special_tokens}
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    own = {n for text, n in tokenizer.get_vocab().items() if n not in added and text not in new}
    highest, count = max(own, default=-1), len(own | added.keys())
    remedy = "Tokenizer and model do not belong together: stage both from one repository."
    if highest >= rows:
        yield usage_error(
            f"{asset} knows {max(count, highest + 1)} tokens, its model {rows} (ids up to "
            f"{highest}; {where}).",
            remedy,
        )
        return
    beyond = {n: text for n, text in added.items() if n >= rows and text not in new}
    template = str(tokenizer.chat_template or "") if task.writes_chats else ""
    special = {getattr(tokenizer, f"{role}_token", None) for role in SPECIAL}
    if used := {
        n: text
        for n, text in beyond.items()
        if task.draws_tokens or text in special or text in template
    }:
        yield usage_error(
            f"{asset} adds {_named(used)} beyond the model's {rows} ids ({where}).",
            "Resize the model's embedding and save it (model.resize_token_embeddings), then "
            "stage it again; or remove the tokens from the tokenizer.",
        )
    elif beyond:
        yield warning(
            f"{asset} adds {_named(beyond)} beyond the model's {rows} ids: a text in which they "
            "are written would end the run.",
            "Check that the texts hold none of them.",
        )
    if count < FEW * rows:
        yield warning(
            f"{asset} knows {count} tokens, its model {rows}.",
            f"If that is not intended: {remedy[0].lower()}{remedy[1:]}",
        )


def _named(tokens: dict[int, str]) -> str:
    named = [f"{text} ({number})" for number, text in sorted(tokens.items())[:NAMED]]
    more = len(tokens) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _write_samples(config: RunConfig, recipe: Recipe) -> Iterator[Finding]:
    tokenizer = load_tokenizer(recipe.model)
    if problem := task_named(recipe.task).try_first_rows(recipe, tokenizer):
        yield warning(
            f"{config.path}: {problem}.",
            "Look at these rows: in `messages`, the answers need the role `assistant`; "
            "dataset.response names the column of the answers; a longer sequence_length, or "
            "dataset.too_long: cut, keeps long rows.",
        )
