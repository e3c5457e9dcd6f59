"""Writes `not_obeyed.txt` again: known reasons stay; a new remedy is `open`, which is no reason."""

from __future__ import annotations

from tests.remedies.test_remedies import NOT_OBEYED, is_obeyed, not_obeyed
from tests.remedies.walk import remedies

if __name__ == "__main__":
    known = not_obeyed() if NOT_OBEYED.exists() else {}
    rows = [
        (known.get((file, text), "open"), file, text)
        for file, text in remedies()
        if not is_obeyed(file, text)
    ]
    NOT_OBEYED.write_text("".join("\t".join(row) + "\n" for row in sorted(rows)))
