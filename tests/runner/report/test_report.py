"""`runner report`: one page with the content of any run folder, which needs nothing else."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from runner.cli import main
from runner.report import write
from runner.report.chart import short, svg, ticks
from runner.report.curves import Chart, Curve, thinned
from runner.run_folder.history import History
from tests.runner.folders import hostile_folder, line, run_folder


class Page(HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(*folders: Path) -> Page:
    return Page(write(folders, folders[0].parent / "page.html").read_text(encoding="utf-8"))


def test_the_page_says_what_was_trained_how_fast_and_where_it_comes_from(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "run", mfu=0.4))
    for said in (
        "made",
        "40 of 40",
        "Training loss",
        "Validation loss",
        "3.2500 at step 40",
        "1,000",
        "ab" * 32,
        "optimizer.lr",
    ):
        assert said in page.text, said
    assert [tag for tag, _ in page.tags].count("polyline") >= 6


def test_the_page_asks_nothing_of_a_network_and_runs_no_script(tmp_path: Path) -> None:
    page = page_of(hostile_folder(tmp_path / "bad"), run_folder(tmp_path / "good"))
    assert not {tag for tag, _ in page.tags} & {
        "script",
        "img",
        "link",
        "iframe",
        "object",
        "form",
        "base",
        "a",
    }
    for _, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href")}
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_a_hostile_folder_gives_a_page_that_says_what_is_wrong(tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "bad")
    page = page_of(folder)
    assert "not finite (nan or inf) at step 2" in page.text
    assert re.search(r"metrics.jsonl: \d+ lines are damaged", page.text)
    assert "<script>" in page.text  # as text, not as a tag
    assert "\u202e" not in page.text
    for number in re.findall(r'"(-?[\d.e+]+|nan|inf)[,"]', (tmp_path / "page.html").read_text()):
        assert number not in ("nan", "inf")


def test_runs_are_compared_and_their_differences_come_first(tmp_path: Path) -> None:
    one, two = (
        run_folder(tmp_path / "one", name="one"),
        run_folder(tmp_path / "two", name="two", steps=20),
    )
    (two / "config.yaml").write_text("format: 1\nname: two\nsteps: 40\noptimizer:\n  lr: 0.5\n")
    text = write([one, two], tmp_path / "page.html").read_text()
    marked = re.findall(r'<tr class="differs"><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td>', text)
    assert marked == [("optimizer.lr", "0.001", "0.5")]
    assert "two: unfinished: step 20 of 40" in Page(text).text


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "a"), run_folder(tmp_path / "b"))
    assert f"made ({tmp_path / 'a'})" in page.text and f"made ({tmp_path / 'b'})" in page.text


def test_of_a_run_that_just_began_there_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    assert "no step was logged" in page_of(tmp_path / "run").text


def test_what_is_no_run_folder_is_refused_in_words(tmp_path: Path) -> None:
    run_folder(tmp_path / "output" / "tiny")
    for folder, said in (
        (tmp_path / "nowhere", "no such run folder"),
        (tmp_path / "output", "Did you mean"),
    ):
        done = CliRunner().invoke(main, ["report", str(folder)])
        assert done.exit_code == 2 and said in done.output, done.output


def test_one_run_gets_its_page_into_its_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    done = CliRunner().invoke(main, ["report", str(folder)])
    assert done.exit_code == 0 and (folder / "report.html").is_file()
    assert str(folder / "report.html") in done.output


def test_a_resumed_run_that_tells_a_step_again_is_read_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=3)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line(2, loss=1.0)) + "\n")
    history = History.read(folder)
    assert [(told["step"], told["loss"]) for told in history.steps][1] == (2, 1.0)
    assert history.checkpoints == (20,)  # step-40.tmp is none


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.lists(st.tuples(st.integers(-(2**53), 2**53), numbers), min_size=1, max_size=50),
    st.booleans(),
)
def test_any_finite_curve_becomes_a_drawing_inside_its_frame(
    points: list[tuple[int, float]], from_zero: bool
) -> None:
    curve = Curve(0, tuple(sorted(points)), broken=(points[0][0],), dotted=True)
    root = ElementTree.fromstring(svg(Chart("x", "", (curve,), from_zero)))
    for circle in root.iter("circle"):
        assert -1 <= float(circle.attrib["cx"]) <= 521 and -1 <= float(circle.attrib["cy"]) <= 241


@given(st.lists(numbers, min_size=1, max_size=5000))
def test_thinning_keeps_the_peaks_and_the_order(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thinned(points, 40)
    assert len(kept) <= 40
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {max(values), min(values)} <= {value for _, value in kept}


@given(numbers, numbers)
def test_axes_have_few_round_numbers_within_the_range(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high, 5)
    assert len(found) <= 14
    slack = (high / 2 - low / 2) * 1e-6
    assert all(low - slack <= tick <= high for tick in found)


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (1200, "1.2k"), (3e-5, "3e-05"), (-2.5e6, "-2.5M"), (1e300, "1e+300")],
)
def test_numbers_on_axes_are_short(value: float, said: str) -> None:
    assert short(value) == said
