"""The walk of the real `go.sh`, begun, joined and followed, by this machine's sh."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from runner.errors import IncompleteError, __version__
from runner.inputs.far import PushTarget, RemoteShell, connected
from runner.remote.plan import Road
from runner.remote.there import End, There, plan_digest, understood, walk
from tests.remedies.obeyed import in_it, obeys
from tests.runner.remote.conftest import RUN
from tests.runner.remote.test_there import look
from tests.support.environment.laptop import EnvironmentLaptop


@pytest.fixture
def road(tmp_path: Path) -> Road:
    for name in ("runs", "manifests", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "runs/my.yaml").write_text(RUN)
    (tmp_path / "manifests/small.yaml").write_text(
        "format: 1\nname: small\nassets:\n  bert: {model: acme/bert}\n"
    )
    (tmp_path / "runs/clusters.yaml").write_text(f"far:\n  folder: {tmp_path}/there\n")
    return Road.of(tmp_path / "runs/my.yaml", "far", tmp_path / "bundle")


def test_a_walk_is_shown_and_a_second_one_joins_it(road: Road, tmp_path: Path) -> None:
    """There is no bundle, so its first step ends with 5."""
    there, plan = tmp_path / "there", road.plan("0" * 64)
    seen: list[list[str]] = [[], []]
    found: list[tuple[str | None, End | None]] = []

    def one(number: int) -> None:
        with connected(PushTarget(None, str(there))) as remote:
            found.append(walk(remote, road, plan, seen[number].append))

    first = threading.Thread(target=one, args=(0,))
    first.start()
    deadline = time.monotonic() + 20
    while not (there / ".airlift/lock/step").exists():
        assert time.monotonic() < deadline and first.is_alive()
        time.sleep(0.02)
    one(1)
    first.join(30)
    begun = {walked for walked, _ in found}
    assert None in begun and len(begun) == 2, found  # the second one joined
    (name,) = begun - {None}
    assert {end for _, end in found} == {End(str(name), 5, 0, plan_digest(plan))}
    assert f"== {name} verify" in "".join(seen[0])
    assert (there / "runs/my.yaml").read_text() == RUN
    again = ["".join(text) for text in seen]
    one(0)  # it is not taken for the end of the first
    assert found[-1][0] not in begun and again[0] in "".join(seen[0])


@obeys("runner/remote/there.py", "Look at what is there: {}ls -la {}")
def test_what_is_no_answer_of_ours_ends_with_words(road: Road, tmp_path: Path) -> None:
    (tmp_path / "there/.airlift").mkdir()
    shell = ("sh", "-c", "sh -s | sed '/^noqueue=/d; s/^kib=.*/kib=x/; s/^[0-9]*$/x/'")
    remote = RemoteShell(PushTarget(None, str(tmp_path / "there")), shell, "")
    with pytest.raises(IncompleteError, match="is not understood"):
        There.look(remote, road)
    with pytest.raises(IncompleteError, match="is not understood") as error, understood(remote):
        walk(remote, road, road.plan("0" * 64), print)
    subprocess.run(["sh", "-c", in_it(error.value.remedy, "ls -la .*")], check=True)


@pytest.mark.slow
def test_the_environment_of_the_bundle_is_made_once_and_known_again(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
    """Up to `check`, which needs more than this small environment has."""
    for name in ("runs", "there"):
        (tmp_path / name).mkdir()
    there = tmp_path / "there"
    shutil.copytree(environment_laptop.bundle, there / "bundle")
    (tmp_path / "runs/my.yaml").write_text(RUN)
    (tmp_path / "runs/clusters.yaml").write_text(f"far:\n  folder: {there}\n")
    manifest = next(environment_laptop.folder.glob("*.yaml"))
    road = Road.of(tmp_path / "runs/my.yaml", "far", environment_laptop.bundle, manifest)
    assert road.environment == "small-env" and road.here.is_locked
    assert road.here.id is not None
    plan = road.plan(road.here.id)
    with connected(PushTarget(None, str(there))) as remote:
        ends = [walk(remote, road, plan, print)[1] for _ in range(2)]
    found = look(there, road.env_folder, "my.yaml")
    assert found["airlift"] == __version__ and found["bundle"] == road.here.id
    assert all(end is not None and end.code for end in ends)
    steps = [line.split()[1:3] for line in (there / ".airlift/steps").read_text().splitlines()]
    assert [state for step, state in steps if step == "environment" and state != "begin"] == [
        "done",
        "skipped",
    ]
