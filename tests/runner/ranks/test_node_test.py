"""Before the ranks start, each node says what would keep it from the others, with its name.

`srun` here starts the real test twice on this machine, as two nodes; the second one can have a
network of its own, without a way out.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner.errors import NeverMetError
from runner.launch.srun import check_nodes, node_test_command
from runner.ranks.network import interface_of, missing_interfaces, source_towards
from runner.ranks.node_test import Meeting
from runner.slurm.environment import SlurmJobEnvironment
from tests.runner.launch.test_local import BATCH
from tests.support.environment.laptop import alone

SRUN = """\
#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NODEID=0 SLURMD_NODENAME=n1 "$@" &
SLURM_NODEID=1 SLURMD_NODENAME=n2 SECOND "$@"
wait
"""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Two nodes; the words before the command of the second one can take its network away."""

    def make(second: str = "", text: str = SRUN) -> None:
        (tmp_path / "srun").write_text(text.replace("SECOND", second))
        (tmp_path / "srun").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    make()
    return make


def tested(address: str = "127.0.0.1", folders: dict[str, str] | None = None, **given: str) -> None:
    job = SlurmJobEnvironment.from_environ(BATCH)
    assert job is not None and job.num_nodes == 2
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    check_nodes(job, {**os.environ, **given}, Meeting(address, port, 1, folders or {}))


def test_nodes_that_reach_each_other_are_one_line(
    nodes: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tested(folders={"the run folder": str(tmp_path)}, GLOO_SOCKET_IFNAME="lo")
    assert "2 nodes reach each other (tested in" in capsys.readouterr().err


# Entries of docs/first-job-failures.md, found before a rank starts -> variables.
INTERFACES = {
    "N3": {"NCCL_SOCKET_IFNAME": "ib7", "GLOO_SOCKET_IFNAME": "lo"},
    "N4": {"NCCL_SOCKET_IFNAME": "=ib7,=ib8", "GLOO_SOCKET_IFNAME": "lo"},
}


@pytest.mark.parametrize("entry", INTERFACES)
def test_an_interface_that_a_node_lacks_is_named_with_what_it_has(
    nodes: Callable[..., None], entry: str
) -> None:
    variables = INTERFACES[entry]
    with pytest.raises(NeverMetError) as refused:
        tested(**variables)
    said, value = str(refused.value), variables["NCCL_SOCKET_IFNAME"]
    assert f"node n1: NCCL_SOCKET_IFNAME={value}: there is no interface ib7" in said
    assert f"node n2: NCCL_SOCKET_IFNAME={value}" in said and "it has lo" in said
    assert "Unset NCCL_SOCKET_IFNAME" in said
    assert "unchanged will not help" in said and refused.value.exit_code == 1


def test_a_node_without_a_way_to_rank_0_and_one_without_an_interface_are_named(
    nodes: Callable[..., None],
) -> None:
    """Both at once: the first node waits for the second one for most of a minute."""
    address = source_towards("192.0.2.1")
    if address is None:
        pytest.skip("this machine has loopback alone")
    nodes(" ".join(alone("n")))
    name = interface_of(address)

    def said(**given: str) -> str:
        with pytest.raises(NeverMetError) as refused:
            tested(address, GLOO_SOCKET_IFNAME="lo", **given)
        assert "node n1" not in str(refused.value)
        return str(refused.value)

    with ThreadPoolExecutor() as both:
        lacks = both.submit(said, NCCL_SOCKET_IFNAME=name)
        no_way = said()
    assert f"node n2: cannot reach {address}:" in no_way and "no route" in no_way
    assert "lost another rank" not in no_way
    there = f"node n2: NCCL_SOCKET_IFNAME={name}: there is no interface {name}; it has lo"
    assert there in lacks.result()


def test_a_folder_that_is_not_on_a_node_is_named(nodes: Callable[..., None]) -> None:
    with pytest.raises(NeverMetError, match="node n2: the bundle /nowhere/bundle is not there"):
        tested(folders={"the bundle": "/nowhere/bundle"}, GLOO_SOCKET_IFNAME="lo")


def test_a_test_that_cannot_be_made_ends_no_job(
    nodes: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes(text="#!/bin/sh\necho 'srun: error: Unable to create step' >&2\nexit 1\n")
    tested()
    said = capsys.readouterr().err
    assert "only 0 of 2 nodes answered the test: srun: error: Unable to create step" in said


@pytest.mark.parametrize(
    ("value", "of_nccl", "missing"),
    [
        ("eth0", True, []),
        ("eth", True, []),
        ("=eth", True, ["eth"]),
        ("=eth0", True, []),
        ("^docker,lo", True, []),
        ("^lo,eth", True, ["^lo,eth"]),
        ("^=lo,eth", True, []),
        ("^lo", False, ["^lo"]),
        ("ib,eth", True, []),
        ("ib0,ib1", True, ["ib0", "ib1"]),
        ("eth", False, ["eth"]),
        ("eth0,ib0", False, ["ib0"]),
    ],
)
def test_names_of_interfaces_are_read_as_the_libraries_read_them(
    value: str, of_nccl: bool, missing: list[str]
) -> None:
    assert missing_interfaces(value, ["lo", "eth0"], of_nccl=of_nccl) == missing


def test_the_step_of_the_test_is_one_task_for_each_node_without_gpus() -> None:
    job = SlurmJobEnvironment.from_environ(BATCH)
    assert job is not None
    command = node_test_command(job, Meeting("10.0.0.1", 29500, 1, {}))
    assert command[:5] == [
        "srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=1",
    ]  # fmt: skip
