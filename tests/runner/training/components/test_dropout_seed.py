"""The seed of dropout: the same for ever, and another one for each step and rank."""

from __future__ import annotations

from runner.training.components.device import dropout_seed


def test_dropout_is_seeded_by_a_function_that_no_version_of_python_changes() -> None:
    assert dropout_seed(42, 7, 1) == 8033518362486211898
    numbers = {dropout_seed(s, step, rank) for s in (1, 2) for step in (0, 1) for rank in (0, 1)}
    assert len(numbers) == 8 and all(0 <= number < 2**63 for number in numbers)
