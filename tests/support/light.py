"""A light installation (`pip install .` or `'.[laptop]'`: no torch) as a real virtual environment.

It needs no package index. It holds airlift and the requirements that pyproject.toml declares, with
theirs: each is a link into the site-packages of the tests. So a package that airlift imports and
does not declare is missing there, also in child processes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from stage.installation import DISTRIBUTION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def make_light(folder: Path, extra: str = "laptop") -> None:
    """Makes the environment in `folder`, with `stage`, `runner` and `airlift` in its `bin`."""
    site = make_requirements(folder, extra)
    # What pip recorded of airlift itself, and nothing of the editable installation's import hooks.
    recorded = f"{DISTRIBUTION.replace('-', '_')}-*.dist-info"
    own = next(found for path in sys.path for found in Path(path).glob(recorded))
    (site / own.name).symlink_to(own)
    for package in ("stage", "runner"):
        (site / package).symlink_to(ROOT / package)
    for name, module in project()["scripts"].items():
        script = folder / "bin" / name
        script.write_text(
            f"#!{folder}/bin/python\nimport sys\n"
            f"from {module.partition(':')[0]} import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)


def make_requirements(folder: Path, extra: str = "laptop") -> Path:
    """Makes the environment without airlift itself; returns its site-packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = folder / "bin" / "python"
    site = Path(subprocess.check_output([python, "-c", ask], text=True).strip())
    for distribution in closure(declared(extra)):
        for entry in {Path(str(file)).parts[0] for file in distribution.files or ()}:
            target = Path(str(distribution.locate_file(entry)))
            if entry not in ("..", "__pycache__") and not (site / entry).exists():
                (site / entry).symlink_to(target)
    return site


def project() -> dict[str, Any]:
    """The section `[project]` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def declared(extra: str = "") -> list[Requirement]:
    """The requirements in pyproject.toml, with those of an extra."""
    more = project()["optional-dependencies"][extra] if extra else []
    return [Requirement(text) for text in [*project()["dependencies"], *more]]


def closure(wanted: list[Requirement]) -> list[metadata.Distribution]:
    """The installed distributions of these requirements, and of what they require in turn."""
    found: dict[str, metadata.Distribution] = {}
    while wanted:
        requirement = wanted.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or not _applies(requirement):
            continue
        found[name] = metadata.distribution(requirement.name)
        wanted += [Requirement(text) for text in found[name].requires or ()]
    return list(found.values())


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
