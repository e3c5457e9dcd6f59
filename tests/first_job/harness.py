"""A person's login node for the failures of the list: a bundle with one fault per asset."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from click.testing import CliRunner

from runner.cli import main as runner
from scripts.lib.demo.repositories import paragraphs
from tests.runner.conftest import RUN
from tests.support.environ import kept_environment
from tests.support.staging import run_as

NOBODY = 65534
Change = Callable[[Path], object]


class Said(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Found:
    """What a command must say about one failure of the list.

    Attributes:
        words: name the cause.
        remedy: a part of a line that begins with `->`; empty: of a command that succeeds.
        code: the exit code.
    """

    words: tuple[str, ...]
    remedy: str = ""
    code: int = 2


def assert_found(said: Said, found: Found) -> None:
    """Asserts exit code, cause and remedy, and that nobody sees a traceback."""
    text = said.out + said.err
    assert "Traceback" not in text, text
    assert said.code == found.code, text
    for word in found.words:
        assert word in text, f"{word!r} is not in:\n{text}"
    if found.code == 0 and not found.remedy:
        return
    start = text.rindex("warning: ") if found.code == 0 else text.index("error: ")
    remedies = "\n".join(text[start:].split("-> ")[1:])
    assert found.remedy in remedies, f"{found.remedy!r} is not in the remedy of:\n{text}"


def assert_silent(said: Said) -> None:
    """Asserts that a good run passes without a warning."""
    assert said.code == 0, said.out + said.err
    assert said.err == "" and "warning" not in said.out, said.out + said.err
    assert "nothing found that would fail\n" in said.out


def run_runner(folder: Path, *arguments: str, **variables: str | None) -> Said:
    """`runner` in this process, with a user's variables: no Slurm, no offline variables."""
    here = Path.cwd()
    dropped = ("SLURM_", "HF_", "TRANSFORMERS_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "CUDA_",
               "PYTEST_")  # fmt: skip
    with kept_environment():
        for name in [name for name in os.environ if name.startswith(dropped)]:
            del os.environ[name]
        os.environ.update({name: value for name, value in variables.items() if value is not None})
        os.chdir(folder)
        try:
            done = CliRunner().invoke(
                runner, list(arguments), prog_name="runner", catch_exceptions=False
            )
        finally:
            os.chdir(here)
    return Said(done.exit_code, done.stdout, done.stderr)


def as_nobody(folder: Path, *arguments: str) -> Said:
    """`runner` as a user without rights, in a fork of this process."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        said = Said(70, "", "")
        try:
            run_runner(folder, *arguments)  # what it imports may lie in a folder of root's
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.environ["XDG_STATE_HOME"] = str(folder / "state")
            said = run_runner(folder, *arguments)
        finally:
            os.write(sender, json.dumps(said).encode())
            os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as answer:
        said = Said(*json.loads(answer.read()))
    os.waitpid(child, 0)
    return said


def run_stage(folder: Path, *arguments: str, **variables: str) -> Said:
    """`stage` in this process, as on a laptop without an internet."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    own = {"HOME": str(folder), "AIRLIFT_STORE": "none", "XDG_STATE_HOME": str(folder / "state")}
    done = run_as(arguments, folder, {**kept, **own, **variables})
    return Said(done.returncode, done.stdout, done.stderr)


def write_run(folder: Path, name: str = "tiny", /, **changes: Any) -> Path:
    """A run file: that of the runner's tests, with keys replaced (None: left out)."""
    path = folder / f"{name}.yaml"
    texts = {"asset": "texts", "limit": {"train": 200}}
    wanted = {**RUN, "name": name, "dataset": texts, **changes}
    settings = {key: value for key, value in wanted.items() if value is not None}
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def check(folder: Path, bundle: Path, *options: str, **run: Any) -> Said:
    """`runner check` of a run file with these keys."""
    write_run(folder, **run)
    where = () if "--processes" in options or "slurm" in run else ("--processes", "2")
    return run_runner(folder, "check", "tiny.yaml", "--bundle", str(bundle), *where, *options)


def fetch(folder: Path, assets: Mapping[str, Mapping[str, Any]], *options: str) -> Said:
    """`stage fetch` of a manifest with these assets into `folder/bundle`."""
    manifest = {"format": 1, "name": "tiny", "assets": dict(assets)}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))
    return run_stage(folder, "fetch", "tiny.yaml", "-o", "bundle", *options)


def bundle_of_variants(folder: Path, sources: Mapping[str, tuple[Path, Change]]) -> Path:
    """A sound bundle whose models are copies with a fault: as a colleague's folder could be.

    It also has the datasets `texts` and `chats`; `twice`, in which the user asks twice; and `bots`,
    without an assistant.

    Args:
        sources: asset name -> the folder that is copied, and what is done to the copy.
    """
    for name, (source, change) in sources.items():
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("README.md"))
        change(folder / name)
    assets: dict[str, Any] = {name: {"path": f"./{name}"} for name in sources}
    lines = [line for _, line in paragraphs()["train"][:300]]
    talks = [
        [{"role": "user", "content": "And?"}, {"role": "assistant", "content": line[:80]}]
        for line in lines
    ]
    twice = [[{"role": "user", "content": "Well?"}, *talk] for talk in talks]
    bots = [[{"role": "bot", "content": line[:80]}] for line in lines]
    for name, column, values in (
        ("texts", "text", lines),
        ("chats", "messages", talks),
        ("twice", "messages", twice),
        ("bots", "messages", bots),
    ):
        rows = "".join(json.dumps({column: value}) + "\n" for value in values)
        (folder / f"{name}.jsonl").write_text(rows)
        assets[name] = {"path": f"./{name}.jsonl", "convert": "json"}
    said = fetch(folder, assets, "--no-offline-check")
    assert said.code == 0, said.err
    return folder / "bundle"


def edit(name: str, change: Callable[[Any], Any]) -> Change:
    """Changes a JSON file of a folder."""

    def apply(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return apply


def remove(*patterns: str) -> Change:
    """Removes files of a folder."""

    def apply(folder: Path) -> None:
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            path.unlink()

    return apply


def programs(folder: Path, **bodies: str) -> str:
    """Programs that answer as on a cluster; returns a PATH that begins with them."""
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def torch_of(folder: Path, version: str, cuda: str) -> str:
    """What an installed torch says of itself; returns a folder for the front of sys.path."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (folder / "torch").mkdir()
    (folder / "torch/version.py").write_text(f"cuda: Optional[str] = {cuda}\nhip = None\n")
    return str(folder)


def both(*changes: Change) -> Change:
    """Several changes, one after the other."""

    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply
