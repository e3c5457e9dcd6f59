"""What `runner status` says about the run of a command: its starts, its results, what it missed."""

from __future__ import annotations

import os
import time
from typing import Any

from runner.from_stage import format_age, human_count, human_size, quoted
from runner.run_folder.curves import CURVES
from runner.run_folder.history import History, number, where_asked
from runner.run_folder.missing import missing_of

NAMED = 3  # at most so many results are named


def state_of_command(history: History) -> tuple[str, list[str]]:
    """The state of a command that no job runs now, and what to do next."""
    last = history.starts[-1] if history.starts else {}
    logs = f"runner logs {quoted(os.path.relpath(history.folder.root))}{where_asked()}"
    if history.is_pulled and last.get("kind") != "done":
        return "stopped", ["what it does there: runner status --to CLUSTER"]
    if not last:
        return "stopped", [f"its command never began; why: {logs}"]
    kind, code = last.get("kind"), last.get("code")
    if kind == "done":
        return "finished", [f"the command ended with exit code 0; results: {history.folder.work}"]
    if kind is None:
        return "stopped", [f"it was ended from outside; why: {logs}"]
    ends = {"stopped": "it was stopped by a signal", "hung": "it was ended"}
    how = ends.get(str(kind), f"it ended with exit code {code}")
    cause = f": {last['cause']}" if last.get("cause") else ""
    place = f" ({last['place']})" if last.get("place") else ""
    remedy = last.get("remedy") or f"why: {logs}"
    return "stopped", [f"{how}{cause}{place}", f"-> {remedy}"]


def lines_of_command(history: History) -> list[str]:
    """Lines for people on its starts and results.

    Args:
        history: of `with_curves`.
    """
    words = " ".join(map(str, history.starts[-1].get("words", []))) if history.starts else ""
    lines = [f"command: {words or history.settings.get('command')}"]
    if history.done:
        loss = number(history.steps.last, "loss")
        of = f": loss {loss:.4f}" if loss is not None else ""
        lines.append(f"step {history.done}{of}  ({history.facts.get(CURVES)})")
    if len(history.starts) > 1:
        lines.append(f"{len(history.starts)} starts")
    found = history.results
    if found:
        size = human_size(sum(result.size for result in found))
        lines.append(f"{human_count(len(found), 'result')}, {size}; the newest:")
        for result in reversed(found[-NAMED:]):
            ago = format_age(max(0.0, time.time() - result.changed))
            lines.append(f"  {result.path} ({human_size(result.size)}, {ago} ago)")
    elif history.starts:
        lines.append("no result")
    if missing := missing_of(history.folder.missing):
        lines.append(
            "the bundle lacks what it asked for; on the laptop: runner submit RUN --to CLUSTER "
            "--add brings it; by hand: write this below `assets:` of the manifest, then stage "
            "fetch and stage push:"
        )
        lines += [f"  {line}" for line in missing.splitlines()]
    return lines


def document_of_command(history: History) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "command": history.starts[-1].get("words") if history.starts else None,
        "starts": list(history.starts),
        "results": [
            {"path": result.path, "size": result.size, "changed": result.changed}
            for result in history.results
        ],
        "missing": missing_of(history.folder.missing),
    }
