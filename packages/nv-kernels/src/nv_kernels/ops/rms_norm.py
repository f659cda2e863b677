"""Root mean square normalisation, alone and after a residual addition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
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
        weight: Scale of each element, [n], contiguous, dtype of `x`.
        eps: Added to the mean square.
        backend: "auto", "torch" or "triton".

    Returns:
        A new contiguous tensor, shape and dtype of `x`.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees.

    Source: "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """
    _check_norm(x, weight)
    if choose_implementation(backend, x.device) == "triton":
        from nv_kernels.triton.rms_norm import rms_norm as rms_norm_triton

        return rms_norm_triton(x, weight, eps=eps)
    return rms_norm_reference(x, weight, eps=eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Adds the residual and normalises the sum.

    Args:
        x: Output of the last layer, [..., n], fp32, fp16 or bf16, any strides; not changed.
        residual: The residual stream, shape and dtype of `x`, any strides; not changed.
        weight: Scale of each element, [n], contiguous, dtype of `x`.
        eps: Added to the mean square.
        backend: "auto", "torch" or "triton".

    Returns:
        The normalised sum and the sum itself (the new residual, rounded to the dtype of `x`; the
        norm sees it rounded), both new contiguous tensors.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees.
    """
    _check_norm(x, weight)
    check_tensor(
        "residual", residual, "the shape of x", x.shape, dtypes=(x.dtype,), device=x.device
    )
    if choose_implementation(backend, x.device) == "triton":
        from nv_kernels.triton.rms_norm import add_rms_norm as add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps=eps)
    return add_rms_norm_reference(x, residual, weight, eps=eps)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    if x.dim() == 0:
        raise KernelInputError(
            "x is a scalar, but must be [..., n]. Pass rows, or add a dimension with x[None]."
        )
    check_tensor("x", x, "[..., n]", x.shape, dtypes=FLOAT_DTYPES)
    check_tensor("weight", weight, "[n]", x.shape[-1:], dtypes=(x.dtype,), device=x.device)
    check_last_dim_contiguous("weight", weight)
