"""`metric:` assets: Spaces of `evaluate`, from a Hub into a bundle and back to the real library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.servers.hubs import TestHub
from tests.support.staging import Laptop

SPACE = "evaluate-metric/share_equal"
MAIN = b"""
import datasets
import evaluate
from .counting import equal

class ShareEqual(evaluate.Metric):
    def _info(self):
        features = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        return evaluate.MetricInfo(
            description="", citation="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references):
        return {"share_equal": equal(predictions, references) / len(references)}
"""
FILES = {
    "share_equal.py": MAIN,
    "counting.py": b"def equal(a, b):\n    return sum(x == y for x, y in zip(a, b))\n",
    "app.py": b"import gradio\n",
    "requirements.txt": b"git+https://x/evaluate@main\n# for it\nscikit-learn\n",
    "README.md": b"---\nlicense: apache-2.0\nsdk: gradio\n---\n# Share\n",
}
ASSET = "  share:\n    metric: share_equal\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        hub.commit("spaces", SPACE, FILES)
        yield hub


def laptop_for(folder: Path, hub: TestHub, assets: str) -> Laptop:
    laptop = Laptop(folder, hub)
    laptop.write(f"format: 1\nname: tiny\nassets:\n{assets}")
    return laptop


def test_a_lock_cannot_bring_code_that_the_manifest_does_not_allow(
    source: TestHub, tmp_path: Path
) -> None:
    laptop = laptop_for(tmp_path, source, f"{ASSET}    allow_code: true\n")
    assert "share: its requirements.txt asks for: scikit-learn\n" in laptop.fetch().stderr
    lock = (tmp_path / "tiny.lock").read_text().replace('"allow_code": true,', "")
    (tmp_path / "tiny.lock").write_text(lock)
    laptop = laptop_for(tmp_path, source, ASSET)
    done = laptop.fetch("again")
    assert done.returncode == 3 and "which this manifest does not allow" in done.stderr
    assert laptop.bundle.is_dir()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"share_equal.py": b"from .far import x  # From: https://example.org/far.py\n"},
            "downloads https://example.org/far.py each time it is loaded",
        ),
        ({"other.py": b"pass\n"}, "has no share_equal.py"),
        ({"share_equal.py": b"def broken(:\n"}, "not Python"),
    ],
)
def test_a_metric_that_would_not_load_on_the_cluster_is_refused_on_the_laptop(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    with ExitStack() as stack:
        hub = TestHub(tmp_path / "hub", stack)
        hub.commit("spaces", SPACE, files)
        laptop = laptop_for(tmp_path, hub, f"{ASSET}    allow_code: true\n")
        assert words in laptop.refused(2)
