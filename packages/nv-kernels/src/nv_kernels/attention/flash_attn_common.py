"""What the adapters of both flash-attn packages share: limits, and rows that belong to no sequence.

The packages' kernels know sequences only. A batch of ours may have more rows, as captured graphs
need them, and promises zeros there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.attention.backend import AttentionShape
    from nv_kernels.metadata import AttentionMetadata

_MAX_HEAD_DIM = 256


def unsupported_shape_reason(shape: AttentionShape) -> str | None:
    """Says which dtype or head size neither package computes, as a clause; None if both do."""
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {shape.dtype}"
    if shape.cache_dtype != shape.dtype:
        return f"it reads no cache of {shape.cache_dtype}, only of {shape.dtype}"
    if shape.head_dim > _MAX_HEAD_DIM:
        return f"it supports head_dim up to {_MAX_HEAD_DIM}, not {shape.head_dim}"
    return None


def has_no_context(metadata: AttentionMetadata) -> bool:
    """Whether no token sees any key, so that there is nothing to launch, and no grid to do it."""
    longest = min(metadata.max_query_len, metadata.max_context_len)
    return metadata.num_tokens == 0 or metadata.num_seqs == 0 or longest == 0


def num_decode_rows(metadata: AttentionMetadata) -> int:
    """Counts the rows to decode: row i is the one query token of sequence i.

    Padding comes last (see `AttentionMetadata`), so what is left over on either side is padding. A
    padded sequence has no context, for which the kernels write zeros.
    """
    return min(metadata.num_tokens, metadata.num_seqs)


def append_padding(output: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Adds zeros for the tokens behind those that were decoded.

    Args:
        output: [num_decode_rows, num_heads, head_dim].
        metadata: The batch.

    Returns:
        [num_tokens, num_heads, head_dim]; `output` itself if it has all tokens.
    """
    num_missing = metadata.num_tokens - output.shape[0]
    return pad(output, (0, 0, 0, 0, 0, num_missing)) if num_missing else output


def clear_padding(output: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Zeroes the rows after the last sequence, which the kernels leave as fresh memory was.

    Args:
        output: [num_tokens, num_heads, head_dim]; changed in place. The host does not wait.
        metadata: The batch.

    Returns:
        `output`.
    """
    row = torch.arange(metadata.num_tokens, device=output.device)
    is_padding = row >= metadata.cu_seqlens_q[-1]
    return output.masked_fill_(is_padding[:, None, None], 0)
