"""The bundles of the runner's tests, for the failures of the list."""

from pathlib import Path

import pytest

from tests.first_job.harness import bundle_of_variants
from tests.runner.conftest import bundle, twins_bundle
from tests.support.once import once

__all__ = ["bundle", "twins_bundle"]


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Path:
    """A sound bundle with a small GPT-2, made once. Treat it as read-only."""

    def make(folder: Path) -> None:
        bundle_of_variants(
            folder, {"gpt2": (bundle / "data/models/tiny-gpt2", lambda _folder: None)}
        )

    return once(tmp_path_factory, "staged", make) / "bundle"
