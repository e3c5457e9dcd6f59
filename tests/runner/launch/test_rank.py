"""What a rank does before torch is imported."""

from __future__ import annotations

import dataclasses

import pytest

from runner.errors import NeverMetError
from runner.launch.ranks import RankInfo
from runner.training.rank import check_interfaces

# Entries of docs/first-job-failures.md, found before torch is imported -> variables.
INTERFACES = {
    "N3": {"NCCL_SOCKET_IFNAME": "ib7", "GLOO_SOCKET_IFNAME": "lo"},
    "N4": {"NCCL_SOCKET_IFNAME": "=ib7,=ib8", "GLOO_SOCKET_IFNAME": "lo"},
}


@pytest.mark.parametrize("entry", INTERFACES)
def test_an_interface_that_a_node_lacks_is_named_with_what_it_has(entry: str) -> None:
    variables = {**INTERFACES[entry], "SLURMD_NODENAME": "n1"}
    place = RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=1, master="n1", port=1)
    with pytest.raises(NeverMetError) as refused:
        check_interfaces(place, variables)
    said, value = str(refused.value), variables["NCCL_SOCKET_IFNAME"]
    assert f"node n1: NCCL_SOCKET_IFNAME={value}: there is no interface ib7" in said
    assert "it has lo" in said and "Unset NCCL_SOCKET_IFNAME" in said
    assert "unchanged will not help" in said and refused.value.exit_code == 1
    check_interfaces(dataclasses.replace(place, local_world_size=2), variables)  # on one machine
    check_interfaces(place, {"NCCL_SOCKET_IFNAME": "lo"})
