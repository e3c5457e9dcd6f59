"""`separate` documents by flex attention (torch.nn.attention.flex_attention).

A mask of every pair of tokens is computed, read and kept by each layer. Flex attention computes in
blocks of 128 x 128 pairs: blocks in which no token sees another one are left out, and only the
others look at the numbers of the documents. Which blocks those are follows from the numbers alone;
`blocks_of` finds them while a batch is made, in the thread that does that.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runner.data.store import Rows
from runner.training.components.device import OFF, wants_reference

BLOCK = 128
AMPERE = 8
"""The major compute capability since which Triton has fast kernels for it."""

LEAST_HEAD = 16
"""The least width of a head (torch/nn/attention/flex_attention.py)."""


def choose(
    model: Any, capability: tuple[int, int] | None, environ: Mapping[str, str] = os.environ
) -> tuple[bool, str]:
    """Whether flex attention keeps documents apart, and the line to print.

    Args:
        model: the transformers model.
        capability: of the GPU; None: there is none.
        environ: the environment variables.
    """
    why_not = _why_not(model, capability, environ)
    if why_not:
        return False, f"documents kept apart by SDPA with a mask: {why_not}"
    return True, f"documents kept apart by flex attention: it leaves out what no token sees ({OFF})"


def _why_not(
    model: Any, capability: tuple[int, int] | None, environ: Mapping[str, str]
) -> str | None:
    settings = model.config.get_text_config()
    if wants_reference(environ):
        return OFF.removesuffix(" turns it off") + " says so"
    if capability is None:
        return "flex attention is for training on GPUs only"
    if capability[0] < AMPERE:
        return f"flex attention needs a GPU of {AMPERE}.0 or newer, this one is {capability[0]}.x"
    if not _torch_has_it():
        return f"torch {torch.__version__} has no finished flex attention"
    if not getattr(model, "_supports_flex_attn", False):
        return f"transformers has no flex attention for {settings.model_type}"
    if settings._attn_implementation != "sdpa":
        return f"the model uses {settings._attn_implementation} attention"
    if dropout := _dropout_of(settings):
        return f"flex attention has no dropout, and this model's attention has {dropout}"
    if (width := _width_of_heads(settings)) < LEAST_HEAD:
        return f"flex attention needs heads of {LEAST_HEAD}, this model's have {width}"
    return None


def _torch_has_it() -> bool:
    """torch 2.6 has it without masks of any length, and with known faults (pytorch#146260)."""
    from torch.nn.attention.flex_attention import BlockMask

    return "seq_lengths" in inspect.signature(BlockMask.from_kv_blocks).parameters


def _dropout_of(settings: Any) -> float:
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
    return max(float(getattr(settings, name, 0.0) or 0.0) for name in names)


def _width_of_heads(settings: Any) -> int:
    given = getattr(settings, "head_dim", None)
    return int(given or settings.hidden_size // settings.num_attention_heads)


def whole_blocks(rows: Rows) -> Rows:
    """The same rows with empty places behind them, up to a multiple of `BLOCK` tokens.

    So all batches of full rows have one shape, and one compiled kernel.
    """
    missing = -rows.ids.shape[1] % BLOCK
    behind = ((0, 0), (0, missing))
    return rows._replace(
        ids=np.pad(rows.ids, behind),
        documents=np.pad(rows.documents, behind),
        learned=np.pad(rows.learned, behind),
    )


def blocks_of(documents: NDArray[np.int64]) -> NDArray[np.int32]:
    """Which blocks of a causal model see which.

    Args:
        documents: (rows, length): the number of each token's document, ascending from 1; 0 behind
            the end. The length is a multiple of `BLOCK`.

    Returns:
        (rows, 2, n, 1 + n) for n blocks: for each row and block of queries, how many blocks of keys
        it sees, and their numbers first; [:, 0] those that it sees in part, [:, 1] wholly.
    """
    rows, length = documents.shape
    count = length // BLOCK
    ascending = np.where(documents > 0, documents, np.iinfo(documents.dtype).max)
    parts = ascending.reshape(rows, count, BLOCK)
    low, high = parts.min(-1), parts.max(-1)
    before = np.tri(count, dtype=bool)
    sees = before & (high[:, None, :] >= low[:, :, None])
    alone = low == high  # blocks of one document
    wholly = (
        np.tri(count, k=-1, dtype=bool)
        & (alone[:, :, None] & alone[:, None, :])
        & (low[:, None, :] == low[:, :, None])
    )
    kinds = np.stack([sees & ~wholly, wholly], axis=1)
    numbers = np.argsort(~kinds, axis=-1, kind="stable")
    return np.concatenate([kinds.sum(-1)[..., None], numbers], axis=-1).astype(np.int32)


def block_mask(documents: torch.Tensor, blocks: torch.Tensor) -> Any:
    """The mask that flex attention takes.

    Args:
        documents: (rows, length), on the device.
        blocks: what `blocks_of` gave, on the device.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (documents[row, query] == documents[row, key])

    # The compiled kernel finds a row by the strides of one head: views of `blocks` would give it
    # the numbers of another row (torch/_inductor/kernel/flex/templates, `sparse_hz_offset`).
    partly, wholly = (
        (of_kind[..., 0].contiguous(), of_kind[..., 1:].contiguous())
        for of_kind in (blocks[:, :1], blocks[:, 1:])
    )
    length = documents.shape[1]
    return BlockMask.from_kv_blocks(
        *partly, *wholly,
        BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length),
    )  # fmt: skip


def capability() -> tuple[int, int] | None:
    """The compute capability of this rank's GPU; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
