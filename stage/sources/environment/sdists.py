"""A source distribution -> the wheel that travels, built on the laptop, the same bytes each time.

Only wheels for any platform are taken: what a laptop compiles does not run on a cluster. The build's own tools are
pinned (their names and versions stand in the wheel), dates and hash seeds are fixed, and deepspeed is told to compile
its operators where it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from stage.environment.packages import Package
from stage.errors import DamageError, IncompleteError, UsageError
from stage.progress import Reporter
from stage.sources.environment.tools import index_options, uv
from stage.sources.environment.uv import uv_environment

BUILD_TOOLS = (
    "setuptools==80.9.0",
    "wheel==0.45.1",
    "hatchling==1.27.0",
    "flit-core==3.12.0",
    "poetry-core==2.1.3",
    "packaging==25.0",
)
"""What may have made the bytes of a wheel: constraints, so a build that needs none of them is not given any."""

SETTINGS = {"SOURCE_DATE_EPOCH": "1700000000", "PYTHONHASHSEED": "0", "DS_BUILD_OPS": "0"}


def build_wheel(sdist: Path, package: Package, out: Path, reporter: Reporter) -> Path:
    """Builds the wheel of an sdist into `out`.

    Raises:
        UsageError: the wheel is for one platform only.
        DamageError: the wheel is of another package or version.
        IncompleteError: the build failed, in its own last words.
    """
    reporter.note(f"{package.name} {package.version}: no wheel is published; building one from {sdist.name}")
    with tempfile.TemporaryDirectory(prefix="airlift-build-") as folder:
        pins = Path(folder, "build-constraints.txt")
        pins.write_text("".join(f"{pin}\n" for pin in BUILD_TOOLS), encoding="utf-8")
        command = [uv(), "build", "--wheel", "--no-config", "--python", sys.executable]
        command += [
            *index_options(),
            "--build-constraints",
            str(pins),
            "--out-dir",
            f"{folder}/out",
            str(sdist.absolute()),
        ]
        done = subprocess.run(command, env={**uv_environment(os.environ), **SETTINGS}, capture_output=True, cwd=folder)
        if done.returncode != 0:
            said = (line.strip() for line in done.stderr.decode(errors="replace").splitlines())
            words = [line for line in said if line and not line.startswith("hint:")][-6:]
            raise IncompleteError(
                f"{package.name} {package.version}: no wheel could be built from {sdist.name}: {' / '.join(words)}",
                "Look whether another version has a wheel, or whether the build's own packages can be reached.",
            )
        wheels = sorted(Path(folder, "out").glob("*.whl"))
        wheel = _the_one(wheels, package, sdist)
        out.mkdir(parents=True, exist_ok=True)
        target = out / wheel.name
        target.write_bytes(wheel.read_bytes())
    return target


def _the_one(wheels: list[Path], package: Package, sdist: Path) -> Path:
    (wheel,) = wheels
    name, version, _, _ = parse_wheel_filename(wheel.name)
    if (name, str(version)) != (canonicalize_name(package.name), package.version):
        raise DamageError(f"{sdist.name}: gives {wheel.name}, which is another package or version.", "Lock again.")
    if not wheel.name.endswith("-none-any.whl"):
        raise UsageError(
            f"{package.name} {package.version}: {wheel.name} is compiled for this machine, not for the cluster.",
            "Take a version that publishes wheels, or its conda package instead.",
        )
    return wheel
