"""`stage push` over a real sshd: complete, interrupted, damaged, and with each remote verifier."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stage.bundle.bundle import verify
from stage.carry.push import (
    inspect_remote,
    run_rsync,
    verify_remote,
)
from stage.carry.ssh import PushTarget, RemoteShell
from stage.errors import IncompleteError, UsageError
from tests.remedies.obeyed import in_it, obeys
from tests.stage.bundles import BIG, make_bundle
from tests.stage.carry.conftest import TAGS, WEIGHTS, flip, push
from tests.support.servers.sshd import Sshd
from tests.support.waiting import wait_for

PUSH = "stage/carry/push.py"
pytestmark = pytest.mark.usefixtures("tools")


def test_a_pushed_bundle_is_verified_there_and_the_next_command_is_said(
    sshd: Sshd, bundle: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there is space" / "bundle"
    there.parent.mkdir()
    done = push(sshd, bundle, there)
    assert done.returncode == 0, done.stderr
    assert verify(there).ok
    assert "sound there, every byte (by stage)" in done.stdout
    assert f"bundle id {verify(bundle).bundle_id}" in done.stdout
    assert f"runner check RUN --bundle {shlex.quote(str(there))}" in done.stdout
    assert not (tmp_path / "laptop" / "bundle.report.json").exists()
    again = push(sshd, bundle, there, "--report", str(tmp_path / "r.json"))
    report = json.loads((tmp_path / "r.json").read_text())
    assert again.returncode == 0 and report["ok"] and report["level"] == "full"


def login_node(programs: Path, folder: Path) -> RemoteShell:
    """A shell with a Python on its PATH. Not by ssh: a user's ~/.bashrc would change the PATH."""
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python3").chmod(0o755)
    return RemoteShell(
        PushTarget("cluster", str(folder)), ("env", f"PATH={programs}", "sh", "-s"), ""
    )


def test_a_script_that_is_not_ours_is_never_started_there(
    bundle: Path, tmp_path: Path, tools: Path
) -> None:
    """Whoever made the bundle could have written any program into it."""
    (tools / "stage").unlink()
    place = login_node(tools, bundle)
    assert inspect_remote(place, bundle).verifiers == ("stage-verify.py",)
    script, ran = bundle / "stage-verify.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'w'); print('{{\"ok\": true, \"findings\": []}}')\n")
    facts = inspect_remote(place, bundle)
    assert facts.verifiers == ()
    with pytest.raises(IncompleteError, match="NOT VERIFIED"):
        verify_remote(place, facts.verifiers, tmp_path / "state")
    assert not ran.exists()


@pytest.mark.parametrize("killed", ["told to end", "with -9"])
def test_an_interrupted_push_keeps_what_came_and_the_rerun_goes_on(
    sshd: Sshd, big_bundle: Path, tmp_path: Path, killed: str
) -> None:
    """Killed with -9, its rsync goes on; the next push ends it, and does not fight it."""
    slow = tmp_path / "bin"
    slow.mkdir()
    pids = tmp_path / "pids"
    (slow / "rsync").write_text(
        f"#!/bin/sh\necho $$ >>{pids}\n"
        f'exec {shutil.which("rsync")} "$@" $(test "$1" = --version || echo --bwlimit=8m)\n'
    )
    (slow / "rsync").chmod(0o755)
    there = tmp_path / "there"
    command = [
        sys.executable,
        "-m",
        "stage",
        "push",
        str(big_bundle),
        f"{sshd.host}:{there}",
        "--ssh",
        sshd.ssh,
    ]
    environment = {**os.environ, "PATH": f"{slow}:{os.environ['PATH']}"}
    pushing = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (there / BIG).exists() and (there / BIG).stat().st_size > 4_000_000)
    rsync = int(pids.read_text().split()[-1])
    if killed == "with -9":
        pushing.kill()
        pushing.wait()
        os.kill(rsync, 0)  # it sends
    else:
        pushing.send_signal(signal.SIGTERM)  # to it alone, as `kill` and Slurm send it
        _, err = pushing.communicate(timeout=60)
        assert pushing.returncode == 143 and "Run the same command again" in err
        with pytest.raises(ProcessLookupError):
            os.kill(rsync, 0)
    assert 4_000_000 < (there / BIG).stat().st_size < 60_000_000
    assert not (there / TAGS).exists()
    again = push(sshd, big_bundle, there)
    assert again.returncode == 0, again.stderr
    assert ("rsync of a killed command is ended first" in again.stderr) == (killed == "with -9")
    assert verify(there).ok


def test_an_older_bundle_there_is_updated_and_what_it_had_more_is_named(
    sshd: Sshd, bundle: Path, big_bundle: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    assert push(sshd, big_bundle, there).returncode == 0
    smaller = bundle.rename(bundle.with_name("smaller"))
    done = push(sshd, smaller, there)
    assert done.returncode == 1, done.stderr
    assert f"{BIG}: extra" in done.stderr and "--delete" in done.stderr
    report = json.loads((tmp_path / "laptop" / "smaller.report.json").read_text())
    assert {finding["problem"] for finding in report["findings"]} == {"extra"}
    (there / "data/files/mine").mkdir(parents=True)
    (there / "data/files/mine/note|1.txt").write_text("mine")
    done = push(sshd, smaller, there, "--delete")
    assert done.returncode == 0, done.stderr
    (line,) = (text for text in done.stderr.splitlines() if "removed there, as not of" in text)
    removed = line.partition("of this bundle: ")[2].replace("`", "").split(", ")
    assert {BIG, "data/files/mine/", "data/files/mine/note|1.txt"} < set(removed) and (
        smaller / WEIGHTS
    ).exists()
    assert not [path for path in removed if (smaller / path).exists() or (there / path).exists()]
    assert verify(there).bundle_id == verify(smaller).bundle_id


@obeys(PUSH, "Check the bytes with coreutils; no output means that they are right: {}{}")
@pytest.mark.parametrize("has_sha256sum", [True, False], ids=["coreutils", "nothing"])
def test_a_copy_that_nothing_there_can_verify_is_called_not_verified_with_the_command_to_run(
    sshd: Sshd, bundle: Path, tmp_path: Path, tools: Path, has_sha256sum: bool
) -> None:
    (tools / "stage").unlink()
    if not has_sha256sum:
        (tools / "sha256sum").unlink()
    there = tmp_path / "there is space"
    done = push(sshd, bundle, there)
    assert done.returncode == 5 and "NOT VERIFIED" in done.stderr, done.stderr
    assert "sound" not in done.stdout + done.stderr.partition("all files are sent")[2]
    early = done.stderr.index("will not be verified")
    assert early < done.stderr.index("all files are sent")
    assert verify(there).ok
    if not has_sha256sum:
        return
    (line,) = [line for line in done.stderr.splitlines() if "sha256sum -c" in line]
    command = line.partition("they are right: ")[2]
    checked = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout) == (0, ""), checked
    flip(there / WEIGHTS, 1000)
    checked = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 1 and f"{WEIGHTS}: FAILED" in checked.stdout
    place = login_node(tools, there)
    found = inspect_remote(place, bundle).verifiers
    verifier, report = verify_remote(place, found, tmp_path / "state")
    assert (verifier, report["ok"]) == ("stage-verify.py", False)


@obeys(
    "stage/carry/faults.py",
    "Try it: {by_hand}true (port or key: in ~/.ssh/config; for a push also --ssh",
)
def test_no_connection_is_exit_5_with_the_command_to_try(
    sshd: Sshd, bundle: Path, tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "stage", "push", bundle, f"127.0.0.1:{tmp_path}/b", "--ssh")
    done = subprocess.run(
        [*command, "ssh -F none -p 1"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 5 and "no connection" in done.stderr
    line = in_it(done.stderr, r"(?<=Try it: )ssh .*? true")
    tried = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert tried.returncode == 255 and "port 1: Connection refused" in tried.stderr
    ssh = shlex.split(in_it(done.stderr, r"--ssh '[^']*'"))[1].replace("2222", str(sshd.port))
    more = sshd.ssh.partition(" -i ")[2].split(" ", 1)  # the key, and how it is known here
    ssh = f"{ssh.replace('KEY', more[0])} -F none {more[1]}"
    done = subprocess.run([*command, ssh], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "host", "folder"),
    [
        ("cluster:bundle", "cluster", "bundle"),
        ("me@cluster:/scratch/me/b/", "me@cluster", "/scratch/me/b"),
        ("cluster:~/b", "cluster", "b"),
        ("[::1]:b", "[::1]", "b"),
        ("./a:b", None, "./a:b"),
        ("/mnt/disk", None, "/mnt/disk"),
    ],
)
def test_where_a_target_is(text: str, host: str | None, folder: str) -> None:
    assert PushTarget.parse(text) == PushTarget(host, folder)


@pytest.mark.parametrize(
    "text",
    [
        "host::module",
        "rsync://host/m",
        "-oProxyCommand=x:b",
        "host:",
        "host:~you/b",
        "a\nb:c",
        "me@cluster",
    ],
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(UsageError):
        PushTarget.parse(text)


def test_somebody_elses_folder_is_not_written_into(
    sshd: Sshd, bundle: Path, tmp_path: Path
) -> None:
    there = tmp_path / "home"
    there.mkdir()
    (there / "thesis.tex").write_text("years")
    done = push(sshd, bundle, there, "--delete")
    assert done.returncode == 2 and "not a bundle" in done.stderr
    assert [p.name for p in there.iterdir()] == ["thesis.tex"]
    done = push(sshd, bundle, there / "thesis.tex")
    assert done.returncode == 2 and "is a file" in done.stderr


def test_a_damaged_file_there_is_repaired_by_a_rerun(
    sshd: Sshd, bundle: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    assert push(sshd, bundle, there).returncode == 0
    flip(there / WEIGHTS, 30_000)
    flip(there / "stage.lock")
    flip(there / TAGS)
    done = push(sshd, bundle, there)
    assert done.returncode == 0, done.stderr
    assert "sending again with checksums" in done.stderr and "repaired" in done.stdout
    assert verify(there).ok


def test_another_bundle_of_the_same_sizes_and_the_same_second_takes_its_place(
    sshd: Sshd, tmp_path: Path
) -> None:
    first, second = (
        make_bundle(tmp_path / name, big=False, files={"data/files/notes/a": text}).root
        for name, text in (("first", b"one"), ("second", b"two"))
    )
    for path in (*first.rglob("*"), *second.rglob("*")):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    there = tmp_path / "there"
    assert push(sshd, first, there).returncode == 0
    done = push(sshd, second, there)
    assert done.returncode == 0, done.stderr
    assert verify(there).bundle_id == verify(second).bundle_id != verify(first).bundle_id


@pytest.mark.parametrize("code", [12, 23, 124, -9])
def test_each_end_of_rsync_has_words_and_a_next_step(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    rsync = tmp_path / "bin/rsync"
    rsync.parent.mkdir()
    rsync.write_text(f"#!/bin/sh\n{f'exit {code}' if code >= 0 else f'kill {code} $$'}\n")
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", f"{rsync.parent}:{os.environ['PATH']}")
    remote = RemoteShell(PushTarget("me@hpc", "b"), ("sh", "-s"), "ssh -p 22")
    with pytest.raises(IncompleteError, match=rf"rsync ended with {code} \(") as ended:
        run_rsync(remote, bundle, quiet=True)
    assert ended.value.remedy and "{" not in ended.value.remedy
