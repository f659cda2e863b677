"""Views a tensor as rows, for kernels that treat the last dimension as one unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Rows(NamedTuple):
    """A tensor seen as num_outer * num_inner rows with a contiguous last dimension.

    Two levels are kept because the hot strided case is a slice of a fused projection,
    [num_tokens, num_heads, head_dim], whose tokens are further apart than its heads.
    """

    data: Tensor
    num_rows: int
    num_inner: int
    outer_stride: int
    inner_stride: int


def as_rows(x: Tensor) -> Rows:
    """Views a tensor as rows, copying only layouts that two strides cannot describe.

    Args:
        x: At least one dimension, any strides.

    Returns:
        The rows, in the order of `x.reshape(-1, x.shape[-1])`.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() not in (2, 3):
        x = x.reshape(-1, x.shape[-1])
    if x.dim() == 2:
        return Rows(x, x.shape[0], 1, x.stride(0), 0)
    return Rows(x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
