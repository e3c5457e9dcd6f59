"""All mistakes of a run file come together: those in it, and those that only the bundle shows."""

from __future__ import annotations

import re

import pytest

from tests.runner.job.test_preflight import Terminal, terminal

__all__ = ["terminal"]


def test_all_mistakes_of_a_run_file_are_listed_together_with_their_lines(
    terminal: Terminal,
) -> None:
    """Assets and columns were looked for only when every value in the file was right."""
    (terminal.cluster.folder / "k5.yaml").write_text(
        "format: 1\ntask: masked-lm\nmodel: {asset: tiny-brt}\n"
        "datasets:\n- {asset: numbers, text: txt}\n- {asset: numbrs}\n"
        "- {asset: numbers, train: training}\nepochs: many\n"
    )
    code, _, err = terminal.run("check", "k5.yaml")
    assert code == 2
    lines = [line.strip() for line in err.splitlines()]
    numbered = [line for line in lines if re.match(r"\d\. ", line)]
    assert [line.partition(" ")[2][:10] for line in numbered] == [
        f"k5.yaml:{n}:" for n in (3, 5, 6, 7, 8)
    ], err
    for words in ("`model.asset: tiny-brt`", "`datasets[0].text: txt`", "`epochs` must be"):
        assert words in err
    # The same without a wrong value, when the bundle alone shows the mistakes.
    path = terminal.cluster.folder / "k5.yaml"
    path.write_text(path.read_text().replace("epochs: many\n", ""))
    code, _, err = terminal.run("check", "k5.yaml")
    assert code == 2 and "k5.yaml: 4 mistakes:" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "3"], "`epochs` is a key of the run file: write it there, or --set epochs="),
        (["--lr", "1e-4"], "--set optimizer.lr=VALUE"),
        (["--partition", "gpu"], "--set slurm.partition=VALUE"),
        (["--set", "model=tiny-bert"], "Write model: {asset: tiny-bert}"),
        (["--set", "model.asset=acme/tiny-bert"], "Write `tiny-bert`, the asset's name"),
        (["--nonsense", "1"], "check --help"),
        (["--set", "batch.global", "16"], "a setting has a `=` (--set KEY=VALUE)"),
        (["--set", "optimizer.lr=1e-4,3e-4"], "runner submit RUN --array optimizer.lr=A,B"),
    ],
)
def test_what_people_write_first_gets_the_line_to_write_instead(
    terminal: Terminal, words: list[str], said: str
) -> None:
    terminal.cluster.write()
    assert said in terminal.refused("check", "tiny.yaml", *words)
