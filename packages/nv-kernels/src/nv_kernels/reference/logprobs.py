"""Log-probabilities of tokens, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one token per row, and of the row's most probable tokens.

    Attributes:
        logprobs: The token's, [num_rows] fp32.
        ranks: Its place among all tokens, 1 for the most probable, [num_rows] int64.
        top_logprobs: The most probable tokens', descending, [num_rows, num_top] fp32.
        top_token_ids: Their ids, [num_rows, num_top] int64.
    """

    logprobs: Tensor
    ranks: Tensor
    top_logprobs: Tensor
    top_token_ids: Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Implements `nv_kernels.ops.logprobs.token_logprobs`."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_before = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return TokenLogprobs(
        logprobs=logprobs.gather(1, token_ids[:, None])[:, 0],
        ranks=1 + is_before.sum(dim=-1),
        top_logprobs=logprobs.gather(1, order),
        top_token_ids=order,
    )
