"""What the tests of a run in this process share."""

from __future__ import annotations

from tests.runner.training.saving.conftest import ranks as alone

__all__ = ["alone"]
