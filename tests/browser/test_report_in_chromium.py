"""The report in a real browser: it draws, in light and in dark mode, and no script in it runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from runner.report import write
from tests.runner.folders import hostile_folder, run_folder

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--window-size=1100,1500",
)  # fmt: skip
LIGHT, DARK = (0xFD, 0xFD, 0xFC), (0x15, 0x18, 0x1C)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def browse(tmp_path: Path, page: Path, *options: str) -> str:
    command = [
        str(CHROMIUM),
        *QUIET,
        f"--user-data-dir={tmp_path / 'profile'}",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def colours(png: Path) -> set[tuple[int, int, int]]:
    from PIL import Image

    with Image.open(png) as image:
        counted = image.convert("RGB").getcolors(maxcolors=2**24)
    return {colour for _, colour in counted or ()}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [run_folder(folder / "good", mfu=0.4), hostile_folder(folder / "bad")]
    return write(runs, folder / "page.html")


@pytest.mark.parametrize(
    ("dark", "paper", "line"),
    [(False, LIGHT, (0x1F, 0x6F, 0xEB)), (True, DARK, (0x6E, 0xA8, 0xFE))],
)
def test_the_curves_are_drawn_in_light_and_in_dark(
    page: Path, tmp_path: Path, dark: bool, paper: tuple[int, int, int], line: tuple[int, int, int]
) -> None:
    shot = tmp_path / "shot.png"
    browse(
        tmp_path,
        page,
        f"--screenshot={shot}",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    )
    found = colours(shot)
    assert paper in found and line in found


def test_what_is_hostile_in_a_run_folder_stays_text(page: Path, tmp_path: Path) -> None:
    dom = browse(tmp_path, page, "--dump-dom")
    assert re.search(
        r"<title>2 runs compared</title>", dom
    )  # the script in the name would have set another
    assert "<img" not in dom and "<script" not in dom
    assert dom.count("<figure>") >= 6
