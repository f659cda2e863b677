"""silu_and_mul against the fp64 formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_oracles import (
    Target,
    assert_close,
    assert_same_bits,
    random_tensor,
    silu_and_mul_oracle,
    targets,
)
from nv_kernels import KernelInputError, silu_and_mul

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Half types: the activation and the product are rounded once each, half a unit of eps both. fp32
# adds the exponential's own error of a few units. Below, the smallest normal number of fp16.
RTOL = {torch.float32: 1e-6, torch.float16: 1.1 * 2**-10, torch.bfloat16: 1.1 * 2**-7}
ATOL = {torch.float32: 1e-12, torch.float16: 2**-14, torch.bfloat16: 1e-12}


def assert_activated(actual: Tensor, gate_up: Tensor) -> None:
    expected = silu_and_mul_oracle(gate_up)
    assert actual.dtype == gate_up.dtype
    assert actual.is_contiguous()
    assert_close(actual, expected, rtol=RTOL[gate_up.dtype], atol=ATOL[gate_up.dtype])


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("shape", [(4, 64), (3, 2), (10,), (2, 3, 14), (2, 2, 2, 6), (3, 3072)])
def test_shapes(target: Target, shape: tuple[int, ...]) -> None:
    gate_up = random_tensor(1, *shape, target=target, scale=3.0)
    before = gate_up.clone()
    assert_activated(silu_and_mul(gate_up, backend=target.backend), gate_up)
    assert_same_bits(gate_up, before)


@pytest.mark.parametrize("target", targets())
def test_strided_rows(target: Target) -> None:
    wide = random_tensor(2, 6, 40, target=target)
    for gate_up in (wide[:, 4:30], wide[::2], wide.T, wide.view(6, 4, 10)[:, ::2]):
        assert_activated(silu_and_mul(gate_up, backend=target.backend), gate_up)


# exp(60000) is inf, which 1 / (1 + inf) turns into the right zero; only the interpreter tells.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("target", targets())
def test_extreme_gates(target: Target) -> None:
    gates = torch.tensor([-60000.0, -100.0, -20.0, 0.0, 20.0, 100.0, 60000.0])
    row = torch.cat((gates, torch.full_like(gates, 0.5))).to(target.device, target.dtype)
    actual = silu_and_mul(row, backend=target.backend)
    assert not bool(actual.isnan().any())
    assert_activated(actual, row)


@pytest.mark.parametrize("target", targets())
def test_no_rows(target: Target) -> None:
    empty = random_tensor(3, 0, 8, target=target)
    assert silu_and_mul(empty, backend=target.backend).shape == (0, 4)


def test_errors_name_the_argument() -> None:
    with pytest.raises(KernelInputError, match=r"gate_up has shape \[2, 5\]"):
        silu_and_mul(torch.ones(2, 5))
    with pytest.raises(KernelInputError, match="gate_up has dtype"):
        silu_and_mul(torch.ones(2, 4, dtype=torch.int64))
