"""The curves of a command's run, from what people's trainers write into its working folder.

The first of `_SOURCES` that has steps gives the curves. No file is trusted: what is large, damaged
or no number is omitted, with a note. Needs no torch.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.from_stage import human_size, quoted
from runner.run_folder.history import Columns, History, number
from runner.run_folder.project import description_of, read_description
from runner.run_folder.results import ResultFile, results

MOST_BYTES = 64 * 10**6  # of one file
MOST_NAMES = 200  # measures, and rows of the table
MOST_FILES = 20  # of one kind
MOST_WORDS = 200  # characters of an error
CURVES = "curves"  # in the facts of a History: the file with the curves

_STEPS = ("step", "global_step", "current_steps", "iteration", "iter")
"""transformers and Lightning; accelerate's scripts; LLaMA-Factory; others."""

_OURS = {
    "learning_rate": "lr",
    "train_loss": "loss",
    "train_learning_rate": "lr",
    "train_grad_norm": "grad_norm",
    "validation_acc": "validation_accuracy",
}
_VALIDATION = re.compile(r"^(?:eval|val|valid|validation)[_/]")
_WANDB = re.compile(r"(?:.*/)?offline-run-[^/]*(?=/)")
_TABLES = re.compile(r"(?:^|/)(?:\w+_results|results(?:_[^/]*)?)\.json$")

Line = dict[str, Any]
Source = tuple[re.Pattern[str], Callable[[Path], Sequence[Any]]]


def with_curves(history: History, *, quick: bool = False) -> History:
    """The history of a command's run, with what its command wrote and measured.

    Args:
        quick: without TensorBoard's files, whose library takes seconds to import.

    Returns:
        The history of a training as it is.
    """
    if not history.is_command:
        return history
    work, found, notes = history.folder.work, results_of(history), list[str]()
    sources = [source for source in _SOURCES if not (quick and source[1] is _of_tensorboard)]
    source, lines = _steps(work, found[::-1], sources, notes)
    steps, validations, table = _columns(lines)
    table |= _table(work, found[::-1], notes)
    for run in sorted({match[0] for result in found if (match := _WANDB.match(result.path))}):
        sync = f"wandb sync {quoted(work / run)}"
        notes.append(f"files of wandb, to send from a machine with internet: {sync}")
    return replace(
        history,
        facts={**history.facts, CURVES: f"work/{source}" if source else None},
        steps=steps,
        validations=validations,
        table=table,
        results=tuple(found),
        warnings=(*history.warnings, *notes),
    )


def _columns(lines: Sequence[Line]) -> tuple[Columns, Columns, dict[str, str | float]]:
    """The measures of steps, those of validations, and those of the whole run."""
    table = dict[str, str | float]()
    by_step, names = dict[int, Line](), set[str]()
    for line in lines:
        if "train_runtime" in line:  # the last line of Trainer: means over the whole run
            table |= {name: value for name, value in line.items() if name != "step"}
            continue
        measures = {_our_name(name): value for name, value in line.items() if name != "step"}
        names |= set(sorted(measures.keys() - names)[: MOST_NAMES - len(names)])
        kept = {name: value for name, value in measures.items() if name in names}
        by_step.setdefault(line["step"], {}).update(kept)
    steps, validations = Columns(), Columns()
    for step, measures in sorted(by_step.items()):
        seldom = {name for name in measures if name.startswith("validation_")}
        for columns, chosen in ((validations, seldom), (steps, measures.keys() - seldom)):
            if chosen:
                columns.append({"step": step, **{name: measures[name] for name in chosen}})
    return steps, validations, table


def results_of(history: History) -> list[ResultFile]:
    """What the command wrote, as `results:` of its run file narrows it; the newest last."""
    packed = read_description(description_of(history.folder))
    asked = history.settings.get("results")
    patterns = [str(pattern) for pattern in asked] if isinstance(asked, list) else []
    return results(history.folder.work, packed.files if packed else {}, patterns)


def _our_name(name: str) -> str:
    """A measure by our name where it means the same."""
    name = _VALIDATION.sub("validation_", name)
    return _OURS.get(name.replace("/", "_"), name)


def _steps(
    work: Path, newest: Sequence[ResultFile], sources: Sequence[Source], notes: list[str]
) -> tuple[str, list[Line]]:
    """The file with the curves, and its lines; empty: there is none."""
    for pattern, entries_of in sources:
        for result in [result for result in newest if pattern.search(result.path)][:MOST_FILES]:
            entries = _read(work, result, entries_of, notes)
            if lines := [line for line in map(_line, entries) if line]:
                return result.path, lines
    return "", []


def _read(
    work: Path, result: ResultFile, entries_of: Callable[[Path], Sequence[Any]], notes: list[str]
) -> Sequence[Any]:
    """What a file has; nothing, with a note, where it cannot be read."""
    try:
        if result.size > MOST_BYTES:
            raise ValueError(f"it has {human_size(result.size)}")
        return entries_of(work / result.path)
    except Exception as error:  # noqa: BLE001 - anyone wrote these bytes; protobuf has errors of its own
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        kind = "it has no " if isinstance(error, KeyError) else kind
        notes.append(f"{result.path} was not read: {kind}{str(error)[:MOST_WORDS]}")
        return ()


def _line(entry: Any) -> Line | None:
    """The step and the numbers of an entry; None: it has no step, or no number."""
    if not isinstance(entry, dict):
        return None
    step = next((step for key in _STEPS if type(step := entry.get(key)) is int), None)
    if step is None or abs(step) > 2**53:
        return None
    # NaN and infinity stay: the page says at which step there was none.
    measures = {
        str(key): value
        for key, value in entry.items()
        if key not in (*_STEPS, "epoch")
        and (isinstance(value, float) or number(entry, key) is not None)
    }
    return {**measures, "step": step} if measures else None


def _parsed(text: str) -> Any:
    """A line of JSON; None: it is damaged, or is still being written."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _of_trainer(path: Path) -> Sequence[Any]:
    """transformers/trainer_callback.py, TrainerState; it is in each checkpoint."""
    return list(json.loads(path.read_bytes())["log_history"])


def _of_json_lines(path: Path) -> Sequence[Any]:
    """Scripts of their own; `trainer_log.jsonl` of LLaMA-Factory."""
    return [_parsed(line) for line in path.read_text("utf-8", "replace").splitlines()]


def _of_lightning(path: Path) -> Sequence[Any]:
    """lightning/fabric/loggers/csv_logs.py: a column per measure, with empty fields."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: _parsed(str(value)) for key, value in row.items()} for row in rows]


def _of_tensorboard(path: Path) -> Sequence[Any]:
    """The scalars of all event files beside one: each start of a run writes another."""
    files = path.parent.glob("events.out.tfevents.*")
    if sum(file.stat().st_size for file in files) > MOST_BYTES:
        raise ValueError(f"the files of its folder have more than {human_size(MOST_BYTES)}")
    try:
        from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
            event_accumulator,
        )
    except ImportError:
        view = f"tensorboard --logdir {quoted(path.parent)}"
        raise ValueError(f"this Python has no package tensorboard; where one has: {view}") from None
    reader = event_accumulator.EventAccumulator(str(path.parent)).Reload()
    return [
        {"step": event.step, tag: event.value}
        for tag in reader.Tags()["scalars"]
        for event in reader.Scalars(tag)
    ]


_SOURCES: Sequence[Source] = (
    (re.compile(r"(?:^|/)trainer_state\.json$"), _of_trainer),
    (re.compile(r"\.jsonl$"), _of_json_lines),
    (re.compile(r"(?:^|/)metrics\.csv$"), _of_lightning),
    (re.compile(r"(?:^|/)events\.out\.tfevents\.[^/]*$"), _of_tensorboard),
)
"""The first that has steps is drawn: Trainer writes TensorBoard's files too."""


def _table(work: Path, newest: Sequence[ResultFile], notes: list[str]) -> dict[str, str | float]:
    """Measures without a step: `all_results.json` of transformers' examples; the tasks in
    `results_*.json` of lm-evaluation-harness.
    """
    chosen = [result for result in newest if _TABLES.search(result.path)][:MOST_FILES]
    folders = {result.path.rpartition("/")[0] for result in chosen}
    table: dict[str, str | float] = {}
    for result in chosen:
        where = f"{result.path.rpartition('/')[0]}:" if len(folders) > 1 else ""
        for task, measures in _read(work, result, _of_tasks, notes):
            for name in measures if isinstance(measures, dict) else ():
                if len(table) < MOST_NAMES and (value := number(measures, name)) is not None:
                    table.setdefault(" ".join(filter(None, (where, task, name))), value)
    return table


def _of_tasks(path: Path) -> Sequence[Any]:
    """(Task, its measures); the first without a task."""
    document = json.loads(path.read_bytes())
    tasks = document.get("results")
    return [("", document), *(tasks.items() if isinstance(tasks, dict) else ())]
