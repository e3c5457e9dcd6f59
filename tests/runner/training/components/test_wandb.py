"""wandb beside TensorBoard: offline, from the run folder, and never in the way of training."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from runner.errors import StageError
from runner.job.check import check_everything
from runner.job.job import Job
from runner.run_folder.layout import RunFolder
from runner.training.components.metrics import Console, Observer
from tests.runner.conftest import Cluster

LINE = {"step": 1, "epoch": 0.5, "loss": 2.0, "tokens_per_s": 10.0, "lr": 1e-3, "grad_norm": 1.0}

# The file is a log of LevelDB (doc/log_format.md there) behind seven bytes: records of protobuf.
READ = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2 as pb
data, at, whole = open(sys.argv[1], "rb").read(), 7, b""
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, size, kind = struct.unpack_from("<IHB", data, at)
    whole += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # whole, or the last part
        record, whole = pb.Record.FromString(whole), b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            print(json.dumps(values))
"""


def is_here() -> bool:
    from runner.job.installed import is_installed

    return is_installed("wandb")


@pytest.mark.skipif(is_here(), reason="wandb is installed here")
def test_check_refuses_it_where_the_environment_lacks_it(cluster: Cluster) -> None:
    path = cluster.write(wandb=True, engine={"name": "ddp"})
    run = Job.load(path, cluster.bundle, None, ())
    found = check_everything(run, 1, None)
    (error,) = [error for error in found.errors if "wandb" in error.message]
    assert "training needs wandb, not installed for" in error.message
    assert error.remedy == "pip install wandb" and error.exit_code == 2
    with pytest.raises(StageError, match="wandb"):
        found.raise_errors()


@pytest.mark.skipif(is_here(), reason="wandb is installed here")
def test_a_rank_without_it_says_so_once_and_logs_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    with open(tmp_path / "said", "w") as out:
        settings = {"name": "tiny"}
        observer = Observer(folder, 2, Console(out, out), is_first=True, wandb=settings)
        observer.begin(0)
        observer.step(LINE)
        observer.step({**LINE, "step": 2})
        observer.close()
    said = (tmp_path / "said").read_text()
    assert said.count("wandb: nothing more is logged with it (No module named 'wandb')") == 1
    assert "metrics.jsonl has all" in said
    assert len(folder.metrics.read_text().splitlines()) == 2


@pytest.mark.slow  # an environment of its own, with the real wandb
def test_the_real_wandb_writes_a_run_to_sync_and_reaches_no_network(cluster: Cluster) -> None:
    prefix = cluster.folder / "env"
    venv.create(prefix, with_pip=True)
    python = str(prefix / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-qq", "wandb"], capture_output=True)
    if done.returncode:
        pytest.skip(f"wandb cannot be installed: {done.stderr[-200:]!r}")
    (site,) = prefix.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("\n".join([*ours, str(Path(__file__).parents[4])]))

    cluster.write(wandb=True, engine={"name": "ddp"}, steps=3)
    # strace is not everywhere; without a route, a library that asks for the network fails.
    network = ["unshare", "-rn", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"]
    alone = subprocess.run([*network, "true"], capture_output=True).returncode == 0
    command = [python, "-m", "runner", "train", "tiny.yaml", "--bundle", str(cluster.bundle)]
    done = subprocess.run(
        [*(network if alone else []), *command, "--processes", "1"],
        cwd=cluster.folder, env=cluster.environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,) = (cluster.output() / "wandb").glob("offline-run-*")
    assert f"wandb sync {kept}" in done.stdout
    (file,) = kept.glob("run-*.wandb")
    found = subprocess.run([python, "-c", READ, str(file)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    logged = {}
    for line in found.stdout.splitlines():
        values = json.loads(line)
        logged.setdefault(values["_step"], {}).update(values)
    for line in map(json.loads, (cluster.output() / "metrics.jsonl").read_text().splitlines()):
        for key in {"loss", "validation_loss", "lr"} & set(line):
            assert logged[line["step"]][key] == pytest.approx(line[key])
