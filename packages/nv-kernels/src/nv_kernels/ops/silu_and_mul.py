"""The gated activation between the two projections of a SwiGLU MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.checks import FLOAT_DTYPES, check_is_tensor, check_tensor
from nv_kernels.dispatch import choose_implementation
from nv_kernels.errors import KernelInputError
from nv_kernels.reference.silu_and_mul import silu_and_mul as silu_and_mul_reference

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_mul(gate_up: Tensor, *, backend: str = "auto") -> Tensor:
    """Multiplies the SiLU of the first half of each row by its second half.

    Args:
        gate_up: Rows of n gates and n values, [..., 2 * n], fp32, fp16 or bf16, any strides; not
            changed.
        backend: "auto", "torch" or "triton".

    Returns:
        A new contiguous tensor, [..., n], dtype of `gate_up`.

    Raises:
        KernelInputError: The shape or dtype is not allowed.

    Source: "GLU Variants Improve Transformer" (arXiv:2002.05202).
    """
    check_is_tensor("gate_up", gate_up)
    check_tensor("gate_up", gate_up, "[..., 2 * n]", gate_up.shape, dtypes=FLOAT_DTYPES)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise KernelInputError(
            f"gate_up has shape {list(gate_up.shape)}, but its last dimension must hold n gates "
            "and n values, an even number. Concatenate gate and up in that dimension."
        )
    if choose_implementation(backend, gate_up.device) == "triton":
        from nv_kernels.triton.silu_and_mul import silu_and_mul as silu_and_mul_triton

        return silu_and_mul_triton(gate_up)
    return silu_and_mul_reference(gate_up)
