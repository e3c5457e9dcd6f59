"""The channel of tests and demo is a real one: a solver reads it, and its Python runs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stage.environment.spec.profile import Profile
from tests.support.environment.channel import GREETING, SCRIPT_RAN, make_channel
from tests.support.environment.rattler import ConflictError, solve

PROFILES = Path(__file__).resolve().parents[4] / "envs" / "profiles"


def virtual_packages(profile: str) -> dict[str, str]:
    return Profile.load(PROFILES / f"{profile}.yml").virtual_packages()


@pytest.fixture(scope="module")
def prefix(conda_channel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with a bit of everything, in a prefix whose name is long."""
    base = tmp_path_factory.mktemp("installed")
    prefix = base / ("long-" * 12)
    specs = ["python", "pip", "greeter <1.1", "openmpi", "links", "scripted"]
    solve(conda_channel, specs, virtual_packages("cpu"), base / "cache", prefix)
    return prefix


def run(*command: str | Path) -> str:
    """Runs a command with nothing of this machine's PATH or Python settings."""
    done = subprocess.run(
        list(map(str, command)), env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_python_in_it_is_its_own(prefix: Path) -> None:
    """Neither the interpreter nor its modules come from the Python that it was made from."""
    code = "import sys, os, ssl, ctypes; print(sys.prefix, os.__file__, *sys.path, sep='\\n')"
    code += "; print(open('/proc/self/maps').read())"
    shown = run(prefix / "bin" / "python", "-c", code)
    assert shown.splitlines()[0] == str(prefix)
    assert shown.splitlines()[1].startswith(str(prefix))
    series = sysconfig.get_python_version()
    assert f"{prefix}/lib/python{series}/lib-dynload/_ssl" in shown
    base = Path(sys.base_prefix).resolve()
    for own in ("bin/python", "lib/python", "lib/libpython", "local/lib/python"):
        assert f" {base}/{own}" not in shown and f"\n{base}/{own}" not in shown
    assert (
        f"{prefix}/lib/libpython{series}.so" in shown
        or not (base / f"lib/libpython{series}.so").exists()
    )


def test_packages_go_where_conda_has_them(prefix: Path) -> None:
    """Debian's Python looks in dist-packages, and would install below /usr/local."""
    series = sysconfig.get_python_version()
    code = "import site, sysconfig; print(site.getsitepackages()[-1], "
    code += "*map(sysconfig.get_path, ('purelib', 'scripts')))"
    place = f"{prefix}/lib/python{series}/site-packages"
    assert run(prefix / "bin" / "python", "-c", code) == f"{place} {place} {prefix}/bin"
    told = "".join(
        path.read_text() for path in (prefix / f"lib/python{series}").glob("_sysconfigdata_*.py")
    )
    assert f"'{prefix}/lib" in told and f"'{Path(sys.base_prefix).resolve()}/lib" not in told


def test_commands_of_noarch_packages_run(prefix: Path) -> None:
    assert run(prefix / "bin" / "greet") == f"{GREETING} 1.0"
    assert run(prefix / "bin" / "pip", "--version").startswith("pip ")


def test_prefixes_in_text_and_binaries_are_those_of_the_environment(prefix: Path) -> None:
    assert run(prefix / "bin" / "mpirun").startswith("orterun of")
    binary = (prefix / "lib" / "libmpi.so").read_bytes()
    here = str(prefix).encode()
    assert binary.startswith(b"\x7fNOT-AN-ELF\0" + here + b"\0")
    assert here + b"/etc:" + here + b"/share\0" in binary


def test_links_are_links_and_scripts_were_not_run(prefix: Path) -> None:
    assert (prefix / "share/links/to-folder/inside.txt").read_text() == "inside\n"
    assert (prefix / "share/links/dangling").is_symlink()
    assert not (prefix / SCRIPT_RAN).exists()


@pytest.mark.parametrize(
    ("profile", "spec", "expected"),
    [
        ("a800", "cudatoolkit", "cudatoolkit-12.4.1-0"),
        ("v100-cuda11", "cudatoolkit", "cudatoolkit-11.8.0-0"),
        ("cpu", "newer-glibc", "newer-glibc-1.0-0"),
        ("h200", "newer-glibc", "newer-glibc-2.0-0"),
    ],
)
def test_the_profile_decides_which_build_is_chosen(
    conda_channel: Path, tmp_path: Path, profile: str, spec: str, expected: str
) -> None:
    assert expected in solve(conda_channel, [spec], virtual_packages(profile), tmp_path)


def test_what_cannot_be_had_together_conflicts(conda_channel: Path, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="cudatoolkit"):
        solve(conda_channel, ["wants-cuda11", "wants-cuda12"], virtual_packages("a800"), tmp_path)
    with pytest.raises(ConflictError, match="__cuda"):
        solve(conda_channel, ["cudatoolkit"], virtual_packages("cpu"), tmp_path)


def test_it_is_the_same_bytes_every_time(conda_channel: Path, tmp_path: Path) -> None:
    assert digests(make_channel(tmp_path / "again")) == digests(conda_channel)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
