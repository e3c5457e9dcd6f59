"""Licences, as a repository's card states them and as a manifest's policy allows them.

A statement is text: an identifier of the Hub's list (mostly SPDX's, in lower case), several of them
separated by commas, `other (name)` for one that is not in the list, or nothing. Nothing counts as
`unknown`, the Hub's own term.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

UNKNOWN, OTHER = "unknown", "other"


def stated(identifiers: Sequence[object], name: object) -> str | None:
    """The statement of a card, from its `license` and `license_name`; None if it states nothing."""
    words = [str(identifier).strip() for identifier in identifiers if str(identifier).strip()]
    named = " ".join(name.replace(",", " ").split()) if isinstance(name, str) else ""
    return (
        ", ".join(f"{OTHER} ({named})" if word == OTHER and named else word for word in words)
        or None
    )


def identifiers(statement: str | None) -> list[str]:
    """The licences of a statement, `unknown` if there is none."""
    return [word for word in (statement or "").split(", ") if word] or [UNKNOWN]


def not_allowed(statement: str | None, allowed: Collection[str]) -> list[str]:
    """The licences of a statement that a policy does not allow.

    Each has to be allowed, because a card does not say whether several mean "or" or "and". `other
    (name)` is allowed by `name`, by `other (name)` and by `other`. Case does not matter (SPDX 2.3,
    annex D.2).
    """
    known = {word.casefold() for word in allowed}
    return [word for word in identifiers(statement) if not _spellings(word.casefold()) & known]


def _spellings(word: str) -> set[str]:
    if word.startswith(f"{OTHER} (") and word.endswith(")"):
        return {word, word.removeprefix(f"{OTHER} (").removesuffix(")"), OTHER}
    return {word}


def states_nothing(statement: str | None) -> bool:
    """Whether a user may know more than the card states."""
    return all(word == UNKNOWN or word.startswith(OTHER) for word in identifiers(statement))
