"""A file, from the Hub to a verified byte: how many files a person opens who follows it.

The ground files (`stage/*.py`: errors, digests, paths, ...) are not counted.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from click.testing import Result

import stage as package
from stage.staging.sources.repository import HubSource
from tests.support.servers.hubs import TestHub

ROOT = Path(package.__file__).parents[1]
STORY = {
    "stage/staging/fetch.py",
    "stage/staging/resolve.py",
    "stage/staging/sources/source.py",
    "stage/staging/sources/repository.py",
}
MOST = 19


def imported(files: set[str]) -> set[str]:
    """The files of `stage` that these import."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stage"):
                module = (node.module or "").replace(".", "/")
                found |= {f"{module}.py", *(f"{module}/{alias.name}.py" for alias in node.names)}
    return found


def test_a_reader_opens_at_most_19_files(hub: TestHub, stage: Callable[..., Result]) -> None:
    hub.commit("models", "acme/tiny", {"config.json": b'{"model_type": "bert"}'})
    Path("m.yaml").write_text("format: 1\nassets:\n  tiny: {model: acme/tiny}\n")
    ends = {HubSource.resolve.__code__, HubSource.fetch.__code__}
    ran: set[str] = set()
    inside = threading.local()

    def follow(frame: FrameType, event: str, _: Any) -> None:
        inside.depth = getattr(inside, "depth", 0)
        if frame.f_code in ends:
            inside.depth += {"call": 1, "return": -1}.get(event, 0)
        if inside.depth and event == "call":
            ran.add(frame.f_code.co_filename)

    threading.setprofile(follow)
    sys.setprofile(follow)
    try:
        stage("fetch", "m.yaml", "-o", "b", "--no-offline-check")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inner = {Path(name).relative_to(ROOT) for name in ran if name.startswith(f"{ROOT}/stage/")}
    journey = STORY | {path.as_posix() for path in inner if len(path.parts) > 2}
    assert len(journey) <= MOST, "\n".join(sorted(journey))
    assert {"stage/hub/client.py", "stage/download/partial_file.py"} < journey
    reached = {"stage/staging/fetch.py"}
    ground = {path.relative_to(ROOT).as_posix() for path in (ROOT / "stage").glob("*.py")}
    while more := (imported(reached) & (journey | ground)) - reached:
        reached |= more
    assert journey <= reached, "the imports lead from file to file"
