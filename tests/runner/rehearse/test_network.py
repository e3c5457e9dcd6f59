"""The wall around the ranks of a rehearsal: they reach each other, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ASK = """
import ctypes, encodings.idna, json, os, socket, sys
from runner.trials.network import leave_network
uid = int(sys.argv[1])
if uid != os.geteuid():  # an ordinary user; as such a process starts, /proc/self is its own
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE
refused = leave_network()
if refused:
    print(json.dumps({"refused": refused})); sys.exit()
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname(), timeout=5).close()
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5).close()
    out = "open"
except OSError as error:
    out = error.strerror
there = [name for _, name in socket.if_nameindex()]
print(json.dumps({"outside": out, "uid": os.geteuid(), "there": there}))
"""


@pytest.mark.parametrize("uid", [0, 65534])
def test_ranks_meet_on_loopback_and_no_route_leads_out(uid: int) -> None:
    if os.geteuid() != 0 and uid != os.geteuid():
        uid = os.geteuid()
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(uid)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "refused" in found:
        pytest.skip(found["refused"])
    assert found == {"outside": "Network is unreachable", "uid": uid, "there": ["lo"]}
