"""What the nodes of a rehearsal's job find."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.config.run_config import RunConfig
from runner.from_stage import StageError, UsageError
from runner.job.findings import Finding
from runner.trials import children
from runner.trials import rehearse_job as look
from runner.trials.rehearse_job import WAIT_S, try_ports, wait_for_all
from tests.first_job.harness import programs
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster

LOOK = "runner/trials/rehearse_job.py"


THERE = ["lo", "eth0", "eth10", "ib0"]


def test_a_node_whose_temporary_disk_is_full_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look.check_caches(tmp_path / "of-a-job") == []
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**26))
    (finding,) = look.check_caches(tmp_path / "of-a-job")
    assert f"{tmp_path} has 67.1 MB free" in finding.message


def test_too_little_locked_memory_for_infiniband_is_named(tmp_path: Path) -> None:
    devices = tmp_path / "infiniband"
    assert look.check_locked_memory(devices, 2**23, {}) == []  # there is none
    (devices / "mlx5_0").mkdir(parents=True)
    (finding,) = look.check_locked_memory(devices, 2**23, {})
    assert "8.39 MB" in finding.message and "memlock unlimited" in finding.remedy
    assert look.check_locked_memory(devices, -1, {}) == []  # no limit
    assert look.check_locked_memory(devices, 2**23, {"NCCL_IB_DISABLE": "1"}) == []


def test_gpus_that_are_asked_for_and_that_torch_does_not_see_are_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.load(cluster.write(slurm={"nodes": 1, "gpus_per_node": 4}))
    with pytest.raises(UsageError, match=r"asks for 4 GPUs per node .* is for CPUs only"):
        list(look.check_devices(config, {"SLURM_JOB_ID": "1"}))
    line = "NVIDIA A800-SXM4-80GB, 81920, 8.0, GPU-1, Disabled"
    programs(tmp_path, **{"nvidia-smi": f"echo '{line}'"})
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"slurm.gpus_per_node: 4, and torch sees 0 GPUs here"):
        list(look.check_devices(config, {}))


def test_a_gpu_that_torch_has_no_code_for_is_named_with_its_builds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ones(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available.\nCompile with ...")

    cuda = SimpleNamespace(
        device_count=lambda: 2,
        get_device_name=lambda _: "Tesla V100-SXM2-32GB",
        get_arch_list=lambda: ["sm_80", "sm_90"],
    )
    torch = SimpleNamespace(cuda=cuda, ones=ones, __version__="2.13.0")
    monkeypatch.setattr(children, "torch", torch)
    with pytest.raises(StageError) as caught:
        children.run_kernels()
    assert caught.value.message == (
        "GPU 0 (Tesla V100-SXM2-32GB): CUDA error: no kernel image is available. torch 2.13.0 is "
        "compiled for sm_80 sm_90."
    )
    assert caught.value.exit_code == 1


def test_what_env_check_prints_becomes_findings() -> None:
    output = "ok    glibc 2.31\nnote  no module command\nbad   driver 418\n      -> ask the site\n"
    note, bad = look.read_env_check(output, "train-env")
    assert (note.level, bad.level, bad.remedy) == ("note", "error", "ask the site")
    assert '"exit_code": 1' in json.dumps(bad.to_json()), "not `true`"


def try_all(folders: dict[str, Path], hosts: list[str]) -> dict[str, tuple[list[Finding], str]]:
    """What each node finds; each is an address of loopback, and sees a folder."""
    results: dict[str, tuple[list[Finding], str]] = {}

    def one(host: str, folder: Path) -> None:
        results[host] = try_ports(folder, host, f"127.0.0.{host[1:]}", hosts)

    threads = [threading.Thread(target=one, args=pair) for pair in folders.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_each_node_tries_the_way_to_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third one dropped its listener; a fourth does not come within a minute."""
    (tmp_path / "n3.address.json").write_text('{"address": "127.0.0.3", "port": 9}')
    (tmp_path / "n3.done").touch()
    found = try_all({"n1": tmp_path, "n2": tmp_path}, ["n1", "n2", "n3"])
    for host, ((finding,), line) in found.items():
        assert finding.message == f"{host} cannot connect to n3 at 127.0.0.3:9: it refuses."
        assert line == f"{host} reaches 1 of 2 nodes"
    seconds = iter([0.0, 60.0, 61.0, 0.0, 60.0, 61.0])
    monkeypatch.setattr(wait_for_all, "__defaults__", (WAIT_S, seconds.__next__))
    (finding,), line = try_ports(tmp_path, "n1", "127.0.0.1", ["n1", "n4"])
    assert finding.message == f"n4 wrote nothing into {tmp_path} that n1 sees."
    assert (finding.exit_code, line, [*seconds]) == (1, "n1 reaches 0 of 1 nodes", [])


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth1"}, 1),  # gloo takes whole names
        ({"GLOO_SOCKET_IFNAME": "eth0,missing"}, 1),  # and needs each of them
        ({"NCCL_SOCKET_IFNAME": "eth0,missing"}, 0),
        ({"NCCL_SOCKET_IFNAME": "eth"}, 0),  # NCCL takes prefixes
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, 1),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, 0),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth,ib"}, 1),
        ({}, 0),
    ],
)
@obeys(LOOK, "unset {} (slurm.setup, ~/.bashrc)")
def test_an_interface_that_a_node_does_not_have_is_named(
    variables: dict[str, str], found: int
) -> None:
    findings = look.check_interfaces({**variables, "HOME": "/nowhere"}, THERE)
    assert len(findings) == found
    for finding in findings:
        assert "eth10" in finding.message
        name = in_it(finding.remedy, r"(?<=^unset )\w+")
        left = {key: value for key, value in variables.items() if key != name}
        assert look.check_interfaces({**left, "HOME": "/nowhere"}, THERE) == []
