"""A source distribution -> the wheel that travels, built on the laptop, the same bytes each time.

Only wheels for any platform are accepted: code that a laptop compiles does not run on a cluster.
The build tools are pinned (their versions are written into the wheel), and dates and hash seeds are
fixed. DS_BUILD_OPS=0 lets deepspeed compile its operators where it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from stage.environment.solve.advice import Target, compiled_advice
from stage.environment.solve.indexes import choose_indexes
from stage.environment.solve.uv import find_uv, uv_environment
from stage.environment.spec.conda_lock import Package
from stage.environment.spec.pip_section import PipSection
from stage.errors import DamageError, IncompleteError, UsageError
from stage.progress import Reporter

BUILD_TOOLS = (
    "setuptools==80.9.0",
    "wheel==0.45.1",
    "hatchling==1.27.0",
    "flit-core==3.12.0",
    "poetry-core==2.1.3",
    "packaging==25.0",
)
"""Constraints on the tools that write the bytes of a wheel; a build installs those it needs."""

# A date within the years that zip files can have, from 1980 on.
SETTINGS = {"SOURCE_DATE_EPOCH": "1700000000", "PYTHONHASHSEED": "0", "DS_BUILD_OPS": "0"}


def build_wheel(
    sdist: Path, package: Package, out: Path, target: Target, reporter: Reporter
) -> Path:
    """Builds the wheel of an sdist into `out`.

    Args:
        target: the properties of the cluster, for advice.

    Raises:
        UsageError: the wheel is for one platform only, or it is not one.
        DamageError: the wheel is of another package or version.
        IncompleteError: the build failed; the message has the last lines of its output.
    """
    reporter.note(
        f"{package.name} {package.version}: no wheel is published; building one from {sdist.name}"
    )
    with tempfile.TemporaryDirectory(prefix="airlift-build-") as folder:
        pins = Path(folder, "build-constraints.txt")
        lines = choose_indexes(PipSection(), os.environ).lines
        options = [part for line in lines for part in line.split(" ", 1)]
        pins.write_text("".join(f"{pin}\n" for pin in BUILD_TOOLS), encoding="utf-8")
        command = [find_uv(), "build", "--wheel", "--no-config", "--python", sys.executable]
        command += [*options, "--build-constraints", str(pins)]
        command += ["--out-dir", f"{folder}/out", str(sdist.absolute())]
        done = subprocess.run(
            command, env={**uv_environment(os.environ), **SETTINGS}, capture_output=True, cwd=folder
        )
        if done.returncode != 0:
            said = (line.strip() for line in done.stderr.decode(errors="replace").splitlines())
            last = [line for line in said if line and not line.startswith("hint:")][-6:]
            raise IncompleteError(
                f"{package.name} {package.version}: no wheel could be built from {sdist.name}: "
                f"{' / '.join(last)}",
                "Check that the index with the build's requirements can be reached. If it "
                f"compiles: {compiled_advice(package.name, target)}",
            )
        wheels = sorted(Path(folder, "out").glob("*.whl"))
        wheel = _the_one(wheels, package, sdist, target)
        out.mkdir(parents=True, exist_ok=True)
        built = out / wheel.name
        built.write_bytes(wheel.read_bytes())
    return built


def _the_one(wheels: list[Path], package: Package, sdist: Path, target: Target) -> Path:
    if len(wheels) != 1:
        raise UsageError(
            f"{package.name} {package.version}: building {sdist.name} gives "
            f"{', '.join(wheel.name for wheel in wheels) or 'no wheel'}, not one wheel.",
            compiled_advice(package.name, target),
        )
    (wheel,) = wheels
    name, version, _, _ = parse_wheel_filename(wheel.name)
    if (name, str(version)) != (canonicalize_name(package.name), package.version):
        raise DamageError(
            f"{sdist.name}: its build gives {wheel.name}, another package or version.",
            "Lock again.",
        )
    if not wheel.name.endswith("-none-any.whl"):
        raise UsageError(
            f"{package.name} {package.version}: {wheel.name} is compiled for this machine, not for "
            "the cluster.",
            compiled_advice(package.name, target),
        )
    return wheel
