"""Licences, as a repository's card states them and as a manifest's policy allows them.

A statement is text: an identifier of the Hub's list (mostly SPDX's, in lower case), several of them with commas
between, `other (name)` for one that is not in the list, or nothing. Nothing counts as `unknown`, the Hub's own word.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

UNKNOWN, OTHER = "unknown", "other"


def stated(identifiers: Sequence[object], name: object) -> str | None:
    """The statement of a card with these `license` identifiers and this `license_name`; None if it states nothing."""
    words = [str(identifier).strip() for identifier in identifiers if str(identifier).strip()]
    named = " ".join(name.replace(",", " ").split()) if isinstance(name, str) else ""
    return ", ".join(f"{OTHER} ({named})" if word == OTHER and named else word for word in words) or None


def identifiers(statement: str | None) -> list[str]:
    """The licences of a statement, `unknown` if there is none."""
    return [word for word in (statement or "").split(", ") if word] or [UNKNOWN]


def not_allowed(statement: str | None, allowed: Collection[str]) -> list[str]:
    """The licences of a statement that a policy does not allow.

    Each has to be allowed: whether several mean a choice or a sum, a card does not say. `other (name)` is allowed by
    `name`, by itself written out, and by `other`. Upper and lower case are one (SPDX 2.3, annex D.2).
    """
    known = {word.casefold() for word in allowed}
    return [word for word in identifiers(statement) if not _spellings(word.casefold()) & known]


def _spellings(word: str) -> set[str]:
    if word.startswith(f"{OTHER} (") and word.endswith(")"):
        return {word, word.removeprefix(f"{OTHER} (").removesuffix(")"), OTHER}
    return {word}


def states_nothing(statement: str | None) -> bool:
    """Whether a person may know more than the card says."""
    return all(word == UNKNOWN or word.startswith(OTHER) for word in identifiers(statement))
