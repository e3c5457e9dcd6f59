"""The data of a run before they are prepared: rows and classes; splits that may be small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from runner.config.run_config import RunConfig
from runner.data.prepare import is_prepared
from runner.data.recipe import Recipe
from runner.data.table import COLUMNS, MOST_ROWS, Classes, footer, read_classes, united
from runner.from_stage import UsageError, human_count
from runner.inputs import DatasetInput, SplitInput
from runner.job.findings import Finding, attempt, errors_in, warning
from runner.job.plan import check_step
from runner.tasks import task_named

ROWS_PER_SEQUENCE = 2
"""Where documents are not joined, some rows are left out, and some share a sequence."""
LONGEST_TOKEN = 16


def describe_dataset(config: RunConfig, data: DatasetInput, length: int) -> str:
    """Returns a line on the rows of a dataset that are read.

    Args:
        config: the run file.
        data: the dataset.
        length: tokens per sequence.
    """
    share = f", weight {data.settings.weight:g}" if len(config.sources) > 1 else ""
    each = f"; sequences of {length} tokens" if task_named(config.task).has_tokens else ""
    train, of_train = _rows(data, "train", data.train)
    validation, of_validation = _rows(data, "validation", data.validation)
    if data.validation and data.validation.part:
        of_validation += (
            f" ({data.validation.name}, by validation_seed {data.settings.validation_seed})"
        )
    return (
        f"data {data.asset}/{data.config}: {human_count(train, 'row')} to train on{of_train}, "
        f"{validation:,} to validate{of_validation}{share}{each}"
    )


def _rows(data: DatasetInput, role: str, split: SplitInput | None) -> tuple[int, str]:
    """Returns the number of rows that are read, and a note if `limit` omits some."""
    rows = split.rows if split else 0
    limit = data.settings.limit.get(role)
    if limit is None or limit >= rows:
        return rows, ""
    return limit, f" (limit.{role}, of {rows:,})"


def check_rows(recipe: Recipe) -> None:
    """Refuses a split without rows.

    Raises:
        UsageError: it has none.
    """
    if recipe.split.rows == 0:
        raise UsageError(
            f"split `{recipe.split.name}` has no rows.",
            "Set another split in the run file (`stage show BUNDLE` lists them).",
        )


def check_data(
    config: RunConfig, wanted: Mapping[str, Sequence[Recipe]], total: int | None
) -> Iterator[Finding]:
    """Finds splits without rows, classes that are not known, and what a task cannot read.

    Args:
        wanted: `train` and `validation` -> what is read.
        total: sequences per step; None: not known.
    """
    task, found = task_named(config.task), list[Finding]()
    classes: dict[str, list[Classes]] = {"train": [], "validation": []}
    for role, several in wanted.items():
        for recipe in several:
            found += attempt(check_split, recipe, classes[role])
    yield from found
    if errors_in(found):
        return
    if task.has_classes:
        united(classes["train"], classes["validation"])
    if not task.has_tokens and total is not None:  # a sample for each row
        rows = (min(r.split.rows, r.limit or r.split.rows) for r in wanted["train"])
        yield from check_step(config, sum(rows), total)


def check_split(recipe: Recipe, classes: list[Classes]) -> Iterator[Finding]:
    """Finds what is wrong with the rows of a split.

    Args:
        classes: gets those of the split, if it has some.
    """
    task = task_named(recipe.task)
    check_rows(recipe)
    if task.has_classes:
        classes.append(read_classes(recipe))
        if doubtful := task.doubt(recipe, classes[-1]):
            yield warning(doubtful, COLUMNS)
    task.check_rows(recipe)


def may_be_few(recipe: Recipe, total: int) -> bool:
    """Whether a split may have less than a step's sequences; from the footers of its files.

    A token is at most 16 bytes long, on average over a text.

    Args:
        recipe: what is read.
        total: sequences per step.
    """
    rows = min(recipe.split.rows, recipe.limit or recipe.split.rows)
    if recipe.documents != "joined":
        return rows < ROWS_PER_SEQUENCE * total
    if rows > MOST_ROWS:
        return False
    share = rows / max(1, recipe.split.rows)
    return bytes_of_text(recipe) * share < LONGEST_TOKEN * recipe.sequence_length * total


def bytes_of_text(recipe: Recipe) -> int:
    """Bytes of the text column of a split, uncompressed; from the footers of its files."""
    size = 0
    for path in recipe.split.files:
        metadata = footer(path)
        for group in (metadata.row_group(n) for n in range(metadata.num_row_groups)):
            columns = (group.column(n) for n in range(group.num_columns))
            size += sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema.split(".")[0] == recipe.dataset.text
            )
    return round(size * recipe.split.share)


def to_count(
    wanted: Mapping[str, Sequence[Recipe]], stores: Path, total: int
) -> tuple[list[Recipe], bool]:
    """The splits that may be too small and are not prepared yet, those to train on first.

    Args:
        wanted: `train` and `validation` -> what is read.
        stores: the folder with prepared data.
        total: sequences per step.

    Returns:
        The splits, and whether all that is trained on is among them.
    """
    few = {
        role: [
            recipe
            for recipe in several
            if task_named(recipe.task).has_tokens
            and recipe.split.rows
            and not is_prepared(recipe, stores)
            and may_be_few(recipe, total if role == "train" else 1)
        ]
        for role, several in wanted.items()
    }
    return [*few["train"], *few.get("validation", ())], len(few["train"]) == len(wanted["train"])
