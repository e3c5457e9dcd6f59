"""Packages laid into one folder: what recipes and wheels do that an environment has to bear."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.conda_channel import PLACEHOLDER, File, Package, write_package
from stage.environment import image, shebang
from stage.environment.ownwheel import write_wheel
from stage.environment.relocate import find_regions, replace
from stage.environment.shebang import Shebang

SITE_PACKAGES = "lib/python3.11/site-packages"
PIP = "pip-24.0.dist-info"
SAYS = b"import sys\nprint(sys.argv[1:])\n"
FUTURE = b'"""Its docstring."""\n\nfrom __future__ import annotations\n\n' + SAYS


@dataclass(frozen=True)
class Laid:
    """An environment that says the placeholder, and what was said of it."""

    root: Path
    notes: list[str]

    def at(self, name: str, prefix: str) -> bytes:
        """A file, as it is once the environment lies at `prefix`."""
        content, old = (self.root / name).read_bytes(), image.PLACEHOLDER.encode()
        regions = find_regions(content, old, is_binary=False)
        return replace(content, regions, old, prefix.encode(), is_binary=False)

    def record(self, info: str) -> list[str]:
        return (self.root / SITE_PACKAGES / info / "RECORD").read_text().splitlines()


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Laid:
    """A pip as conda-forge has it, a noarch package and a compiled one with scripts, and a wheel with scripts."""
    folder = tmp_path_factory.mktemp("laid")
    started = b"#!" + PLACEHOLDER.encode() + b"/bin/python3.11"
    record = (
        "../../../bin/pip,sha256=abc,12\n../../../bin/pip3.11,sha256=abc,12\n../../../../bin/outside,sha256=abc,12\n"
    )
    packages = [
        Package(
            name="python",
            version="3.11.7",
            payload={
                "bin/python3.11": File(b"\x7fNOT-AN-ELF\0", executable=True),
                "bin/compiled": File(started + b" -u\n" + SAYS, executable=True),
                "bin/future": File(started + b"\n" + FUTURE, executable=True),
            },
        ),
        Package(
            name="pip",
            version="24.0",
            depends=("python >=3.9",),
            payload={f"site-packages/{PIP}/RECORD": File(record.encode())},
            python=True,
            entry_points=("pip = pip:main",),
        ),
        Package(
            name="scripts",
            version="1.0",
            depends=("python >=3.9",),
            payload={
                "python-scripts/neutral": File(started + b"\n" + SAYS, executable=True),
                "site-packages/neutral.conf": File(PLACEHOLDER.encode()),
            },
            python=True,
        ),
    ]
    wheel = folder / "tools-1.0-py3-none-any.whl"
    files = {
        "tools-1.0.data/scripts/tool": b"#!python\n" + SAYS,
        "tools-1.0.data/scripts/tool-future": b"#!python\n" + FUTURE,
        "tools-1.0.data/scripts/tool.sh": b"#!/bin/sh\necho tool\n",
        "tools-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tools\nVersion: 1.0\n",
        "tools-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    write_wheel(wheel, files, "tools-1.0.dist-info/RECORD")
    (folder / "bin").mkdir()
    (folder / "bin/outside").write_text(image.PLACEHOLDER)
    conda = {write_package(folder / "channel", package): f"https://x.example/{package.stem}" for package in packages}
    answer: dict[str, Any] = image.lay_out(folder / "root", conda=conda, wheels=[wheel], platform="linux-64")
    return Laid(folder / "root", answer["notes"])


def test_a_record_that_names_a_script_its_recipe_removed_stops_nothing(laid: Laid) -> None:
    """conda-forge's pip: bin/pip3.11 goes after `pip install` wrote the RECORD."""
    assert not (laid.root / "bin/pip3.11").exists()
    assert laid.record(PIP)[:2] == ["../../../bin/pip,,", "../../../bin/pip3.11,sha256=abc,12"]


def test_what_lies_outside_of_the_environment_does_not_change_its_records(laid: Laid) -> None:
    """Else the tree would be another on every machine."""
    assert laid.record(PIP)[2] == "../../../../bin/outside,sha256=abc,12"


@pytest.mark.parametrize("name", ["tool", "compiled", "neutral"])
def test_a_script_of_a_wheel_or_a_noarch_package_starts_in_a_prefix_longer_than_a_kernel_reads(
    laid: Laid, tmp_path: Path, name: str
) -> None:
    prefix = tmp_path / ("long-" * 25) / "env"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/python3.11").symlink_to(sys.executable)
    script = prefix / "bin" / name
    script.write_bytes(laid.at(f"bin/{name}", str(prefix)))
    script.chmod(0o755)
    assert len(str(prefix)) > shebang.LONGEST
    assert script.read_bytes().startswith(b"#!/bin/sh\n")
    assert script.read_bytes().count(b"'''exec'") == 1
    assert subprocess.check_output([script, "a b", "c"], env={}, text=True) == "['a b', 'c']\n"


def test_a_wheels_record_promises_nothing_of_scripts_that_change_with_the_prefix(laid: Laid) -> None:
    lines = [line for line in laid.record("tools-1.0.dist-info") if "/bin/" in line]
    assert {line for line in lines if line.endswith(",,")} == {"../../../bin/tool,,", "../../../bin/tool-future,,"}
    assert (laid.root / "bin/tool.sh").read_bytes() == b"#!/bin/sh\necho tool\n"


@pytest.mark.parametrize("name", ["future", "tool-future"])
def test_a_script_with_a_future_import_is_not_made_a_syntax_error(laid: Laid, name: str) -> None:
    """Behind a docstring it would be one, if sh's lines stood before both."""
    content = laid.at(f"bin/{name}", "/env")
    assert content == b"#!/env/bin/python3.11\n" + FUTURE
    (said,) = (note for note in laid.notes if note.startswith(f"bin/{name}: "))
    assert "longer than 127 bytes, only Linux 5.1 or newer starts it" in said


def test_a_script_that_is_not_utf_8_keeps_the_line_that_says_so() -> None:
    code = "# -*- coding: latin-1 -*-\nprint('é')\n".encode("latin-1")
    lines, reason = shebang.start(Shebang(b"/env", b"python", b"-u"), code)
    assert (lines, reason) == (b"#!/env/bin/python -u\n", "it is not UTF-8")


@pytest.mark.parametrize("second", [b"", b"'''exec' \"/p/bin/python\" \"$0\" \"$@\" #'''\n"])
def test_py_rattlers_start_goes_whole_in_either_form(second: bytes) -> None:
    assert shebang.without_start(b"#!/usr/bin/env python\n" + second + SAYS) == SAYS
