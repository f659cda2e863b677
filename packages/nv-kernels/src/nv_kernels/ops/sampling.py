"""Sampling one token per row, with noise that is a function of seed, position and token id."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from nv_kernels.dispatch import choose_implementation
from nv_kernels.errors import KernelInputError
from nv_kernels.reference.sampling import TOKEN_MASK
from nv_kernels.reference.sampling import sample_shard as sample_shard_reference
from nv_kernels.reference.sampling import sample_tokens as sample_tokens_reference

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.logit_rules import LogitAdjustments, TokenFilters


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    adjustments: LogitAdjustments | None = None,
    filters: TokenFilters | None = None,
    backend: str = "auto",
) -> Tensor:
    """Draws each row's token from softmax(logits / temperature), or takes its best one.

    Each row goes through these steps, in fp32, in vLLM's order; greedy rows stop after the third:

    1. Tokens that `allowed_mask` does not allow get -inf; `logit_bias` is added.
    2. Logits of tokens in prompt or output are divided by the repetition penalty if positive, and
       multiplied if not.
    3. frequency penalty * count and, where the count is not 0, the presence penalty are
       subtracted; counts are of the output alone.
    4. Logits are divided by the temperature. Let p be their softmax.
    5. min-p drops tokens with p < min_p * max(p).
    6. top-k drops tokens below the k-th largest of the rest.
    7. top-p drops a token if the tokens above it reach top_p of the rest's probability.

    Tokens of equal logits are kept or dropped together, so top-k may keep more than k tokens.

    A draw is Gumbel-max: the argmax of logits / temperature + g, with g standard Gumbel noise. The
    noise is a hash of (seed, position, counter), so a row's draw depends on nothing but the row:
    not on the other rows, their number or their order. Rows that step 5, 6 or 7 applies to draw
    among all tokens at once, with the token id as counter. All others draw in two stages, which
    yields the same distribution from a sixteenth of the noise: first among groups of 16 token ids
    by their summed probability (the counter is -1 - the group's first id), then within the group.

    Args:
        logits: [num_rows, vocab_size], fp32, fp16 or bf16, last dimension contiguous; not changed.
            -inf keeps a token from being drawn; each row must hold a finite value that is allowed,
            and neither NaN nor +inf.
        temperatures: [num_rows] fp32, any stride; 0 takes the best token (the lowest id among
            equals). Others from 1e-30 to 1e30: beyond, products leave the range of fp32.
        seeds: [num_rows] int64, any value, any stride.
        positions: [num_rows] int64, any stride: the position in its sequence that each token will
            have.
        adjustments: Changes of logits; None for none.
        filters: Which tokens to leave out; None for none. A draw of a row without filters is the
            same whether this is None or not.
        backend: "auto", "torch" or "triton".

    Returns:
        Token ids, [num_rows] int64. For a row that breaks the rules above, any id.

    Raises:
        KernelInputError: A shape, dtype, stride or device is not allowed.

    Source: the Gumbel-max trick (Gumbel, "Statistical theory of extreme values", 1954); the hash is
    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014);
    repetition penalty: Keskar et al., "CTRL", arXiv:1909.05858, section 4.1; top-p: Holtzman et
    al., arXiv:1904.09751; min-p: Nguyen et al., arXiv:2407.01082.
    """
    _check_draw(logits, temperatures, seeds, positions)
    num_rows, vocab_size = logits.shape
    if adjustments is not None:
        adjustments.check(num_rows, vocab_size, logits.device)
    if filters is not None:
        filters.check(num_rows, logits.device)
    if choose_implementation(backend, logits.device) == "triton":
        from nv_kernels.triton.sampling import sample_tokens as sample_tokens_triton

        return sample_tokens_triton(logits, temperatures, seeds, positions, adjustments, filters)
    return sample_tokens_reference(logits, temperatures, seeds, positions, adjustments, filters)


def sample_shard(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    first_token: int,
    backend: str = "auto",
) -> Tensor:
    """Draws each row's token among one run of token ids, together with its score.

    For a vocabulary that is split over ranks: the maximum over the shards of what this returns,
    read by `winning_tokens`, is the token that `sample_tokens` draws from the whole row, if every
    shard begins at a multiple of 16. If not, it is a draw from the same distribution. No logits
    have to be gathered for it.

    Args:
        logits: The shard's, [num_rows, num_tokens]; otherwise as in `sample_tokens`, but a row may
            be -inf throughout.
        temperatures: As in `sample_tokens`.
        seeds: As in `sample_tokens`.
        positions: As in `sample_tokens`.
        first_token: Token id of the first column, from 0 and below 2**31 - num_tokens.
        backend: "auto", "torch" or "triton".

    Returns:
        [num_rows] int64: the score's bits, so turned that integers compare as scores do, above
        2**32 - 1 - token id, so that of equal scores the lowest id is the maximum.

    Raises:
        KernelInputError: A shape, dtype, stride or device is not allowed, or `first_token` is out
            of range.
    """
    _check_draw(logits, temperatures, seeds, positions)
    most = 2**31 - 1 - logits.shape[1]
    if not 0 <= first_token <= most:
        raise KernelInputError(
            f"first_token is {first_token}, but must be from 0 to {most}: token ids have 31 bits. "
            "Pass the id of the shard's first column."
        )
    if choose_implementation(backend, logits.device) == "triton":
        from nv_kernels.triton.sampling import sample_shard as sample_shard_triton

        return sample_shard_triton(logits, temperatures, seeds, positions, first_token=first_token)
    return sample_shard_reference(logits, temperatures, seeds, positions, first_token=first_token)


def winning_tokens(draws: Tensor) -> Tensor:
    """Reads the token ids out of what `sample_shard` returned, or of maxima of it.

    Args:
        draws: [num_rows] int64.

    Returns:
        Token ids, [num_rows] int64.
    """
    return TOKEN_MASK - (draws & TOKEN_MASK)


def _check_draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> None:
    check_tensor("logits", logits, "[num_rows, vocab_size]", [None, None], dtypes=FLOAT_DTYPES)
    check_last_dim_contiguous("logits", logits)
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        raise KernelInputError("logits has vocab_size 0, but a row needs at least one token.")
    for name, tensor, dtype in (
        ("temperatures", temperatures, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        check_tensor(name, tensor, "[num_rows]", [num_rows], dtypes=(dtype,), device=logits.device)
