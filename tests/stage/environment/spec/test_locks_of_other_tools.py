"""Locks and lists of other tools in the place of an environment.yml: named, with the way on."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stage.environment.spec.conda_lock import EnvironmentLock
from stage.environment.spec.environment_yml import EnvironmentSpec
from tests.first_job.harness import run_stage
from tests.remedies.obeyed import in_it

DIGEST = "1" * 64
WHEEL = "https://example.org/tool-1.0-py3-none-any.whl"
UV = f"""\
version = 1
requires-python = ">=3.11"

[[package]]
name = "mine"
version = "1"
source = {{ virtual = "." }}
dependencies = [{{ name = "tool" }}]

[[package]]
name = "tool"
version = "1.0"
source = {{ registry = "https://pypi.org/simple" }}
wheels = [{{ url = "{WHEEL}", hash = "sha256:{DIGEST}", size = 10 }}]
"""
LOCKS = {
    "uv.lock": (UV, "a lock of uv", "uv export "),
    "poetry.lock": (
        '# made by a tool\n\n[[package]]\nname = "tool"\nversion = "1.0"\n',
        "a lock of poetry",
        "poetry export ",
    ),
    "pixi.lock": (
        "version: 6\nenvironments:\n  default:\n    channels: []\npackages: []\n",
        "a lock of pixi",
        "pixi workspace export conda-environment",
    ),
    "conda-linux-64.lock": (
        "# platform: linux-64\n@EXPLICIT\n"
        f"https://c.example/linux-64/zlib-1.3-0.conda#{'0' * 32}\n",
        "conda's explicit list",
        "conda env export ",
    ),
    "pylock.toml": (
        'lock-version = "1.0"\ncreated-by = "pip"\n\n'
        '[[packages]]\nname = "tool"\nversion = "1.0"\n',
        "a pylock.toml",
        "uv pip sync ",
    ),
    "requirements.txt": ("numpy\ntorch\n", "a list of requirements", "[-r requirements.txt]"),
}
PROFILE = 'format: 1\nname: a\nplatform: linux-64\nglibc: "2.28"\n'


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_of_another_tool_is_named_with_the_way_on(tmp_path: Path, name: str) -> None:
    text, kind, way = LOCKS[name]
    (tmp_path / name).write_text(text)
    (tmp_path / "p.yml").write_text(PROFILE)
    (tmp_path / "m.yaml").write_text(f"format: 1\nname: m\nassets:\n  e: {{environment: {name}}}\n")
    for command in (f"env lock {name} --profile p.yml", "lock m.yaml"):
        done = run_stage(tmp_path, *command.split())
        assert done.code == 2 and f"{name}: this is {kind}, not an environment.yml" in done.err
        assert way in done.err


def test_a_text_file_with_mistakes_is_still_a_list_of_requirements(tmp_path: Path) -> None:
    (tmp_path / "reqs.txt").write_text("tool==1==2\n./local\nhttps://example.org/latest.whl\n")
    (tmp_path / "p.yml").write_text(PROFILE)
    done = run_stage(tmp_path, "env", "lock", "reqs.txt", "--profile", "p.yml")
    assert done.code == 2 and "this is a list of requirements, not an environment.yml" in done.err


def test_a_table_of_something_else_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "Cargo.lock").write_text('version = 3\n\n[[package]]\nname = "a"\n')
    (tmp_path / "p.yml").write_text(PROFILE)
    done = run_stage(tmp_path, "env", "lock", "Cargo.lock", "--profile", "p.yml")
    assert done.code == 2 and "a lock of" not in done.err


def test_the_export_of_uv_is_read(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text(UV)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\n'
        'dependencies = ["tool"]\n'
    )
    (tmp_path / "p.yml").write_text(PROFILE)
    said = run_stage(tmp_path, "env", "lock", "uv.lock", "--profile", "p.yml").err
    uv, *words = shlex.split(in_it(said, r"uv export [^;]*"))
    done = subprocess.run(
        [Path(sys.executable).with_name(uv), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    listed = in_it(said, r"dependencies: \[python=3.11.*\]}\]")
    (tmp_path / "environment.yml").write_text(f"channels: [conda-forge]\n{listed}\n")
    (tool,) = EnvironmentSpec.load(tmp_path / "environment.yml").pip.requirements
    assert (tool.text, tool.sha256) == ("tool==1.0", (DIGEST,))


def test_optional_categories_of_a_conda_lock_are_left_out_as_conda_lock_does(
    tmp_path: Path,
) -> None:
    def entry(name: str, category: str) -> dict[str, object]:
        return {
            "name": name, "version": "1", "manager": "conda", "platform": "linux-64",
            "dependencies": {}, "url": f"https://c.example/noarch/{name}-1-0.conda",
            "hash": {"sha256": DIGEST}, "category": category, "optional": category != "main",
        }  # fmt: skip

    packages = [entry("python", "main"), entry("ipython", "dev"), entry("pytest", "test")]
    packages += [entry("shared", "main"), entry("shared", "test")]
    document = {"version": 1, "metadata": {"platforms": ["linux-64"]}, "package": packages}
    (tmp_path / "conda-lock.yml").write_text(json.dumps(document))
    names = [p.name for p in EnvironmentLock.load(tmp_path / "conda-lock.yml").packages]
    assert names == ["python", "ipython", "shared"]
