"""The bundles of the runner's tests, for the failures of the list."""

from tests.runner.conftest import bundle, twins_bundle

__all__ = ["bundle", "twins_bundle"]
