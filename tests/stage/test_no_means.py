"""An error of the machine is no damage: without memory, descriptors or processes, exit code 5."""

from __future__ import annotations

import errno
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stage.cli import base
from stage.cli.base import Group
from stage.environment.image import relocate
from stage.errors import shortage
from stage.files import read_file
from tests.stage.bundle.test_standalone import TEMPLATE, pythons
from tests.stage.bundles import make_bundle
from tests.support.environment.laptop import EnvironmentLaptop, alone

STAGE = str(Path(sys.executable).with_name("stage"))
RUNNER = str(Path(sys.executable).with_name("runner"))
# KiB of address space besides what Python itself needs to start and to compile a script: with less
# than that, it ends before it has run a line of ours. That differs between builds of one version.
SPARE_KIB = (2_000_000, 280_000, 100_000, 45_000, 18_000, 8_000, 3_000)


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
@pytest.mark.parametrize("limit", [*SPARE_KIB, "-n 32", "-n 8", "-n 5"])
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


def test_with_two_gigabytes_of_address_space_a_sound_bundle_is_sound(bundle: Path) -> None:
    for command in ([STAGE, "verify"], [STAGE, "show"], [pythons()[0], "-I", TEMPLATE]):
        done = limited("-v 2000000", *command, bundle)
        assert done.returncode == 0, done.stderr


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


@pytest.mark.skipif(
    os.geteuid() != 0, reason="a user of its own is needed, who has no other processes"
)
def test_a_user_without_processes_left_gets_a_verdict_by_one_process(
    bundle: Path, tmp_path: Path
) -> None:
    """The limit does not hold for root, so a user without any other process verifies."""
    # Other users cannot read pytest's folders.
    open_to_all = Path("/tmp") / f"no-processes-{os.getpid()}"
    shutil.copytree(bundle, open_to_all / "bundle")
    try:
        subprocess.run(["chmod", "-R", "a+rX", open_to_all], check=True)
        python = "/usr/bin/python3"
        verify = [python, "-I", open_to_all / "bundle/stage-verify.py", "--jobs", 4]
        drop = "exec setpriv --reuid=64999 --clear-groups bash -c"
        script = f"ulimit -u 1 && exec {shlex.join(map(str, verify))}"
        done = subprocess.run(
            ["bash", "-c", f"{drop} {shlex.quote(script)}"], capture_output=True, text=True
        )
        assert done.returncode == 0 and "sound" in done.stdout, done.stderr
    finally:
        shutil.rmtree(open_to_all)


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


def test_a_report_that_finds_no_room_is_not_damage(bundle: Path) -> None:
    for command in ([STAGE, "verify"], [pythons()[0], "-I", TEMPLATE]):
        done = limited(
            "-f 0",
            *command,
            bundle,
            "--fast",
            "--report",
            bundle.parent / "r.json",
            before="trap '' XFSZ;",
        )
        assert done.returncode == 5 and "Traceback" not in done.stderr, done.stderr


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


def test_what_python_raises_when_no_memory_is_left_is_called_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.11 at its limit: SystemError, or a SyntaxError of sound code."""
    monkeypatch.setattr(base, "_memory_is_left", lambda: False)
    group = Group("any")

    @group.command()
    def fail() -> None:
        raise SystemError("error return without exception set")

    done = CliRunner().invoke(group, ["fail"])
    assert done.exit_code == 5 and "not enough memory" in done.output, done.output
    assert "Traceback" not in done.output


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


def test_a_file_is_read_without_taking_the_memory_it_might_have_had(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 5000)
    (tmp_path / "large").write_bytes(b"x" * 5001)
    code = "from stage.files import read_file; "
    code += f"from pathlib import Path; read_file(Path({str(tmp_path / 'small')!r}))"
    assert limited("-v 100000", sys.executable, "-c", code).returncode == 0
    assert read_file(tmp_path / "small", 5000) == b"x" * 5000
    with pytest.raises(OSError, match="larger than"):
        read_file(tmp_path / "large", 5000)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user, who has no other processes")
@pytest.mark.parametrize(  # without a process, bash tries for 15 s
    ("shell", "lacking"), [("dash", "a process"), ("bash", "the right to read")]
)
def test_bootstrap_that_cannot_look_at_the_image_does_not_call_it_damaged(
    environment_laptop: EnvironmentLaptop, shell: str, lacking: str
) -> None:
    open_to_all = Path("/tmp") / f"no-means-{os.getpid()}"
    shutil.copytree(environment_laptop.asset, open_to_all / "asset")
    try:
        subprocess.run(["chmod", "-R", "a+rwX", open_to_all], check=True)
        if lacking == "the right to read":
            (open_to_all / "asset/image.tar.gz").chmod(0)
        limit = "ulimit -u 1 && " if lacking == "a process" else ""
        script = f"{limit}exec {shell} {open_to_all}/asset/bootstrap.sh {open_to_all}/env"
        drop = ["setpriv", "--reuid=64998", "--clear-groups", "--bounding-set=-all"]
        done = subprocess.run(
            [*drop, "bash", "-c", script], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 5 and "damaged" not in done.stderr, done.stdout + done.stderr
        assert not (open_to_all / "env").exists()
    finally:
        shutil.rmtree(open_to_all)


# Runs a script with a limit of what this Python has in use by then, and so many bytes more.
STARVED = """\
import resource, sys
path, spare = sys.argv[1], int(sys.argv[2])
sys.argv = [path, *sys.argv[3:]]
with open(path) as file:
    code = compile(file.read(), path, "exec")
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + spare
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
exec(code, {"__name__": "__main__"})
"""


def test_relocation_without_memory_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(relocate, "put_in_place", refuse)
    assert relocate.main([str(tmp_path), str(tmp_path / "env"), "0" * 64]) == 5
    assert "MemoryError" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the memory in use is read from /proc")
@pytest.mark.parametrize("spare_kb", [1000, 1500])
def test_a_relocation_whose_imports_find_no_memory_is_not_damage(
    tmp_path: Path, spare_kb: int
) -> None:
    arguments = [relocate.__file__, str(spare_kb * 1000), tmp_path, tmp_path / "env", "0" * 64]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", STARVED, *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5 and done.stderr.startswith("not made: "), done.stderr
