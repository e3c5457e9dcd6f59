"""Loads an exported model and lets it fill in a word: `fill_mask.py MODEL SENTENCE...`"""

from __future__ import annotations

import os
import sys


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    from transformers import pipeline

    folder, *sentences = sys.argv[1:]
    fill = pipeline("fill-mask", model=folder)
    for sentence in sentences:
        words = ", ".join(f"{one['token_str']} {one['score']:.1%}" for one in fill(sentence))
        print(f"{sentence}\n    {words}")


if __name__ == "__main__":
    main()
