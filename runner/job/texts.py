"""Whether a small dataset fills one sequence, and one step (large ones do); labels and roles.

The data are really prepared, in a temporary folder: the same code and the same message as in
`runner prepare`, but before the job waits in the queue.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runner import kept, offline
from runner.child import in_child
from runner.config.chats import KNOWN, Naming, unknown_role
from runner.config.run_config import RunConfig
from runner.config.tasks import data_of
from runner.data.classes import COLUMNS, Classes, doubt, read_classes, united
from runner.data.labelled import check_lengths
from runner.data.prepare import is_prepared, samples
from runner.data.recipe import Recipe
from runner.data.table import reading, row_of
from runner.errors import UsageError, human_count
from runner.inputs import DatasetInput, SplitInput
from runner.job.findings import Finding, Findings
from runner.job.plan import check_step
from runner.job.transformers_tables import leave_torch_alone

MOST_ROWS = 20_000
"""Larger datasets fill a step, and to read them takes more than a second."""
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
    each = "" if config.task == "image-classification" else f"; sequences of {length} tokens"
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


def check_classes(recipes: dict[str, tuple[Recipe, ...]]) -> Findings:
    """Reads the classes of texts, words and images: whether there are some, and belong together.

    Args:
        recipes: `train` and `validation` -> what is read.
    """
    found = Findings()
    classes: dict[str, list[Classes]] = {}
    for role, several in recipes.items():
        for recipe in several:
            if data_of(recipe.task) not in ("labelled", "images"):
                return found
            with found.keeping():
                check_rows(recipe)
                those = read_classes(recipe)
                classes[role] = [*classes.get(role, ()), those]
                if doubtful := doubt(recipe, those):
                    found.others.append(Finding("warning", doubtful, COLUMNS))
                if recipe.task == "token-classification":
                    check_tags(recipe)
    if not found.errors:
        found.attempt(united, classes["train"], classes.get("validation", ()))
    return found


def check_tags(recipe: Recipe) -> None:
    """Compares the numbers of words and of tags in the first rows of a split.

    Raises:
        UsageError: they differ in a row.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names = [recipe.dataset.words, recipe.dataset.tags]
    most = min(MOST_ROWS, recipe.split.rows if recipe.limit is None else recipe.limit)
    first, whole = 0, replace(recipe.split, part=None)
    for path in recipe.split.files:
        with reading(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=names):
                if first >= most:
                    return
                batch = batch.slice(0, most - first)
                lengths = [pc.list_value_length(batch.column(name)) for name in names]
                row = pc.index(pc.not_equal(*lengths), True).as_py()
                if row >= 0:
                    values = (batch.column(name)[row].as_py() for name in names)
                    check_lengths(whole, first + row, *values)
                first += batch.num_rows


def check_roles(recipe: Recipe) -> None:
    """Compares who speaks in the first rows of a split of chats with the roles that are known.

    Raises:
        UsageError: a role is not known.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from pyarrow import array

    name = recipe.dataset.messages
    kind = recipe.split.columns.get(name or "", "")
    naming = Naming.of(kind, recipe.dataset.fields, recipe.dataset.roles)
    if name is None or naming is None or not naming.is_strict:
        return
    whole, first = replace(recipe.split, part=None), 0
    for path in whole.files:
        with reading(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=[name]):
                if first >= MOST_ROWS:
                    return
                chats = batch.column(name)
                roles = pc.struct_field(pc.list_flatten(chats), naming.role)
                known = array([*naming.roles, *KNOWN], type=roles.type)
                place = pc.index(pc.is_in(roles, value_set=known), False).as_py()
                if place >= 0:
                    row = pc.list_parent_indices(chats)[place].as_py()
                    raise unknown_role(row_of(whole, first + row), str(roles[place].as_py()))
                first += batch.num_rows


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
    import pyarrow.parquet as pq

    size = 0
    for path in recipe.split.files:
        with reading(path):
            metadata = pq.read_metadata(path)
        for group in (metadata.row_group(n) for n in range(metadata.num_row_groups)):
            columns = (group.column(n) for n in range(group.num_columns))
            size += sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema.split(".")[0] == recipe.dataset.text
            )
    return round(size * recipe.split.share)


def check_texts(
    config: RunConfig, recipes: dict[str, tuple[Recipe, ...]], stores: Path, total: int | None
) -> Findings:
    """Prepares datasets that may be too small, if they are not prepared yet.

    Args:
        config: the run file.
        recipes: `train` and `validation` -> what is read.
        stores: the folder with prepared data.
        total: sequences per step; None: not known.
    """
    found = Findings()
    counts: list[int | None] = []
    for role, several in recipes.items():
        for recipe in several:
            number = None
            with found.keeping():
                check_rows(recipe)
                if recipe.task == "instruction":
                    check_roles(recipe)
                if _is_tried(recipe, stores, (total or 1) if role == "train" else 1):
                    number = _counted(recipe)
            counts += [number] if role == "train" else []
    if total is not None and data_of(config.task) == "images" and not found.errors:
        # A sample for each row.
        rows = (min(r.split.rows, r.limit or r.split.rows) for r in recipes["train"])
        _examine_step(found, config, sum(rows), total)
    known = [number for number in counts if number is not None]
    if total is not None and known and len(known) == len(counts):
        _examine_step(found, config, sum(known), total)
    return found


def _is_tried(recipe: Recipe, stores: Path, total: int) -> bool:
    return (
        recipe.task != "image-classification"
        and not is_prepared(recipe, stores)
        and may_be_few(recipe, total)
    )


def _examine_step(found: Findings, config: RunConfig, number: int, total: int) -> None:
    if few := found.attempt(check_step, config, number, total):
        found.others.append(Finding("warning", *few))


def _counted(recipe: Recipe) -> int:
    """Counts in a child process, once."""
    path = kept.path_of("texts", kept.versions("transformers", "tokenizers"), recipe.key)
    if isinstance(known := kept.read(path), int):
        return known
    number = in_child(_count, (recipe,), "counting the texts", "")
    kept.keep(path, number)
    return number


def _count(recipe: Recipe) -> int:
    """Returns the number of sequences of a split; in a child process without network.

    Raises:
        UsageError: there is none.
    """
    leave_torch_alone()
    offline.close_network()
    return sum(1 for _ in samples(recipe))
