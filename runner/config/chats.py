"""How the messages of a chat are renamed: `dataset.fields` and `dataset.roles` (`Naming`). Pure.

Where these keys are absent, the column's type decides: ShareGPT's names `{from, value}` are known,
and those of a question with its answer (`{human, assistant}`). The names are those of the data of
LLaMA-Factory and axolotl.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runner.from_stage import UsageError, WrongValueError, nearest_name, suggest

OURS = ("role", "content")
SHAREGPT = ("from", "value")
FORMS = (OURS, SHAREGPT, ("from", "content"), ("role", "value"))
"""The names of the two keys of a message that are known."""
ASKED = (
    *("instruction", "prompt", "question", "query", "problem", "human", "user", "input"),
    *("article", "message_1"),
)
"""The names of a question, as a column or beside its answer; the most telling first."""
ANSWERED = (
    *("output", "response", "completion", "solution", "answer", "assistant", "gpt", "bot"),
    *("generation", "summary", "message_2", "chosen"),
)
"""The names of an answer, likewise."""
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""ShareGPT's names of the speakers, and LLaMA-Factory's of a tool's call and its answer."""
KNOWN = ("system", "user", "assistant", "tool")
"""Roles that keep their names; most chat templates have no others."""


class UnknownRoleError(ValueError):
    """A message has a role that nothing renames. The text is the role."""


@dataclass(frozen=True)
class Naming:
    """How the messages of a column are renamed.

    Attributes:
        role, content: the keys of a message that hold them.
        roles: role in the data -> role for the chat template.
        is_strict: whether other roles than `roles` and `KNOWN` are refused.
        given: the roles that the run file renames.
        are_pairs: each item is a question and its answer, under the keys `role` and `content`.
        unread: other keys of such a pair, which are not learned.
    """

    role: str
    content: str
    roles: Mapping[str, str]
    is_strict: bool
    given: Mapping[str, str]
    are_pairs: bool = False
    unread: tuple[str, ...] = ()

    @staticmethod
    def of(kind: str, fields: Mapping[str, str], roles: Mapping[str, str]) -> Naming | None:
        """Finds how the messages of a column are renamed.

        Args:
            kind: Arrow type of the column.
            fields: `role` and `content` -> the keys of a message, as in the run file.
            roles: as in the run file.

        Returns:
            None: the column has no such messages.
        """
        found = re.fullmatch(r"(?:large_)?list<\w+: struct<(.*)>(?: not null)?>", kind)
        if found is None:
            return None
        members = found[1]
        for _ in range(members.count("<")):  # those of members are removed, the innermost first
            members = re.sub(r"<[^<>]*>", "", members)
        for names in (OURS,) if fields else FORMS:
            role, content = (fields.get(o, name) for o, name in zip(OURS, names, strict=True))
            if _has(members, role) and _has(members, content):
                is_foreign = (role, content) != OURS
                known = ROLES if is_foreign else {}
                return Naming(role, content, {**known, **roles}, is_foreign, roles)
        asked = [name for name in ASKED if _has(members, name, "string") and not fields]
        answered = [name for name in ANSWERED if _has(members, name, "string")]
        if asked and answered:
            pair = (asked[0], answered[0])
            others = re.findall(r"(?:^|, )([^:,]+): ", members)
            unread = tuple(name for name in others if name not in pair)
            return Naming(*pair, {}, False, {}, are_pairs=True, unread=unread)
        return None

    def renamed(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with `role` and `content`; what else they have stays.

        Raises:
            UnknownRoleError: a role is not known.
        """
        if self.are_pairs:
            sides = ((self.role, "user"), (self.content, "assistant"))
            return [
                {"role": role, "content": pair[key]}
                for pair in messages
                for key, role in sides
                if pair[key] is not None
            ]
        return [self._renamed(message) for message in messages]

    def _renamed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message.get(self.role)
        if self.is_strict and role not in self.roles and role not in KNOWN:
            raise UnknownRoleError(str(role))
        others = {k: v for k, v in message.items() if k not in (self.role, self.content)}
        return {
            **others,
            "role": self.roles.get(str(role), role),
            "content": message.get(self.content),
        }

    def describe(self) -> str:
        """Says what is renamed, with the reason; empty: nothing."""
        if self.are_pairs:
            beside = f"; not read, and not learned: {', '.join(self.unread)}" if self.unread else ""
            pair = f"`{self.role}` is read as the user's message, `{self.content}` as the answer"
            return pair + beside
        if not self.is_strict and not self.given:
            return ""
        parts = []
        if (self.role, self.content) != OURS:
            parts.append(f"{{{self.role}, {self.content}}} is read as {{role, content}}")
        parts += [f"{theirs} -> {ours}" for theirs, ours in self.roles.items()]
        by_file = "as the run file says" if self.given else ""
        by_name = "ShareGPT's names" if set(self.roles) - set(self.given) else ""
        return f"{', '.join(parts)} ({'; '.join(filter(None, (by_file, by_name)))})"


def _has(members: str, name: str, kind: str = "") -> bool:
    return re.search(rf"(?:^|, ){re.escape(name)}: {kind}", members) is not None


def unknown_role(where: str, role: str) -> UsageError:
    """Returns the error for a role that nothing renames.

    Args:
        where: split and row.
        role: as the data have it.
    """
    known = ", ".join((*ROLES, *KNOWN))
    return UsageError(
        f"{where}: a message is from `{role}`; known are {known}.",
        f"Say whose words these are: dataset.roles: {{{role}: assistant}}, or another role of the "
        "chat template.",
    )


def known_fields(fields: dict[str, str]) -> dict[str, str]:
    """Refuses keys of `dataset.fields` that no message has here.

    Raises:
        WrongValueError: there is one.
    """
    for key in fields.keys() - set(OURS):
        remedy = suggest(key, OURS, "For instance: fields: {role: from, content: value}")
        raise WrongValueError(f"has `{key}`: a message has no `{key}` here", remedy)
    return fields


def known_roles(roles: dict[str, str]) -> dict[str, str]:
    """Refuses roles that were probably mistyped.

    Raises:
        WrongValueError: there is one.
    """
    for ours in roles.values():
        if ours not in KNOWN and nearest_name(ours, KNOWN):
            raise WrongValueError(f"has `{ours}`, which is no role of a chat", suggest(ours, KNOWN))
    return roles
