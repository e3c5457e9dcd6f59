"""Killed or interrupted at any moment, `stage fetch` resumes when it is started again."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.servers.hubs import TestHub
from tests.support.staging import LANDING, MANIFEST, Laptop, payload

WEIGHTS = 12_000_000
SLOW_MBPS = 15.0


@pytest.fixture
def slow_laptop(laptop: Laptop) -> Laptop:
    """A laptop whose fetch takes about a second of downloading."""
    laptop.publish(WEIGHTS)
    laptop.hub.faults.add(side="cdn", path=r"model\.safetensors$", rate_mbps=SLOW_MBPS)
    return laptop


def start(laptop: Laptop, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        laptop.command("fetch", "tiny.yaml", "-o", "bundle", "--no-offline-check"),
        cwd=laptop.folder,
        env=laptop.environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition: Callable[[], bool], running: subprocess.Popen[str]) -> bool:
    """Waits for a condition; False if the process ended before it held."""
    while not condition():
        if running.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def bytes_here(bundle: Path) -> int:
    try:
        return sum(payload(bundle).values())
    except FileNotFoundError:  # renamed at this moment
        return 0


def what_is_here(bundle: Path) -> tuple[set[str], dict[str, int]]:
    """Complete payload files, and the size of each unfinished one by its final name."""
    sizes = payload(bundle)
    unfinished = {
        path.rsplit(".", 2)[0]: size for path, size in sizes.items() if path.endswith(".partial")
    }
    return {path for path in sizes if not path.endswith(".partial")}, unfinished


def check_nothing_fetched_twice(
    hub: TestHub, complete: set[str], unfinished: dict[str, int]
) -> None:
    """The Hub's log since the last kill: no received byte was sent again."""
    for request in hub.requests():
        landing = LANDING.get(request.file or "")
        if landing is None or request.status not in (200, 206):
            continue
        assert landing not in complete, f"{landing} was here and was asked for again"
        if size := unfinished.get(landing, 0):
            assert request.range == f"bytes={size}-", f"{size} bytes of {landing} were here"


def test_killed_at_ten_random_moments_it_resumes_and_fetches_nothing_twice(
    slow_laptop: Laptop, tmp_path: Path
) -> None:
    laptop, dice = slow_laptop, random.Random(20)
    total = WEIGHTS + 500_000
    # Up to nine tenths: the rest must take longer than noticing that the ninth was reached.
    moments = [0, *sorted(dice.randrange(total * 9 // 10) for _ in range(8)), total]
    kills = 0
    for moment in moments:
        complete, unfinished = what_is_here(laptop.bundle)
        laptop.hub.forget_requests()
        running = start(laptop)
        there = bytes_here(laptop.bundle)
        goal = max(moment, there + 1) if moment < total else total
        if moment == 0:
            reached = wait_until(lambda: len(laptop.hub.requests()) > 0, running)
        else:
            reached = wait_until(lambda: bytes_here(laptop.bundle) >= goal, running)  # noqa: B023
        if reached:
            running.kill()
            kills += 1
        running.communicate()
        check_nothing_fetched_twice(laptop.hub, complete, unfinished)
    assert kills >= 9  # the last may be too late

    complete, unfinished = what_is_here(laptop.bundle)
    assert complete
    laptop.hub.forget_requests()
    resumed = laptop.fetched()
    check_nothing_fetched_twice(laptop.hub, complete, unfinished)
    assert not [path for path in payload(laptop.bundle) if path.endswith(".partial")]

    laptop.hub.faults.clear()
    (laptop.folder / "tiny.lock").unlink()
    assert laptop.fetched("elsewhere") == resumed


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 5), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_its_end_does_not_wait_for_a_server_that_says_nothing(
    tmp_path: Path, number: int, code: int
) -> None:
    with ExitStack() as stack:
        laptop = Laptop(tmp_path, TestHub(tmp_path / "hub", stack))  # close() ends a stall
        laptop.publish()
        laptop.write(MANIFEST)
        laptop.hub.faults.add(
            side="cdn", path=r"model\.safetensors$", times=1, stall_after=2_000_000, stall_s=300
        )
        running = start(laptop, HF_HUB_DOWNLOAD_TIMEOUT="300")
        assert wait_until(lambda: bytes_here(laptop.bundle) >= 1_000_000, running)
        running.send_signal(number)
        _, errors = running.communicate(timeout=120)
    assert (
        running.returncode == code
        and "Run the same command again" in errors
        and "Traceback" not in errors
    )


def test_two_fetches_into_one_folder_do_not_mix(slow_laptop: Laptop) -> None:
    laptop = slow_laptop
    first = start(laptop)
    assert wait_until(lambda: bytes_here(laptop.bundle) >= 1_000_000, first)
    second = laptop.fetch()
    assert second.returncode == 5 and "another `stage fetch`" in second.stderr
    first.communicate()
    assert first.returncode == 0
    assert laptop.stage("verify", "bundle").returncode == 0


def test_a_disk_that_fills_up_on_the_way_is_named_and_costs_nothing(laptop: Laptop) -> None:
    laptop.hub.faults.add(
        side="cdn", path=r"model\.safetensors$", times=1, stall_after=2_500_000, stall_s=2
    )
    (laptop.folder / "disk").mkdir()
    script = """
        mount -t tmpfs -o size=24m none disk || exit 99
        "$@" & fetch=$!
        until ls disk/bundle/data/models/tiny-bert/model*.partial >/dev/null 2>&1
        do kill -0 $fetch || exit 98; done
        cat /dev/zero >disk/filler 2>/dev/null
        wait $fetch; echo "first: $?"
        rm disk/filler
        "$@" >/dev/null 2>&1; echo "second: $?"
        "$1" -m stage verify -q disk/bundle; echo "verify: $?"
    """
    done = subprocess.run(
        [
            "unshare",
            "-rm",
            "sh",
            "-c",
            script,
            "sh",
            *laptop.command("fetch", "tiny.yaml", "-o", "disk/bundle", "--no-offline-check"),
        ],
        cwd=laptop.folder,
        env=laptop.environment(HF_HUB_DOWNLOAD_TIMEOUT="5"),
        capture_output=True,
        text=True,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no mount of one's own here: {done.stderr}")
    assert done.stdout.splitlines() == ["first: 5", "second: 0", "verify: 0"], (
        done.stdout + done.stderr
    )
    assert "No space left on device" in done.stderr and "disk/bundle/data/" in done.stderr
    # The shared store is on another disk: to empty it would free nothing on this one.
    assert "The disk is full. Free space there; then run the same" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_another_revision_left_half_done_is_not_taken_for_this_one(
    slow_laptop: Laptop,
) -> None:
    laptop = slow_laptop
    running = start(laptop)
    assert wait_until(lambda: bytes_here(laptop.bundle) >= 2_000_000, running)
    running.kill()
    running.communicate()
    laptop.hub.faults.clear()
    laptop.publish(WEIGHTS + 5)
    laptop.write(MANIFEST.replace("name: tiny", "name: newer"))
    newer = laptop.fetched("bundle", "--update")
    assert not [path for path in payload(laptop.bundle) if path.endswith(".partial")]
    (laptop.folder / "tiny.lock").unlink()
    assert laptop.fetched("elsewhere") == newer


def test_a_finished_bundle_fetched_again_asks_for_no_file(laptop: Laptop) -> None:
    first = laptop.fetched()
    laptop.hub.forget_requests()
    assert laptop.fetched() == first
    assert laptop.hub.requests() == []


def test_a_bundle_cut_off_in_the_middle_is_called_unfinished(slow_laptop: Laptop) -> None:
    laptop = slow_laptop
    running = start(laptop)
    assert wait_until(lambda: bytes_here(laptop.bundle) >= 2_000_000, running)
    running.kill()
    running.communicate()
    for command in ("verify", "show"):
        done = laptop.stage(command, "bundle")
        assert done.returncode in (1, 2), done.stderr
        assert "unfinished" in done.stderr + done.stdout and "Traceback" not in done.stderr


def test_a_file_damaged_on_disk_is_fetched_again(laptop: Laptop) -> None:
    first = laptop.fetched()
    weights = laptop.bundle / "data/models/tiny-bert/model.safetensors"
    with open(weights, "r+b") as file:
        file.seek(1_000_000)
        file.write(b"damage")
    laptop.hub.forget_requests()
    assert laptop.fetched() == first
    assert {request.file for request in laptop.hub.requests()} == {
        "models/acme/tiny-bert/model.safetensors"
    }
