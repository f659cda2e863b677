"""rms_norm and add_rms_norm against an fp64 loop over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_oracles import (
    BAD_EPS,
    DTYPES,
    Target,
    assert_close,
    assert_same_bits,
    random_tensor,
    rms_norm_oracle,
    targets,
)
from nv_kernels import KernelInputError, add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-6
# fp32: a mean over up to 4097 squares and a reciprocal root stay within a few units in the last
# place. Half types: the normalised row and the product are rounded once each, half a unit of eps
# both, and a value next to a power of two can add the fp32 error on top.
RTOL = {torch.float32: 1e-6, torch.float16: 1.1 * 2**-10, torch.bfloat16: 1.1 * 2**-7}
ATOL = {torch.float32: 1e-7, torch.float16: 2**-23, torch.bfloat16: 1e-7}


def assert_normal(actual: Tensor, x: Tensor, weight: Tensor, eps: float = EPS) -> None:
    assert actual.dtype == x.dtype
    assert actual.shape == x.shape
    assert actual.is_contiguous()
    expected = rms_norm_oracle(x, weight, eps)
    assert_close(actual, expected, rtol=RTOL[x.dtype], atol=ATOL[x.dtype])


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(
    "shape", [(5, 64), (7,), (3, 1), (2, 3, 80), (2, 2, 2, 33), (40, 96), (2, 4097)]
)
def test_rows(target: Target, shape: tuple[int, ...]) -> None:
    x = random_tensor(1, *shape, target=target, scale=3.0)
    weight = random_tensor(2, shape[-1], target=target)
    before = x.clone()
    assert_normal(rms_norm(x, weight, eps=EPS, backend=target.backend), x, weight)
    assert_same_bits(x, before)


@pytest.mark.parametrize("target", targets())
def test_heads_of_a_fused_projection(target: Target) -> None:
    num_heads, head_dim = 6, 40
    qkv = random_tensor(3, 5, 2 * num_heads * head_dim, target=target)
    before = qkv.clone()
    key = qkv.view(5, -1, head_dim)[:, num_heads:]
    weight = random_tensor(4, head_dim, target=target)
    assert_normal(rms_norm(key, weight, eps=EPS, backend=target.backend), key, weight)
    assert_same_bits(qkv, before)


@pytest.mark.parametrize("target", targets())
def test_every_second_head(target: Target) -> None:
    x = random_tensor(21, 3, 6, 16, target=target)[:, ::2]
    weight = random_tensor(22, 16, target=target)
    assert_normal(rms_norm(x, weight, eps=EPS, backend=target.backend), x, weight)


@pytest.mark.parametrize("target", targets())
def test_strided_last_dimension(target: Target) -> None:
    x = random_tensor(5, 24, 3, target=target).T
    weight = random_tensor(6, 24, target=target)
    assert_normal(rms_norm(x, weight, eps=EPS, backend=target.backend), x, weight)


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_eps_counts_where_values_are_small(target: Target, eps: float) -> None:
    x = random_tensor(7, 3, 48, target=target, scale=1e-2)
    weight = random_tensor(8, 48, target=target)
    result = rms_norm(x, weight, eps=eps, backend=target.backend)
    assert_normal(result, x, weight, eps)
    zeros = rms_norm(torch.zeros_like(x), weight, eps=eps, backend=target.backend)
    assert not bool(zeros.any())


@pytest.mark.parametrize("target", targets())
def test_squares_beyond_the_range_of_fp16(target: Target) -> None:
    x = random_tensor(9, 2, 64, target=target, scale=3000.0)
    weight = torch.ones(64, dtype=target.dtype, device=target.device)
    assert_normal(rms_norm(x, weight, eps=EPS, backend=target.backend), x, weight)


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("shape", [(4, 72), (2, 3, 16), (1, 2, 2, 5), (3, 4097)])
def test_add(target: Target, shape: tuple[int, ...]) -> None:
    x = random_tensor(10, *shape, target=target)
    residual = random_tensor(11, *shape, target=target, scale=5.0)
    weight = random_tensor(12, shape[-1], target=target)
    before = x.clone(), residual.clone()

    normed, total = add_rms_norm(x, residual, weight, eps=EPS, backend=target.backend)

    # The sum of two values of a dtype, rounded once: fp64 holds it exactly.
    assert_same_bits(total, (x.double() + residual.double()).to(target.dtype))
    assert_normal(normed, total, weight)
    # The norm sees the sum as it was rounded.
    assert_same_bits(normed, rms_norm(total, weight, eps=EPS, backend=target.backend))
    assert_same_bits(x, before[0])
    assert_same_bits(residual, before[1])
    pointers = {tensor.data_ptr() for tensor in (x, residual, normed, total)}
    assert len(pointers) == 4


@pytest.mark.parametrize("target", targets())
def test_add_of_strided_views(target: Target) -> None:
    wide = random_tensor(13, 6, 2, 3, 24, target=target)
    x, residual = wide[:, 0, :2], wide[:, 1, ::2]
    weight = random_tensor(14, 24, target=target)
    before = wide.clone()
    normed, total = add_rms_norm(x, residual, weight, eps=EPS, backend=target.backend)
    assert_same_bits(total, (x.double() + residual.double()).to(target.dtype))
    assert_normal(normed, total, weight)
    assert_same_bits(wide, before)


@pytest.mark.parametrize("target", targets())
def test_no_rows(target: Target) -> None:
    x = random_tensor(15, 0, 16, target=target)
    weight = random_tensor(16, 16, target=target)
    assert rms_norm(x, weight, eps=EPS, backend=target.backend).shape == (0, 16)
    normed, total = add_rms_norm(x, x, weight, eps=EPS, backend=target.backend)
    assert normed.shape == total.shape == (0, 16)


@pytest.mark.parametrize("target", targets())
def test_a_row_does_not_depend_on_the_others(target: Target) -> None:
    x = random_tensor(17, 37, 56, target=target)
    weight = random_tensor(18, 56, target=target)
    together = rms_norm(x, weight, eps=EPS, backend=target.backend)
    for row in (0, 17, 36):
        alone = rms_norm(x[row : row + 1], weight, eps=EPS, backend=target.backend)
        assert_same_bits(alone[0], together[row])


@pytest.mark.parametrize("target", targets(dtypes=DTYPES[1:]))
def test_the_row_is_rounded_before_the_weight(target: Target) -> None:
    """The order of transformers; one rounding at the end would give other bits."""
    x = random_tensor(19, 8, 128, target=target)
    weight = random_tensor(20, 128, target=target)
    ones = torch.ones_like(weight)
    normal = rms_norm_oracle(x, ones, EPS)
    twice = (normal.to(target.dtype).double() * weight.double().cpu()).to(target.dtype)
    once = (normal * weight.double().cpu()).to(target.dtype)
    actual = rms_norm(x, weight, eps=EPS, backend=target.backend).cpu()
    assert (once != twice).double().mean() > 0.1
    # A normalised value that lies on a rounding boundary may fall to either side.
    assert (actual != twice).double().mean() < 0.01


@pytest.mark.parametrize("eps", BAD_EPS)
def test_eps_must_be_a_number_of_0_or_more(eps: Any) -> None:  # noqa: ANN401
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(KernelInputError, match=r"eps is .*, but must be a number of 0 or more"):
        rms_norm(x, weight, eps=eps)
    with pytest.raises(KernelInputError, match=r"eps is .*, but must be a number of 0 or more"):
        add_rms_norm(x, x, weight, eps=eps)


def test_errors_name_the_argument() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    cases: list[tuple[str, Tensor, Tensor]] = [
        ("x is a scalar", torch.tensor(1.0), weight),
        ("x has dtype torch.float64", x.double(), weight.double()),
        ("weight has shape", x, weight[:4]),
        ("weight has dtype", x, weight.half()),
        ("weight has stride 2", x, torch.ones(16)[::2]),
        ("weight is on meta", x, weight.to("meta")),
    ]
    for message, bad_x, bad_weight in cases:
        with pytest.raises(KernelInputError, match=message):
            rms_norm(bad_x, bad_weight, eps=EPS)
        with pytest.raises(KernelInputError, match=message.replace("x ", "residual ", 1)):
            add_rms_norm(bad_x, bad_x, bad_weight, eps=EPS)
    parts = torch.ones(3, 2, 8)
    bad_sums: list[tuple[str, Tensor]] = [
        ("x has shape", x[:1]),
        ("x has dtype torch.float16", x.half()),
        ("x has shape", parts[:, :1]),
        ("x has dtype torch.float16", parts.half()),
        ("be contiguous", parts.transpose(0, 1).contiguous().transpose(0, 1)),
        ("at least one part", parts[:0]),
    ]
    for message, bad_x in bad_sums:
        with pytest.raises(KernelInputError, match=message):
            add_rms_norm(bad_x, x, weight, eps=EPS)
