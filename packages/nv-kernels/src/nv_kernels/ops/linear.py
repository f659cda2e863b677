"""The matrix product of a linear layer, fast also for a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import linear as linear_reference

from nv_kernels.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from nv_kernels.dispatch import choose_implementation

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ROWS = 4
_MAX_OUTPUTS_FOR_SEVERAL_ROWS = 2048


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
        weight: [out_features, in_features], dtype of `x`, contiguous last dimension.
        bias: [out_features], dtype of `x`; None for none.
        backend: "auto", "torch" or "triton".

    Returns:
        [num_rows, out_features], a new tensor.

    Raises:
        KernelInputError: A shape, dtype, device or stride disagrees.
    """
    check_tensor("x", x, "[num_rows, in_features]", [None, None], dtypes=FLOAT_DTYPES)
    num_rows, in_features = x.shape
    dtypes, device = (x.dtype,), x.device
    layout = "[out_features, in_features]"
    check_tensor("weight", weight, layout, [None, in_features], dtypes=dtypes, device=device)
    if bias is not None:
        sizes = [weight.shape[0]]
        check_tensor("bias", bias, "[out_features]", sizes, dtypes=dtypes, device=device)
        check_last_dim_contiguous("bias", bias)
    check_last_dim_contiguous("x", x)
    check_last_dim_contiguous("weight", weight)
    if choose_implementation(backend, device) == "triton" and (
        backend == "triton" or _is_faster_here(num_rows, weight)
    ):
        from nv_kernels.triton.linear import linear as linear_triton

        return linear_triton(x, weight, bias)
    return linear_reference(x, weight, bias)


def _is_faster_here(num_rows: int, weight: Tensor) -> bool:
    """Whether our kernel beats the library's.

    Measured on an H200 (benchmarks/kernels/bench_linear.py, bf16, microseconds, ours / library):
    one row 4096 x 1024 4.3 / 5.0, 1024 x 2048 3.7 / 12.8, 6144 x 1024 5.5 / 6.1, 1024 x 3072
    4.3 / 6.7, 4096 x 12288 26.3 / 29.3, 151936 x 1024 74 / 79; two to four rows 1024 x 2048
    4.2 to 5.3 / 8.2 to 8.6, 1024 x 3072 5.7 to 6.8 / 6.7 to 6.9, all wider ones slower.
    """
    if weight.element_size() != 2:
        return False
    if num_rows == 1:
        return True
    return 1 < num_rows <= _MAX_ROWS and weight.shape[0] <= _MAX_OUTPUTS_FOR_SEVERAL_ROWS
