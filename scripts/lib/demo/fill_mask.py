"""Loads an exported model and lets it fill in a word: `fill_mask.py MODEL SENTENCE...`"""

from __future__ import annotations

import os
import sys


def main() -> int:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder, *sentences = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    for sentence in sentences:
        inputs = tokenizer(sentence, return_tensors="pt")
        (index,) = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero(as_tuple=True)
        if len(index) != 1:
            problem = f"error: exactly one {tokenizer.mask_token} is needed: {sentence}"
            print(problem, file=sys.stderr)
            return 2
        with torch.no_grad():
            chances = model(**inputs).logits[0, index[0]].softmax(-1)
        best = chances.topk(5)
        words = ", ".join(
            f"{tokenizer.decode([token])} {chance:.1%}"
            for token, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        print(f"{sentence}\n    {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
