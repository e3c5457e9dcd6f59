"""A cluster whose Python and torch are the site's: modules and virtual environments.

The site's torch and numpy are those of this test run, by links to their folders.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stage.environment.image import relocate, site_path
from stage.environment.image.link import NAMESPACE
from tests.support.environment.laptop import bootstrap

REPOSITORY = Path(__file__).resolve().parents[3]
BASE = Path(os.path.realpath(sys.executable))
"""A Python of this machine without packages of its own."""


def with_requirements(*names: str) -> set[str]:
    """Distributions of this run and all that they require here, normalised."""
    found, waiting = set[str](), [*names]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            stated = map(Requirement, metadata.requires(name) or [])
            waiting += [r.name for r in stated if r.marker is None or r.marker.evaluate()]
    return found


def link_into(folder: Path, names: set[str]) -> Path:
    """Links distributions of this run into a folder, which can be on PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for file in metadata.distribution(name).files or []:
            top = Path(str(file.locate())).parents[len(file.parts) - 1] / file.parts[0]
            link = folder / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(top)
    return folder


def plant_old(folder: Path) -> Path:
    """An old transformers and a regular package `google`, which would hide newer ones."""
    for name in ("transformers", "google/ours"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("WHOSE = 'site'\n")
    (folder / "google/__init__.py").touch()
    only_metadata(folder, "transformers", "4.46.3")
    return folder


def only_metadata(folder: Path, name: str, version: str) -> Path:
    """A distribution without its module."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def modules(folder: Path) -> str:
    """PYTHONPATH after `module load`: three folders, of torch, of numpy and of old packages."""
    torch = link_into(folder / "torch", with_requirements("torch"))
    numpy = link_into(folder / "numpy", {"numpy"})
    return os.pathsep.join(map(str, (plant_old(folder / "old"), torch, numpy)))


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def path_with(folder: Path, python: Path) -> str:
    """A PATH on which `python3` is a link to `python`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "python3").symlink_to(python)
    return f"{folder}:/usr/bin:/bin"


PURELIB = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def venv(prefix: Path, python: Path = BASE) -> Path:
    """A virtual environment, empty."""
    command = (python, "-m", "venv", "--without-pip", "--system-site-packages", prefix)
    subprocess.run(command, check=True)
    return prefix


def venv_with_torch(prefix: Path) -> Path:
    """A virtual environment as images of vendors have it."""
    link_into(venv(prefix) / PURELIB, with_requirements("torch", "numpy"))
    return prefix


def venv_of_a_venv(folder: Path) -> Path:
    """The Python of a virtual environment with torch in a parent virtual environment."""
    parent = venv_with_torch(folder / "parent")
    child = venv(folder / "child", parent / "bin/python3")
    (child / PURELIB / "parent.pth").write_text(f"{parent / PURELIB}\n")
    return child / "bin/python3"


def left_nothing(asset: Path, folder: Path, **settings: str) -> str:
    """Runs `bootstrap.sh`, which must end with 1 and leave not even the parent; its words."""
    folder.mkdir(exist_ok=True)
    done = bootstrap(asset, folder / "parent/env", **settings)
    assert done.returncode == 1, done.stdout + done.stderr
    assert list(folder.iterdir()) == [] and "Traceback" not in done.stderr, done.stderr
    return " ".join(done.stderr.split())


def copy_for(asset: Path, folder: Path, **site: str) -> Path:
    """A copy of an environment's files, whose `bootstrap.sh` says another site."""
    shutil.copytree(asset, folder, copy_function=os.link)
    text = (asset / "bootstrap.sh").read_text()
    for name, version in site.items():
        text = re.sub(rf"\b{name}==[^ ']+", f"{name}=={version}", text)
    (folder / "bootstrap.sh").unlink()
    (folder / "bootstrap.sh").write_text(text)
    return folder


def environment_on(folders: str, prefix: Path, names: set[str]) -> Path:
    """An environment that `bootstrap.sh` would make on a site, with links in place of an image.

    Args:
        folders: PYTHONPATH of the site.
        names: the distributions of this run that are its own, with what they require.
    """
    site_packages = prefix / PURELIB
    provided = {name: metadata.version(name) for name in ("torch", "numpy")}
    own = with_requirements(*names) - provided.keys()
    link_into(site_packages, own - with_requirements("torch"))
    google = (site_packages / "google").resolve()
    (site_packages / "google").unlink()
    (site_packages / "google").mkdir()
    for inner in google.iterdir():
        (site_packages / "google" / inner.name).symlink_to(inner)
    (site_packages / "google/__init__.py").write_text(NAMESPACE)
    for name in ("runner", "stage"):
        (site_packages / name).symlink_to(REPOSITORY / name)
    shutil.copy(site_path.__file__, site_packages / "_airlift_site.py")
    start = "import sys\nfrom runner.__main__ import main\nsys.exit(main())\n"
    program(prefix / "bin/runner", start)
    python = ".".join(map(str, sys.version_info[:3]))
    facts = {"python": python, "tree": "0" * 64, "provides": {"python": python, **provided}}
    (prefix / ".airlift").mkdir()
    (prefix / ".airlift/env.json").write_text(json.dumps(facts))
    (prefix / ".airlift/site").write_text("\n".join([str(BASE), *folders.split(os.pathsep)]))
    relocate.join_site(str(prefix))
    return prefix
