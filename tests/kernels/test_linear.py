"""linear against the fp64 product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_oracles import Target, assert_close, assert_same_bits, random_tensor, targets
from nv_kernels import KernelInputError, add_rms_norm, linear, linear_parts

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
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 17, 130])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(1, 8), (7, 40), (64, 512), (33, 1030), (3, 0)]
)
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


@pytest.mark.parametrize("target", targets(gpu_backends=("triton",)))
@pytest.mark.parametrize("sizes", [(4, 2048, 4), (8, 4096, 8), (2, 64, 1)])
@pytest.mark.parametrize("in_features", [4096, 4100])
def test_tiles_of_one_row(target: Target, sizes: tuple[int, int, int], in_features: int) -> None:
    if target.backend == "torch":
        pytest.skip("PyTorch has no tiles")
    kernels = pytest.importorskip("nv_kernels.triton.linear")
    x = random_tensor(14, 1, in_features, target=target)
    weight = random_tensor(15, 11, in_features, target=target)
    actual = kernels.multiply_row(x, weight, None, tile=kernels.RowTile(*sizes))
    assert_product(actual, x, weight, None)


@pytest.mark.gpu
@pytest.mark.parametrize("in_features", [1024, 2560, 4096, 5120])
def test_one_row_of_a_real_vocabulary(in_features: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    target = Target("triton", "cuda", torch.bfloat16)
    x = random_tensor(16, 1, in_features, target=target)
    weight = torch.randn(151936, in_features, device="cuda", dtype=torch.bfloat16)
    some = slice(None, None, 97)
    assert_product(linear(x, weight, backend="triton")[:, some], x, weight[some], None)


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
    x = random_tensor(6, 16, 700, target=target)
    weight = random_tensor(7, 50, 700, target=target)
    together = linear(x, weight, backend=target.backend)
    for num_rows in (2, 3, 9):
        alone = linear(x[:num_rows], weight, backend=target.backend)
        assert_same_bits(alone, together[:num_rows])


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("num_rows", [0, 1, 2, 20])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 512), (7, 40), (130, 1024)])
def test_parts_add_up(target: Target, num_rows: int, out_features: int, in_features: int) -> None:
    x = random_tensor(8, num_rows, in_features, target=target)
    weight = random_tensor(9, out_features, in_features, target=target)
    parts = linear_parts(x, weight, backend=target.backend)
    assert parts.shape[1:] == (num_rows, out_features)
    assert parts.dtype == (x.dtype if len(parts) == 1 else torch.float32)
    if target.backend == "triton" and num_rows > 1 and in_features >= 512:
        assert len(parts) > 1
    if num_rows:
        assert_product(parts.sum(0).to(x.dtype), x, weight, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features", "num_parts"),
    [
        (65, 4096, 12288, 2),
        (129, 1024, 2048, 2),
        (256, 1024, 3072, 2),
        (200, 4096, 4096, 2),
        (257, 4096, 12288, 1),
        (200, 8192, 4096, 1),
        (200, 100, 4096, 1),
    ],
)
def test_the_librarys_parts_add_up(
    num_rows: int, out_features: int, in_features: int, num_parts: int, dtype: torch.dtype
) -> None:
    target = Target("auto", "cuda", dtype)
    # Rows and weights may be slices: each half is read where it lies.
    x = random_tensor(14, num_rows, in_features + 64, target=target)[:, 64:]
    weight = random_tensor(15, out_features, in_features + 8, target=target)[:, 8:]
    parts = linear_parts(x, weight)
    assert parts.shape == (num_parts, num_rows, out_features)
    assert_product(parts.sum(0).to(dtype), x, weight, None)


@pytest.mark.parametrize("target", targets())
def test_the_norm_that_follows_adds_the_parts(target: Target) -> None:
    x = random_tensor(10, 3, 512, target=target)
    weight = random_tensor(11, 64, 512, target=target)
    residual, scale = random_tensor(12, 3, 64, target=target), random_tensor(13, 64, target=target)
    parts = linear_parts(x, weight, backend=target.backend)
    product = torch.zeros_like(residual, dtype=torch.float32)
    for part in parts:
        product += part
    whole = product.to(x.dtype)
    expected = add_rms_norm(whole, residual, scale, eps=1e-6, backend=target.backend)
    actual = add_rms_norm(parts, residual, scale, eps=1e-6, backend=target.backend)
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


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
    with pytest.raises(KernelInputError, match="weight has shape"):
        linear_parts(x, torch.zeros(3, 9))
