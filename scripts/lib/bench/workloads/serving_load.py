"""Starts a server, reads one file over many connections at once, and writes what it took.

    python -m scripts.lib.bench.workloads.serving_load ANSWER CLIENTS SIZE PATH -- SERVER...

The server prints its address (`at http://...`), or listens on port 8090. ANSWER gets the seconds,
and the sum of the peak memory of the server's processes in KiB.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT = "127.0.0.1:8090"
BUFFER = 2**20
SETTLE_S = 20.0


def main() -> int:
    answer, clients, size, path = sys.argv[1:5]
    with subprocess.Popen(sys.argv[6:], stdout=subprocess.PIPE, text=True) as server:
        try:
            host, port = _address(server)
            before = time.perf_counter()
            count = min(os.cpu_count() or 1, int(clients))
            shares = [len(range(n, int(clients), count)) for n in range(count)]
            work = [(host, port, f"/{path}", int(size), share) for share in shares]
            with multiprocessing.Pool(count) as pool:
                failed = sum(pool.starmap(read_all, work))
            seconds = time.perf_counter() - before
            found = {"seconds": seconds, "peak": peak_kib(server.pid)}
            Path(answer).write_text(json.dumps(found))
        finally:
            server.terminate()
    if failed:
        print(f"{failed} of {clients} clients did not get {size} bytes", file=sys.stderr)
    return int(failed > 0)


def _address(server: subprocess.Popen[str]) -> tuple[str, int]:
    """Host and port, once the server answers."""
    assert server.stdout is not None
    where = DEFAULT
    if "stage" in server.args:  # type: ignore[operator]
        match = re.search(r"at (http://\S+),", server.stdout.readline())
        where = urlsplit(match[1]).netloc if match else DEFAULT
    host, _, port = where.rpartition(":")
    until = time.monotonic() + SETTLE_S
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return host, int(port)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def read_all(host: str, port: int, path: str, size: int, count: int) -> int:
    """Reads the file over `count` connections at once; the number of those that got less."""
    failed: list[int] = []
    threads = [
        threading.Thread(target=_read, args=(host, port, path, size, failed)) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(failed)


def _read(host: str, port: int, path: str, size: int, failed: list[int]) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    buffer, got, head = bytearray(BUFFER), 0, b""
    try:
        with socket.create_connection((host, port), 60) as connection:
            connection.sendall(request)
            while b"\r\n\r\n" not in head:
                piece = connection.recv(4096)
                if not piece:
                    break
                head += piece
            got = len(head.partition(b"\r\n\r\n")[2])
            while count := connection.recv_into(buffer):
                got += count
    except OSError:
        pass
    if got != size or b" 200 " not in head.split(b"\r\n")[0]:
        failed.append(got)


def peak_kib(pid: int) -> int:
    """The peak resident memory of a process and its children, in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(match[1]) if match else 0) + sum(peak_kib(int(c)) for c in children)


if __name__ == "__main__":
    sys.exit(main())
