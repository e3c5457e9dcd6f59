"""Files in a bundle, in the current folder or in the environment never replace our own code.

A liar is a module, program or setting with a name that ours would use. It leaves a mark when it
runs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stage.sandbox import isolated
from tests.stage.bundle.test_standalone import pythons
from tests.stage.bundles import make_bundle
from tests.support.environment.laptop import EnvironmentLaptop, bootstrap

LIBRARIES = (
    "click",
    "yaml",
    "numpy",
    "pyarrow",
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "pip",
)
OURS = ("stage", "runner")


LIAR = """
import posix
posix.close(posix.open({mark!r}, 0o101))
print('sound: 3 files', flush=True)
posix._exit(0)
"""


def plant_liars(folder: Path, started: str | None = None) -> Path:
    """A folder with a module for each name of Python's library, of other libraries and of ours.

    Args:
        folder: gets the modules.
        started: a Python. Modules that it imports before any script are left out: with them it
            would not start, or would run them before our first line.

    Returns:
        The file that is created when one of the modules is imported.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder.parent / f"{folder.name}-spoke"
    names = {*sys.stdlib_module_names, *LIBRARIES, "sitecustomize", "usercustomize"} - {"__main__"}
    if started:
        ask = [started, "-c", "import runpy, sys; print(*sys.modules)"]
        names -= {
            "sitecustomize",
            "usercustomize",
            "_winapi",
            "nt",
            *subprocess.check_output(ask, text=True).split(),
        }
    for name in sorted(names):
        (folder / f"{name}.py").write_text(LIAR.format(mark=str(mark)))
    for name in OURS:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(LIAR.format(mark=str(mark)))
    return mark


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("sound") / "bundle", big=False).root


@pytest.fixture
def lying(bundle: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A bundle without its weights and with many liars; returns their mark, too."""
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    (copy / "data/models/bert/vocab.txt").unlink()
    return copy, plant_liars(copy)


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize("options", [(), ("-I",)], ids=["plain", "isolated"])
def test_modules_beside_stage_verify_say_nothing(
    lying: tuple[Path, Path], python: str, options: tuple[str]
) -> None:
    copy, mark = lying
    for cwd, script in (
        (copy, "stage-verify.py"),
        (copy.parent, copy / "stage-verify.py"),
        (copy, "./stage-verify.py"),
    ):
        command = [python, *options, str(script), "-q", "--jobs", "1"]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert (done.returncode, mark.exists()) == (1, False), done.stdout + done.stderr
        assert "vocab.txt`: missing" in done.stdout


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize("where", ["{0}", ".", ":", "{0}:", "relative:{0}/data"])
def test_nor_do_they_where_pythonpath_leads_into_the_bundle(
    bundle: Path, tmp_path: Path, python: str, where: str
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    python = os.path.realpath(python)  # a venv's `.pth` files import at start, too
    mark = plant_liars(copy, python)
    for arguments in (["stage-verify.py"], ["-m", "stage-verify"]):
        done = subprocess.run(
            [python, *arguments, "-q", "--jobs", "1"],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": where.format(copy)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, mark.exists()) == (1, False), done.stdout + done.stderr


def test_a_bundle_whose_modules_python_ran_before_stage_verify_is_not_called_sound(
    bundle: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    (copy / "sitecustomize.py").write_text("import json\njson.loads = None\n")
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    for python in pythons():
        command = [python, copy / "stage-verify.py"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "sitecustomize.py" in done.stderr, done.stderr
        # The printed command works as it is: without PYTHONPATH, the extra file is found.
        remedy = done.stderr.rpartition("-> ")[2].partition("   (")[0]
        assert remedy.startswith("python3 -I "), done.stderr
        command = [python, *shlex.split(remedy)[1:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "`sitecustomize.py`: extra" in done.stdout, done.stdout


HELPERS = (
    "stage.bundle.load_test",
    "stage.convert.pickled_weights",
    "stage.environment.image.link",
    "runner.child",
    "pip",
    "conda_lock",
)


@pytest.mark.parametrize("module", HELPERS)
def test_a_helper_that_we_start_hears_no_liar(module: str, tmp_path: Path) -> None:
    """It fails, because it has no arguments; but with its own message."""
    mark = plant_liars(tmp_path / "here")
    home = tmp_path / "home"
    user_site = [sys.executable, "-c", "import site; print(site.getusersitepackages())"]
    where = subprocess.check_output(
        user_site, env={**os.environ, "HOME": str(home)}, text=True
    ).strip()
    shutil.copytree(tmp_path / "here", where)
    done = subprocess.run(
        isolated(module, "--version"),
        cwd=tmp_path / "here",
        env={**os.environ, "HOME": str(home), "PYTHONPATH": f":{tmp_path / 'here'}"},
        input="",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not mark.exists() and "sound" not in done.stdout, done.stdout
    assert (
        done.returncode == 0
        if module in ("pip", "conda_lock")
        else "stage" in done.stderr or "runner" in done.stderr
    )


@pytest.mark.parametrize("option", ["--fast", "--deep"])
def test_stage_verify_in_a_folder_of_liars_says_what_it_says_elsewhere(
    bundle: Path, tmp_path: Path, option: str
) -> None:
    mark = plant_liars(tmp_path / "here")
    stage = Path(sys.executable).with_name("stage")
    done = [
        subprocess.run(
            [stage, "verify", option, "--json", bundle],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        for cwd in (tmp_path / "here", "/")
    ]
    assert not mark.exists()
    assert (
        done[0].stdout == done[1].stdout
        and done[0].returncode == done[1].returncode
        and done[0].stdout
    )


SETTINGS = {
    "TAR_OPTIONS": "--exclude=relocate.py --to-command=true",
    "GZIP": "--no-such-option",
    "POSIXLY_CORRECT": "1",
    "CDPATH": "/:/tmp",
    "IFS": "/",
    "LD_PRELOAD": "/no/such/library.so",
    "LD_LIBRARY_PATH": "/no/such",
    "GREP_OPTIONS": "--color=always",
    "PYTHONHOME": "/no/such",
    "PYTHONSTARTUP": "/no/such",
    "BASH_FUNC_tar%%": "() { true; }",
    "BASH_FUNC_sha256sum%%": "() { true; }",
}


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_bootstrap_makes_the_environment_with_any_shell_settings(
    environment_laptop: EnvironmentLaptop, tmp_path: Path, shell: str
) -> None:
    mark = plant_liars(tmp_path / "here")
    liar = tmp_path / "liar.sh"
    liar.write_text("sha256sum() { echo lie; }; tar() { :; }; gzip() { :; }\n")
    for program in ("tar", "gzip", "sha256sum", "python", "df"):
        (tmp_path / "here" / program).write_text(f"#!/bin/sh\n: >{mark}\n")
        (tmp_path / "here" / program).chmod(0o755)
    done = bootstrap(
        environment_laptop.asset,
        tmp_path / "env",
        shell=shell,
        **SETTINGS,
        ENV=str(liar),
        BASH_ENV=str(liar),
        PYTHONPATH=str(tmp_path / "here"),
        PATH=f"{tmp_path / 'here'}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "env/.airlift/tree.txt").exists() and not mark.exists()
