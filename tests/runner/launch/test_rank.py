"""What a rank does before torch is imported."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import NeverMetError
from runner.launch.place import Place
from runner.launch.rank import check_interfaces, flight_recorder


@pytest.mark.parametrize(
    ("torch", "size"),
    [("2.6.0+cu118", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("2.13.0", "TORCH_FR_BUFFER_SIZE")],
)
def test_every_torch_writes_its_last_collectives_to_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, size: str
) -> None:
    """By default newer torch writes them to ~/.cache, and torch 2.6 keeps none."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: torch)
    ours = flight_recorder(tmp_path, {"TORCH_FR_DUMP_TEMP_FILE": "/mine/"})
    assert ours == {
        size: "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/flight-rank-",
    }, "what the user set wins"


RANK = """
import os, sys, warnings
from pathlib import Path
from runner.launch.rank import become_rank
from runner.run_folder.layout import RunFolder
become_rank(RunFolder(Path(sys.argv[1])), os.environ)
from tqdm import tqdm
for _ in tqdm(range(3)):
    warnings.warn("deprecated", FutureWarning)
os._exit(0)
"""


def test_the_log_of_a_rank_has_no_bars_and_no_libraries_own_warnings(tmp_path: Path) -> None:
    """At the end of `runner logs` were bars of DeepSpeed and FutureWarnings of torch."""
    (tmp_path / "logs").mkdir()
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(tmp_path)],
        env={**os.environ, **variables, "MASTER_PORT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


# Entries of docs/first-job-failures.md, found before torch is imported -> variables.
INTERFACES = {
    "N3": {"NCCL_SOCKET_IFNAME": "ib7", "GLOO_SOCKET_IFNAME": "lo"},
    "N4": {"NCCL_SOCKET_IFNAME": "=ib7,=ib8", "GLOO_SOCKET_IFNAME": "lo"},
}


@pytest.mark.parametrize("entry", INTERFACES)
def test_an_interface_that_a_node_lacks_is_named_with_what_it_has(entry: str) -> None:
    variables = {**INTERFACES[entry], "SLURMD_NODENAME": "n1"}
    place = Place(rank=0, world_size=2, local_rank=0, local_world_size=1, master="n1", port=1)
    with pytest.raises(NeverMetError) as refused:
        check_interfaces(place, variables)
    said, value = str(refused.value), variables["NCCL_SOCKET_IFNAME"]
    assert f"node n1: NCCL_SOCKET_IFNAME={value}: there is no interface ib7" in said
    assert "it has lo" in said and "Unset NCCL_SOCKET_IFNAME" in said
    assert "unchanged will not help" in said and refused.value.exit_code == 1
    check_interfaces(dataclasses.replace(place, local_world_size=2), variables)  # on one machine
    check_interfaces(place, {"NCCL_SOCKET_IFNAME": "lo"})
