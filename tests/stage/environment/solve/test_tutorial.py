"""The environment of a published tutorial locks for the clusters of its readers.

`conda create python==3.10`, `conda install mpi4py` and a `requirement.txt` with versions of 2021
and 2024. The requirement lines are the tutorial's; the index has what matters of the real metadata
of each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.lib.conda.channel import File, Package, write_package
from scripts.lib.conda.channel import index as index_channel
from stage.environment.image.own_wheel import check_holds_airlift
from stage.environment.solve.lock import own_requirements
from stage.environment.spec.conda_lock import EnvironmentLock
from stage.errors import UsageError
from tests.remedies.obeyed import in_it, obeys
from tests.support.environment.pypi import Index, dynamic_sdist, sdist, serve_index, wheel

PROFILES = Path(__file__).resolve().parents[4] / "envs" / "profiles"

REQUIREMENTS = """\
torch==2.4.1
transformers==4.46.0
deepspeed==0.15.2
datasets
tensorboard
fire==0.4.0
pytz==2021.1
loguru==0.5.3
sh==1.14.2
pytest==6.2.5
tqdm==4.62.3
"""
ENVIRONMENT = """\
name: bert-large
channels: [{channel}]
dependencies:
  - python==3.10
  - pip
  - mpi4py
  - pip:
    - -i {index}
    - -r requirement.txt
"""


def fill(index: Index) -> None:
    """PyPI's requirements of these packages, and newer versions, so that there is a choice."""
    any_wheel = {
        "transformers": ("4.46.0", ["huggingface-hub<1.0,>=0.23.2", "tokenizers<0.21,>=0.20",
                                    "tqdm>=4.27"]),
        "tokenizers": ("0.20.3", ["huggingface-hub<1.0,>=0.16.4"]),
        "tensorboard": ("2.21.0", ["numpy>=1.12"]),
        "pytz": ("2021.1", []), "loguru": ("0.5.3", []), "sh": ("1.14.2", []),
        "pytest": ("6.2.5", ["attrs>=19.2", "iniconfig", "packaging", "pluggy<2.0,>=0.12",
                             "py>=1.8.2", "toml"]),
        "attrs": ("26.1.0", []), "iniconfig": ("2.3.1", []), "packaging": ("26.3", []),
        "pluggy": ("1.7.0", []),
        "py": ("1.11.0", []), "toml": ("0.10.2", []), "tqdm": ("4.62.3", []), "six": ("1.17.0", []),
        "termcolor": ("3.3.0", []), "numpy": ("2.2.6", []), "hjson": ("3.1.0", []),
        "ninja": ("1.13.2", []),
        "psutil": ("7.2.2", []), "py-cpuinfo": ("9.0.0", []), "pydantic": ("2.14.3", []),
        "pandas": ("2.3.3", []),
        "nvidia-cuda-runtime-cu12": ("12.1.105", []),
    }  # fmt: skip
    index.add(
        *(
            wheel(name, version, requires=requires)
            for name, (version, requires) in any_wheel.items()
        )
    )
    index.add(
        wheel(
            "torch",
            "2.4.1",
            requires=["nvidia-cuda-runtime-cu12==12.1.105"],
            tag="cp310-cp310-manylinux1_x86_64",
        )
    )
    index.add(wheel("tqdm", "4.70.1"), wheel("fire", "0.7.1"), wheel("transformers", "5.23.0"))
    for version, least in (("2.19.2", "4.62.1"), ("5.2.0", "4.66.3")):
        needs = [
            f"tqdm>={least}",
            "pyarrow>=12",
            "pandas",
            "huggingface-hub>=0.21.2",
            "numpy>=1.17",
        ]
        index.add(wheel("datasets", version, requires=needs))
    index.add(wheel("huggingface-hub", "0.36.2", requires=["tqdm>=4.42.1"]))
    own = [text for text in own_requirements() if not text.startswith("tqdm")]
    index.add_stand_ins([*own, "pyarrow>=12"])
    needs = [
        "hjson",
        "ninja",
        "numpy",
        "packaging>=20.0",
        "psutil",
        "py-cpuinfo",
        "pydantic>=2.0.0",
        "torch",
        "tqdm",
    ]
    index.add(sdist("deepspeed", "0.15.2", requires=needs), wheel("deepspeed", "0.3.1.dev5"))
    index.add(dynamic_sdist("fire", "0.4.0", requires=["six", "termcolor"]))


def conda_forge(folder: Path) -> str:
    """A channel with what the conda half asks for, without contents; its address."""
    write_package(folder, Package(name="python", version="3.10.0", payload={}))
    write_package(folder, Package(name="python", version="3.11.13", payload={}))
    write_package(
        folder, Package(name="mpich", version="4.2.3", payload={"lib/libmpi.txt": File(b"")})
    )
    for name, version, depends in (("pip", "25.2", ()), ("mpi4py", "4.1.1", ("mpich >=3.4",))):
        metadata = File(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode())
        payload = {f"site-packages/{name}-{version}.dist-info/METADATA": metadata}
        needs = ("python >=3.9", *depends)
        write_package(
            folder, Package(name=name, version=version, payload=payload, depends=needs, python=True)
        )
    index_channel(folder)
    return folder.as_uri()


@obeys("stage/environment/image/own_wheel.py", "stage env lock adds them; with another tool")
def test_it_locks_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "requirement.txt").write_text(REQUIREMENTS)
    channel = conda_forge(tmp_path / "channel")
    with serve_index() as index:
        fill(index)
        (tmp_path / "environment.yml").write_text(
            ENVIRONMENT.format(channel=channel, index=index.url)
        )
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        done = subprocess.run(
            [sys.executable, "-m", "stage", "env", "lock", "environment.yml",
             "--profile", PROFILES / "v100.yml"],
            cwd=tmp_path, env={**kept, "HOME": str(tmp_path),
                               "PIP_CONFIG_FILE": "/dev/null", "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lock = EnvironmentLock.load(tmp_path / "conda-lock.yml")
    versions = {package.name: package.version for package in lock.packages}
    for line in filter(None, REQUIREMENTS.splitlines()):
        name, _, version = line.partition("==")
        assert version in ("", versions[name]), line
    assert (versions["python"], versions["datasets"], versions["huggingface-hub"]) == (
        "3.10.0",
        "2.19.2",
        "0.36.2",
    )
    assert {p.name for p in lock.of("conda")} == {"python", "pip", "mpi4py", "mpich"}
    assert {p.name for p in lock.of("pip") if p.is_sdist} == {"deepspeed", "fire"}
    check_holds_airlift(lock, "lock")
    own = {Requirement(line).name: line for line in own_requirements()}
    foreign = replace(lock, packages=[p for p in lock.packages if p.name.lower() not in own])
    with pytest.raises(UsageError, match="does not meet their requirements") as caught:
        check_holds_airlift(foreign, "lock")
    lines = in_it(caught.value.message, r"(?<=requirements: ).*(?=\.$)").split(", ")
    assert "stage env lock adds them" in caught.value.remedy
    assert "add them to the pip section" in caught.value.remedy
    for added in map(Requirement, lines):
        assert added.name in own and added.specifier.contains(versions[added.name.lower()])
    assert "would not run" not in done.stderr and "Not known whether" not in done.stderr
