"""The choice of interface and address, and messages of failed connections, on real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from runner.errors import NeverMetError
from runner.from_stage import StageError, UsageError
from runner.launch import network, reach
from runner.launch.network import locate
from runner.run_folder.heartbeat import JOIN, START, Heartbeat
from tests.remedies.obeyed import obeys

# As torch 2.13 raises them: two nodes of Debian's kind, a port without a listener, a port in use.
GLOO = (
    "Gloo connectFullMesh failed with "
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting: "
    "SO_ERROR: Connection refused, remote=[127.0.1.1]:21927$0"
)
STORE = (
    "The client socket has failed to connect to any network address of (n1, 25177). "
    "The client socket has failed to "
    "connect to 10.77.0.1:25177 (errno: 113 - No route to host)."
)
FEW = "Timed out after 1801 seconds waiting for clients. 1/2 clients joined."


@pytest.fixture
def port() -> Iterator[int]:
    """A port of loopback that is taken and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def own_address() -> str:
    found = network.own_address_towards(network._UNANSWERED)
    if found is None:
        pytest.skip("this machine has no route but loopback")
    return found[0]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GLOO, "cannot reach 127.0.1.1:21927: a loopback address, which leads back to"),
        (STORE, "cannot reach 10.77.0.1:25177: no route"),
        (FEW, "only 1 of 2 ranks connected to n1:25177"),
    ],
    ids=["gloo", "store", "few"],
)
def test_a_store_without_a_route_is_told_with_its_address(error: str, words: str) -> None:
    told = reach.explain_joining(RuntimeError(error), 1, "n1", 25177)
    assert isinstance(told, NeverMetError) and told.exit_code == 1
    assert words in told.message and "will not help" in told.remedy


@pytest.mark.parametrize(
    "words", ["Connection closed by peer [10.77.0.2]:4021", "mat1 and mat2 shapes"]
)
def test_a_peer_that_was_reached_and_other_faults_are_left_as_they_are(words: str) -> None:
    assert reach.explain_joining(RuntimeError(words), 1, "10.77.0.1", 29500) is None


@pytest.mark.parametrize("beats", [True, False])
def test_a_rank_waits_as_long_as_rank_0_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, beats: bool
) -> None:
    """The failure of an earlier start is none of this one."""
    vitals, now, answers = Heartbeat(tmp_path, 0), [0.0], ["", *["it refuses"] * 9]
    vitals.fail("error: of an earlier start", 2, consequence=False)

    def ask(*_: object) -> str:
        now[0] += reach.SILENT_S / 2
        vitals.beat(f"{START} {now[0] if beats else ''}")
        return answers.pop()

    monkeypatch.setattr(reach, "try_to_connect", ask)
    monkeypatch.setattr(reach, "TRY_EVERY_S", 0.0)
    started = time.time() + reach.CLOCKS_DIFFER_S + 1
    with nullcontext() if beats else pytest.raises(NeverMetError, match="for 2700 s"):
        reach.wait_for_rank_0(1, "127.0.0.2", 9, tmp_path, started=started, clock=lambda: now[0])
    assert bool(answers) is not beats


def test_a_rank_0_that_listens_elsewhere_is_not_waited_for(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "LISTENS_S", 1.0)
    with (
        Heartbeat(tmp_path, 0).beating(JOIN),
        pytest.raises(NeverMetError, match=rf"127\.0\.0\.1:{port}: .*it refuses"),
    ):
        reach.wait_for_rank_0(1, "127.0.0.1", port, tmp_path, started=time.time())


def test_a_rank_0_that_gave_up_ends_the_others_with_its_code(tmp_path: Path, port: int) -> None:
    Heartbeat(tmp_path, 0).fail("error: no such column", 2, consequence=False)
    with pytest.raises(StageError, match=r"rank 0 on .* failed") as told:
        reach.wait_for_rank_0(1, "127.0.0.1", port, tmp_path, started=time.time())
    assert told.value.exit_code == 2


def test_what_the_user_set_wins_and_is_told() -> None:
    address = own_address()
    ours, lines = network.interface_variables({"GLOO_SOCKET_IFNAME": "ib0"}, address, [])
    assert ours == {"NCCL_SOCKET_IFNAME": f"={network.interface_of(address)}"}
    assert "GLOO_SOCKET_IFNAME=ib0: as you set it" in lines
    assert (
        network.interface_variables({network.GLOO: "ib0", network.NCCL: "ib"}, address, [])[0] == {}
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("n1", "n1.cluster.local", True),
        ("N1.cluster.local.", "n1", True),
        ("gpu-a-1", "gpu-a-10", False),
        ("n1.east", "n1.west", False),
        ("10.0.0.1", "10.0.0.10", False),
        ("10.0.0.1", "10", False),
    ],
)
def test_a_host_is_the_same_with_and_without_its_domain(one: str, other: str, same: bool) -> None:
    assert network.same_host(one, other) is network.same_host(other, one) is same


def test_a_master_from_elsewhere_is_ignored_on_one_node_and_told() -> None:
    master = locate("n9.other.cluster", ["n1"], 1, is_first=True)
    assert (master.address, master.ignored) == (
        "127.0.0.1",
        "MASTER_ADDR=n9.other.cluster is ignored on one node",
    )
    assert locate("127.0.0.1", ["n1"], 1, is_first=True).ignored == ""


def test_the_first_nodes_address_under_another_name_is_taken_and_anybody_elses_refused() -> None:
    address = own_address()
    assert locate(address, ["n1", "n2"], 2, is_first=True).address == address
    with pytest.raises(UsageError, match=r"and rank 0 runs on n1; was it set for another job"):
        locate(address, ["n1", "n2"], 2, is_first=False)


@obeys("runner/launch/network.py", "Ask the site for a name or address that other nodes reach")
def test_where_names_say_nothing_the_schedulers_addresses_are_asked() -> None:
    address = own_address()
    told = {"first.invalid": address, "second.invalid": "192.0.2.1"}
    hosts = list(told)
    first = locate("", hosts, 2, is_first=True, address_in_scheduler=told.get)
    assert (first.address, first.reason) == (address, "the route to 192.0.2.1")
    second = locate("", hosts, 2, is_first=False, address_in_scheduler=told.get)
    assert (second.address, second.reason) == (
        address,
        "the address that the scheduler uses for first.invalid",
    )
    with pytest.raises(UsageError, match=r"'first\.invalid' has no address") as refused:
        locate("", hosts, 2, is_first=False)
    assert "export MASTER_ADDR=..." in refused.value.remedy
    for is_first, given in ((True, address), (False, "192.0.2.1")):
        assert locate(given, hosts, 2, is_first=is_first).address == given


def test_an_interface_is_named_by_its_address() -> None:
    assert network.interface_of("127.0.0.1") == network.LOOPBACK
    assert network.interface_of("192.0.2.77") == ""
