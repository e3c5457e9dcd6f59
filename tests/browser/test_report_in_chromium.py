"""The report in a real browser: desktop, phone and dark; with and without its script."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.report import write
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
    runs = [noisy_run(folder / str(rate), rate) for rate in (2e-4, 5e-4, 1e-3)]
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
def test_ticks_are_readable_and_nothing_is_wider_than_the_screen(
    window: Browser, one: Path, width: int
) -> None:
    window.open(one, width)
    heights = window.value(
        "[...document.querySelectorAll('.tick')].map(t => t.getBoundingClientRect().height)"
        ".filter(height => height > 0)"
    )
    assert heights and min(heights) >= 11
    assert window.value("document.documentElement.scrollWidth") <= width
    cells = (
        "[...document.querySelectorAll('.overview td, .one td')]"
        ".map(c => c.getBoundingClientRect().right)"
    )
    assert max(window.value(cells)) <= width
    outside = window.value(
        "[...document.querySelectorAll('.tick')].filter(t => t.getBoundingClientRect().width"
        " && (t.getBoundingClientRect().left < t.ownerSVGElement.getBoundingClientRect().left"
        " || t.getBoundingClientRect().right > t.ownerSVGElement.getBoundingClientRect().right))"
        ".map(t => t.textContent)"
    )
    assert outside == []


def test_the_pointer_shows_the_values_of_each_run(
    window: Browser, sweep: Path, shots: Path
) -> None:
    window.open(sweep, DESKTOP)
    charts = window.value("document.querySelectorAll('.charts figure').length")
    for index in range(charts):
        box = window.value(
            f"(() => {{ const f = document.querySelectorAll('.charts figure')[{index}];"
            " if (f.closest('details.more')) f.closest('details.more').open = true;"
            " f.scrollIntoView(); const s = [...f.querySelectorAll('svg')].find(s =>"
            " s.getBoundingClientRect().width); const b = s.getBoundingClientRect();"
            " return [b.left + b.width * 0.6, b.top + b.height / 2]; })()"
        )
        window.point(*box)
        said = window.value("document.querySelector('.tip:not([hidden])').innerText")
        assert said.startswith("step "), said
        for name in ("demo · lr=2e-4: ", "demo · lr=5e-4: ", "demo · lr=0.001: "):
            assert name in said
        if index == 0:
            assert "(average 2." in said
            window.shot(shots / "hover.png")


def test_without_its_script_the_page_shows_everything(window: Browser, one: Path) -> None:
    seen = []
    for script in (True, False):
        window.open(one, DESKTOP, script=script)
        seen.append(window.value("document.body.innerText"))
    assert seen[0] == seen[1]
    assert "Training loss" in seen[1] and "In numbers" in seen[1]


def test_the_log_axis_is_one_click_away(window: Browser, one: Path) -> None:
    window.open(one, DESKTOP, script=False)
    window.value("document.querySelector('figure label').click()")
    shown = "getComputedStyle(document.querySelector('figure .{}')).display"
    assert window.value(shown.format("log")) == "block"
    assert window.value(shown.format("linear")) == "none"


def test_what_is_hostile_in_a_run_folder_stays_text(window: Browser, tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / "good", mfu=0.4), hostile_folder(tmp_path / "bad")]
    window.open(write(runs, tmp_path / "page.html"), DESKTOP)
    assert window.value("document.title") == "2 runs compared"  # a script in the name sets another
    assert window.value("document.querySelectorAll('img').length") == 0
    assert window.value("document.querySelectorAll('script').length") == 1
    assert window.value("document.querySelectorAll('figure').length") >= 6
