"""The matrix product of a linear layer, fast also for a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear as linear_reference

from nv_kernels.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from nv_kernels.cpu import packed_linear
from nv_kernels.dispatch import choose_implementation

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ROWS = 32
_MAX_ROWS_IN_PARTS = 64
_MAX_ROWS_IN_PARTS_OF_SMALL = 128
_SMALL_WEIGHT = 2**22  # elements
_MAX_ROWS_AS_TWO = 256
_MAX_OUTPUTS_AS_TWO = 4096


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Multiplies rows by a weight matrix and adds a bias.

    A product with few rows does nothing but read the weight, and libraries read small weights
    slowly. On CUDA, such products in fp16 or bf16 therefore go to a kernel of ours where it was
    measured to be faster; everything else goes to PyTorch.

    Args:
        x: Rows, [num_rows, in_features], fp32, fp16 or bf16; not changed. Any strides but a
            contiguous last dimension.
        weight: [out_features, in_features], dtype of `x`, contiguous last dimension; or what
            `pack_linear_weight` made of it. On Hopper it is read while the kernel launched before
            this one may still run, so that kernel must not be what writes it.
        bias: [out_features], dtype of `x`; None for none.
        backend: "auto", "torch" or "triton".

    Returns:
        [num_rows, out_features], a new tensor.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees.
    """
    _check(x, weight)
    if bias is not None:
        sizes = [weight.shape[0]]
        check_tensor("bias", bias, "[out_features]", sizes, dtypes=(x.dtype,), device=x.device)
        check_last_dim_contiguous("bias", bias)
    if weight.is_mkldnn:
        return packed_linear.multiply(x, weight, bias)
    if (
        choose_implementation(backend, x.device) == "triton"
        and (backend == "triton" or _is_faster_here(x.shape[0], weight))
        and x.shape[1] > 0
    ):
        from nv_kernels.triton.linear import linear as linear_triton

        return linear_triton(x, weight, bias)
    return linear_reference(x, weight, bias)


def linear_parts(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """Multiplies rows by a weight matrix and may leave the last sum to the reader.

    A weight with few outputs is read fastest when the inputs, too, are shared out; what each share
    yields then has to be added up, which the operation that follows can do on its way
    (`add_rms_norm`).

    Args:
        x: As for `linear`.
        weight: As for `linear`.
        backend: As for `linear`.

    Returns:
        [num_parts, num_rows, out_features], a new tensor; the product is the sum of the parts, in
        their order, rounded to the dtype of `x`. One part has that dtype already, several are fp32.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees.
    """
    _check(x, weight)
    if weight.is_mkldnn:
        return packed_linear.multiply(x, weight, None)[None]
    if (
        choose_implementation(backend, x.device) == "triton"
        and (backend == "triton" or _is_faster_in_parts(x.shape[0], weight))
        and x.shape[1] > 0
    ):
        from nv_kernels.triton.linear import linear_parts as linear_parts_triton

        return linear_parts_triton(x, weight)
    if backend == "auto" and _is_faster_as_two(x, weight):
        return _multiply_as_two(x, weight)
    return linear_reference(x, weight)[None]


def _check(x: Tensor, weight: Tensor) -> None:
    check_tensor("x", x, "[num_rows, in_features]", [None, None], dtypes=FLOAT_DTYPES)
    layout, sizes = "[out_features, in_features]", [None, x.shape[1]]
    check_tensor("weight", weight, layout, sizes, dtypes=(x.dtype,), device=x.device)
    check_last_dim_contiguous("x", x)
    if not weight.is_mkldnn:  # which has no strides
        check_last_dim_contiguous("weight", weight)


def pack_linear_weight(weight: Tensor) -> Tensor:
    """Brings a weight into the layout in which `linear` reads it fastest on its device.

    Args:
        weight: [out_features, in_features]; not changed.

    Returns:
        A copy that nothing but `linear` and `linear_parts` can read, of the same shape and dtype;
        the weight itself where its own layout is the best there is, which is so on every device
        but a CPU.
    """
    return packed_linear.pack(weight) if packed_linear.can_pack(weight) else weight


def _is_faster_here(num_rows: int, weight: Tensor) -> bool:
    """Whether our kernel beats the library's; docs/kernels.md has the measurements."""
    return weight.element_size() == 2 and num_rows <= _MAX_ROWS and _is_cut_evenly(weight)


def _is_faster_in_parts(num_rows: int, weight: Tensor) -> bool:
    """The same for `linear_parts`."""
    is_small = weight.numel() <= _SMALL_WEIGHT
    max_rows = _MAX_ROWS_IN_PARTS_OF_SMALL if is_small else _MAX_ROWS_IN_PARTS
    return weight.element_size() == 2 and num_rows <= max_rows and _is_cut_evenly(weight)


def _is_faster_as_two(x: Tensor, weight: Tensor) -> bool:
    """Whether two products of half the inputs, at once, beat one; see docs/kernels.md.

    They do where one product leaves processors without work, or has to add up shares of its own.
    """
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    least = 65 if in_features > 2 * out_features else 129
    return (
        weight.is_cuda
        and weight.element_size() == 2
        and least <= num_rows <= _MAX_ROWS_AS_TWO
        and out_features <= _MAX_OUTPUTS_AS_TWO
        and in_features >= 1024
        and _is_cut_evenly(weight)
    )


def _multiply_as_two(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies the halves of the rows by the halves of the weight: two parts, in fp32."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    halves = x.view(num_rows, 2, in_features // 2).transpose(0, 1)
    weight_halves = weight.view(out_features, 2, in_features // 2).permute(1, 2, 0)
    return torch.bmm(halves, weight_halves, out_dtype=torch.float32)


def _is_cut_evenly(weight: Tensor) -> bool:
    return weight.shape[0] % 64 == 0 and weight.shape[1] % 64 == 0
