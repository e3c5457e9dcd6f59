"""An environment on a site's own torch: one image for all sites, and its own packages win."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

from stage.environment.image.image import own_requirements, pure_wheel
from stage.environment.image.relocate import NotAsMade, check_tree
from tests.support.environment import site
from tests.support.environment.laptop import (
    PROFILE,
    EnvironmentLaptop,
    bootstrap,
    wheel_of_installed,
)

XY = f"{sys.version_info[0]}.{sys.version_info[1]}"
SITE_PACKAGES = f"lib/python{XY}/site-packages"
WHOSE = (
    "import google.ours, transformers, importlib.metadata as m, importlib.util as u; "
    "print(transformers.WHOSE, google.ours.WHOSE, m.version('torch'), m.version('numpy'), "
    "*(u.find_spec(name).origin.rpartition('/')[2] for name in ('torch', 'numpy')))"
)
FOUND = f"environment environment {version_of('torch')} {version_of('numpy')}" + 2 * " __init__.py"


def made(folder: Path) -> EnvironmentLaptop:
    """A laptop with the environment in a bundle: airlift, a transformers, and part of `google`."""
    wheels = folder / "wheels"
    for requirement in own_requirements():
        wheel_of_installed(requirement.partition(">")[0], wheels)
    ours = "WHOSE = 'environment'\n"
    new = {"transformers/__init__.py": f"{ours}class PreTrainedModel: ...\n".encode()}
    for name, version, files in (
        ("transformers", "5.0", new),
        ("google-ours", "1.0", {"google/ours/__init__.py": ours.encode()}),
    ):
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        pure_wheel(wheels, name, version, files, {"METADATA": text.encode()})
    (folder / "small.yaml").write_text(
        "format: 1\nname: small\nassets:\n  small-env:\n"
        "    environment: environment.yml\n    profile: node.yml\n"
    )
    provided = {"python": f"{XY}.0", "torch": version_of("torch"), "numpy": version_of("numpy")}
    lines = "".join(f'  {name}: "{version}"\n' for name, version in provided.items())
    (folder / "node.yml").write_text(f"{PROFILE}provides:\n{lines}")
    (folder / "environment.yml").write_text(
        "dependencies:\n  - pip:\n    - --no-index\n    - --find-links wheels\n"
        "    - transformers\n    - google-ours\n"
    )
    laptop = EnvironmentLaptop(folder, folder)
    done = laptop.stage("fetch", "small.yaml", "-o", "bundle", HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return laptop


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentLaptop:
    return made(tmp_path_factory.mktemp("laptop"))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH after `module load` at site (a)."""
    return site.modules(tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="module")
def on_modules(
    laptop: EnvironmentLaptop, modules: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The environment at site (a), by a path of 150 bytes. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("a")
    prefix = folder / ("long" * 40)[: 150 - len(str(folder)) - 1]
    path = site.path_with(folder / "bin", site.BASE)
    done = bootstrap(laptop.asset, prefix, PATH=path, PYTHONPATH=modules)
    assert done.returncode == 0, done.stdout + done.stderr
    return prefix


def python(prefix: Path, *words: str, **settings: str) -> str:
    """What the environment's Python prints."""
    done = subprocess.run(
        [prefix / "bin/python", *words], env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def problem_of(prefix: Path) -> str:
    """Which files of an environment are not those that were made; empty: it is sound."""
    tree = json.loads((prefix / ".airlift/env.json").read_text())["tree"]
    try:
        check_tree(str(prefix), tree, str(prefix))
    except NotAsMade as error:
        return str(error)
    return ""


def test_the_image_has_neither_python_nor_torch(laptop: EnvironmentLaptop) -> None:
    with tarfile.open(laptop.asset / "image.tar.gz") as image:
        names = image.getnames()
    assert {name.split("/")[0] for name in names} == {".airlift", "activate", "bin", "lib"}
    assert f"{SITE_PACKAGES}/stage/__init__.py" in names and "bin/torchrun" in names
    assert not [name for name in names if "torch/" in name or name.startswith("bin/python")]


def test_its_own_packages_win_and_torch_is_the_sites(
    on_modules: Path, modules: str, tmp_path: Path
) -> None:
    (tmp_path / "transformers.py").write_text("WHOSE = 'mine'\n")
    assert python(on_modules, "-c", WHOSE) == FOUND
    assert python(on_modules, "-I", "-c", WHOSE) == FOUND
    assert python(on_modules, "-c", WHOSE, PYTHONPATH=modules) == FOUND
    mine = python(on_modules, "-c", WHOSE, PYTHONPATH=f"{tmp_path}:{modules}")
    assert mine == FOUND.replace("environment", "mine", 1)
    after = f'. "$0/activate" && export PYTHONPATH="{modules}" && exec python -c "$1"'
    for shell in ("sh", "bash"):
        command = [shell, "-c", after, on_modules, WHOSE]
        done = subprocess.run(
            command, env={"PYTHONPATH": modules, "PATH": "/usr/bin:/bin"}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == FOUND


def test_the_same_tree_on_another_site_and_a_changed_byte_is_named(
    laptop: EnvironmentLaptop, on_modules: Path, tmp_path: Path
) -> None:
    venv = site.venv_of_a_venv(tmp_path / "site")
    prefix = tmp_path / "环境/env"
    done = bootstrap(laptop.asset, prefix, PATH=f"{venv.parent}:/usr/bin:/bin")
    assert done.returncode == 0, done.stdout + done.stderr
    assert python(prefix, "-c", WHOSE) == FOUND
    trees = [(where / ".airlift/tree.txt").read_bytes() for where in (prefix, on_modules)]
    assert trees[0] == trees[1] and problem_of(on_modules) == problem_of(prefix) == ""
    ours = ("bin/torchrun", "activate", ".airlift/tree.txt")
    for name in (f"{SITE_PACKAGES}/_airlift_site.py", *ours):
        path = prefix / name
        before = path.read_bytes()
        path.write_bytes(before + b"#")
        assert problem_of(prefix) == name
        path.write_bytes(before)
    (prefix / SITE_PACKAGES / "more.pth").touch()
    assert problem_of(prefix) == f"{SITE_PACKAGES}/more.pth"
    (prefix / "bin/python3").unlink()
    (prefix / "bin/python3").symlink_to("/gone/python3.11")
    done = subprocess.run([f'. "{prefix}/activate"'], shell=True, capture_output=True, text=True)
    assert "The site's Python has gone: /gone/python3.11" in done.stderr and done.returncode != 0


def test_another_site_is_refused_and_nothing_is_left(
    laptop: EnvironmentLaptop, on_modules: Path, modules: str, tmp_path: Path
) -> None:
    path = site.path_with(tmp_path / "bin", site.BASE)
    settings = {"PATH": path, "PYTHONPATH": modules}
    (tmp_path / "empty").mkdir()
    later = site.copy_for(laptop.asset, tmp_path / "later", torch="9.9")
    other = site.copy_for(laptop.asset, tmp_path / "other", python="3.99.1")
    here = tmp_path / "bin/python3"
    for asset, changed, words in (
        (laptop.asset, {"PATH": str(tmp_path / "empty")}, "there is no python3 on PATH."),
        (laptop.asset, {"PYTHONPATH": ""}, f"it was locked on torch {version_of('torch')};"),
        (laptop.asset, {"PATH": f"{on_modules}/bin:/usr/bin:/bin"}, "airlift_deactivate first."),
        (later, {}, f"locked on torch 9.9; {here} has {version_of('torch')}."),
        (other, {}, f"it is for the site's Python 3.99; {here} is {XY}."),
    ):
        said = site.left_nothing(asset, tmp_path / "place", **{**settings, **changed})
        assert words in said and "Nothing was unpacked. ->" in said, said
