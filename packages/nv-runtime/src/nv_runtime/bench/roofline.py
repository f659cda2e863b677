"""The least time that a device needs for a workload, and the rates that it is computed from.

The floor lets every request run from the first step to its last token, with nothing between the
steps, no launch cost, each weight and each cached key and value read once per step at the memory's
rate, and each product at the rate of a large one. What all prompts begin with is computed once, and
read once per step. Ranks have the rates of all their devices together, and nothing to tell each
other:

    T = prefill + sum over decode steps of  max(W / BW, 2 * B * P / F) + k * sum(c_i) / BW
    prefill = (2 * P_body * prompt tokens + 2 * P_head * requests + attention) / F

W bytes of the weights that a step reads (layers and LM head), P their number, BW bytes/s of memory,
F floating-point operations/s, B requests in the step, k bytes of keys and values per token, c_i
context of request i. Attention over a prompt of n tokens takes 2 * n * (n + 1) * head_dim
operations per query head and layer, its causal half. No engine reaches the floor; the share of it
says how near one comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from nv_models import ModelConfig
from nv_runtime.kv_cache import kv_bytes_per_token

if TYPE_CHECKING:
    from nv_runtime.bench.workload import Workload
    from nv_runtime.llm import LLM

__all__ = [
    "DeviceRates",
    "Floor",
    "decode_floor_s",
    "floor_of",
    "measure_rates",
    "workload_floor",
]

_COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
_REPEATS = 5
_CALLS_PER_REPEAT = 10


@dataclass(frozen=True)
class DeviceRates:
    """What a device does per second.

    Args:
        bytes_per_s: Memory traffic of a large copy, reads and writes counted.
        flops_per_s: Floating-point operations of a large matrix product.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Floor:
    """The least time of a workload, in seconds.

    Args:
        prefill_s: All prompts.
        weights_s: Reading weights in decode steps, or multiplying by them if that takes longer.
        kv_s: Reading cached keys and values in decode steps.
    """

    prefill_s: float
    weights_s: float
    kv_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.prefill_s + self.weights_s + self.kv_s

    def as_dict(self) -> dict[str, float]:
        """The parts and their sum."""
        return {**asdict(self), "total_s": self.total_s}


@dataclass(frozen=True)
class _ModelCosts:
    body_params: int
    head_params: int
    attention_flops: int
    """Of one query token looking at one position, in all layers."""
    kv_token_bytes: int


def _costs_of(config: ModelConfig, kv_cache_dtype: torch.dtype) -> _ModelCosts:
    query = config.num_heads * config.head_dim
    key_and_value = 2 * config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * query + key_and_value)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return _ModelCosts(
        body_params=config.num_layers * (attention + mlp),
        head_params=config.vocab_size * config.hidden_size,
        attention_flops=4 * query * config.num_layers,
        kv_token_bytes=kv_bytes_per_token(config, kv_cache_dtype),
    )


def decode_floor_s(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    rates: DeviceRates,
    num_seqs: int,
    num_context_tokens: int,
) -> tuple[float, float]:
    """Floor of one decode step.

    Args:
        config: The model.
        dtype: Of weights.
        kv_cache_dtype: Of keys and values in the cache.
        rates: What the device does.
        num_seqs: Requests in the step.
        num_context_tokens: Tokens that they have in the cache, all together.

    Returns:
        Seconds for weights, and for keys and values.
    """
    costs = _costs_of(config, kv_cache_dtype)
    params = costs.body_params + costs.head_params
    weights_s = max(
        params * dtype.itemsize / rates.bytes_per_s, 2 * num_seqs * params / rates.flops_per_s
    )
    return weights_s, num_context_tokens * costs.kv_token_bytes / rates.bytes_per_s


def workload_floor(
    config: ModelConfig,
    lengths: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    rates: DeviceRates,
    num_shared_tokens: int = 0,
) -> Floor:
    """Floor of a workload whose requests all start at once.

    Args:
        config: The model.
        lengths: (prompt tokens, output tokens) of each request.
        dtype: Of weights.
        kv_cache_dtype: Of keys and values in the cache.
        rates: What the devices do.
        num_shared_tokens: Tokens that all prompts begin with.
    """
    costs = _costs_of(config, kv_cache_dtype)
    num_spared = max(len(lengths) - 1, 0)
    num_prompt_tokens = sum(num_prompt for num_prompt, _ in lengths)
    num_prompt_tokens -= num_spared * num_shared_tokens
    pairs = sum(num_prompt * (num_prompt + 1) // 2 for num_prompt, _ in lengths)
    pairs -= num_spared * num_shared_tokens * (num_shared_tokens + 1) // 2
    flops = 2 * (costs.body_params * num_prompt_tokens + costs.head_params * len(lengths))
    prefill_s = (flops + costs.attention_flops * pairs) / rates.flops_per_s

    weights_s = kv_s = 0.0
    # The prompt's step gives the first token; step s reads s tokens more than the prompt.
    for step in range(1, max((num_output for _, num_output in lengths), default=0)):
        contexts = [num_prompt + step for num_prompt, num_output in lengths if num_output > step]
        step_weights_s, step_kv_s = decode_floor_s(
            config,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            rates=rates,
            num_seqs=len(contexts),
            num_context_tokens=sum(contexts) - (len(contexts) - 1) * num_shared_tokens,
        )
        weights_s += step_weights_s
        kv_s += step_kv_s
    return Floor(prefill_s=prefill_s, weights_s=weights_s, kv_s=kv_s)


def floor_of(llm: LLM, workload: Workload, *, rates: DeviceRates) -> Floor:
    """Floor of a workload on a loaded model, in the dtypes that it runs in.

    Args:
        llm: The model.
        workload: The workload.
        rates: What one device does.
    """
    dtype = llm.config.resolve_dtype(llm.model_config.dtype, llm.config.resolve_device())
    size = llm.config.tensor_parallel_size
    return workload_floor(
        llm.model_config,
        workload.lengths,
        dtype=dtype,
        kv_cache_dtype=llm.config.resolve_kv_cache_dtype(dtype),
        rates=DeviceRates(size * rates.bytes_per_s, size * rates.flops_per_s),
        num_shared_tokens=workload.num_shared_tokens,
    )


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measures a large copy and a large matrix product, best of several; takes a second or two."""
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bytes_per_s = 2 * source.numel() / _best_s(device, partial(target.copy_, source))
    del source, target

    size = _MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    matmul_s = _best_s(device, partial(torch.matmul, left, right, out=product))
    return DeviceRates(bytes_per_s=bytes_per_s, flops_per_s=2 * size**3 / matmul_s)


def _best_s(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of one call, from the fastest of several rows of calls, the first not counted."""

    def row_s() -> float:
        started = perf_counter()
        for _ in range(_CALLS_PER_REPEAT):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (perf_counter() - started) / _CALLS_PER_REPEAT

    row_s()
    return min(row_s() for _ in range(_REPEATS))
