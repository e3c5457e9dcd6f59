"""Compares what a command prints with --json with its schema in docs/schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from scripts.lib.docs import schemas


def check_document(program: str, arguments: Sequence[str], code: int, out: str) -> None:
    """Fails if the output of a command with --json does not fit the schema of the command.

    Args:
        program: `stage` or `runner`.
        arguments: of the program.
        out: its stdout.
    """
    if "--json" not in arguments or not out.startswith("{"):
        return
    jsonschema = pytest.importorskip("jsonschema")
    name = "-".join(arguments[:2]) if arguments[0] == "env" else arguments[0]
    document = json.loads(out)
    is_error = code != 0 and set(document) == {"format", "exit_code", "error"}
    jsonschema.validate(document, schemas.load("error" if is_error else f"{program}/{name}"))
