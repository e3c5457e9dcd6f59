"""`runner report`: one page with the content of any run folder, which needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import runner.run_folder.report
from runner.cli import main
from runner.run_folder.history import History
from runner.run_folder.report import write
from runner.run_folder.report_curves import charts, thinned
from runner.run_folder.report_page import short_names
from tests.runner.folders import hostile_folder, line, run_folder

UPLOT = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot-license.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


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


def drawn_in(text: str) -> list[dict[str, Any]]:
    """What the page's script draws."""
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert found is not None
    of_page: list[dict[str, Any]] = json.loads(found[1])["charts"]
    return of_page


def page_of(*folders: Path) -> Page:
    return Page(write(folders, folders[0].parent / "page.html").read_text(encoding="utf-8"))


def test_the_page_says_what_was_trained_how_fast_and_where_it_comes_from(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", mfu=0.4, exported_weights_step=20)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 40, "train_host_gib": 3.0, "train_device_gib": 8.0}) + "\n")
    page = page_of(folder)
    for said in (
        "made", "40 of 40", "Training loss", "Validation loss", "3.2500 at step 40", "1,000",
        "ab" * 32, "optimizer.lr", "The exported weights are of step20",
        "Most memory of a rank, devicetrain 8.59 GB", "Most memory of a rank, hosttrain 3.22 GB",
    ):  # fmt: skip
        assert said in page.text, said
    assert [tag for tag, _ in page.tags].count("figure") >= 6


@pytest.mark.parametrize(("task", "is_said"), [("masked-lm", True), ("text-classification", False)])
def test_only_a_language_model_s_loss_is_per_predicted_token(
    tmp_path: Path, task: str, is_said: bool
) -> None:
    folder = run_folder(tmp_path / "run")
    with open(folder / "config.yaml", "a") as file:
        file.write(f"task: {task}\n")
    assert ("per predicted token" in page_of(folder).text) == is_said


def test_the_page_asks_nothing_of_a_network_and_has_the_scripts_that_it_permits(
    tmp_path: Path,
) -> None:
    page = page_of(hostile_folder(tmp_path / "bad"), run_folder(tmp_path / "good"))
    tags = [tag for tag, _ in page.tags]
    assert not set(tags) & {"img", "link", "iframe", "object", "form", "base", "a"}
    for _, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href")}
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    scripts = re.findall(r"<script>(.*?)</script>", (tmp_path / "page.html").read_text(), re.S)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert len(digests) == 2 and tags.count("script") == 3, "and the charts as JSON"
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"


def test_uplot_is_the_published_one_with_its_licence() -> None:
    """npm, uplot 1.6.32."""
    assets = Path(runner.run_folder.report.__file__).with_name("assets")
    digests = {
        name: hashlib.sha256((assets / name).read_bytes()).hexdigest()
        for name in ("uplot.js", "uplot.css", "uplot-license.txt")
    }
    assert digests == UPLOT
    assert "MIT License" in (assets / "uplot-license.txt").read_text()


def test_a_hostile_folder_gives_a_page_that_says_what_is_wrong(tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "bad")
    page = page_of(folder)
    assert "not finite (nan or inf) at step 2" in page.text
    assert re.search(r"metrics.jsonl: \d+ damaged lines? omitted", page.text)
    assert "<script>" in page.text  # as text, not as a tag
    assert "\u202e" not in page.text
    charts = drawn_in((tmp_path / "page.html").read_text())
    values = [v for chart in charts for one in chart["lines"] for v in one["values"]]
    assert None in values and all(v is None or abs(v) < float("inf") for v in values)


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


def test_runs_of_a_sweep_are_named_by_what_differs(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / f"lr={rate}", name="demo") for rate in ("2e-4", "0.01")]
    folders += [run_folder(tmp_path / "lr=1" / "run", name="other")]
    names = short_names([History.read(folder) for folder in folders])
    assert names == ["demo · lr=2e-4", "demo · lr=0.01", "other"]
    twice = [run_folder(tmp_path / one / "run", name="demo") for one in ("a", "b")]
    assert short_names([History.read(one) for one in twice]) == ["demo · a/run", "demo · b/run"]


def test_the_top_says_how_the_run_stands_and_what_it_cost(tmp_path: Path) -> None:
    facts = {"world_size": 8, "device": "NVIDIA A800"}
    page = page_of(run_folder(tmp_path / "run", steps=20, **facts))
    top = page.text[: page.text.index("Curves")]
    for said in ("stopped", "20 of 40", "40 s", "0.0889", "3.25"):
        assert said in top, top
    (tmp_path / "run/running").mkdir()
    (tmp_path / "run/running/holder").touch()
    assert "running" in page_of(tmp_path / "run").text


def test_each_chart_has_its_numbers_in_words(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one", name="one", mfu=0.4)
    text = write([one, run_folder(tmp_path / "two", steps=9)], tmp_path / "page.html").read_text()
    drawn = drawn_in(text)
    assert text.count('class="plot" role="img"') == len(drawn) == text.count("In numbers")
    assert "6.95 (step 1)" in text and "5 (step 40)" in text
    loss = drawn[0]["lines"]
    assert [line["steps"][-1] for line in loss] == [40, 9] and loss[0]["values"][0] == 6.95
    folded = text[text.index('<details class="more">') :]
    assert "Samples per second" in folded and "Validation perplexity" in folded
    assert "Training loss" not in folded[: folded.index("Settings")]


def test_a_noisy_loss_is_smoothed_and_decades_begin_on_a_log_axis(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    lines = [line(step, grad_norm=1000.0 / step) for step in range(1, 41)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    by_title = {chart.title: chart for chart in charts([History.read(folder)])}
    loss, norm = by_title["Training loss"], by_title["Gradient norm, before clipping"]
    assert loss.window == 5 and not loss.log and not norm.log
    lines = [line(step, grad_norm=1000.0 / step**2) for step in range(1, 41)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    by_title = {chart.title: chart for chart in charts([History.read(folder)])}
    assert by_title["Gradient norm, before clipping"].log
    assert "moving average of 5 steps" in page_of(folder).text


def test_of_a_run_that_just_began_there_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    assert "no step was logged" in page_of(tmp_path / "run").text


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


def test_a_resumed_run_that_tells_a_step_again_is_read_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=3)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line(2, loss=1.0)) + "\n")
    history = History.read(folder)
    assert history.steps.points("loss")[1] == (2, 1.0)
    assert history.checkpoints == (20,)  # step-40.tmp is none


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(numbers, min_size=1, max_size=5000))
def test_thinning_keeps_the_peaks_and_the_order(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thinned(points, 40)
    assert len(kept) <= 40
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {max(values), min(values)} <= {value for _, value in kept}
