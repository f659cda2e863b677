"""Drawing from logits of which every rank holds a part.

Each rank finds the best of its own token ids; the best of these is the draw, the same on every rank
and the same as from the whole row, because noise is keyed by token id. Eight bytes a row travel
instead of the vocabulary. What needs the whole row (top-k, top-p, penalties) gathers it instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nv_kernels import sample_shard, sample_tokens, winning_tokens
from nv_models import CausalLM

_NO_DRAW = torch.iinfo(torch.int64).min
"""Below every draw: of a rank that holds nothing but padding."""


def sample_from_shard(
    model: CausalLM, shard: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Draws one token per row by temperature alone.

    Args:
        model: The model, for this rank's part of the vocabulary and the other ranks.
        shard: What `CausalLM.compute_logits_shard` returned, [num_rows, tokens per rank].
        temperatures: See `nv_kernels.sample_tokens`.
        seeds: See `nv_kernels.sample_tokens`.
        positions: See `nv_kernels.sample_tokens`.

    Returns:
        Token ids, [num_rows] int64, the same on every rank.
    """
    ranks, num_tokens = model.tensor_parallel, model.num_shard_tokens
    if ranks.size == 1:
        return sample_tokens(shard, temperatures, seeds, positions)
    if num_tokens == 0:
        draws = torch.full_like(seeds, _NO_DRAW)
    else:
        draws = sample_shard(
            shard[:, :num_tokens], temperatures, seeds, positions, first_token=model.first_token
        )
    return winning_tokens(ranks.all_reduce_max(draws))
