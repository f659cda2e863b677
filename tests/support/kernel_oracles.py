"""What the kernel tests share: fp64 oracles as plain loops, poisoned caches, and run targets.

Nothing here calls nv_kernels: the oracles are a second, independent statement of the maths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _pytest.mark.structures import ParameterSet

HAS_CUDA = torch.cuda.is_available()
# Looked for, not imported: tests/kernels/conftest.py decides how Triton is first imported.
HAS_TRITON = find_spec("triton") is not None
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BAD_EPS = ("x", None, -1e-6, float("nan"), float("inf"), torch.tensor(1e-6))


@dataclass(frozen=True)
class Target:
    """One implementation on one device in one dtype."""

    backend: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}-{str(self.dtype).removeprefix('torch.')}"


def targets(
    gpu_backends: Sequence[str] = ("torch", "triton"),
    dtypes: Sequence[torch.dtype] = DTYPES,
    cpu_backends: Sequence[str] = ("torch",),
) -> list[ParameterSet]:
    """Lists the targets: PyTorch on the CPU, Triton's interpreter, everything on CUDA.

    The interpreter computes bf16 matrix products wrongly, so bf16 is left to the GPU. Where a GPU
    is present, kernels are compiled and the interpreter is not available.
    """
    cpu = [Target(backend, "cpu", dtype) for backend in cpu_backends for dtype in dtypes]
    interpreted = [Target("triton", "cpu", dtype) for dtype in dtypes if dtype != torch.bfloat16]
    cuda = [Target(backend, "cuda", dtype) for backend in gpu_backends for dtype in dtypes]
    no_interpreter = pytest.mark.skipif(
        HAS_CUDA or not HAS_TRITON, reason="kernels are compiled where CUDA is, or Triton is absent"
    )
    no_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
    return [
        *(pytest.param(target, id=str(target)) for target in cpu),
        *(pytest.param(target, id=str(target), marks=no_interpreter) for target in interpreted),
        *(
            pytest.param(target, id=str(target), marks=[pytest.mark.gpu, no_cuda])
            for target in cuda
        ),
    ]


def random_tensor(seed: int, *shape: int, target: Target, scale: float = 1.0) -> Tensor:
    """Draws on the CPU, so that every target sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(target.device, target.dtype)


def bits(tensor: Tensor) -> Tensor:
    """Views the memory as integers, in which NaN equals NaN and -0 differs from 0."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(size)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(bits(actual), bits(expected))


def assert_close(actual: Tensor, expected: Tensor, *, rtol: float, atol: float) -> None:
    """Compares in fp64; a NaN on either side fails."""
    torch.testing.assert_close(
        actual.double().cpu(), expected.double().cpu(), rtol=rtol, atol=atol, equal_nan=False
    )


# --- oracles


def rms_norm_oracle(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    n = x.shape[-1]
    result = torch.empty(x.shape, dtype=torch.float64)
    weights = weight.double().tolist()
    for source, target in zip(x.double().cpu().reshape(-1, n), result.view(-1, n), strict=True):
        row = source.tolist()
        root = math.sqrt(math.fsum(value * value for value in row) / n + eps)
        target.copy_(torch.tensor([v / root * w for v, w in zip(row, weights, strict=True)]))
    return result


def rotary_oracle(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    result = x.double().cpu().clone()
    half = cos_sin_cache.shape[1] // 2
    cache = cos_sin_cache.double().cpu()
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = complex(cache[position, i].item(), cache[position, half + i].item())
            pair = torch.complex(result[token, :, i], result[token, :, i + half]) * angle
            result[token, :, i], result[token, :, i + half] = pair.real, pair.imag
    return result


def silu_and_mul_oracle(gate_up: Tensor) -> Tensor:
    n = gate_up.shape[-1] // 2
    wide = gate_up.double().cpu()
    return wide[..., :n] / (1 + torch.exp(-wide[..., :n])) * wide[..., n:]


# --- attention batches


@dataclass(frozen=True)
class Batch:
    """A ragged batch: (query length, context length) of each sequence, and its blocks."""

    lens: tuple[tuple[int, int], ...]
    block_size: int
    block_tables: tuple[tuple[int, ...], ...]
    num_blocks: int
    num_padding_tokens: int = 0

    @property
    def query_starts(self) -> list[int]:
        return [0, *accumulate(query_len for query_len, _ in self.lens)]

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1] + self.num_padding_tokens

    def slot(self, seq: int, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_size)
        return self.block_tables[seq][block], offset


def make_batch(
    lens: Sequence[tuple[int, int]], block_size: int, *, num_padding_tokens: int = 0, seed: int = 0
) -> Batch:
    """Gives each sequence blocks of its own, in shuffled order, from a pool with spare blocks."""
    counts = [-(-context_len // block_size) for _, context_len in lens]
    num_blocks = sum(counts) + 3
    generator = torch.Generator().manual_seed(seed)
    ids = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = tuple(tuple(next(ids) for _ in range(count)) for count in counts)
    return Batch(tuple(lens), block_size, tables, num_blocks, num_padding_tokens)


def make_cache(
    batch: Batch, num_kv_heads: int, head_dim: int, layout: str, *, seed: int, target: Target
) -> Tensor:
    """Makes one cache whose every slot is NaN except those in some sequence's context."""
    cache = empty_cache(batch.num_blocks, batch.block_size, num_kv_heads, head_dim, layout, target)
    for seq, (_, context_len) in enumerate(batch.lens):
        rows = random_tensor(seed + seq, max(context_len, 1), num_kv_heads, head_dim, target=target)
        for position in range(context_len):
            cache[batch.slot(seq, position)] = rows[position]
    return cache


def empty_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, layout: str, target: Target
) -> Tensor:
    """Makes a cache of NaN, [num_blocks, block_size, num_kv_heads, head_dim] in some layout."""
    nan = float("nan")

    def full(*shape: int) -> Tensor:
        return torch.full(shape, nan, device=target.device, dtype=target.dtype)

    if layout == "contiguous":
        return full(num_blocks, block_size, num_kv_heads, head_dim)
    if layout == "stacked":  # keys and values side by side in each block
        return full(num_blocks, 2, block_size, num_kv_heads, head_dim)[:, 1]
    if layout == "head_major":
        return full(num_blocks, num_kv_heads, block_size, head_dim).permute(0, 2, 1, 3)
    if layout == "padded":
        return full(num_blocks + 1, block_size, num_kv_heads + 1, head_dim + 8)[
            1:, :, :-1, :head_dim
        ]
    raise ValueError(layout)


LAYOUTS = ("contiguous", "stacked", "head_major", "padded")


def cache_of_heads_apart(block_size: int, head_dim: int, target: Target) -> Tensor:
    """Makes a cache of bytes whose third head lies more than 2^31 elements behind the first.

    Its memory is taken up only where it is touched; fresh memory must not be filled.
    """
    num_blocks = 2**30 // (block_size * head_dim) + 1
    shape = (3, num_blocks, block_size, head_dim)
    return torch.empty(shape, dtype=target.dtype, device=target.device).permute(1, 2, 0, 3)


def attention_oracle(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Batch, scale: float
) -> Tensor:
    """Attends token by token and head by head, in fp64."""
    result = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // key_cache.shape[2]
    wide_query = query.double().cpu()
    wide_keys, wide_values = key_cache.double().cpu(), value_cache.double().cpu()
    for seq, (query_len, context_len) in enumerate(batch.lens):
        for index in range(query_len):
            token = batch.query_starts[seq] + index
            num_visible = context_len - query_len + index + 1
            slots = [batch.slot(seq, position) for position in range(num_visible)]
            if not slots:
                continue
            blocks, offsets = (list(part) for part in zip(*slots, strict=True))
            keys, values = wide_keys[blocks, offsets], wide_values[blocks, offsets]
            for head in range(query.shape[1]):
                scores = (keys[:, head // group] @ wide_query[token, head]) * scale
                weights = torch.exp(scores - scores.max())
                result[token, head] = weights @ values[:, head // group] / weights.sum()
    return result
