"""The walk of the real `go.sh`, begun, joined and followed, by this machine's sh."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from runner.from_stage import IncompleteError, UsageError
from runner.inputs.staged import Here
from runner.remote import submit_to, there
from runner.remote.road import Road
from runner.remote.there import End, There, plan_digest, walk
from stage.carry.ssh import PushTarget, connected
from tests.first_job.harness import programs
from tests.runner.remote.conftest import RUN


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


def test_a_go_sh_that_is_killed_twice_ends_the_walk(
    road: Road, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(None, None)] * 2)
    monkeypatch.setattr(submit_to, "walk", lambda *_: next(answers))
    with (
        connected(PushTarget(None, str(tmp_path / "there"))) as remote,
        pytest.raises(IncompleteError, match="ended there twice without a result"),
    ):
        submit_to._walk(remote, road, {})


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_walk_goes_on_there_only_once_it_has_begun(
    road: Road, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(PushTarget(None, str(tmp_path / "there"))) as remote:
        monkeypatch.setattr(submit_to, "_show_log", interrupt)
        with pytest.raises(IncompleteError, match=r"go.sh goes on there, and submits"):
            submit_to._walk(remote, road, road.plan("0" * 64))
        monkeypatch.setattr(there, "begin", interrupt)
        with pytest.raises(IncompleteError, match=r"before go.sh was seen to begin there"):
            submit_to._walk(remote, road, road.plan("0" * 64))


def test_a_walk_is_shown_and_a_second_one_joins_it(road: Road, tmp_path: Path) -> None:
    """There is no bundle, so its first step ends with 5."""
    folder, plan = tmp_path / "there", road.plan("0" * 64)
    seen: list[list[str]] = [[], []]
    found: list[tuple[str | None, End | None]] = []

    def one(number: int) -> None:
        with connected(PushTarget(None, str(folder))) as remote:
            found.append(walk(remote, road, plan, seen[number].append))

    first = threading.Thread(target=one, args=(0,))
    first.start()
    deadline = time.monotonic() + 20
    while not (folder / ".airlift/lock/step").exists():
        assert time.monotonic() < deadline and first.is_alive()
        time.sleep(0.02)
    one(1)
    first.join(30)
    begun = {walked for walked, _ in found}
    assert None in begun and len(begun) == 2, found  # the second one joined
    (name,) = begun - {None}
    assert {end for _, end in found} == {End(str(name), 5, 0, plan_digest(plan))}
    assert f"== {name} verify" in "".join(seen[0])
    assert (folder / plan["RUNS"] / "my.yaml").read_text() == RUN
    again = ["".join(text) for text in seen]
    one(0)  # it is not taken for the end of the first
    assert found[-1][0] not in begun and again[0] in "".join(seen[0])


def test_the_job_that_another_laptops_walk_made_is_seen_before_a_walk_begins_again(
    road: Road, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joined that walk, which was for another text under the same name."""
    script = tmp_path / "there/output/my/submit.sbatch"
    queue = f"echo 'job=17|PENDING|{script}'"
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch="exit 0", squeue=queue))
    monkeypatch.setattr(Here, "is_locked", True)
    script.parent.mkdir(parents=True)
    script.write_text(f"exec runner train {tmp_path}/there/runs-0123456789abcdef/my.yaml\n")
    answers = iter([(None, End("w0", 0, 17, ""))])
    monkeypatch.setattr(submit_to, "walk", lambda *_: next(answers))
    with (
        connected(PushTarget(None, str(tmp_path / "there"))) as remote,
        pytest.raises(UsageError, match=r"job 17 \(pending\) writes output/my there"),
    ):
        submit_to._walk(remote, road, road.plan("0" * 64))


def test_a_job_is_of_this_plan_only_if_its_script_says_so(
    road: Road, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would not be submitted, or another's job would be taken for its own."""
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch="exit 0", squeue="exit 0"))
    folder = tmp_path / "there"
    script = folder / "output/my/submit.sbatch"
    script.parent.mkdir(parents=True)

    def found() -> tuple[str, str]:
        with connected(PushTarget(None, str(folder))) as remote:
            there = There.look(remote, road)
            return there.made, there.intact

    (tmp_path / "manifests/small.lock").write_text("{}")
    script.write_text(f"exec runner train {folder}/runs-0123456789abcdef/my.yaml\n")
    assert found() == ("", "")
    script.write_text(f"exec runner train {folder}/{road.runs}/my.yaml\n")
    assert found() == ("yes", "")  # a clean-up took its run file
    (folder / road.runs).mkdir()
    (folder / road.runs / "my.yaml").write_text(RUN)
    assert found() == ("yes", "yes")
    (folder / road.runs / "my.yaml").write_text(RUN + " ")
    assert found() == ("yes", "")


def test_what_a_shell_there_obeys_is_written_by_its_owner_alone(road: Road, tmp_path: Path) -> None:
    """A login node for project groups: umask 002."""
    mask = os.umask(0o002)
    try:
        with connected(PushTarget(None, str(tmp_path / "new"))) as remote:
            with there.sending(remote):
                pass
            assert there.begin(remote, road, road.plan("0" * 64))
    finally:
        os.umask(mask)
    found = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    ours = [path for path in found if path.name in ("new", "go.sh", "plan", "my.yaml", ".airlift")]
    assert len(ours) == 5 and not [path for path in ours if path.stat().st_mode & 0o022]
