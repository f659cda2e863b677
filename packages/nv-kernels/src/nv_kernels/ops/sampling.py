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


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Draws each row's token from softmax(logits / temperature), or takes its best one.

    A draw is the argmax of logits / temperature + g, with g standard Gumbel noise. The noise of a
    token is a hash of (seed, position, token id), so a row's draw depends on nothing but the row:
    not on the other rows, their number or their order.

    Args:
        logits: [num_rows, vocab_size], fp32, fp16 or bf16, last dimension contiguous; not changed.
            -inf keeps a token from being drawn; each row must hold a finite value.
        temperatures: [num_rows] fp32; 0 takes the best token (the lowest id among equals).
        seeds: [num_rows] int64, any value.
        positions: [num_rows] int64, the position in its sequence that each token will have.
        backend: "auto", "torch" or "triton".

    Returns:
        Token ids, [num_rows] int64.

    Raises:
        KernelInputError: A shape, dtype, stride or device is not allowed.

    Source: the Gumbel-max trick (Gumbel, "Statistical theory of extreme values", 1954); the hash is
    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    _check_draw(logits, temperatures, seeds, positions)
    if choose_implementation(backend, logits.device) == "triton":
        from nv_kernels.triton.sampling import sample_tokens as sample_tokens_triton

        return sample_tokens_triton(logits, temperatures, seeds, positions)
    return sample_tokens_reference(logits, temperatures, seeds, positions)


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
    read by `winning_tokens`, is the token that `sample_tokens` draws from the whole row. No logits
    have to be gathered for it.

    Args:
        logits: The shard's, [num_rows, num_tokens]; otherwise as in `sample_tokens`, but a row may
            be -inf throughout.
        temperatures: As in `sample_tokens`.
        seeds: As in `sample_tokens`.
        positions: As in `sample_tokens`.
        first_token: Token id of the first column, below 2**32 - num_tokens.
        backend: "auto", "torch" or "triton".

    Returns:
        [num_rows] int64: the score's bits, so turned that integers compare as scores do, above
        2**32 - 1 - token id, so that of equal scores the lowest id is the maximum.

    Raises:
        KernelInputError: A shape, dtype, stride or device is not allowed.
    """
    _check_draw(logits, temperatures, seeds, positions)
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
        check_last_dim_contiguous(name, tensor)
