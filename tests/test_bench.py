"""The arithmetic, tables and options of scripts/bench; no test measures anything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.lib.bench.__main__ import PARTS, main
from scripts.lib.bench.arithmetic import (
    Target,
    cost_table,
    median_of,
    median_ratio,
    table,
    target_table,
)
from scripts.lib.bench.measure import BenchError, Sample, run
from scripts.lib.bench.options import AREAS
from scripts.lib.bench.report import Result, page, read_results, write_results
from scripts.lib.bench.workload import Candidate, Step, Workload, measure, plain_environment

MIB = 2**20


def rounds(**seconds: list[float]) -> list[dict[str, Sample]]:
    """Rounds of candidates with these seconds, half as many CPU seconds, and a MiB per second."""
    count = len(next(iter(seconds.values())))
    return [
        {
            name: Sample(took[number], took[number] / 2, int(took[number]) * MIB)
            for name, took in seconds.items()
        }
        for number in range(count)
    ]


def test_a_slow_moment_of_the_machine_does_not_change_a_ratio() -> None:
    calm = rounds(ours=[1, 1, 1], theirs=[3, 3, 3])
    stormy = rounds(ours=[1, 10, 1], theirs=[3, 30, 3])
    assert median_ratio(calm, "theirs", "ours") == median_ratio(stormy, "theirs", "ours") == 3


def test_the_ratio_of_medians_is_not_the_median_of_ratios() -> None:
    uneven = rounds(ours=[1, 2, 4], theirs=[4, 2, 2])
    assert median_of(uneven, "theirs", lambda sample: sample.seconds) == 2
    assert median_ratio(uneven, "theirs", "ours") == 1  # of 4, 1 and 0.5


def test_of_an_even_number_of_rounds_the_middle_two_are_averaged() -> None:
    assert median_ratio(rounds(ours=[1, 1], theirs=[2, 4]), "theirs", "ours") == 3


def test_what_follows_adds_up_but_its_memory() -> None:
    assert Sample(1.0, 0.5, 7) + Sample(2.0, 0.25, 5) == Sample(3.0, 0.75, 7)


@pytest.mark.parametrize(
    ("reached", "at_most", "met"),
    [(2.0, False, True), (1.996, False, False), (200.0, True, True), (200.4, True, False)],
)
def test_a_target_missed_by_a_hair_is_missed(reached: float, at_most: bool, met: bool) -> None:
    wanted = 200 if at_most else 2
    target = Target("text", reached, wanted, at_most)
    assert target.is_met is met
    assert ("**missed**" in target_table([target])) is not met


def test_a_table_is_one_that_markdown_reads() -> None:
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_costs_are_medians_beside_the_ratio_to_the_base() -> None:
    text = cost_table(rounds(ours=[1, 2, 3], theirs=[4, 4, 9]), "ours", 10_000_000)
    lines = text.splitlines()
    assert lines[2] == "| **ours** | 2.00 | 1.00 to 3.00 | 5 | 1.00 | 2 | 1.00 |"
    assert lines[3] == "| theirs | 4.00 | 4.00 to 9.00 | 2 | 2.00 | 4 | 3.00 |"


def result(name: str) -> Result:
    return Result(
        name=name,
        title=f"Title of {name}",
        note="A note.",
        size=1000,
        base="ours",
        rounds=rounds(ours=[1, 2], theirs=[3, 4]),
        targets=[Target("times as fast", 2.5, 2)],
        machine={"date": "2026-01-01", "processor": "2 cores"},
        versions={"theirs": "1.0"},
        commands={"ours": "ours --all", "theirs": "theirs"},
        load=(0.5, 2.0),
        skipped=["curl: not installed here"],
    )


def test_results_survive_their_file_and_what_was_not_measured_again_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    assert read_results(path) == {}
    write_results(path, {"verify-four": result("verify-four")})
    write_results(path, {**read_results(path), "fetch-many": result("fetch-many")})
    found = read_results(path)
    assert {name: asdict(one) for name, one in found.items()} == {
        name: json.loads(json.dumps(asdict(result(name))), object_hook=_with_tuples)
        for name in found
    }
    text = page(found)
    assert text.index("Title of fetch-many") < text.index("Title of verify-four")
    assert "Left out: curl: not installed here." in text


def _with_tuples(document: dict[str, object]) -> dict[str, object]:
    load = document.get("load")
    return {**document, "load": tuple(load)} if isinstance(load, list) else document


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="memory is measured on Linux only"
)
def test_memory_and_cpu_of_a_child_count_too(tmp_path: Path) -> None:
    child = "import time; held = bytearray(64 * 2**20); time.sleep(0.5); "
    child += "[hash(str(i)) for i in range(300_000)]"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    sample = run([sys.executable, "-c", parent], plain_environment(), tmp_path)
    assert sample.peak > 64 * MIB and sample.cpu_s > 0


def test_a_command_that_fails_ends_the_benchmark_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"ended with 3:\s+no such thing"):
        run(["sh", "-c", "echo no such thing; exit 3"], plain_environment(), tmp_path)


def test_a_command_without_end_is_ended_with_its_children_and_its_limit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks went on beside what was measured next, and the error named a signal only."""
    monkeypatch.setattr("scripts.lib.bench.measure.TIMEOUT_S", 1.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # The child holds the pipe open for writing until it ends.
    command = f"sh -c 'exec sleep 1000' >{pipe} & wait"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BenchError, match="took more than 1 seconds"):
        run(["sh", "-c", command], plain_environment(), tmp_path)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # the child has ended
    os.close(reader)


def test_a_workload_that_fails_is_said_and_those_after_it_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "done"

    @contextmanager
    def two(folder: Path, peers: object) -> Iterator[list[Workload]]:
        yield [
            Workload(name, name, "", 1, 1, name, [Candidate.single(name, *command)], lambda _: [])
            for name, command in (("fails", ("false",)), ("works", ("touch", str(done))))
        ]

    class NoPeers:
        venv = tmp_path

        @classmethod
        def install(cls, *_: object) -> NoPeers:
            return cls()

        def versions(self) -> dict[str, str]:
            return {}

        def command(self, name: str) -> str:
            return "true"

    monkeypatch.setattr("scripts.lib.bench.__main__.Peers", NoPeers)
    monkeypatch.setitem(PARTS, "env", {"environment": two})
    monkeypatch.setattr("sys.argv", ["bench", "env", "--folder", str(tmp_path / "bench")])
    assert main() == 1
    assert done.exists() and "error: fails: `false` ended with 1" in capsys.readouterr().err


def test_every_round_begins_with_another_candidate_in_an_empty_folder(tmp_path: Path) -> None:
    out, order = tmp_path / "out", tmp_path / "order.txt"

    def candidate(name: str) -> Candidate:
        check = f'test "$(ls {out})" = seed.txt && echo {name} >>{order} && touch {out}/mine'
        return Candidate((Step(("sh", "-c", check), name), Step(("true",), f"{name} and more")))

    workload = Workload(
        name="x",
        title="X",
        note="",
        size=1,
        files=1,
        base="a",
        candidates=[candidate("a"), candidate("b")],
        targets=lambda rounds: [],
        writes=out,
        seeds={"seed.txt": "sown"},
    )
    samples = measure(workload, 2, tmp_path, lambda text: None)
    assert order.read_text().split() == ["a", "b", "b", "a"]
    for one in samples:
        assert list(one) == ["a", "a and more", "b", "b and more"]
        assert one["a"].seconds < one["a and more"].seconds


def test_wrong_options_and_help_end_before_anything_is_installed(tmp_path: Path) -> None:
    """On a PATH without the tools that it would install, where an installation leaves a file."""
    root = Path(__file__).resolve().parents[1]
    for name in ("bash", "sh", "sed", "dirname", "touch"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "python3").symlink_to(Path(sys.executable).resolve())
    for name in ("apt-get", "id"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/installed\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path)}

    def bench(*arguments: str) -> tuple[int, str]:
        command = [root / "scripts/bench", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
        return done.returncode, done.stdout + done.stderr

    code, text = bench("stage", "fetsch")
    assert code == 2 and "fetsch" in text and "fetch, verify" in text
    assert bench("stage", "--rounds", "0")[0] == 2
    for arguments in ((), ("--help",), ("stage", "--help")):
        code, text = bench(*arguments)
        assert code == 0 and "scripts/bench stage [fetch]" in text
    assert not (tmp_path / "installed").exists()


def test_the_options_name_the_parts_that_exist() -> None:
    assert {area: tuple(parts) for area, parts in PARTS.items()} == AREAS
