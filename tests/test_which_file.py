"""A file that is given in place of another is called by its name, by every reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.config import deepspeed
from runner.config.run_config import RunConfig
from stage.bundle.bundle import check_is_bundle
from stage.bundle.report import read_report
from stage.bundle.verifier import VerificationReport
from stage.environment.spec.conda_lock import EnvironmentLock
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile
from stage.errors import UsageError
from stage.file_kinds import kinds_of
from stage.lock.manifest import Manifest
from stage.lock.read import read_lock
from tests.stage.environment.spec.test_conda_lock import lock, package
from tests.stage.locks import every_kind

TOP = Path(__file__).parents[1]

# Each kind: file name and content, as users have them.
FILES = {
    "a manifest": ("m.yaml", (TOP / "manifests/demo.yaml").read_bytes()),
    "a run file": ("r.yaml", (TOP / "runs/demo.yaml").read_bytes()),
    "a profile": ("p.yml", (TOP / "envs/profiles/cpu.yml").read_bytes()),
    "an environment.yml": ("e.yml", (TOP / "envs/demo-cpu.yml").read_bytes()),
    "a lock": ("l.lock", every_kind().to_json()),
    "a conda lock": ("conda-lock.yml", lock(package("python")).to_yaml()),
    "a ds_config.json": (
        "ds.json",
        b'{\n  // DeepSpeed\n  "train_batch_size": "auto",\n  "zero_optimization": {}\n}\n',
    ),
    "a list of requirements": ("requirements.txt", b"# CUDA\ntorch>=2,<3\nnumpy\n-r other.txt\n"),
    "a verification report": (
        "report.json",
        json.dumps(
            VerificationReport(Path("b"), "full", None, 0, 0, (), None, (), None, None).to_json()
        ).encode(),
    ),
    "a table (CSV)": ("t.csv", b'text,label\n"Good, really",1\n"Two\nlines",0\n'),
    "JSON data": ("d.jsonl", b'{"task": "a", "text": "b"}\n{"task": "c", "text": "d"}\n'),
    "a parquet file": ("d.parquet", b""),
}
READERS: dict[str, Callable[[Path], object]] = {
    "a manifest": Manifest.load,
    "a run file": lambda path: RunConfig.load(path, ()),
    "a profile": Profile.load,
    "an environment.yml": EnvironmentSpec.load,
    "a lock": lambda path: read_lock(path.read_bytes(), str(path)),
    "a conda lock": EnvironmentLock.load,
    "a ds_config.json": lambda path: deepspeed.load(path, "run.yaml:3"),
    "a verification report": read_report,
    "a bundle": check_is_bundle,
}


def written(folder: Path, kind: str) -> Path:
    name, content = FILES[kind]
    path = folder / name
    path.write_bytes(content)
    if kind == "a parquet file":
        pq.write_table(pa.table({"text": ["a"]}), path)
    return path


@pytest.mark.parametrize("wanted", READERS)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_another_kind_is_called_by_its_name(
    tmp_path: Path, kind: str, wanted: str
) -> None:
    path = written(tmp_path, kind)
    if kind == wanted or (kind, wanted) == ("JSON data", "a ds_config.json"):
        assert kinds_of(path.read_bytes()) == [kind]
        return
    with pytest.raises(UsageError) as caught:
        READERS[wanted](path)
    assert f"{path}: this is {kind}, not {wanted}." in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        ("", []),
        ("a word\nand others, too\n", []),
        ("format: 1\nmodel: {asset: a, init: scratch}\nepochs: 1, 2\n", []),
        ("a;b\n1;2\n", ["a table (CSV)"]),
        ("text\tlabel\nhello: you\t1\n", ["a table (CSV)"]),
        ("id,text\n1,a\n2,b\n", ["a table (CSV)"]),
        ("{format: 1, assets: {a: {model: o/n}}}", ["a manifest"]),
        ('{"format": 1, "assets": {"a": {"url": "https://x", "sha256": "0"}}}', ["a manifest"]),
        ("[1, 2]", ["JSON data"]),
        ('{"text": "unfinished', ["JSON data"]),
        ("torch==2.6 --hash=sha256:00\n", ["a list of requirements"]),
        ("x @ https://example.org/x.whl\ny; python_version < '3'\n", ["a list of requirements"]),
        ("\ufefftask: masked-lm\n", ["a run file"]),
    ],
)
def test_the_kind_is_known_by_the_content(content: str, kinds: list[str]) -> None:
    assert kinds_of(content.encode()) == kinds
