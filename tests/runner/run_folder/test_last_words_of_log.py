"""Why a command ended, by the words in the log of its job."""

from __future__ import annotations

import pytest

from runner.run_folder.logs import last_words

OF_A_RANK = """\
{0}Traceback (most recent call last):
{0}  File "/home/me/train.py", line 3, in <module>
{0}    load()
{0}OSError: no such model
{1}Traceback (most recent call last):
{1}  File "/env/bin/torchrun", line 10, in <module>
{1}    raise ChildFailedError(
{1}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:{2}
{1}============================================================
srun: error: n2: task 1: Exited with exit code 1
"""


@pytest.mark.parametrize(
    ("rank", "task", "space"), [("", "", ""), ("1: [rank3]: ", "1: ", " "), ("0: ", "0: ", " ")]
)
def test_the_cause_is_what_a_rank_raised_not_what_its_launcher_did(
    rank: str, task: str, space: str
) -> None:
    found = last_words(OF_A_RANK.format(rank, task, space))
    assert (found.line, found.text) == (4, "OSError: no such model")


def test_without_an_exception_it_is_the_last_line_that_no_launcher_wrote() -> None:
    text = "1: usage: x.py\n1: x.py: error: unrecognized arguments: --y\nsrun: error: n2: task 1\n"
    assert last_words(text).text == "x.py: error: unrecognized arguments: --y"


def test_advice_after_the_exception_is_kept() -> None:
    text = "Traceback (most recent call last):\nValueError: x\nrunner exec: take y\n"
    assert last_words(text).advice == "take y"


def test_a_port_that_is_taken_is_a_cause_and_a_row_of_signs_is_none() -> None:
    taken = "torch.distributed.DistNetworkError: The server socket has failed to listen on any"
    row = "=" * 60
    log = f"Traceback (most recent call last):\n  File x\n{taken}\nfit.py FAILED\n{row}\n"
    assert last_words(log).text == taken
    assert last_words(f"fit.py FAILED\n{row}\n").text == "fit.py FAILED"
