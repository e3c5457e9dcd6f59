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
from runner.report.chart import log_ticks, short, svg, ticks
from runner.report.curves import Chart, Curve, moving_average, thinned
from runner.report.names import short_names
from runner.report.script import DIGEST
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


def test_the_page_has_the_memory_of_each_phase_and_the_step_of_the_exported_weights(
    tmp_path: Path,
) -> None:
    folder = run_folder(tmp_path / "run", exported_weights_step=20)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 40, "train_host_gib": 3.0, "train_device_gib": 8.0}) + "\n")
    page = page_of(folder)
    assert "Most memory of a rank, devicetrain 8.59 GB" in page.text
    assert "Most memory of a rank, hosttrain 3.22 GB" in page.text
    assert "The exported weights are of step20" in page.text
    assert "Most memory of rank 01.61 GB" in page_of(run_folder(tmp_path / "older")).text


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


@pytest.mark.parametrize(("task", "is_said"), [("masked-lm", True), ("text-classification", False)])
def test_only_a_language_model_s_loss_is_per_predicted_token(
    tmp_path: Path, task: str, is_said: bool
) -> None:
    folder = run_folder(tmp_path / "run")
    with open(folder / "config.yaml", "a") as file:
        file.write(f"task: {task}\n")
    assert ("per predicted token" in page_of(folder).text) == is_said


def test_memory_is_in_decimal_units_as_everywhere_else(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", mfu=0.4)
    facts = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(facts | {"device_memory_gib": 79.2}))
    page = page_of(folder)
    assert "1.61 GB" in page.text
    assert "85 GB" in page.text
    assert "GiB" not in page.text
    (folder / "environment.json").write_text(json.dumps(facts | {"device_memory_gib": 10**400}))
    assert "a number too large to show" in page_of(folder).text


def test_the_page_asks_nothing_of_a_network_and_has_one_script_of_its_own(tmp_path: Path) -> None:
    page = page_of(hostile_folder(tmp_path / "bad"), run_folder(tmp_path / "good"))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1
    assert not set(tags) & {
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
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{DIGEST}'"
    )


def test_a_hostile_folder_gives_a_page_that_says_what_is_wrong(tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "bad")
    page = page_of(folder)
    assert "not finite (nan or inf) at step 2" in page.text
    assert re.search(r"metrics.jsonl: \d+ damaged lines? omitted", page.text)
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
    assert "made · a" in page.text and "made · b" in page.text


def test_runs_of_a_sweep_are_named_by_what_differs(tmp_path: Path) -> None:
    rates = (0.0002, 0.01, 1.0)
    folders = [run_folder(tmp_path / str(rate), name="demo") for rate in rates]
    for folder, rate in zip(folders, rates, strict=True):
        (folder / "config.yaml").write_text(
            f"name: demo\noptimizer:\n  lr: {rate}\n  b: {[rate]}\n"
        )
    names = short_names([History.read(folder) for folder in folders])
    assert names == [
        "demo · lr=2e-4 · b=[0.0002]",
        "demo · lr=0.01 · b=[0.01]",
        "demo · lr=1 · b=[1.0]",
    ]


def test_the_top_says_how_the_run_stands_and_what_it_cost(tmp_path: Path) -> None:
    facts = {"world_size": 8, "device": "NVIDIA A800"}
    page = page_of(run_folder(tmp_path / "run", steps=20, **facts))
    top = page.text[: page.text.index("Curves")]
    for said in ("stopped", "20 of 40", "40.0 s", "0.0889", "3.25"):
        assert said in top, top
    (tmp_path / "run/running").mkdir()
    (tmp_path / "run/running/holder").touch()
    assert "running" in page_of(tmp_path / "run").text


def test_each_chart_has_its_numbers_in_words_and_the_same_steps(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one", name="one", mfu=0.4)
    text = write([one, run_folder(tmp_path / "two", steps=9)], tmp_path / "page.html").read_text()
    page = Page(text)
    drawn = [
        attributes for tag, attributes in page.tags if tag == "svg" and "data-first" in attributes
    ]
    assert {(a["data-first"], a["data-last"]) for a in drawn} == {("1", "40")}
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert drawn and all(a["role"] == "img" and a["aria-describedby"] in ids for a in drawn)
    folded = text[text.index('<details class="more">') :]
    assert "Samples per second" in folded and "Validation perplexity" in folded
    assert "Training loss" not in folded


def test_a_noisy_loss_is_smoothed_with_the_raw_line_behind(tmp_path: Path) -> None:
    points = tuple((step, 5.0 + (step % 2)) for step in range(1, 101))
    smooth = moving_average(points, 10)
    assert max(value for _, value in smooth[20:]) < 5.6 and len(smooth) == 100
    text = write([run_folder(tmp_path / "run")], tmp_path / "page.html").read_text()
    assert 'class="line raw c0"' in text and "moving average of 5 steps" in text


def test_a_curve_over_decades_begins_on_a_log_axis(tmp_path: Path) -> None:
    decades = Chart("x", "", (Curve(0, ((1, 1000.0), (2, 1.0))),))
    assert decades.has_log_axis and decades.begins_with_log_axis
    assert not Chart("x", "", (Curve(0, ((1, 1000.0), (2, 0.0))),)).has_log_axis
    assert log_ticks(1, 1000) == [1, 10, 100, 1000]


def test_of_a_run_that_just_began_there_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    assert "no step was logged" in page_of(tmp_path / "run").text


def test_what_is_no_run_folder_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    for folder, said in (
        (tmp_path / "nowhere", "no such run folder"),
        (tmp_path / "nothing", "not a run folder"),
    ):
        done = CliRunner().invoke(main, ["report", str(folder)])
        assert done.exit_code == 2 and said in done.output, done.output


def test_a_sweep_gets_one_page_into_its_folder_and_may_be_among_others(tmp_path: Path) -> None:
    """`runner report output/*` ended at the folder of a sweep, and then at the page in it."""
    sweep = tmp_path / "output" / "sweep"
    for name in ("seed=1", "seed=2"):
        run_folder(sweep / name)
    run_folder(tmp_path / "output" / "alone")
    done = CliRunner().invoke(main, ["report", str(sweep)])
    assert done.exit_code == 0 and (sweep / "report.html").is_file(), done.output
    written = (sweep / "report.html").read_text()
    assert "seed=1" in written and "seed=2" in written and "alone" not in written
    page, inside = tmp_path / "all.html", sorted(map(str, sweep.glob("*")))
    for runs in (sorted(map(str, (tmp_path / "output").glob("*"))), inside):
        done = CliRunner().invoke(main, ["report", *runs, "-o", str(page)])
        assert done.exit_code == 0 and "seed=2" in page.read_text(), done.output


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
    [
        (0, "0"),
        (1200, "1.2k"),
        (3e-5, "3e-5"),
        (2.5e-4, "2.5e-4"),
        (-2.5e6, "-2.5M"),
        (1e300, "1e+300"),
    ],
)
def test_numbers_on_axes_are_short(value: float, said: str) -> None:
    assert short(value) == said


positive = st.floats(min_value=1e-300, max_value=1e300)


@given(st.lists(positive, min_size=2, max_size=50))
def test_any_positive_curve_fits_a_log_axis(values: list[float]) -> None:
    chart = Chart("x", "", (Curve(0, tuple(enumerate(values)), dotted=True),))
    root = ElementTree.fromstring(svg(chart, log=chart.has_log_axis))
    for circle in root.iter("circle"):
        assert -1 <= float(circle.attrib["cy"]) <= 241


@given(st.lists(numbers, min_size=1, max_size=200), st.integers(2, 50))
def test_a_moving_average_stays_between_the_values(values: list[float], window: int) -> None:
    found = [value for _, value in moving_average(list(enumerate(values)), window)]
    assert min(values) <= min(found) and max(found) <= max(values)


def test_a_run_file_stands_for_its_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder(tmp_path / "output" / "mine")
    (tmp_path / "mine.yaml").write_text(
        "format: 1\nname: mine\ntask: masked-lm\nmodel: {asset: m}\ndataset: {asset: d}\n"
    )
    done = CliRunner().invoke(main, ["report", "mine.yaml"])
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").exists()
