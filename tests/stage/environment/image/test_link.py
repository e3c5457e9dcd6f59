"""Packages laid into one folder: what recipes and wheels do that an environment has to bear."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.conda.channel import PLACEHOLDER, File, Package, write_package
from stage.environment.image import image, link
from stage.environment.image.image import write_wheel
from stage.environment.image.relocate import find_regions, replace
from stage.errors import UsageError

WHEEL = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
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
    """A pip like conda-forge's; a noarch and a compiled package and a wheel, with scripts."""
    folder = tmp_path_factory.mktemp("laid")
    started = b"#!" + PLACEHOLDER.encode() + b"/bin/python3.11"
    record = (
        "../../../bin/pip,sha256=abc,12\n../../../bin/pip3.11,sha256=abc,12\n"
        "../../../../bin/outside,sha256=abc,12\n"
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
        "tools-1.0.dist-info/WHEEL": WHEEL,
    }
    write_wheel(wheel, files, "tools-1.0.dist-info/RECORD")
    (folder / "bin").mkdir()
    (folder / "bin/outside").write_text(image.PLACEHOLDER)
    conda = [write_package(folder / "channel", package) for package in packages]
    answer: dict[str, Any] = image.lay_out(
        folder / "root", conda=conda, wheels=[wheel], platform="linux-64"
    )
    return Laid(folder / "root", answer["notes"])


def test_a_record_that_names_a_script_its_recipe_removed_stops_nothing(laid: Laid) -> None:
    """conda-forge's pip: bin/pip3.11 goes after `pip install` wrote the RECORD."""
    assert not (laid.root / "bin/pip3.11").exists()
    assert laid.record(PIP)[:2] == ["../../../bin/pip,,", "../../../bin/pip3.11,sha256=abc,12"]


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
    assert len(str(prefix)) > link.LONGEST
    assert script.read_bytes().startswith(b"#!/bin/sh\n")
    assert script.read_bytes().count(b"'''exec'") == 1
    # Without `-s` it would import what `pip install --user` left.
    assert len(re.findall(rb'" -s(?: -u)? "\$0"', script.read_bytes())) == 1
    assert subprocess.check_output([script, "a b", "c"], env={}, text=True) == "['a b', 'c']\n"


@pytest.mark.parametrize("name", ["future", "tool-future"])
def test_a_script_with_a_future_import_is_not_made_a_syntax_error(laid: Laid, name: str) -> None:
    """Behind a docstring it would be one, if sh's lines stood before both."""
    content = laid.at(f"bin/{name}", "/env")
    assert content == b"#!/env/bin/python3.11 -s\n" + FUTURE
    (said,) = (note for note in laid.notes if note.startswith(f"bin/{name}: "))
    assert "longer than 127 bytes, only Linux 5.1 or newer starts it" in said


@pytest.mark.parametrize("makes_disk", [True, False])
def test_a_laptop_whose_disks_ignore_case_lays_it_out_in_a_disk_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes_disk: bool
) -> None:
    """As a Mac does, or the refusal; `hdiutil` is a program that writes down its calls."""
    monkeypatch.setattr(image, "ignores_case", lambda folder: True)
    program, calls = tmp_path / "bin/hdiutil", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >>{calls}\n')
    program.chmod(0o755 if makes_disk else 0o644)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    if makes_disk:
        with image.folder_that_keeps_case(tmp_path) as mount:
            assert mount.is_dir()
        create, attach, detach = calls.read_text().splitlines()
        assert "-fs Case-sensitive APFS" in create
        assert f"-mountpoint {mount} " in attach and attach.endswith(create.split()[-1])
        assert detach.startswith("detach") and detach.endswith(str(mount))
    else:
        with pytest.raises(UsageError, match="this disk ignores case") as told:
            image.folder_that_keeps_case(tmp_path).__enter__()
        assert "TMPDIR=" in told.value.remedy


@pytest.mark.parametrize(
    ("path", "file", "words"),
    [
        ("share/x", File(link="../../../etc/passwd"), "a link that leads out of the environment"),
        ("share/x", File(link="../.."), "a link that leads out of the environment"),
        ("share/x", File(link="/etc/passwd"), "a link that leads out of the environment"),
        ("share/a\nb", File(b"x"), "'share/a\\\\nb': a line break in a file's name"),
        ("share/a\rb", File(b"x"), "a line break in a file's name"),
    ],
)
def test_a_package_that_would_reach_out_of_the_environment_is_refused(
    tmp_path: Path, path: str, file: File, words: str
) -> None:
    payloads = {
        "python": {"bin/python3.11": File(b"x", executable=True)},
        "evil": {path: file},
    }
    conda = [
        write_package(tmp_path, Package(name=name, version="3.11.7", payload=payload))
        for name, payload in payloads.items()
    ]
    with pytest.raises(UsageError, match=words):
        image.lay_out(tmp_path / "root", conda=conda, wheels=[], platform="linux-64")
