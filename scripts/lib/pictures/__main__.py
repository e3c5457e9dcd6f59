"""`python -m scripts.lib.pictures [--record]`: draws docs/pictures/*.svg."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from scripts.lib.pictures import road, terminal
from scripts.lib.pictures.record import record

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "pictures"


def main() -> int:
    """Draws the pictures; returns the exit code."""
    cast = PICTURES / "demo.cast"
    if sys.argv[1:] == ["--record"]:
        with tempfile.TemporaryDirectory(prefix="airlift-recording-") as folder:
            record(Path(folder), cast)
    elif sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    (PICTURES / "terminal.svg").write_text(terminal.drawn(cast.read_text("utf-8")), "utf-8")
    (PICTURES / "road.svg").write_text(road.drawn(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
