"""Whoever does what a remedy says is better off: each is obeyed, word by word, or named as not.

`not_obeyed.txt` has the remedies that nobody obeys here, each with its reason. A new remedy with a
command or a line of YAML in it is in neither list, and fails the first test.
"""

from __future__ import annotations

from pathlib import Path

from tests.remedies.obeyed import stories
from tests.remedies.walk import every, remedies, unquoted

NOT_OBEYED = Path(__file__).with_name("not_obeyed.txt")
REASONS = {
    "accounts": "needs Slurm's accounts (slurmdbd), which the tests' site has not",
    "choice": "the user has to choose, or to look first; no one line is right for all",
    "double": "its command, or line of YAML, is that of another remedy, which is obeyed",
    "device": "needs a GPU, a driver, or memory that this machine has not",
    "hub": "needs a Hub, a server or a proxy that answers so",
    "index": "needs an index of packages",
    "once": "a test obeyed it, and left: the test of the fault stays, with the words",
    "shows": "shows where to look, and changes nothing",
    "system": "needs another disk, right, program or limit of the system",
}


def not_obeyed() -> dict[tuple[str, str], str]:
    """(file, remedy) -> a key of `REASONS`."""
    lines = NOT_OBEYED.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    return {(file, text): reason for reason, file, text in rows}


def is_obeyed(file: str, text: str) -> bool:
    """Whether a test does what this remedy says."""
    return any(file == of and remedy in text for of, remedy in stories())


def test_every_remedy_is_obeyed_or_it_is_said_why_not() -> None:
    """To record: python -m tests.remedies.record, then give each new line its reason."""
    obeyed = {row for row in remedies() if is_obeyed(*row)}
    listed = not_obeyed()
    assert set(listed.values()) <= REASONS.keys()
    assert remedies() - obeyed - listed.keys() == set(), "new: obey it, or say why not"
    assert listed.keys() - remedies() == set(), "no remedy any more"
    assert listed.keys() & obeyed == set(), "obeyed by now"
    stale = [s for s in stories() if not any(s[0] == of and s[1] in text for of, text in every())]
    assert stale == [], "said to be obeyed, and no remedy any more"


def test_a_path_in_a_command_is_one_word_for_a_shell() -> None:
    """`rm -r {folder}` removed another folder than the one with a space in its name."""
    words = {"comment(quoted(path))", "place_for_bundle(every)", "place_for_bundle(found)"}
    assert [one for one in unquoted() if one[1] not in words] == []
