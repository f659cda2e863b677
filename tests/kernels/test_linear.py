"""linear against the fp64 product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_oracles import Target, assert_close, assert_same_bits, random_tensor, targets
from nv_kernels import KernelInputError, linear

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# One rounding to the dtype; fp32 adds the error of its own sums.
RTOL = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def assert_product(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expected = x.double().cpu() @ weight.double().cpu().T
    if bias is not None:
        expected = expected + bias.double().cpu()
    rtol = RTOL[x.dtype]
    assert actual.dtype == x.dtype
    assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 8), (7, 40), (64, 512), (33, 1030)])
def test_shapes(target: Target, num_rows: int, out_features: int, in_features: int) -> None:
    x = random_tensor(1, num_rows, in_features, target=target)
    weight = random_tensor(2, out_features, in_features, target=target)
    bias = random_tensor(3, out_features, target=target) if out_features % 2 else None
    before = (x.clone(), weight.clone())
    actual = linear(x, weight, bias, backend=target.backend)
    assert actual.shape == (num_rows, out_features)
    if num_rows:
        assert_product(actual, x, weight, bias)
    assert_same_bits(x, before[0])
    assert_same_bits(weight, before[1])


@pytest.mark.parametrize("target", targets())
def test_strided_rows(target: Target) -> None:
    wide = random_tensor(4, 6, 100, target=target)
    weight = random_tensor(5, 11, 200, target=target)[:, 30:94]
    x = wide[::2, 20:84]
    assert_product(linear(x, weight, backend=target.backend), x, weight, None)


@pytest.mark.parametrize("target", targets(gpu_backends=("triton",)))
def test_a_row_does_not_depend_on_its_neighbours_in_our_kernel(target: Target) -> None:
    if target.backend == "torch":
        pytest.skip("PyTorch promises nothing of the kind")
    x = random_tensor(6, 4, 700, target=target)
    weight = random_tensor(7, 50, 700, target=target)
    together = linear(x, weight, backend=target.backend)
    for num_rows in (1, 2, 3):
        alone = linear(x[:num_rows], weight, backend=target.backend)
        assert_same_bits(alone, together[:num_rows])


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    with pytest.raises(KernelInputError, match="weight has shape"):
        linear(x, torch.zeros(3, 9))
    with pytest.raises(KernelInputError, match="bias has shape"):
        linear(x, weight, torch.zeros(2))
    with pytest.raises(KernelInputError, match="weight has dtype"):
        linear(x, weight.half())
    with pytest.raises(KernelInputError, match="x has stride"):
        linear(torch.zeros(8, 2).T, weight)
