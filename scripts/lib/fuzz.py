"""Runs libFuzzer (atheris) on one of the parsers in tests/stage/fuzzing.py, for scripts/fuzz.

python -m scripts.lib.fuzz TARGET FOLDER... [libFuzzer options]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris


def main() -> None:
    target = sys.argv.pop(1)
    with atheris.instrument_imports(include=["stage", "json", "yaml"]):
        from tests.stage.fuzzing import survives
    with tempfile.TemporaryDirectory(prefix="airlift-fuzz-") as folder:
        atheris.Setup(sys.argv, lambda data: survives(target, data, Path(folder)))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
