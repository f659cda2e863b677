"""Root mean square normalisation, alone and after a residual addition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.checks import (
    FLOAT_DTYPES,
    check_eps,
    check_is_tensor,
    check_last_dim_contiguous,
    check_tensor,
)
from nv_kernels.dispatch import choose_implementation
from nv_kernels.errors import KernelInputError
from nv_kernels.reference.rms_norm import add_rms_norm as add_rms_norm_reference
from nv_kernels.reference.rms_norm import rms_norm as rms_norm_reference

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, backend: str = "auto") -> Tensor:
    """Scales each row to a root mean square of one, then by the weight.

    The mean is taken in fp32, and the normalised row is rounded to the dtype of `x` before it is
    multiplied by the weight, as transformers does.

    Args:
        x: Rows, [..., n], fp32, fp16 or bf16, any strides; not changed.
        weight: Scale of each element, [n], contiguous, dtype of `x`. On Hopper
            it is read while the kernel launched before may still run, so that kernel must not be
            what writes it.
        eps: Added to the mean square.
        backend: "auto", "torch" or "triton".

    Returns:
        A new contiguous tensor, shape and dtype of `x`.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees.

    Source: "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """
    _check_norm(x, weight, eps)
    if choose_implementation(backend, x.device) == "triton":
        from nv_kernels.triton.rms_norm import rms_norm as rms_norm_triton

        return rms_norm_triton(x, weight, eps=eps)
    return rms_norm_reference(x, weight, eps=eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Adds the residual and normalises the sum.

    Args:
        x: Output of the last layer, [..., n], dtype of `residual`, any strides; or, with one more
            dimension in front, parts that add up to it (see `linear_parts`): one in that dtype, or
            several in fp32, contiguous. Not changed.
        residual: The residual stream, [..., n], fp32, fp16 or bf16, any strides; not changed.
        weight: Scale of each element, [n], contiguous, dtype of `residual`; read as in
            `rms_norm`.
        eps: Added to the mean square.
        backend: "auto", "torch" or "triton".

    Returns:
        The normalised sum and the sum itself (the new residual), both new contiguous tensors, shape
        and dtype of `residual`. The norm sees the sum rounded; parts are added up in fp32 and
        rounded before the residual is added.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees.
    """
    _check_norm(residual, weight, eps, name="residual")
    check_is_tensor("x", x)
    if x.dim() == residual.dim() + 1 and x.shape[0] == 1:
        x = x[0]
    if x.dim() == residual.dim() + 1:
        sizes = [x.shape[0], *residual.shape]
        layout = "[num_parts, *residual.shape]"
        check_tensor("x", x, layout, sizes, dtypes=(torch.float32,), device=residual.device)
        if not x.is_contiguous() or x.shape[0] == 0:
            raise KernelInputError(
                f"x holds parts of shape {list(x.shape)} and strides {list(x.stride())}, but must "
                "be contiguous and have at least one part; pass what linear_parts returned"
            )
    else:
        dtypes = (residual.dtype,)
        layout = "the shape of residual"
        check_tensor("x", x, layout, residual.shape, dtypes=dtypes, device=residual.device)
    if choose_implementation(backend, x.device) == "triton":
        from nv_kernels.triton.rms_norm import add_rms_norm as add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps=eps)
    return add_rms_norm_reference(x, residual, weight, eps=eps)


def _check_norm(x: Tensor, weight: Tensor, eps: float, *, name: str = "x") -> None:
    check_is_tensor(name, x)
    if x.dim() == 0:
        raise KernelInputError(
            f"{name} is a scalar, but must be [..., n]. Pass rows, or add a dimension with [None]."
        )
    check_tensor(name, x, "[..., n]", x.shape, dtypes=FLOAT_DTYPES)
    check_tensor("weight", weight, "[n]", x.shape[-1:], dtypes=(x.dtype,), device=x.device)
    check_last_dim_contiguous("weight", weight)
    check_eps(eps)
