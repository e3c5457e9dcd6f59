"""`runner report`: one page with the content of any run folder, which needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import runner.run_folder.report
from runner.run_folder.history import Columns
from runner.run_folder.report import thinned, write_report
from tests.runner.folders import hostile_folder, run_folder

numbers = st.floats(allow_nan=False, allow_infinity=False)


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
    return Page(write_report(folders, folders[0].parent / "page.html").read_text(encoding="utf-8"))


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


def test_of_a_run_that_just_began_there_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    assert "no step was logged" in page_of(tmp_path / "run").text


@given(st.lists(numbers, min_size=1, max_size=5000))
def test_thinning_keeps_the_peaks_and_the_order(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thinned(points, 40)
    assert len(kept) <= 40
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {max(values), min(values)} <= {value for _, value in kept}


def test_columns_have_the_last_line_of_each_step_and_say_what_is_missing_or_no_number() -> None:
    columns = Columns()
    for step, measures in (
        (1, {"a": 1.0}), (3, {"a": 3.0, "b": 30}), (2, {"b": None}), (3, {"a": math.nan}),
        (5, {"c": True, "a": 5}), (4, {"a": -math.inf, "b": 2}),
    ):  # fmt: skip
        columns.append({"step": step, **measures})
    found = columns.by_step()
    assert ([*found.steps], found.last, found.numbers("a")) == (
        [1, 2, 3, 4, 5],
        {"step": 5, "c": True, "a": 5},
        [1.0, 5.0],
    )
    assert {key: found.points(key) for key in "abcd"} == {
        "a": [(1, 1.0), (3, None), (4, None), (5, 5.0)],
        "b": [(2, None), (4, 2.0)],
        "c": [(5, None)],
        "d": [],
    }
