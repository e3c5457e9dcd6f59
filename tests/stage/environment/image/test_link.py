"""Packages laid into one folder: what recipes and wheels do that an environment has to bear."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from scripts.lib.conda.channel import PLACEHOLDER, File, Package, write_package
from stage.cli import main
from stage.environment.image import image, shebang
from stage.environment.image.assemble import bootstrap
from stage.environment.image.case import folder_that_keeps_case
from stage.environment.image.own_wheel import write_wheel
from stage.environment.image.relocate import find_regions, replace
from stage.environment.image.shebang import Shebang
from stage.errors import UsageError
from tests.support.caseless import caseless_disk

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
    # Without `-s` it would import what `pip install --user` left.
    assert len(re.findall(rb'" -s(?: -u)? "\$0"', script.read_bytes())) == 1
    assert subprocess.check_output([script, "a b", "c"], env={}, text=True) == "['a b', 'c']\n"


def test_a_wheels_record_promises_nothing_of_scripts_that_change_with_the_prefix(
    laid: Laid,
) -> None:
    lines = [line for line in laid.record("tools-1.0.dist-info") if "/bin/" in line]
    assert {line for line in lines if line.endswith(",,")} == {
        "../../../bin/tool,,",
        "../../../bin/tool-future,,",
    }
    assert (laid.root / "bin/tool.sh").read_bytes() == b"#!/bin/sh\necho tool\n"


@pytest.mark.parametrize("name", ["future", "tool-future"])
def test_a_script_with_a_future_import_is_not_made_a_syntax_error(laid: Laid, name: str) -> None:
    """Behind a docstring it would be one, if sh's lines stood before both."""
    content = laid.at(f"bin/{name}", "/env")
    assert content == b"#!/env/bin/python3.11 -s\n" + FUTURE
    (said,) = (note for note in laid.notes if note.startswith(f"bin/{name}: "))
    assert "longer than 127 bytes, only Linux 5.1 or newer starts it" in said


def test_a_script_that_is_not_utf_8_keeps_the_line_that_says_so() -> None:
    code = "# -*- coding: latin-1 -*-\nprint('é')\n".encode("latin-1")
    lines, reason = shebang.start(Shebang(b"/env", b"python", b"-u"), code)
    assert (lines, reason) == (b"#!/env/bin/python -su\n", "it is not UTF-8")


@pytest.mark.parametrize("second", [b"", b"'''exec' \"/p/bin/python\" \"$0\" \"$@\" #'''\n"])
def test_py_rattlers_start_goes_whole_in_either_form(second: bytes) -> None:
    assert shebang.without_start(b"#!/usr/bin/env python\n" + second + SAYS) == SAYS


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """Packages and wheels with names that differ only in case, or the form of an accent.

    As ncurses has terminfo, perl `HEAD`, and some wheels a module of each spelling.
    """
    folder = tmp_path_factory.mktemp("twins")
    started = b"#!" + PLACEHOLDER.encode() + b"/bin/python3.11\n"
    both = {
        "share/terminfo/n/ncr260vt": File(b"small n"),
        "share/terminfo/N/NCR260VT": File(b"large N"),
        "share/terminfo/N/link": File(link="../n/ncr260vt"),
        "share/terminfo/a/adm": File(b"adm"),
        "share/terminfo/A/ADM": File(PLACEHOLDER.encode()),
        "lib/caf\u00e9.txt": File(b"composed"),
        "lib/cafe\u0301.txt": File(b"decomposed"),
        "bin/head": File(started + b"# head\n", executable=True),
        "share/File": File(b"a file"),
    }
    packages = [
        Package(
            name="python",
            version="3.11.7",
            payload={"bin/python3.11": File(b"\x7fNO-ELF\0", executable=True)},
        ),
        Package(name="ncurses", version="6.5", payload=both),
        Package(
            name="perl",
            version="5.32",
            payload={
                "bin/HEAD": File(started + SAYS, executable=True),
                "bin/bin": File(b"\x7fELF" + PLACEHOLDER.encode() + b"/lib\0\0", executable=True),
                "share/file/inside": File(b"in a folder"),
            },
        ),
        Package(
            name="noarch",
            version="1.0",
            depends=("python >=3.9",),
            python=True,
            entry_points=("BIN = noarch:main",),
            payload={
                "site-packages/noarch.py": File(b"1"),
                "site-packages/NoArch.py": File(b"2"),
                "python-scripts/Head": File(started + b"# Head\n", executable=True),
            },
        ),
    ]
    wheel = folder / "mods-1.0-py3-none-any.whl"
    files = {
        "NOARCH.py": b"3",
        "mods/Base.py": b"4",
        "mods/base.py": b"5",
        "mods-1.0.data/scripts/HeaD": b"#!python\n" + SAYS,
        "mods-1.0.dist-info/entry_points.txt": (
            b"[console_scripts]\nhEAD2 = mods:main\nhead2 = mods:main\n"
        ),
        "mods-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: mods\nVersion: 1.0\n",
        "mods-1.0.dist-info/WHEEL": WHEEL,
    }
    write_wheel(wheel, files, "mods-1.0.dist-info/RECORD")
    written = [write_package(folder / "channel", package) for package in packages]
    old = _as_tar_bz2(written.pop(2), folder)
    return [*written, old], [wheel]


def _as_tar_bz2(package: Path, folder: Path) -> Path:
    """The same package in the older format."""
    with zipfile.ZipFile(package) as source:
        tars = [
            source.read(name) for name in sorted(source.namelist()) if name.endswith(".tar.zst")
        ]
    target = folder / package.name.replace(".conda", ".tar.bz2")
    with tarfile.open(target, "w:bz2") as out:
        for data in tars:
            with tarfile.open(
                fileobj=pa.input_stream(pa.BufferReader(data), compression="zstd"), mode="r|"
            ) as tar:
                for entry in tar:
                    out.addfile(entry, tar.extractfile(entry) if entry.isreg() else None)
    return target


def _environment(
    folder: Path, twins: tuple[list[Path], list[Path]]
) -> tuple[str, bytes, dict[str, Any]]:
    """Its tree digest, its image, what was said of it."""
    conda, wheels = twins
    answer = image.lay_out(folder / "root", conda=conda, wheels=wheels, platform="linux-64")
    facts = image.describe_tree(folder / "root", {"platform": "linux-64", "glibc": None})
    image.pack(folder / "root", folder / "image.tar.gz")
    return facts["tree"], (folder / "image.tar.gz").read_bytes(), answer


@pytest.mark.fuse
@pytest.mark.parametrize("makes_disk", [True, False])
def test_a_laptop_whose_disk_ignores_case_lays_it_out_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes_disk: bool
) -> None:
    """In TMPDIR; where that is such a disk too, a Mac makes a disk image."""
    (tmp_path / "tmp").mkdir()
    with caseless_disk(tmp_path / "disk") as disk:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        with folder_that_keeps_case(disk) as folder:
            assert folder.parent == tmp_path / "tmp"
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        program, calls = tmp_path / "bin/hdiutil", tmp_path / "calls"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$*" >>{calls}\n')
        if makes_disk:
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        if makes_disk:
            with folder_that_keeps_case(disk) as mount:
                assert mount.is_dir()
            create, attach, detach = calls.read_text().splitlines()
            assert "-fs Case-sensitive APFS" in create
            assert f"-mountpoint {mount} " in attach and attach.endswith(create.split()[-1])
            assert detach.startswith("detach") and detach.endswith(str(mount))
        else:
            with pytest.raises(UsageError) as told, folder_that_keeps_case(disk):
                pass
            assert "this disk ignores case" in str(told.value) and "TMPDIR=" in told.value.remedy
        assert list(disk.iterdir()) == []


@pytest.mark.fuse
def test_on_a_cluster_such_a_disk_is_refused_before_anything_is_unpacked(
    twins: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    _, packed, _ = _environment(tmp_path, twins)
    facts = json.loads((tmp_path / "root/.airlift/env.json").read_bytes())
    digest = hashlib.sha256(packed).hexdigest()
    (tmp_path / "bootstrap.sh").write_text(bootstrap("env", facts, digest))
    with caseless_disk(tmp_path / "disk") as disk:
        command = ["sh", tmp_path / "bootstrap.sh", disk / "env"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert list(disk.iterdir()) == []
    assert done.returncode == 1 and "is on a disk that ignores case" in done.stderr


@pytest.mark.parametrize("name", ["py-rattler", "installer"])
def test_a_tool_that_is_not_installed_is_named_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = metadata.version

    def version(wanted: str) -> str:
        if wanted == name:
            raise metadata.PackageNotFoundError(wanted)
        return real(wanted)

    (tmp_path / "m.yaml").write_text("format: 1\nassets:\n  e: {environment: environment.yml}\n")
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main, ["fetch", "m.yaml", "-o", "bundle"])
    assert said.exit_code == 2
    assert f"making an environment needs {name} (not installed)" in said.stderr
    assert "laptop" in said.stderr
