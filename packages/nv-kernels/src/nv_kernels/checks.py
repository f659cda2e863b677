"""Argument checks of the public ops.

Only host-side facts are compared (shape, stride, dtype, device), never tensor contents: a check
costs about a microsecond and cannot make the host wait for the device. What the contents must
fulfil (slots inside the cache, positions inside the table) stands in each op's docstring.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nv_kernels.errors import KernelInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_is_tensor(name: str, value: object) -> None:
    """Raises unless an argument is a tensor; for ops that look at it before `check_tensor` does.

    Raises:
        KernelInputError: It is something else.
    """
    if not isinstance(value, Tensor):
        raise KernelInputError(
            f"{name} is a {type(value).__name__}, but must be a tensor. Make one with "
            "torch.tensor(...)."
        )


def check_tensor(
    name: str,
    tensor: Tensor,
    layout: str,
    sizes: Sequence[int | None],
    *,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Raises unless the tensor has the shape, dtype and device that an op expects.

    Args:
        name: The argument's name, as the caller wrote it.
        tensor: The argument.
        layout: The expected shape in words, such as "[num_tokens, num_heads, head_dim]".
        sizes: The expected size of each dimension; None where any size will do.
        dtypes: The allowed dtypes.
        device: The device that the tensor must be on; None where any will do.

    Raises:
        KernelInputError: It is no tensor, or its shape, dtype or device differs.
    """
    check_is_tensor(name, tensor)
    shape = tensor.shape
    if not _fits(shape, sizes):
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise KernelInputError(
            f"{name} has shape {list(shape)}, but must be {layout} = [{wanted}]. "
            "Reshape or slice it to that layout before the call."
        )
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise KernelInputError(
            f"{name} has dtype {tensor.dtype}, but must be {allowed}. Convert it with .to(dtype)."
        )
    if device is not None and tensor.device != device:
        raise KernelInputError(
            f"{name} is on {tensor.device}, but the other arguments are on {device}. "
            f"Move it with .to('{device}')."
        )


def _fits(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    # A plain loop: this runs hundreds of times per step, and `any` takes three times as long.
    if len(shape) != len(sizes):
        return False
    for got, want in zip(shape, sizes, strict=False):
        if want is not None and want != got:
            return False
    return True


def check_eps(eps: float) -> None:
    """Raises unless a norm can add `eps` to a mean square.

    Raises:
        KernelInputError: It is no number, negative, infinite or NaN.
    """
    if not isinstance(eps, (int, float)) or not 0 <= eps < inf:
        raise KernelInputError(
            f"eps is {eps!r}, but must be a number of 0 or more. Pass what the model's config says."
        )


def check_bool(name: str, value: object) -> None:
    """Raises unless a flag is a bool.

    Raises:
        KernelInputError: It is something else, a tensor for example, which the host cannot read
            without waiting for the device.
    """
    if not isinstance(value, bool):
        raise KernelInputError(f"{name} is {value!r}, but must be a bool. Pass True or False.")


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    """Raises unless neighbours in the last dimension are neighbours in memory.

    Args:
        name: The argument's name, as the caller wrote it.
        tensor: The argument; its other dimensions may have any strides.

    Raises:
        KernelInputError: The last dimension is strided.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelInputError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension, but must have 1. "
            "Call .contiguous(), or keep that dimension innermost when the tensor is made."
        )
