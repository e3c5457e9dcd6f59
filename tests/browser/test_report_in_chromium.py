"""The report in a real browser: desktop, phone and dark; with and without its script."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.run_folder.report import write
from tests.browser.chromium import CHROMIUM, Browser, browser
from tests.runner.folders import hostile_folder, line, run_folder

LIGHT, DARK = (0xFD, 0xFD, 0xFC), (0x15, 0x18, 0x1C)
DESKTOP, PHONE = 1200, 375

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go: the folder AIRLIFT_SCREENSHOTS, to look at them."""
    asked = os.environ.get("AIRLIFT_SCREENSHOTS")
    folder = Path(asked) if asked else tmp_path_factory.mktemp("shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def noisy_run(root: Path, lr: float, steps: int = 1500) -> Path:
    """A run folder as a GPU run leaves it, with noise and a warm-up."""
    made = run_folder(root, name="demo", world_size=8, device="NVIDIA A800-SXM4-80GB")
    (made / "config.yaml").write_text(f"name: demo\nsteps: {steps}\noptimizer:\n  lr: {lr}\n")
    noise = random.Random(lr)
    lines = []
    for step in range(1, steps + 1):
        loss = 2.5 + 8 * math.exp(-step * lr * 20) + noise.gauss(0, 0.15)
        norm = 1 + 200 * math.exp(-step / 20) + noise.random()
        rate = lr * min(1, step / 100) * (1 - step / steps / 1.1)
        speed = 51_000 + noise.gauss(0, 2000)
        now = line(step, loss=loss, grad_norm=norm, lr=rate, tokens_per_s=speed)
        lines.append({**now, "data_wait": 0.01})
        if step % 300 == 0:
            lines.append({"step": step, "validation_loss": loss, "validation_perplexity": 2**loss})
    (made / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    facts = json.loads((made / "environment.json").read_text())
    facts |= {"num_steps": steps, "exported_step": steps}
    (made / "environment.json").write_text(json.dumps(facts))
    (made / "model").mkdir()
    return made


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    return write([noisy_run(folder / "run", 2e-4)], folder / "page.html")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    runs = [noisy_run(folder / f"lr={rate}", rate) for rate in (2e-4, 5e-4, 1e-3)]
    return write(runs, folder / "page.html")


def colours(png: Path) -> set[tuple[int, int, int]]:
    from PIL import Image

    with Image.open(png) as image:
        counted = image.convert("RGB").getcolors(maxcolors=2**24)
    return {colour for _, colour in counted or ()}


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize(
    ("dark", "paper", "stroke"),
    [(False, LIGHT, (0x1F, 0x6F, 0xEB)), (True, DARK, (0x6E, 0xA8, 0xFE))],
    ids=["light", "dark"],
)
def test_the_curves_are_drawn(
    window: Browser, one: Path, sweep: Path, shots: Path, width: int, dark: bool,
    paper: tuple[int, int, int], stroke: tuple[int, int, int],
) -> None:  # fmt: skip
    for page, name in ((one, "one"), (sweep, "sweep")):
        window.open(page, width, dark=dark)
        png = window.shot(shots / f"{name}-{width}{'-dark' * dark}.png")
        assert {paper, stroke} <= colours(png)


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_nothing_is_wider_than_the_screen(window: Browser, one: Path, width: int) -> None:
    window.open(one, width)
    assert window.value("document.documentElement.scrollWidth") <= width
    cells = (
        "[...document.querySelectorAll('.one td, .uplot')]"
        ".map(c => c.getBoundingClientRect().right)"
    )
    assert max(window.value(cells)) <= width


def area(window: Browser, share: float) -> list[float]:
    """A point of the first chart, at a share of its width."""
    found: list[float] = window.value(
        "(() => { const o = document.querySelector('figure .u-over'); o.scrollIntoView();"
        " const b = o.getBoundingClientRect();"
        f" return [b.left + b.width * {share}, b.top + b.height / 2]; }})()"
    )
    return found


def test_the_pointer_shows_the_values_of_each_run(
    window: Browser, sweep: Path, shots: Path
) -> None:
    window.open(sweep, DESKTOP)
    window.point(*area(window, 0.6))
    said = window.value("document.querySelector('figure .u-legend').innerText")
    for name in ("demo · lr=0.0002", "demo · lr=0.0005", "demo · lr=0.001"):
        assert name in said and f"{name} (average)" in said
    shown = window.value(
        "[...document.querySelectorAll('figure .u-value')].slice(0, 7).map(v => v.textContent)"
    )
    assert 850 < int(shown[0].replace(",", "")) < 950 and all(float(v) > 0 for v in shown[1:7])
    window.shot(shots / "hover.png")


def test_smoothing_and_the_log_axis_are_one_click_away(window: Browser, one: Path) -> None:
    window.open(one, DESKTOP)
    series = "document.querySelectorAll('figure')[0].querySelectorAll('.u-series').length"
    assert window.value(series) == 3
    window.value("document.querySelectorAll('figcaption input')[1].click()")
    assert window.value(series) == 2
    checked = "[...document.querySelectorAll('figcaption')].map(c => [c.innerText, c.querySelector"
    boxes = window.value(f"{checked}('input') && c.querySelector('input').checked])")
    assert [on for text, on in boxes if text.startswith("Gradient norm")] == [True]
    window.value("document.querySelectorAll('figcaption input')[0].click()")
    assert window.value(series) == 2


def test_without_scripts_the_page_has_every_number(window: Browser, one: Path) -> None:
    window.open(one, DESKTOP, script=False)
    said = window.value("document.body.innerText")
    assert "Training loss" in said and "In numbers" in said and "moving average" in said


def test_what_is_hostile_in_a_run_folder_stays_text(window: Browser, tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / "good", mfu=0.4), hostile_folder(tmp_path / "bad")]
    window.open(write(runs, tmp_path / "page.html"), DESKTOP)
    assert window.value("document.title") == "2 runs compared"  # a script in the name sets another
    assert window.value("document.querySelectorAll('img').length") == 0
    assert window.value("document.querySelectorAll('script').length") == 3
    assert window.value("document.querySelectorAll('figure').length") >= 6
