"""An error of the machine is no damage: without memory, descriptors or processes, exit code 5."""

from __future__ import annotations

import errno
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stage.cli.base import Group
from stage.errors import shortage
from tests.stage.bundle.test_standalone import TEMPLATE, pythons
from tests.stage.bundles import make_bundle
from tests.support.environment.laptop import alone

STAGE = str(Path(sys.executable).with_name("stage"))
RUNNER = str(Path(sys.executable).with_name("runner"))
# KiB of address space besides what Python itself needs to start and to compile a script: with less
# than that, it ends before it has run a line of ours. That differs between builds of one version.
SPARE_KIB = (2_000_000, 280_000, 45_000, 8_000, 3_000)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound bundle with a large file.

    Each command of these tests ran once without a limit: then there is bytecode. With too little
    memory Python's compiler raises anything (ValueError: field 'target' is required for AnnAssign).
    """
    folder = tmp_path_factory.mktemp("sound")
    root = make_bundle(folder / "bundle").root
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}  # no receipt
    for command in (
        [STAGE, "verify", "--deep", root],
        [STAGE, "show", root],
        [STAGE, "env", "probe"],
        [RUNNER, "status", folder],
    ):
        subprocess.run([*map(str, command)], env=environment, capture_output=True)
    return root


@functools.cache
def start_kib() -> int:
    """The most that a Python of these tests needs before our code runs, in KiB."""
    peak = (
        "import sys; compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec');"
        "print(*(line.split()[1] for line in open('/proc/self/status') if 'VmPeak' in line))"
    )
    starts = [
        subprocess.run([python, "-c", peak, TEMPLATE], capture_output=True, text=True, check=True)
        for python in {sys.executable, pythons()[0]}
    ]
    return max(int(start.stdout) for start in starts)


def spare(kib: int) -> str:
    """The limit at which this much is left when Python has started."""
    return f"-v {start_kib() + kib}"


def limited(limit: str, *command: object, before: str = "") -> subprocess.CompletedProcess[str]:
    script = f"{before} ulimit {limit} && exec {shlex.join(map(str, command))}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    # Python's hashlib logs each algorithm whose library finds no memory, and goes on.
    done.stderr = re.sub(
        r"(?ms)^ERROR:root:code for hash .*?^ValueError: [^\n]*\n", "", done.stderr
    )
    return done


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere libraries alone take more address space than that"
)
@pytest.mark.parametrize("limit", [*SPARE_KIB, "-n 32", "-n 8"])
def test_a_sound_bundle_is_sound_or_not_looked_at_whatever_the_limit(
    bundle: Path, limit: str | int
) -> None:
    if isinstance(limit, int):
        limit = spare(limit)
    for command in (
        [STAGE, "verify"],
        [pythons()[0], "-I", TEMPLATE],
        [sys.executable, "-I", TEMPLATE],
    ):
        done = limited(limit, *command, "--jobs", 2, bundle)
        assert done.returncode in (0, 5), done.stdout + done.stderr
        assert "Traceback" not in done.stderr and (done.returncode == 0) == (
            "sound: " in done.stdout
        )
        if done.returncode:
            assert done.stderr.startswith("error: "), done.stderr


FAULTS = [
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    RuntimeError("can't start new thread"),
    OverflowError("Python int too large to convert to C long"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    OSError(errno.ENFILE, "Too many open files in system"),
    ImportError("libx.so: failed to map segment from shared object"),
    KeyError("a fault of ours"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_whatever_a_command_meets_it_does_not_end_with_1(fault: Exception) -> None:
    group = Group("any")

    @group.command()
    def fail() -> None:
        raise fault

    done = CliRunner().invoke(group, ["fail"])
    assert done.exit_code == 5 and "error: " in done.output and "\n  -> " in done.output, (
        done.output
    )
    assert shortage(fault) is None or "Traceback" not in done.output


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is measured in /proc")
@pytest.mark.parametrize("kib", SPARE_KIB[2:])
def test_no_command_ends_with_1_for_lack_of_memory(bundle: Path, tmp_path: Path, kib: int) -> None:
    for command in ([STAGE, "show", bundle], [STAGE, "env", "probe"], [RUNNER, "status", tmp_path]):
        done = limited(spare(kib), *command)
        assert done.returncode in (0, 2, 5) and "Traceback" not in done.stderr, done.stderr


def test_what_cannot_be_loaded_for_lack_of_memory_is_not_called_unloadable(bundle: Path) -> None:
    for limit in ("-v 120000", "-v 60000"):
        done = limited(limit, STAGE, "verify", "--deep", bundle)
        assert done.returncode == 5 and "memory" in done.stderr, done.stdout + done.stderr


def test_a_full_disk_for_journal_and_receipt_costs_no_verdict(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    fill = (
        'mount -t tmpfs -o size=64k none "$0"'
        ' && { head -c 1M /dev/zero >"$0"/full; XDG_STATE_HOME="$0" "$@"; }'
    )
    command = [*alone("m"), "sh", "-c", fill, str(tmp_path / "state"), STAGE, "verify", str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "sound" in done.stdout and "No space left" in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT])
def test_an_error_that_says_nothing_of_a_file_is_no_finding(
    bundle: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both verifiers meet it while a process opens a file."""
    hook = (
        "import os\nreal = os.open\n"
        "def refuse(path, *a, **k):\n"
        f"    if os.fsencode(path).endswith(b'vocab.txt'):\n"
        f"        raise OSError({number}, os.strerror({number}), path)\n"
        "    return real(path, *a, **k)\n"
        "os.open = refuse\nimport sys\n"
    )
    ours = hook + "from stage.cli import main\nmain()"
    theirs = hook + (
        f"sys.argv[0] = {str(TEMPLATE)!r}\n"
        "import runpy\nrunpy.run_path(sys.argv[0], None, '__main__')"
    )
    for code, arguments in ((ours, ["verify", bundle]), (theirs, [bundle])):
        for jobs in ("1", "2"):
            command = [sys.executable, "-c", code, *map(str, arguments), "--jobs", jobs]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 5 and "unreadable" not in done.stdout, (
                done.stdout + done.stderr
            )
