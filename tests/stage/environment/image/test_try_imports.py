"""Packages that do not go together are found on the laptop: an environment's own Python tries."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import venv
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from stage.environment.check.imports import PROBE, check_imports
from stage.errors import UsageError
from stage.progress import Reporter
from tests.stage.environment.check.packages import TORCH, write_packages

HERE = f"linux-{'64' if os.uname().machine == 'x86_64' else 'aarch64'}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of an environment: a real Python, without packages."""
    venv.create(tmp_path / "root", with_pip=False, symlinks=True)
    return tmp_path / "root"


def tried(root: Path, *names: str, platform: str = HERE) -> str:
    """What is printed; or the refusal."""
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            check_imports("train-env", Path(os.path.relpath(root)), names, platform, Reporter())
        except UsageError as error:
            return f"refused: {error}"
    return said.getvalue()


def test_packages_that_go_together_pass_and_nothing_is_written(root: Path) -> None:
    write_packages(root, torch=TORCH, transformers="PreTrainedModel = object\n")
    before = sorted(root.rglob("*"))
    said = tried(root, "pytorch", "transformers", "click")
    assert said == "train-env: torch, transformers can be imported, without network\n"
    assert sorted(root.rglob("*")) == before


def test_an_environment_for_another_machine_is_left_in_one_line(root: Path) -> None:
    other = "linux-aarch64" if HERE == "linux-64" else "linux-64"
    said = tried(root, "torch", platform=other)
    assert len(said.splitlines()) == 1
    assert "not tried whether torch can be imported together" in said and other in said


def test_the_network_is_closed_and_variables_of_this_shell_do_not_count(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packages(
        root,
        datasets="import os, socket\n"
        "assert 'PYTHONPATH' not in os.environ and 'LD_LIBRARY_PATH' not in os.environ\n"
        "socket.socket(socket.AF_INET)\n",
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/old/lib64")
    monkeypatch.setenv("PYTHONPATH", "/opt/site")
    assert "PermissionError: [Errno 13] Permission denied" in tried(root, "datasets")


BROKEN = {
    "flash-attn for another torch": (
        "flash_attn",
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi')",
        (
            "undefined symbol: _ZN3c104",
            "built for another version than torch 2.6.0",
            "Install the flash_attn",
        ),
    ),
    "torchvision for another torch": (
        "torchvision",
        "raise RuntimeError('operator torchvision::nms does not exist')",
        ("`import torchvision` fails", "built for another version than torch 2.6.0"),
    ),
    "a package that nobody asked for": (
        "deepspeed",
        "import hjson",
        ("deepspeed needs `hjson`, which is not installed", "Add `hjson` to the environment"),
    ),
    "an older package than the other expects": (
        "peft",
        "from torch import nothing_of_that_name",
        ("peft and torch do not go together", "versions of peft and torch"),
    ),
    "another version is required": (
        "datasets",
        "raise ImportError('tokenizers>=0.21,<0.22 is required for a normal functioning of this "
        "module, but found tokenizers==0.15.2.')",
        ("datasets refuses a package that is installed", "Ask for `tokenizers>=0.21,<0.22`"),
    ),
    "a library of CUDA": (
        "xformers",
        "raise ImportError('libcudart.so.12: cannot open shared object file: No such file')",
        ("xformers needs libcudart.so.12", "torch here has CUDA 12.4"),
    ),
    "an import that kills Python": (
        "deepspeed",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        ("`import deepspeed` ended Python with SIGSEGV", "install deepspeed again"),
    ),
    "an import that ends Python": (
        "deepspeed",
        "import os; os._exit(3)",
        ("`import deepspeed` ended Python with exit code 3",),
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_pair_that_does_not_go_together_is_refused_with_cause_and_remedy(
    root: Path, fault: str
) -> None:
    package, code, words = BROKEN[fault]
    write_packages(root, torch=TORCH, **{package: code})
    said = tried(root, "torch", package)
    assert said.startswith("refused: packages of this environment do not go together")
    assert all(word in said for word in words), said
    assert "--no-offline-check" in said


def test_a_torch_compiled_with_the_other_numpy_is_found_though_its_import_only_warns(
    root: Path,
) -> None:
    broken = "def zeros(n):\n    class T:\n        def numpy(self):\n"
    broken += "            raise RuntimeError('Numpy is not available')\n    return T()\n"
    write_packages(root, torch=TORCH + broken, numpy="__version__ = '2.1.0'\n")
    said = tried(root, "torch", "numpy")
    assert "torch was compiled with NumPy 1, and NumPy 2 is installed" in said
    assert "`numpy<2`" in said


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "raise ImportError('libcuda.so.1: cannot open shared object file: No such')",
            "`import deepspeed` fails: ImportError: libcuda.so.1.*no GPU driver",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
            "with SIGILL: this machine's processor lacks its instructions",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "with SIGKILL: this machine gives it too little memory, or time",
        ),
        ("import os; os._exit(132)  # as a shell tells of a signal", "with SIGILL: this machine"),
    ],
)
def test_what_only_another_machine_knows_is_a_note(root: Path, code: str, words: str) -> None:
    write_packages(root, deepspeed=code)
    said = tried(root, "deepspeed")
    assert re.search(f"^train-env: not known here: .*{words}", said), said
    assert "can be imported" not in said


def test_the_probe_runs_on_the_oldest_python_of_a_cluster() -> None:
    """For machines without an old Python: vermin knows since when each construct exists."""
    command = [sys.executable, "-c", "import sys; from vermin import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "-t=3.6-", "--no-tips", str(PROBE)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
