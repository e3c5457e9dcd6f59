"""`stage-verify.py` in a bundle reports what `stage verify` reports, on a cluster's Pythons."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from stage.bundle import verifier
from stage.bundle.bundle import VERIFIER, verify
from stage.bundle.receipt import find_damage
from tests.stage.bundles import BIG
from tests.support.rights import as_another_user

TEMPLATE = Path(verifier.__file__)


ASK = "import sys; print(*sys.version_info[:2])"


@functools.cache
def pythons() -> list[str]:
    """One interpreter of each minor version from 3.6 on that is here, the oldest first."""
    found: dict[tuple[int, int], str] = {(sys.version_info[0], sys.version_info[1]): sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    names = itertools.chain(
        pyenv.glob("3.*/bin/python"), (f / f"python3.{n}" for f in folders for n in range(6, 16))
    )
    asked = [  # all at once: each worker of a test run waits for them
        (path, subprocess.Popen([path, "-c", ASK], stdout=PIPE, stderr=DEVNULL, text=True))
        for path in names
        if path.exists()
    ]
    for path, process in asked:
        answer = process.communicate()[0]
        if process.returncode == 0 and (version := (*map(int, answer.split()),)) >= (3, 6):
            found.setdefault((version[0], version[1]), str(path))
    return [found[version] for version in sorted(found)]


def standalone(
    python: str, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the shipped file, isolated from what is installed here."""
    return subprocess.run(
        [python, "-I", str(TEMPLATE), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **environment},
        timeout=120,
    )


def test_what_it_uses_of_the_library_was_there_in_python_3_6() -> None:
    """For machines without an old Python: vermin knows since when each function exists."""
    command = [
        sys.executable,
        "-c",
        "import sys; from vermin import main; sys.exit(main())",
        "-t=3.6-",
        "--no-tips",
    ]
    done = subprocess.run([*command, TEMPLATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).parts[-3])
def test_every_python_here_runs_it_where_it_lies(copy: Path, python: str) -> None:
    done = subprocess.run(
        [python, "-I", str(copy / VERIFIER)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"bundle id {verify(copy, 'fast').bundle_id}" in done.stdout.splitlines()
    assert not list(copy.rglob("__pycache__")) and verify(copy).ok, "it left something behind"
    with open(copy / BIG, "r+b") as file:
        file.seek(40 * 2**20)
        file.write(b"x")
    damaged = standalone(python, copy, "--json")
    assert damaged.returncode == 1 and json.loads(damaged.stdout) == verify(copy).to_json()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_names_are_utf_8_in_any_locale(small: Path, locale: str) -> None:
    """Old clusters run jobs in `C`, which Python 3.6 takes for ASCII."""
    done = standalone(pythons()[0], small, "--json", LC_ALL=locale)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mode", [0, 0o400, 0o100], ids=["", "listed", "entered"])
@pytest.mark.parametrize("level", ["full", "fast"])
def test_files_below_a_folder_without_the_right_to_look_are_no_damage(
    small_copy: Path, tmp_path: Path, level: str, mode: int
) -> None:
    (small_copy / "data/models/bert").chmod(mode)
    options = ["--fast"] if level == "fast" else []
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    for program in ([sys.executable, "-m", "stage", "verify"], [pythons()[0], str(TEMPLATE)]):
        done = subprocess.run(
            [*as_another_user(), *program, str(small_copy), *options, "--json"],
            env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        found = {f["path"]: f["problem"] for f in json.loads(done.stdout)["findings"]}
        assert done.returncode == 5 and set(found.values()) == {"unreadable"}, (program, found)
        assert "data/models/bert/vocab.txt" in found
    (small_copy / "data/models/bert").chmod(0o755)
    assert find_damage(tmp_path / "state/airlift", small_copy) is None


def test_its_syntax_is_that_of_python_3_6() -> None:
    text = TEMPLATE.read_text()
    ast.parse(text, feature_version=(3, 6))
    imported = {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
