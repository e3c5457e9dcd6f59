"""The job's own shell is tried before the queue: a real login shell, real Pythons, real faults."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config.run_config import RunConfig
from runner.inputs import resolve
from runner.job import job_shell
from runner.job.findings import Finding
from runner.job.installed import for_tokenizer
from runner.job.run import Asked
from runner.job.training_run import TrainingRun
from runner.run_folder.layout import RunFolder
from tests.first_job.harness import programs
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster
from tests.runner.job.test_preflight import terminal
from tests.stage.environment.check.packages import TORCH, write_packages
from tests.support.findings import errors, lines, others

__all__ = ["terminal"]

NODES = "batch*|8|64000|{gres}|infinite"
MODULES = """\
module() {
    case "$2" in
    gcc-old) export LD_LIBRARY_PATH=/opt/gcc-old/lib64 ;;
    cuda/12.4) export CUDA_HOME=/opt/cuda ;;
    home) export PYTHONHOME=/nowhere ;;
    silent) echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for '$2'" >&2 ;;
    lmod) echo "environment: /usr/share/lmod/lmod/libexec/lmod: No such file or directory" >&2
       return 1 ;;
    *) echo "Lmod has detected the following error: The following module(s) are unknown: $2" >&2
       return 1 ;;
    esac
}
conda() {
    if [ "$1" = info ]; then echo "$HOME/conda"; return; fi
    echo "CommandNotFoundError: Your shell has not been properly configured to use 'conda $1'." >&2
    return 1
}
mamba() {
    echo "CondaError: Job 'conda init' before 'conda activate'" >&2
    return 1
}
"""
SAFE = "__version__ = '1'\n"


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A login node: sinfo that lists nodes, a login profile that makes `module`."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bash_profile").write_text(MODULES)

    def nodes(gres: str) -> None:
        programs(tmp_path / "programs", sinfo=f"echo '{NODES.format(gres=gres)}'")

    nodes("(null)")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    for name in ("CONDA_EXE", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return nodes


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with packages of a few lines; the job's Python is its."""
    prefix = tmp_path / "env"
    venv.create(prefix, with_pip=False, symlinks=True)
    names = ("transformers", "safetensors", "tensorboard", "numpy", "pyarrow", "deepspeed")
    code = dict.fromkeys(names, SAFE)
    write_packages(prefix, torch=TORCH, **code)
    monkeypatch.setattr(sys, "executable", str(prefix / "bin" / "python"))
    return prefix


def tried(cluster: Cluster, **settings: Any) -> list[Finding]:
    slurm, overrides = settings.pop("slurm", {}), settings.pop("overrides", ())
    config = RunConfig.load(cluster.write(slurm=slurm, **settings), overrides)
    inputs = resolve(config, cluster.bundle)
    folder = RunFolder(cluster.folder / "output" / "tiny")
    asked = Asked(ahead=True)
    run = TrainingRun(config, inputs, folder, cluster.bundle, overrides, asked)
    return list(run.shell.found())


def said(found: list[Finding]) -> str:
    return "\n".join(map(str, [*errors(found), *others(found)]))


def test_a_shell_that_works_is_one_line_and_no_finding(
    cluster: Cluster, login: Callable[[str], None], python: Path
) -> None:
    found = tried(cluster, slurm={"modules": ["cuda/12.4"], "setup": ["export A=1"]})
    assert said(found) == ""
    assert lines(found) == [
        f"the job's shell works here: 1 module and 1 line of setup; {python}/bin/python imports "
        "torch, transformers, safetensors, tensorboard, numpy, pyarrow, deepspeed"
    ]


# Keys such as `J16` are entries of docs/first-job-failures.md.
SHELLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "J16": (
        {"modules": ["cuda/12.4", "cuda/99"]},
        ("slurm.modules: `module load cuda/99` fails", "are unknown: cuda/99", "module spider"),
    ),
    "E10": (
        {"setup": ["export A=1", "conda activate train", "export B=1"]},
        (
            "slurm.setup: `conda activate train` fails",
            'slurm.setup: ["export A=1", "source $(conda info --base)/etc/profile.d/conda.sh", '
            '"conda activate train", "export B=1"]',
        ),
    ),
    "E11": (
        {"modules": ["cuda/12.4"], "setup": ["mamba activate train"]},
        ("slurm.setup: `mamba activate train` fails", '/etc/profile.d/conda.sh", "conda activate'),
    ),
    "a conda that is not on PATH": (
        {"setup": ["unset -f conda", "conda activate train"]},
        ("conda: command not found", '["unset -f conda", "source CONDA/etc/profile.d/conda.sh", '),
    ),
    "J17": (
        {"modules": ["lmod", "cuda/12.4"], "setup": ["export A=1"]},
        (
            "lmod: No such file or directory",
            "bash -lc 'type module'",
            'slurm.modules: [] and slurm.setup: ["source FILE", "module load lmod", '
            '"module load cuda/12.4", "export A=1"]',
        ),
    ),
    "an environment that is not there": (
        {"setup": ["export A=1", ". /nowhere/activate"]},
        ("`. /nowhere/activate` fails", "No such file or directory", "Correct the path"),
    ),
    "E18": (
        {"setup": ["set -u", "export B=$PROJ_LIB"]},
        ("`export B=$PROJ_LIB` fails", "unbound variable", "set +u"),
    ),
    "the line ends of Windows": (
        {"setup": ["printf 'export A=1\\r\\nmodule load x\\r\\nls\\r\\n' >$HOME/x", ". ~/x"]},
        ("`. ~/x` fails", "line ends of Windows", "sed -i 's/\\r$//'"),
    ),
    "a script for terminals": (
        {"setup": ["exit 0"]},
        ("`exit 0` ends the shell with exit code 0", "as if all were well", "~/.bashrc"),
    ),
    "a Python that does not start": (
        {"modules": ["home"]},
        ("the job's Python does not start in a login shell here", "PYTHONHOME"),
    ),
    "a script that leaves the shell": (
        {"setup": ["echo no licence; exit 7"]},
        ("`echo no licence; exit 7` fails", "no licence", "bash -lc"),
    ),
}


HERE = "runner/job/job_shell.py"


@obeys(HERE, "A file that this line reads has the line ends", "a file, source that: {source FILE}")
@obeys(HERE, "Correct it; to try it: bash -lc {}", "Look at LD_LIBRARY_PATH and PYTHONHOME after")
@pytest.mark.parametrize("fault", SHELLS)
def test_a_line_that_would_end_the_job_is_found_with_its_remedy(
    cluster: Cluster, login: Callable[[str], None], python: Path, fault: str
) -> None:
    slurm, words = SHELLS[fault]
    found = tried(cluster, slurm=slurm)
    assert len(errors(found)) == 1
    assert all(word in said(found) for word in words), said(found)
    if "Windows" in said(found):  # the line wrote the file, and reads it
        line = in_it(said(found), r"sed -i '.*' FILE").replace("FILE", "~/x")
        again = tried(cluster, slurm={"setup": [slurm["setup"][0], line, "true"]})
        assert errors(again) == [] and b"\r" not in Path("~/x").expanduser().read_bytes()
    for line in re.findall(r"(?:to try it|your modules): (bash -lc '.*?')", said(found)):
        tried_here = ["bash", "-c", line.replace("...", "home")]
        shown = subprocess.run(tried_here, capture_output=True, text=True)
        assert shown.returncode == 7 or "PYTHONHOME=/nowhere" in shown.stdout, shown
    for file in re.findall(r'"source ([^"]+)"', said(found)):
        path = re.sub(r"^\$\(.*\)|CONDA", "~/conda", file).replace("FILE", "~/site.sh")
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        Path(path).expanduser().write_text("conda() { :; }; module() { :; }\n")
        lists = re.findall(r"slurm\.(\w+): (\[[^]]*\])", said(found).replace(file, path))
        slurm |= {name: yaml.safe_load(lines) for name, lines in lists}
        assert errors(tried(cluster, slurm=slurm)) == []


def test_a_line_that_came_from_clusters_yaml_is_said_to_be_its(
    cluster: Cluster, login: Callable[[str], None], python: Path
) -> None:
    """`--to` hands it over by --set: the run file does not have it."""
    found = tried(cluster, overrides=("slurm.modules=[cuda/99]",))
    assert "slurm.modules (with --to: `modules:` of clusters.yaml): `module load" in said(found)


def test_a_line_for_the_job_alone_is_printed_and_never_run(
    cluster: Cluster, login: Callable[[str], None], python: Path, tmp_path: Path
) -> None:
    keep = tmp_path / "keep"
    keep.mkdir()
    found = tried(
        cluster,
        slurm={"setup": [f"rm -r {keep}", "cp -r data $SLURM_TMPDIR/", "nvidia-smi", "false"]},
    )
    assert keep.is_dir()
    assert any("not tried here, only in the job: rm -r" in line for line in lines(found))
    assert errors(found) == []  # `false` may be a consequence of them
    assert [finding.level for finding in others(found)] == ["warning"]


def test_a_line_that_waits_does_not_hold_the_check(
    cluster: Cluster,
    login: Callable[[str], None],
    python: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_shell, "LIMIT_S", 1.0)
    began = time.monotonic()
    found = tried(cluster, slurm={"setup": ["sleep 600"]})
    assert time.monotonic() - began < 120
    assert errors(found) == []
    assert "did not end within 1 s here" in said(found)


IMPORTS: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "E3": (
        {
            "deepspeed": 'raise ImportError("/opt/gcc-old/lib64/libstdc++.so.6: version '
            "`GLIBCXX_3.4.30' not found (required by /env/x.so)\")"
        },
        {"modules": ["gcc-old"]},
        (
            "finds another C++ library first, /opt/gcc-old/lib64/libstdc++.so.6",
            "LD_LIBRARY_PATH has /opt/gcc-old/lib64",
            "export LD_LIBRARY_PATH=",
        ),
    ),
    "E4": (
        {
            "deepspeed": 'raise ImportError("/lib64/libstdc++.so.6: version '
            "`GLIBCXX_3.4.20' not found (required by /env/x.so)\")"
        },
        {},
        ("finds another C++ library first, /lib64/libstdc++.so.6", "export LD_LIBRARY_PATH="),
    ),
    "E1": (
        {
            "transformers": "raise ImportError('A module that was compiled using NumPy 1.x cannot "
            "be run in NumPy 2.1.0 as it may crash')"
        },
        {},
        ("was compiled with NumPy 1", "numpy<2"),
    ),
    "E7": (
        {"deepspeed": 'raise ImportError("/lib64/libc.so.6: version `GLIBC_2.29\' not found")'},
        {},
        ("was built for glibc 2.29 or newer", "stage env lock"),
    ),
    "X2": (
        {
            "deepspeed": "class MissingCUDAException(Exception): pass\nraise MissingCUDAException("
            "'CUDA_HOME does not exist, unable to compile CUDA op(s)')"
        },
        {},
        ("looks for a CUDA toolkit while it is imported", "slurm.modules"),
    ),
    "a package that is not there": (
        {"deepspeed": "import nowhere"},
        {},
        ("deepspeed needs `nowhere`", "Add `nowhere`"),
    ),
    "an import that ends in a signal": (
        {"transformers": "import os; os.abort()"},
        {},
        ("`import transformers` ended Python with SIGABRT",),
    ),
}


@pytest.mark.parametrize("fault", IMPORTS)
def test_an_import_that_would_fail_in_the_ranks_is_found(
    cluster: Cluster, login: Callable[[str], None], python: Path, fault: str
) -> None:
    code, slurm, words = IMPORTS[fault]
    write_packages(python, **code)
    found = tried(cluster, slurm=slurm)
    assert len(errors(found)) == 1
    assert all(word in said(found) for word in words), said(found)


def test_a_package_that_is_missing_says_what_installs_it(
    cluster: Cluster, login: Callable[[str], None], python: Path
) -> None:
    shutil.rmtree(next(python.glob("lib/python*/site-packages/deepspeed")))
    text = said(tried(cluster))
    assert "in the job, deepspeed is not installed" in text and "train]" in text


@obeys(HERE, "Install a torch with CUDA (stage env lock with this cluster's profile chooses one).")
def test_a_torch_without_cuda_is_refused_where_gpus_are_asked_for(
    cluster: Cluster, login: Callable[[str], None], python: Path
) -> None:
    site = next(python.glob("lib/python*/site-packages/torch"))
    (site / "version.py").write_text("__version__ = '2.6.0'\ncuda = None\nhip = None\n")
    before = {"gpus_per_node": 2, "setup": ["export A=1"]}
    text = said(tried(cluster, slurm=before, batch={"global": 8}))
    assert "torch 2.6.0" in text and "build without CUDA" in text and "stage env lock" in text
    setup = yaml.safe_load(in_it(text, r"(?<=slurm\.setup: )\[[^]]*\]"))
    assert "export A=1" in setup, "it replaces no line that is there"
    assert said(tried(cluster, slurm={"gpus_per_node": 2, "setup": setup})) == ""
    assert said(tried(cluster)) == ""


@pytest.mark.parametrize(
    ("gres", "level"),
    [("gpu:v100:4", "error"), ("gpu:a100:4", ""), ("gpu:h800:4", ""), ("gpu:odd:4", "")],
)
def test_a_torch_without_code_for_the_partitions_gpus_is_refused(
    cluster: Cluster, login: Callable[[str], None], python: Path, gres: str, level: str
) -> None:
    login(gres)
    found = tried(cluster, slurm={"gpus_per_node": 4})
    assert bool(errors(found)) == (level == "error"), said(found)
    if level:
        assert "has no code for v100 (7.0), only for 5.0, 8.0, 9.0" in said(found)


@pytest.mark.parametrize(
    ("container", "setup", "warned"),
    [
        (["apptainer", "exec", "train.sif"], [], True),
        (["/opt/bin/singularity", "exec", "--cleanenv", "train.sif"], [], True),
        (["apptainer", "exec", "--nv", "train.sif"], [], False),
        (["apptainer", "exec", "train.sif"], ["export APPTAINER_NV=1"], False),
        (["srun-wrapper", "train.sif"], [], False),
    ],
)
def test_a_container_without_nv_is_a_warning_where_gpus_are_asked_for(
    cluster: Cluster,
    login: Callable[[str], None],
    python: Path,
    container: list[str],
    setup: list[str],
    warned: bool,
) -> None:
    slurm = {"container": container, "setup": setup, "gpus_per_node": 2}
    found = tried(cluster, slurm=slurm)
    assert bool(others(found)) == warned, said(found)
    assert said(tried(cluster, slurm=slurm | {"gpus_per_node": 0})) == ""


def test_a_tokenizer_that_needs_sentencepiece_is_tried_with_it() -> None:
    for names, needed in (
        (["spiece.model", "config.json"], ["sentencepiece"]),
        (["qwen.tiktoken", "tokenizer.model"], ["tiktoken"]),
        (["tokenizer.json", "tokenizer.model"], []),
    ):
        assert for_tokenizer(names) == needed


def test_a_job_whose_options_close_its_environment_starts_from_a_new_login(
    cluster: Cluster,
    login: Callable[[str], None],
    python: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_THIS_SHELL", "1")
    setup = ['test -n "$OF_THIS_SHELL"']
    assert said(tried(cluster, slurm={"setup": setup})) == ""
    closed = tried(cluster, slurm={"setup": setup, "options": {"export": "NONE"}})
    assert "OF_THIS_SHELL" in said(closed)
