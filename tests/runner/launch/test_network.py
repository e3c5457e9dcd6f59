"""Which interfaces a node has, as gloo and NCCL read the settings that name them."""

from __future__ import annotations

import pytest

from runner.launch.network import missing_interfaces


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
