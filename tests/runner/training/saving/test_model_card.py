"""The model card has the facts that a stranger needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stage.bundle.bundle import Bundle
from tests.support.code import run_warm


def test_its_code_loads_the_model_and_it_names_commits_and_licences(
    trained_at: Callable[[int], Path], bundle: Path
) -> None:
    card = (trained_at(2) / "model" / "README.md").read_text()
    assets = Bundle.open(bundle).lock.assets
    for asset in (assets["tiny-bert"], assets["reference"]):
        assert f"at `{asset.source.commit}`" in card and (asset.licence or "not stated") in card
    code = card.partition("```python\n")[2].partition("```")[0]
    code += "assert type(model).__name__ == 'BertForMaskedLM' and tokenizer.mask_token == '[MASK]'"
    done = run_warm(code, cwd=trained_at(2) / "model")
    assert done.returncode == 0, done.stderr
