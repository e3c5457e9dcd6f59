"""`runner submit --to` on a real Slurm: whatever is killed or cut, the next one ends with one job.

The line is counted: what came before a break is not sent again.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stage.bundle.verify import verify
from tests.site.conftest import MANIFEST, Site, stage_tiny
from tests.site.road import Laptop, laptop_of
from tests.site.test_road_on_slurm import SUBMIT, hold

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.timeout(3600)]
SEED, KILLS, CUTS = 39, 10, 5
PAYLOAD = 30_000_000
SPEED = 10_000_000  # bytes in a second, so that a part of the moments falls into the push


class Line(socketserver.ThreadingTCPServer):
    """What is between a laptop and a login node: each connection starts a command there."""

    daemon_threads = True

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.command, self.open, self._sizes = command, list[socket.socket](), list[int]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def bytes(self) -> int:
        """How many went over it, both ways."""
        return sum(self._sizes)

    def carry(self, source: socket.socket, sink: socket.socket) -> None:
        """Until one end is closed, or breaks."""
        with suppress(OSError):
            while data := source.recv(2**16):
                time.sleep(len(data) / SPEED)
                sink.sendall(data)
                self._sizes.append(len(data))
        close(source, sink)

    def cut(self) -> None:
        """Ends all connections."""
        close(*self.open)


def close(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    server: Line

    def handle(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            running = subprocess.Popen(self.server.command, stdin=theirs, stdout=theirs)
        self.server.open.append(self.request)
        back = threading.Thread(target=self.server.carry, args=(ours, self.request))
        back.start()
        self.server.carry(self.request, ours)
        back.join()
        ours.close()
        running.wait()


@contextmanager
def counted(site: Site, staged: Path, folder: Path) -> Iterator[tuple[Laptop, Line]]:
    """A laptop that reaches the site over a line of its own, by TCP."""
    with laptop_of(site, staged, folder, folder.name) as laptop:
        laptop.write()
        config = laptop.keys / "config"
        lines = config.read_text().splitlines()
        (proxy,) = (line for line in lines if "ProxyCommand" in line)
        line = Line(shlex.split(proxy)[1:])
        address = f"  HostName 127.0.0.1\n  Port {line.server_address[1]}\n  HostKeyAlias cluster\n"
        config.write_text("\n".join(line for line in lines if line != proxy) + f"\n{address}")
        try:
            yield laptop, line
        finally:
            for job in laptop.jobs("my"):
                site.run("scancel", str(job), check=False)
            line.cut()
            line.shutdown()
            line.server_close()
            shutil.rmtree(laptop.folder)


def kill_9(process: subprocess.Popen[str]) -> None:
    """The command, and the rsync that it began. The connection is in a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_killed_at_ten_moments_and_cut_at_five_there_is_one_job(
    site: Site, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One of the kills is between sbatch's acceptance of the job and its answer."""
    (tmp_path / "blob").mkdir()
    (tmp_path / "blob/bytes").write_bytes(random.Random(SEED).randbytes(PAYLOAD))
    model = tmp_path_factory.mktemp("model")
    staged = stage_tiny(tmp_path, model, f"{MANIFEST}  blob: {{path: ./blob}}\n")
    chance = random.Random(SEED)
    accepted = site.home / "accepted"
    slow = site.home / "slow"
    slow.mkdir()
    (slow / "sbatch").write_text(
        '#!/bin/sh\ncase $* in *--parsable*) said=$(/usr/bin/sbatch "$@"); : >~/accepted; sleep 5\n'
        'echo "$said"; exit ;; esac\nexec /usr/bin/sbatch "$@"\n'
    )
    slow.joinpath("sbatch").chmod(0o755)
    hold(site, True)
    try:
        with counted(site, staged, tmp_path / "undisturbed") as (laptop, line):
            began = time.monotonic()
            laptop.run(*SUBMIT)
            takes, most = time.monotonic() - began, 1.1 * line.bytes
            bundle_id = verify(laptop.work / "bundle").bundle_id
        for number in range(KILLS + CUTS):
            with counted(site, staged, tmp_path / f"broken-{number}") as (laptop, line):
                (laptop.folder / "blob").symlink_to(tmp_path / "blob")
                laptop.cluster(*[f"export PATH={slow}:$PATH"] * (number == 0))
                first = laptop.start(*SUBMIT)
                if number == 0:
                    site.wait(accepted.exists)
                else:
                    with suppress(subprocess.TimeoutExpired):
                        first.wait(chance.uniform(0, takes))
                kill_9(first) if number < KILLS else line.cut()
                said = first.communicate(timeout=300)[0]
                job = site.job_number(laptop.run(*SUBMIT))
                assert laptop.jobs("my") == [job], said
                found = verify(laptop.work / "bundle")
                assert found.ok and found.bundle_id == bundle_id
                assert line.bytes <= most, f"{number}: {line.bytes} of {most / 1.1:.0f}\n{said}"
    finally:
        hold(site, False)
