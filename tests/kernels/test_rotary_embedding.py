"""rotary_embedding against fp64 complex multiplication, pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_oracles import (
    Target,
    assert_close,
    assert_same_bits,
    random_tensor,
    rotary_oracle,
    targets,
)
from nv_kernels import KernelInputError, rotary_embedding

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# A result is q1 * cos - q2 * sin. Rounding cosine and sine, the two products and the difference
# to the dtype costs half a unit each: less than 3/2 eps of |q1| + |q2|, and inputs stay under 5.
ATOL = {torch.float32: 2e-6, torch.float16: 15 * 2**-10, torch.bfloat16: 15 * 2**-7}
# Typical errors are far smaller; this catches one wrong element among good ones on average.
MEAN_ATOL = {dtype: atol / 20 for dtype, atol in ATOL.items()}


def make_cache(max_position: int, rotary_dim: int, device: str) -> Tensor:
    frequencies = 100.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device, torch.float32)


def assert_rotated(actual: Tensor, x: Tensor, positions: Tensor, cache: Tensor) -> None:
    assert actual.dtype == x.dtype
    assert actual.shape == x.shape
    assert actual.is_contiguous()
    expected = rotary_oracle(x, positions, cache)
    assert_close(actual, expected, rtol=0, atol=ATOL[x.dtype])
    error = (actual.double().cpu() - expected).abs()
    assert error.mean() < MEAN_ATOL[x.dtype]
    # Dimensions that are not rotated pass without any rounding.
    rotary_dim = cache.shape[1]
    assert_same_bits(actual[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 16, 16), (9, 3, 64, 64), (3, 1, 80, 80), (5, 5, 32, 8), (2, 1, 96, 72), (1, 1, 8, 2)],
)
def test_fused_projection(
    target: Target,
    index_dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
) -> None:
    positions = torch.tensor([7, 0, 31, 7, 12], dtype=index_dtype, device=target.device)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = random_tensor(1, len(positions), width, target=target)
    before = qkv.clone()
    heads = qkv.view(len(positions), -1, head_dim)
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    cache = make_cache(32, rotary_dim, target.device)

    rotated = rotary_embedding(query, key, positions, cache, backend=target.backend)

    assert_rotated(rotated[0], query, positions, cache)
    assert_rotated(rotated[1], key, positions, cache)
    assert_same_bits(qkv, before)


@pytest.mark.parametrize("target", targets())
def test_query_and_key_have_strides_of_their_own(target: Target) -> None:
    query = random_tensor(7, 3, 8, 20, target=target)[:, ::2, :16]
    key = random_tensor(8, 2, 3, 16, target=target).transpose(0, 1)
    positions = torch.tensor([5, 1, 3], device=target.device)
    cache = make_cache(8, 16, target.device)
    rotated = rotary_embedding(query, key, positions, cache, backend=target.backend)
    assert_rotated(rotated[0], query, positions, cache)
    assert_rotated(rotated[1], key, positions, cache)


@pytest.mark.parametrize("target", targets())
def test_position_zero_changes_nothing(target: Target) -> None:
    query = random_tensor(2, 2, 3, 24, target=target)
    key = random_tensor(3, 2, 1, 24, target=target)
    positions = torch.zeros(2, dtype=torch.int64, device=target.device)
    cache = make_cache(4, 24, target.device)
    rotated = rotary_embedding(query, key, positions, cache, backend=target.backend)
    assert torch.equal(rotated[0], query)
    assert torch.equal(rotated[1], key)


@pytest.mark.parametrize("target", targets())
def test_scores_depend_on_distance_alone(target: Target) -> None:
    """The property that the rotation exists for, independent of any formula."""
    query = random_tensor(4, 1, 2, 32, target=target).expand(6, -1, -1)
    key = random_tensor(5, 1, 2, 32, target=target).expand(6, -1, -1)
    cache = make_cache(64, 32, target.device)
    early = torch.tensor([0, 3, 8, 13, 20, 30], device=target.device)
    rotated_query, _ = rotary_embedding(query, key, early + 5, cache, backend=target.backend)
    _, rotated_key = rotary_embedding(query, key, early, cache, backend=target.backend)
    scores = (rotated_query.double() * rotated_key.double()).sum(-1)
    spread = (scores - scores[:1]).abs().max().item()
    # A score sums 32 products of inputs under 4, each off by some eps.
    assert spread < 32 * 4 * 3 * torch.finfo(target.dtype).eps


@pytest.mark.parametrize("target", targets())
def test_no_tokens(target: Target) -> None:
    query = random_tensor(6, 0, 3, 16, target=target)
    positions = torch.zeros(0, dtype=torch.int64, device=target.device)
    cache = make_cache(4, 16, target.device)
    rotated = rotary_embedding(query, query, positions, cache, backend=target.backend)
    assert rotated[0].shape == rotated[1].shape == (0, 3, 16)


def test_errors_name_the_argument() -> None:
    query, key = torch.ones(3, 4, 16), torch.ones(3, 2, 16)
    positions, cache = torch.zeros(3, dtype=torch.int64), make_cache(4, 16, "cpu")
    cases: list[tuple[str, tuple[Tensor, Tensor, Tensor, Tensor]]] = [
        ("query has shape", (query[0], key, positions, cache)),
        ("query has dtype", (query.double(), key.double(), positions, cache)),
        ("key has shape", (query, key[:2], positions, cache)),
        ("key has dtype", (query, key.half(), positions, cache)),
        ("positions has shape", (query, key, positions[:2], cache)),
        ("positions has dtype", (query, key, positions.float(), cache)),
        ("cos_sin_cache has dtype", (query, key, positions, cache.half())),
        ("rotary_dim of 15", (query, key, positions, cache[:, :15])),
        ("rotary_dim of 32", (query, key, positions, make_cache(4, 32, "cpu"))),
        ("rotary_dim of 0", (query, key, positions, cache[:, :0])),
        ("query has stride 2", (torch.ones(3, 4, 32)[..., ::2], key, positions, cache)),
    ]
    for message, arguments in cases:
        with pytest.raises(KernelInputError, match=message):
            rotary_embedding(*arguments)
