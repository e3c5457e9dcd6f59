"""Where the ranks' environment comes from: decided from the disks, with a reason, never another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from runner import inputs
from runner.config.run_config import RunConfig
from runner.disks import disk_type
from runner.from_stage import DamageError, IncompleteError, UsageError
from runner.inputs import EnvironmentInput
from runner.job import node_local
from runner.job.node_local import decide_node_local
from stage.bundle.bundle import Bundle
from tests.first_job.harness import programs
from tests.runner.conftest import Cluster

TREE = "ab" * 32
JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_CPUS_PER_TASK": "3",
    "SLURM_JOB_CPUS_PER_NODE": "12(x2)",
}


@pytest.fixture
def environment(tmp_path: Path) -> EnvironmentInput:
    return EnvironmentInput(
        asset="train-env", path=tmp_path / "asset", tree=TREE, size=6 << 30, files=9
    )


def prefix_of(folder: Path, tree: str = TREE) -> Path:
    """An environment of a bundle at a prefix."""
    prefix = folder / "prefix"
    (prefix / ".airlift").mkdir(parents=True)
    (prefix / ".airlift" / "env.json").write_text(json.dumps({"tree": tree}))
    return prefix


def disks(shared: str, own: str, folder: Path) -> str:
    """What is mounted where: the prefix on a shared disk, the node's own disk."""
    at = {"/": "ext4", folder / "prefix": shared, folder / "own": own}
    return "".join(f"/dev/x {path} {kind} rw 0 0\n" for path, kind in at.items())


@pytest.mark.parametrize(
    ("shared", "own", "used", "why"),
    [
        ("lustre", "xfs", True, "is on a network disk (lustre)"),
        ("nfs4", "ext4", True, "is a disk of the node's own (ext4)"),
        ("ext4", "ext4", False, "is on a disk of this node already (ext4)"),
        ("fuse.squashfuse", "ext4", False, "is one mounted file (fuse.squashfuse)"),
        ("squashfs", "ext4", False, "is one mounted file (squashfs)"),
        ("lustre", "nfs", False, "is a network disk too (nfs); set AIRLIFT_NODE_ROOT"),
    ],
)
def test_auto_goes_by_the_disks(
    tmp_path: Path, environment: EnvironmentInput, shared: str, own: str, used: bool, why: str
) -> None:
    environ = {"AIRLIFT_NODE_ROOT": str(tmp_path / "own")}
    root, reason = decide_node_local(
        "auto", environment, environ, disks(shared, own, tmp_path), prefix_of(tmp_path)
    )
    assert root == (tmp_path / "own" if used else None)
    assert why in reason


def test_memory_is_used_only_where_it_was_named(
    environment: EnvironmentInput, tmp_path: Path
) -> None:
    prefix = prefix_of(tmp_path)
    lustre = f"server:/x {prefix} lustre rw 0 0\n"
    shown = f"{lustre}none /tmp tmpfs rw 0 0\n{lustre}"
    root, reason = decide_node_local("auto", environment, {}, shown, prefix)
    assert (root, "/tmp is in memory (tmpfs)" in reason) == (None, True)
    named = {"AIRLIFT_NODE_ROOT": "/tmp"}
    assert decide_node_local("auto", environment, named, shown, prefix)[0] == Path("/tmp")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "nfs4"),
        ("/homes", "ext4"),
        ("/scratch/a b/c", "lustre"),
        ("/mnt", "xfs"),
        ("/数据/envs", "lustre"),
        ("/back\\slash/x", "gpfs"),
        ("/caf\udce9/x", "beegfs"),  # a name in Latin-1
    ],
)
def test_the_nearest_mount_tells_the_disk_and_the_later_of_two(path: str, kind: str) -> None:
    lines = (
        "rootfs / rootfs rw 0 0",
        "/dev/sda / ext4 rw 0 0",
        "srv:/h /home nfs4 rw 0 0",
        "l@o2ib:/s /scratch/a\\040b lustre rw 0 0",
        "none /mnt tmpfs rw 0 0",
        "/dev/sdb /mnt xfs rw 0 0",
        "l@o2ib:/d /数据 lustre rw 0 0",
        "g /back\\134slash gpfs rw 0 0",
        "b /caf\udce9 beegfs rw 0 0",
        "broken",
    )
    assert disk_type(Path(path), "\n".join(lines)) == kind


def srun(folder: Path, body: str) -> Mapping[str, str]:
    """A job whose srun does as it is told; the real one is in tests/site."""
    return {**JOB, "PATH": programs(folder, srun=body)}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo /scratch/e", "1 of 2 nodes have it"),
        ("echo /scratch/e; echo /other/e", "/scratch/e and /other/e"),
        ("echo /scratch/e; echo /scratch/e; exit 5", "2 of 2 nodes have it; see above"),
    ],
)
def test_unless_every_node_has_it_no_rank_starts(
    tmp_path: Path,
    environment: EnvironmentInput,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    said: str,
) -> None:
    environ = srun(tmp_path / "bin", body)
    monkeypatch.setenv("PATH", environ["PATH"])
    with pytest.raises(IncompleteError) as caught:
        node_local.arrange(True, environment, environ, print)
    assert said in str(caught.value)


def test_what_the_job_would_refuse_is_refused_before_it_is_queued(
    tmp_path: Path, environment: EnvironmentInput
) -> None:
    right, wrong = prefix_of(tmp_path / "right"), prefix_of(tmp_path / "wrong", "cd" * 32)
    assert str(right) in node_local.preview(False, environment, right)
    with pytest.raises(UsageError, match=r"bootstrap\.sh PREFIX"):
        node_local.preview(False, environment, wrong)
    with pytest.raises(UsageError, match="not inside a Slurm job"):
        node_local.arrange(True, environment, {}, print)
    with pytest.raises(DamageError, match=r"node-local\.sh: cannot be read: it is missing"):
        node_local.preview("auto", environment, wrong)
    environment.path.mkdir()
    for name in ("node-local.sh", "bootstrap.sh", "image.tar.gz"):
        (environment.path / name).touch()
    assert "is another environment" in node_local.preview(True, environment, wrong)
    assert "or each node's own disk (node_local: auto); 9 files, " in node_local.preview(
        "auto", environment, right
    )


def test_a_run_whose_environment_is_none_is_told_so(cluster: Cluster) -> None:
    config = RunConfig.load(cluster.write(environment={"asset": "notes"}))
    with pytest.raises(UsageError, match="is a files, not an environment"):
        inputs.environment_input(config, Bundle.open(cluster.bundle))


def test_what_was_said_is_done(environment: EnvironmentInput, tmp_path: Path) -> None:
    shared = disks("ext4", "nfs", tmp_path)
    root, _ = decide_node_local(True, environment, {}, shared, prefix_of(tmp_path))
    assert root == Path("/tmp")
    own = disks("lustre", "xfs", tmp_path)
    assert decide_node_local(False, environment, {}, own, tmp_path / "prefix")[0] is None


def test_auto_goes_on_from_the_shared_disk_and_says_so(
    tmp_path: Path, environment: EnvironmentInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... if that is the environment asked for; else it is refused like any other."""
    environ = {**srun(tmp_path / "bin", "exit 5"), "AIRLIFT_NODE_ROOT": str(tmp_path / "own")}
    monkeypatch.setenv("PATH", environ["PATH"])
    mounts = tmp_path / "mounts"
    mounts.write_text(disks("lustre", "xfs", tmp_path))
    said: list[str] = []
    prefix = prefix_of(tmp_path)
    small = replace(environment, size=0)
    assert (
        node_local.arrange("auto", small, environ, said.append, prefix=prefix, mounts=mounts)
        is None
    )
    assert "0 of 2 nodes have it" in said[-1]
    assert "Using the shared disk instead (node_local: auto)" in said[-1]
    with pytest.raises(UsageError, match=r"bootstrap\.sh PREFIX"):
        node_local.arrange("auto", small, environ, said.append, prefix=tmp_path, mounts=mounts)
