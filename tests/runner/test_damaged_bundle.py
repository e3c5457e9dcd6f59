"""A bundle known to be damaged is rejected before a rank starts; unreadable files are named."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from runner import inputs
from runner.config.run_config import RunConfig
from runner.from_stage import DamageError, UsageError
from runner.inputs import ModelInput, resolve
from runner.run_folder.layout import RunFolder
from runner.training.faults import disk_error, write_error
from runner.training.saving.export import read_companions
from stage.bundle.bundle import Bundle
from tests.runner.conftest import Cluster
from tests.runner.job.test_preflight import Terminal, terminal
from tests.support.waiting import free_port

__all__ = ["terminal"]

TOKENIZER = "data/models/tiny-bert/tokenizer.json"
COMMANDS = {
    "check": ("check", "tiny.yaml"),
    "submit": ("submit", "tiny.yaml"),
    "train": ("train", "tiny.yaml", "--processes", "2"),
}


@pytest.fixture
def carried(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundle, and a state folder of this test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    terminal.cluster.write()
    return Path(shutil.copytree(terminal.cluster.bundle, tmp_path / "carried"))


def stage(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stage", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def flip(path: Path) -> None:
    """Other bytes, the same size."""
    with open(path, "r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


@pytest.mark.parametrize("command", COMMANDS)
def test_damage_that_a_verification_found_is_remembered(
    terminal: Terminal, carried: Path, command: str
) -> None:
    """Once `check` said "nothing found that would fail", and training ended with "free space"."""
    flip(carried / TOKENIZER)
    assert stage("verify", carried).returncode == 1
    said = terminal.refused(*COMMANDS[command], code=1, bundle=carried)
    assert f"{TOKENIZER} (mismatched)" in said and "stage verify found it " in said
    assert f"Here: stage apply {carried} PATCH" in said and "stage patch BUNDLE --report " in said
    assert f"Then: stage verify {carried}" in said and "-> stage verify" not in said


def test_exec_refuses_it_too(carried: Path) -> None:
    run = [sys.executable, "-m", "runner", "exec", "--bundle", str(carried), "--", "true"]
    assert subprocess.run(run, capture_output=True).returncode == 0
    (carried / "data/models/tiny-bert/more.json").write_text("{}")
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 1 and "more.json (extra)" in done.stderr
    (carried / "data/models/tiny-bert/more.json").unlink()
    flip(carried / TOKENIZER)
    stage("verify", carried)
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 1 and f"{TOKENIZER} (mismatched)" in done.stderr


def test_ranks_of_torchrun_refuse_it_without_a_launcher_of_ours(
    cluster: Cluster, tmp_path: Path
) -> None:
    copy = Cluster(tmp_path, Path(shutil.copytree(cluster.bundle, tmp_path / "carried")))
    path = copy.write(engine={"name": "ddp"}, steps=2)
    assert copy.run("prepare", path.name).returncode == 0
    (copy.bundle / "data/files/notes/notes.txt").unlink()
    done = copy.run(
        "train", "tiny.yaml", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    assert done.returncode == 1 and "notes.txt (missing)" in done.stderr, done.stderr


def test_what_is_exported_is_what_was_fetched(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(cluster.bundle, tmp_path / "carried"))
    config = RunConfig.load(cluster.write())
    model = resolve(config, bundle).model
    assert set(read_companions(model)) >= {"tokenizer.json", "tokenizer_config.json"}
    flip(bundle / TOKENIZER)
    with pytest.raises(DamageError, match=r"tokenizer\.json: damaged: its bytes are not those"):
        read_companions(model)
    flip(bundle / "data/models/tiny-bert/config.json")
    with pytest.raises(DamageError, match=r"config\.json: damaged"):
        resolve(config, bundle)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "not a model's config"), ("{", "not JSON"), ("", "the model has no config.json")],
)
def test_a_config_that_is_none_is_refused(
    bundle: Path, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    digests = {"config.json": sha256(text.encode()).hexdigest()} if text else {}
    with pytest.raises(UsageError, match=said):
        inputs._settings(tmp_path / "config.json", Bundle.open(bundle), digests)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("tokenizer.json", True),
        ("spiece.model", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tools.jinja", True),
        ("processor_config.json", True),
        ("preprocessor_config.json", True),
        ("LICENSE", True),
        ("config.json", False),
        ("generation_config.json", False),
        ("model.safetensors.index.json", False),
        ("model.gguf", False),
        ("onnx/model.onnx", False),
        ("README.md", False),
    ],
)
def test_companions_are_no_weights_and_nothing_that_is_written_anew(
    tmp_path: Path, name: str, kept: bool
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    model = ModelInput("m", tmp_path, "acme/m", None, {name: sha256(b"x").hexdigest()}, {})
    assert (name in read_companions(model)) is kept


def test_free_space_is_the_advice_for_a_full_disk_alone(tmp_path: Path) -> None:
    bundle, folder = tmp_path / "bundle", RunFolder(tmp_path / "run")
    bundle.mkdir()
    for name in ("stage.lock", "bagit.txt"):
        (bundle / name).touch()
    gone = FileNotFoundError(errno.ENOENT, "No such file", str(bundle / "data/x"))
    unnamed = OSError(f"Error no file named model.safetensors found in {bundle}/data.")
    for lost in (gone, unnamed):
        said = disk_error(lost, bundle, folder, 3)
        assert said.exit_code == 1 and "stage verify" in said.remedy
        assert "Free space" not in said.remedy
    for number in (errno.EIO, errno.EACCES, errno.ENOSPC, errno.EDQUOT):
        fault = OSError(number, os.strerror(number), str(folder.metrics))
        said = disk_error(fault, bundle, folder, 3)
        is_full = number in (errno.ENOSPC, errno.EDQUOT)
        assert said.remedy.startswith("Free space or quota there") == is_full
        assert said.exit_code == 5 if is_full else os.strerror(number) in str(said)


def test_parquet_that_is_not_as_fetched_is_named_with_its_bundle(
    terminal: Terminal, carried: Path
) -> None:
    """The size is right and nobody has verified: `prepare` is the first that sees it."""
    path = min((carried / "data/datasets/reference").rglob("train-*.parquet"))
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(b"\xff" * 4096)
    done = subprocess.run(
        [sys.executable, "-m", "runner", "prepare", "tiny.yaml", "--bundle", str(carried)],
        cwd=terminal.cluster.folder, capture_output=True, text=True, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"{path}: damaged: " in done.stderr and f"stage verify {carried} " in done.stderr


def test_weights_that_the_disk_does_not_take_are_not_called_unreadable(tmp_path: Path) -> None:
    """safetensors has one error for both; the system's limit of a file's size is real."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises((SafetensorError, OSError)) as refused:
            save_file({"weight": torch.zeros(10_000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if isinstance(refused.value, SafetensorError):  # older versions raise an OSError
        fault = write_error(refused.value)
        assert fault is not None and fault.errno == errno.EFBIG
    (tmp_path / "damaged.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(SafetensorError) as unreadable:
        load_file(tmp_path / "damaged.safetensors")
    assert write_error(unreadable.value) is None
