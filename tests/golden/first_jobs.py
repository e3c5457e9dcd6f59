"""What is found before a rank starts: command, exit code and cause of each entry of the list.

The faults are in tables beside the tests that inject them. Here they are only collected. A row
counts as long as a test uses it: one that is parametrized with its table, or that names the entry.
Names beside those of docs/first-job-failures.md are faults that are not on the page.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tests.first_job import (
    test_assets,
    test_batch_and_memory,
    test_data,
    test_environment,
    test_slurm,
    test_storage,
    test_tokenizer,
)
from tests.first_job.harness import Found
from tests.first_job.shell import test_left_in_shell, test_written_for_a_shell
from tests.runner import test_disks
from tests.runner.exec import test_exec, test_last_words
from tests.runner.launch import test_rank, test_surroundings
from tests.runner.ranks import test_reach
from tests.runner.rehearse import test_nodes, test_rehearsal
from tests.runner.training.engines import test_native_engines
from tests.stage.staging.sources import test_files

CHECK, TRAIN, SUBMIT = "runner check", "runner train", "runner submit"
EXEC, REHEARSE = "runner exec", "runner rehearse"
FETCH, ENV_LOCK, ENV_CHECK = "stage fetch", "stage env lock", "stage env check"
ENTRY = re.compile(r"[A-Z]\d+")


class Demand(NamedTuple):
    """What a test demands; the code is None where it calls the function that decides."""

    words: Sequence[str]
    code: int | None = None


Read = Callable[[str, Any], Demand]


def _fault(entry: str, row: Any) -> Demand:
    """The `Found` of a row, which is one or has one."""
    found = row if isinstance(row, Found) else next(v for v in row if isinstance(v, Found))
    return Demand(found.words, found.code)


def _part(number: int, code: int | None = None) -> Read:
    """A reader of rows without a `Found`: their words are in one place."""

    def read(entry: str, row: Any) -> Demand:
        return Demand([row[number]] if isinstance(row[number], str) else row[number], code)

    return read


def _always(*words: str, code: int | None = 2) -> Read:
    """A reader of rows for which a test always demands the same words."""
    return lambda entry, row: Demand(words, code)


@dataclass(frozen=True)
class Table:
    """A table of faults in a module of tests: entry -> what is done, and what is demanded.

    Attributes:
        command: what finds it.
        read: (entry, its row) -> what is demanded.
        how: `found`; `avoided`: it cannot happen; `advised`: our line after a script's own error.
    """

    module: ModuleType
    name: str
    command: str
    read: Read = _fault
    how: str = "found"


TABLES = (
    Table(test_tokenizer, "ROWS", CHECK),
    Table(test_tokenizer, "MORE", CHECK),
    Table(test_assets, "IN_A_FOLDER", FETCH),
    Table(test_assets, "ON_A_HUB", FETCH),
    Table(test_assets, "GATED", FETCH, _always("gated")),
    Table(test_assets, "GONE", CHECK),
    Table(test_assets, "VARIANTS", CHECK),
    Table(test_assets, "CLOSED", CHECK),
    Table(test_data, "FILES", FETCH),
    Table(test_data, "OTHERS", FETCH),
    Table(test_data, "SOUND", FETCH, _always(code=0), "avoided"),
    Table(test_data, "ON_A_HUB", FETCH),
    Table(test_data, "LABELS", CHECK),
    Table(test_data, "UNFIT", CHECK),
    Table(test_data, "FEW", CHECK),
    Table(test_data, "CARRIED", CHECK),
    Table(test_environment, "LOCKED", ENV_LOCK, _part(2)),
    Table(test_environment, "NODES", ENV_CHECK, _part(2, 1)),
    Table(test_environment, "ON_LOGIN", CHECK),
    Table(test_environment, "LAUNCHED", f"{TRAIN} --dry-run"),
    Table(test_environment, "TOOLS", CHECK),
    Table(test_batch_and_memory, "ROWS", CHECK),
    Table(test_slurm, "REFUSED", CHECK),
    Table(test_slurm, "LIMITED", CHECK),
    Table(test_slurm, "TOO_FEW", CHECK),
    Table(test_slurm, "WORDS", CHECK, lambda entry, _: Demand([entry])),
    Table(test_slurm, "LATER", CHECK, _part(0, 5)),
    Table(test_slurm, "NEVER_MET", TRAIN, lambda _, row: Demand([row], 2)),
    Table(test_slurm, "UNEVEN", TRAIN),
    Table(test_storage, "DISKS", CHECK),
    Table(test_storage, "QUOTA", CHECK),
    Table(test_storage, "NODES", ENV_CHECK, _part(1, 1)),
    Table(test_storage, "RESUMED", CHECK),
    Table(test_left_in_shell, "REFUSED", TRAIN),
    Table(test_written_for_a_shell, "SETTINGS", CHECK),
    Table(test_written_for_a_shell, "SCRIPTS", EXEC, lambda _, row: Demand(row[2][:1], 2)),
    Table(test_written_for_a_shell, "UTF_16", CHECK),
    Table(test_surroundings, "SHELLS", CHECK, _part(1)),
    Table(test_surroundings, "IMPORTS", CHECK, _part(2)),
    Table(test_last_words, "ADVISED", EXEC, _part(1), "advised"),
    Table(
        test_rank,
        "INTERFACES",
        TRAIN,
        _always("node n1: NCCL_SOCKET_IFNAME=", "there is no interface ib7", code=1),
    ),
)


@dataclass(frozen=True)
class Single:
    """A fault with a test of its own, which has the words.

    Attributes:
        entry: of the page, or a name.
        words: of the cause; each is in the text of the test.
        others: as for `Table`.
    """

    entry: str
    command: str
    code: int | None
    words: tuple[str, ...]
    test: Callable[..., object]
    how: str = "found"


def _avoided(command: str, test: Callable[..., object], *entries: str) -> tuple[Single, ...]:
    return tuple(Single(entry, command, None, (), test, "avoided") for entry in entries)


SINGLE = (
    Single(
        "N5", TRAIN, 1, ("there is no interface",),
        test_rank.test_an_interface_that_a_node_lacks_is_named_with_what_it_has,
    ),
    Single(
        "N7", TRAIN, 1, ("cannot reach", "no route"),
        test_reach.test_a_store_without_a_route_is_told_with_its_address,
    ),
    Single(
        "T14", REHEARSE, 1, ("rehearsal, data: ", "WordPiece error: Missing [UNK] token"),
        test_rehearsal.test_a_tokenizer_that_cannot_encode_ends_it_before_a_rank_starts,
    ),
    Single(
        "S5", f"{REHEARSE} --job", None, ("has 67.1 MB free",),
        test_nodes.test_a_node_whose_temporary_disk_is_full_is_warned_of,
    ),
    Single(
        "N10", f"{REHEARSE} --job", None, ("8.39 MB",),
        test_nodes.test_too_little_locked_memory_for_infiniband_is_named,
    ),
    Single(
        "L11", REHEARSE, None, ("2 weights ", r" idle\.weight, idle\.bias"),
        test_native_engines.test_ddp_names_weights_that_take_no_part_in_the_loss,
    ),
    Single(
        "a warm-up that never ends", CHECK, 0, ("never reaches 0.003",),
        test_batch_and_memory.test_a_warm_up_that_never_ends_is_told,
    ),
    Single(
        "a rate that is too large", CHECK, 0, ("optimizer.lr 5", "nothing is left of the model"),
        test_batch_and_memory.test_a_rate_that_is_a_slip_of_the_pen_is_told,
    ),
    Single(
        "tokens in place of sequences", CHECK, 2, ("each step would take 1,048,576", "not tokens"),
        test_batch_and_memory.test_tokens_in_place_of_sequences_are_refused,
    ),
    Single(
        "plain files", CHECK, 2, ("is plain files, not a dataset",),
        test_data.test_plain_files_that_a_run_reads_are_named_with_the_line_of_the_manifest,
    ),
    Single(
        "tools of the login node", CHECK, 0, ("the job's nodes may lack it, too",),
        test_environment.test_tools_of_the_login_node_are_a_warning_for_a_job,
    ),
    Single(
        "a number for a time", SUBMIT, 2, ("`slurm.time` must be text",),
        test_slurm.test_a_time_without_quotes_is_what_it_says,
    ),
    Single(
        "a partition of the shell", CHECK, 2, ("08:00:00 is more than partition debug allows",),
        test_left_in_shell.test_a_partition_that_only_the_shell_names_is_the_one_that_is_looked_at,
    ),
    Single(
        "a job that is over", TRAIN, 2, ("SLURM_JOB_ID=17 of this shell is a job that is over",),
        test_left_in_shell.test_a_job_that_is_over_is_not_taken_for_one_that_runs,
    ),
    Single(
        "~ in the middle of a word", CHECK, 2, ("/mine/ds.json: no such file",),
        test_written_for_a_shell.test_a_home_folder_in_the_middle_of_a_word_is_the_home_folder,
    ),
    Single(
        "a folder that was removed", CHECK, None, ("The current folder was removed",),
        test_written_for_a_shell.test_a_folder_that_was_removed_is_named,
    ),
    Single(
        "O11", EXEC, None, ("connects to 9.9.9.9, port 443",),
        test_last_words.test_a_connection_that_would_wait_forever_is_named_once, "advised",
    ),
    Single(
        "L9", EXEC, None, ("srun started 8 tasks",),
        test_exec.test_tasks_that_do_not_know_of_each_other_are_told_of, "advised",
    ),
    *_avoided(EXEC, test_exec.test_a_logger_does_not_wait_for_a_server_that_no_node_reaches,
              "O8", "O9"),
    *_avoided(CHECK, test_batch_and_memory.test_steps_of_a_scheduler_in_ds_config_are_not_used,
              "B4"),
    *_avoided(CHECK, test_tokenizer.test_a_tokenizer_without_a_padding_token_is_no_fault, "T10"),
    *_avoided(CHECK, test_assets.test_a_bundle_that_you_may_only_read_is_enough, "R4"),
    *_avoided(TRAIN, test_assets.test_two_users_have_two_cache_folders, "R6"),
    *_avoided(CHECK, test_data.test_features_of_a_newer_datasets_are_no_fault, "D9"),
    *_avoided(ENV_CHECK, test_environment.test_an_environment_for_an_old_system_needs_no_installer,
              "E8"),
    *_avoided(CHECK, test_environment.test_packages_of_long_ago_are_not_imported, "E12"),
    *_avoided(ENV_CHECK, test_environment.test_mpi4py_without_mpi_is_told, "E13"),
    *_avoided(SUBMIT,
              test_environment.test_ninja_of_the_environment_comes_first_in_the_job, "X5"),
    *_avoided(TRAIN,
              test_environment.test_caches_of_compilers_are_on_the_nodes_disk_and_of_this_job,
              "X13", "X14"),
    *_avoided(SUBMIT, test_slurm.test_a_time_without_quotes_is_what_it_says, "J22"),
    *_avoided(SUBMIT, test_slurm.test_variables_of_a_job_around_us_are_not_passed_on, "J8", "J9"),
    *_avoided(SUBMIT, test_slurm.test_the_script_is_a_login_shell_whose_ranks_get_the_signal,
              "J14", "J15"),
    *_avoided(TRAIN, test_slurm.test_two_jobs_of_a_node_have_two_ports_outside_those_of_the_kernel,
              "L5"),
    *_avoided(TRAIN, test_slurm.test_one_node_never_asks_for_its_own_name, "N2"),
    *_avoided(TRAIN, test_storage.test_a_server_that_is_away_for_a_moment_costs_no_run, "K5"),
    *_avoided(TRAIN, test_storage.test_a_save_that_was_cut_off_is_no_checkpoint, "K6", "K7"),
    *_avoided(CHECK, test_storage.test_check_leaves_nothing_in_the_home, "S3"),
    *_avoided(SUBMIT, test_left_in_shell.test_the_run_file_wins_over_sbatchs_variables,
              "J23"),
    *_avoided(TRAIN,
              test_left_in_shell.test_an_interface_of_other_nodes_does_not_end_ranks_of_one_machine,
              "N11"),
    *_avoided(TRAIN, test_disks.test_a_user_without_a_name_gets_one, "E17"),
    *_avoided(FETCH, test_files.test_what_programs_left_stays_behind_and_is_told, "A11"),
)  # fmt: skip


def _tests_of(module: ModuleType, table: str) -> tuple[list[str], dict[str, list[str]]]:
    """The tests that are parametrized with a table; and entry -> those that name it."""
    every: list[str] = []
    single: dict[str, list[str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        words = [name for d in node.decorator_list for name in ast.walk(d)]
        if any(isinstance(word, ast.Name) and word.id == table for word in words):
            every.append(node.name)
        for part in ast.walk(node):
            if (
                isinstance(part, ast.Subscript)
                and isinstance(part.value, ast.Name)
                and part.value.id == table
                and isinstance(part.slice, ast.Constant)
                and isinstance(part.slice.value, str)
            ):
                single.setdefault(part.slice.value, []).append(node.name)
    return every, single


@dataclass(frozen=True)
class Row:
    """One fault, and what a test demands of the command that meets it."""

    entry: str
    how: str
    command: str
    code: int | None
    cause: tuple[str, ...]
    test: str


def _place(module: str, test: str) -> str:
    return f"{module.replace('.', '/')}.py::{test}"


def _collect() -> Iterator[Row]:
    for table in TABLES:
        every, single = _tests_of(table.module, table.name)
        rows = getattr(table.module, table.name)
        for entry in rows:
            if tests := every or single.get(entry):
                place = _place(table.module.__name__, tests[0])
                found = table.read(entry, rows[entry])
                yield Row(entry, table.how, table.command, found.code, tuple(found.words), place)
    for one in SINGLE:
        text = inspect.getsource(one.test)
        if all(word in text for word in one.words):
            place = _place(one.test.__module__, one.test.__name__)
            yield Row(one.entry, one.how, one.command, one.code, one.words, place)


def _order(row: Row) -> tuple[bool, str, int]:
    of_page = ENTRY.fullmatch(row.entry) is not None
    return not of_page, row.entry[0] if of_page else row.entry, int(row.entry[1:] if of_page else 0)


def collect() -> list[Row]:
    """What the tests demand now; the entries of the page first, in its order."""
    return sorted(_collect(), key=_order)


def read(text: str) -> list[Row]:
    """The rows of a text of `record`."""
    return [Row(**row | {"cause": tuple(row["cause"])}) for row in json.loads(text)]


def record(folder: Path) -> str:
    """One row in a line; `folder` is not used."""
    lines = [json.dumps(asdict(row), ensure_ascii=False) for row in collect()]
    return "[\n" + ",\n".join(lines) + "\n]\n"
