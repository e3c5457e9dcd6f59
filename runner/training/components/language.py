"""A language model with its loss, and masks that keep documents apart.

`joined` documents need no mask. Documents `alone` in a row are padded and need an attention mask.
`separate` documents are side by side in a row: positions restart with each, and the mask is
block-diagonal, because BERT does not find document limits from positions. On GPUs causal models
keep them apart by flex attention where they can (torch.nn.attention.flex_attention).

A mask of every pair of tokens is computed, read and kept by each layer. Flex attention computes in
blocks of 128 x 128 pairs: blocks in which no token sees another one are left out, and only the
others look at the numbers of the documents. Which blocks those are follows from the numbers alone;
`blocks_of` finds them while a batch is made, in the thread that does that.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from runner.data.store import IGNORED, LabelledRows, Rows
from runner.training.components.device import OFF, wants_reference
from runner.training.patches import search_no_packed_sequences

BLOCK = 128  # tokens; torch's own (flex_attention.py, _DEFAULT_SPARSE_BLOCK_SIZE)
AMPERE = 8
"""The major compute capability since which Triton has fast kernels for it."""

LEAST_HEAD = 16
"""The least width of a head (torch/nn/attention/flex_attention.py)."""


def choose_flex(
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
    from torch.nn.attention.flex_attention import BlockMask

    # torch 2.6 has it without masks of any length, and with known faults (pytorch#146260).
    if "seq_lengths" not in inspect.signature(BlockMask.from_kv_blocks).parameters:
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


def gpu_capability() -> tuple[int, int] | None:
    """The compute capability of this rank's GPU; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


LOGITS_AT_ONCE = 2**26
"""The most logits that are held at a time: 256 MiB in float32."""

# Their positions begin after the padding index (modeling_roberta.py,
# create_position_ids_from_input_ids).
_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")


def first_position(settings: Any) -> int:
    """The position of a document's first token, for a model's `config`."""
    return settings.pad_token_id + 1 if settings.model_type in _AFTER_PADDING else 0


def position_inputs(rows: Rows | LabelledRows, first: int) -> dict[str, torch.Tensor]:
    """The part of a batch that says where tokens are: int64 tensors of shape (rows, longest).

    Args:
        rows: what a store gave.
        first: see `first_position`.
    """
    if rows.layout == "joined":
        return {}
    if rows.layout == "alone":
        mask = (rows.documents > 0).astype(np.int64)
        return {} if mask.all() else {"attention_mask": torch.from_numpy(mask)}
    positions = np.where(rows.documents > 0, _positions(rows.documents) + first, 0)
    return {
        "documents": torch.from_numpy(rows.documents),
        "position_ids": torch.from_numpy(positions),
    }


def _positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """The distance of each token from the start of its document; same shape."""
    everywhere = np.arange(documents.shape[1])
    begins = np.ones_like(documents, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return everywhere - np.maximum.accumulate(np.where(begins, everywhere, 0), axis=1)


class Language(nn.Module):
    """A transformers model with its summed loss, and with masks that keep documents apart.

    Args:
        model: the transformers model.
        causal: whether a token sees only those before it, and predicts the next one.
        head: returns the part of the model that turns hidden states into logits, where it can be
            called alone; None: the model is called as a whole.
        smoothing: of the labels, in training.
    """

    def __init__(
        self,
        model: Any,
        *,
        causal: bool,
        head: Callable[[Any], nn.Module] | None = None,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self._causal, self._head = model, causal, head
        self._smoothing = smoothing
        search_no_packed_sequences()

    def forward(
        self, labels: torch.Tensor, guessed: torch.Tensor | None = None, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """The loss summed over all labels that are not `IGNORED`: a float32 scalar.

        Args:
            labels: int64 (rows, longest). A causal model predicts each from the tokens before it.
            guessed: int64 (number,): the positions of all labels, in the flattened batch. Logits
                are computed there only. None: everywhere.
            inputs: the rest of a batch.
        """
        if self._causal:  # each token's logits predict the next one
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        arguments = self.model_inputs(**inputs)
        if self._head is None:
            hidden, head = self.model(**arguments).logits, None
        else:
            hidden = getattr(self.model, self.model.base_model_prefix)(**arguments)[0]
            head = self._head(self.model)
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        if guessed is not None:
            hidden, labels = hidden.index_select(0, guessed), labels.index_select(0, guessed)
        vocabulary = self.model.config.get_text_config().vocab_size
        smoothing = self._smoothing if self.training else 0.0
        return summed_cross_entropy(hidden, labels, head, LOGITS_AT_ONCE // vocabulary, smoothing)

    def model_inputs(
        self,
        *,
        documents: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        blocks: torch.Tensor | None = None,
        **inputs: torch.Tensor,
    ) -> dict[str, Any]:
        """Keyword arguments of the model, from the inputs of a batch (`blocks`: see `blocks_of`).

        transformers would read a mask of two dimensions to see whether it is needed, and a GPU
        would wait for that. It takes one of four dimensions as it is.
        """
        arguments: dict[str, Any] = dict(inputs)
        if documents is not None and blocks is not None:
            arguments["attention_mask"] = block_mask(documents, blocks)
        elif documents is not None:
            sees = documents[:, None, :, None] == documents[:, None, None, :]
            arguments["attention_mask"] = self._mask(sees.tril() if self._causal else sees)
        elif attention_mask is not None and self._head is None:
            arguments["attention_mask"] = attention_mask  # a model of unknown ways
        elif attention_mask is not None and not self._causal:
            length = attention_mask.shape[1]
            seen = attention_mask[:, None, None, :] > 0
            arguments["attention_mask"] = self._mask(seen.expand(-1, -1, length, -1))
        # Otherwise causal: the padding comes after all tokens, so none of them sees it.
        return arguments | ({"use_cache": False} if self._causal else {})

    def _mask(self, sees: torch.Tensor) -> torch.Tensor:
        """What the model's attention takes, from which token sees which: (rows, 1, longest,
        longest).
        """
        if self.model.config._attn_implementation == "sdpa":
            return sees
        # The eager attention adds its mask to the scores.
        dtype = self.model.dtype
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(
            ~sees, torch.finfo(dtype).min
        )


def summed_cross_entropy(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    head: nn.Module | None = None,
    at_once: int = 0,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy in float32, summed over the labels that are not `IGNORED`.

    More than `at_once` rows are taken in parts: the logits of one part are in memory at a time, and
    are computed again in the backward pass. The parts are added up in another order than the rows
    of the whole would be: 1e-6 of the loss.

    Args:
        hidden: (number, size), or logits where there is no head.
        labels: int64 (number,).
        head: hidden states -> logits.
        at_once: the most rows of a part; 0: no limit.
        smoothing: `label_smoothing` of torch.
    """
    if not 0 < at_once < len(labels):
        return _part_of_loss(hidden, labels, head, smoothing)
    parts = [
        checkpoint(
            _part_of_loss, *part, head, smoothing, use_reentrant=False, preserve_rng_state=False
        )
        for part in zip(torch.split(hidden, at_once), torch.split(labels, at_once), strict=True)
    ]
    return torch.stack(parts).sum()


def _part_of_loss(
    hidden: torch.Tensor, labels: torch.Tensor, head: nn.Module | None, smoothing: float
) -> torch.Tensor:
    logits = hidden if head is None else head(hidden)
    return cross_entropy(
        logits.float(), labels, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing
    )
