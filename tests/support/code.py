"""`python -c CODE ARGUMENTS...` as a module, so that `tests.support.warm` can start it warm.

For code that imports torch and does not depend on how it was imported.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.warm import warm_python


def run_warm(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs code as a process that has torch already; `options` are those of subprocess.run."""
    command = [warm_python(), "-m", "tests.support.code", code, *arguments]
    settings = {"capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run(command, **settings)  # type: ignore[call-overload]


if __name__ == "__main__":
    code = sys.argv.pop(1)
    sys.argv[0] = "-c"
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
