"""Log-probabilities of chosen tokens and of the most probable ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from nv_kernels.dispatch import choose_implementation
from nv_kernels.errors import KernelInputError
from nv_kernels.reference.logprobs import TokenLogprobs
from nv_kernels.reference.logprobs import token_logprobs as token_logprobs_reference

if TYPE_CHECKING:
    from torch import Tensor

MAX_KERNEL_TOP = 32
"""More most probable tokens than this are found by sorting."""


def token_logprobs(
    logits: Tensor, token_ids: Tensor, *, num_top: int, backend: str = "auto"
) -> TokenLogprobs:
    """Computes log softmax(logits) of one token per row and of the row's most probable tokens.

    Tokens are ordered by logit, and equal ones by id, lowest first; ranks are places in this order.

    Args:
        logits: [num_rows, vocab_size], fp32, fp16 or bf16, last dimension contiguous; not changed.
            Neither NaN nor +inf; computed in fp32.
        token_ids: One token of each row, [num_rows] int64, in [0, vocab_size).
        num_top: How many of the most probable tokens to return, from 0 to vocab_size. Up to 32 are
            found in the same read of the logits; more cost a sort of the rows.
        backend: "auto", "torch" or "triton".

    Returns:
        See `TokenLogprobs`.

    Raises:
        KernelInputError: A shape, dtype, stride or device is not allowed.
    """
    check_tensor("logits", logits, "[num_rows, vocab_size]", [None, None], dtypes=FLOAT_DTYPES)
    check_last_dim_contiguous("logits", logits)
    num_rows, vocab_size = logits.shape
    check_tensor(
        "token_ids", token_ids, "[num_rows]", [num_rows], dtypes=(torch.int64,),
        device=logits.device,
    )  # fmt: skip
    if not 0 <= num_top <= vocab_size:
        raise KernelInputError(
            f"num_top is {num_top}, but must be in [0, {vocab_size}], the number of tokens."
        )
    if choose_implementation(backend, logits.device) == "triton" and num_top <= MAX_KERNEL_TOP:
        from nv_kernels.triton.logprobs import token_logprobs as token_logprobs_triton

        return token_logprobs_triton(logits, token_ids, num_top)
    return token_logprobs_reference(logits, token_ids, num_top)
