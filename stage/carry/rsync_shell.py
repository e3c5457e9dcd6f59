"""The remote shell of rsync (`-e`) for a host whose login shell prints a greeting.

    rsync -e "python rsync_shell.py MARK ssh OPTIONS" ...

rsync takes each byte that comes back for its own (rsync(1), "is your shell clean?"). So the host
prints MARK just before its rsync begins, and what comes before it is dropped.
"""

import os
import subprocess
import sys


def main(mark: str, *command: str) -> int:
    """Runs ssh with rsync's server behind a mark; returns ssh's exit code."""
    at = next(
        at for at, word in enumerate(command) if command[at : at + 2] == ("rsync", "--server")
    )
    there = f"echo {mark}; exec {' '.join(command[at:])}"
    os.set_blocking(1, True)  # rsync hands over a pipe that is not
    with subprocess.Popen([*command[:at], there], stdout=subprocess.PIPE) as ssh:
        assert ssh.stdout is not None
        before, is_open = b"", False
        while part := os.read(ssh.stdout.fileno(), 2**18):
            if not is_open:
                before += part
                _, is_mark, part = before.partition(f"{mark}\n".encode())
                is_open = bool(is_mark)
            while part:
                part = part[os.write(1, part) :]
    return ssh.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
