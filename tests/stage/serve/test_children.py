"""What each Python of a script does because of the `sitecustomize.py` that it is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from stage.serve import children

LOOKS_UP = """\
import socket
for host in ("127.0.0.1", "datasets-server.127.0.0.1"):
    try:
        print(socket.getaddrinfo(host, 80)[0][4])
    except socket.gaierror as error:
        print(error)
"""


def test_no_name_server_is_asked_for_a_name_below_loopback(tmp_path: Path) -> None:
    """datasets asks `datasets-server.` before the host of HF_ENDPOINT."""
    shutil.copy(children.__file__, tmp_path / "sitecustomize.py")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", LOOKS_UP]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [
        "('127.0.0.1', 80)",
        "[Errno -2] airlift: there is no datasets-server.127.0.0.1",
    ], said.stderr
