"""Runs many commands of `stage` and `runner`, each in a fork of one Python: it imports once.

stdin: JSON, a list of [folder, [command, argument, ...]].
stdout: JSON, a list of [exit code, output, errors].
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from typing import Any


def run(folder: str, command: list[str]) -> tuple[int, str, str]:
    """Runs one command in a fork."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            _become(folder, command, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for stream in (out, err):
            stream.seek(0)
        return code, out.read(), err.read()


def _become(folder: str, command: list[str], out: int, err: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(ours, theirs)
    code: Any = 70
    try:
        os.chdir(folder)
        sys.argv = command
        if command[0] == "stage":
            from stage.cli import main as stage

            stage(prog_name="stage")
        else:
            from runner.cli import main as runner

            runner(prog_name="runner")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - this is what the tests look for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    # Imported once, for all forks.

    json.dump([run(folder, command) for folder, command in json.load(sys.stdin)], sys.stdout)
