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


def plant_liars(folder: Path) -> Path:
    """Makes a module for each name of Python's library, of other libraries and of ours.

    Returns:
        The file that is created when one of the modules is imported.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder.parent / f"{folder.name}-spoke"
    names = {*sys.stdlib_module_names, *LIBRARIES, "sitecustomize", "usercustomize"} - {"__main__"}
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


HELPERS = (
    "stage.staging.load_test",
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


def test_a_bundle_whose_modules_python_ran_before_stage_verify_is_not_called_sound(
    bundle: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    (copy / "sitecustomize.py").write_text("import json\njson.loads = None\n")
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    for python in pythons():
        command = [str(python), str(copy / "stage-verify.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "sitecustomize.py" in done.stderr, done.stderr
        # The printed command works as it is: without PYTHONPATH, the extra file is found.
        remedy = done.stderr.rpartition("-> ")[2].partition("   (")[0]
        assert remedy.startswith("python3 -I "), done.stderr
        command = [python, *shlex.split(remedy)[1:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "`sitecustomize.py`: extra" in done.stdout, done.stdout


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
