"""What a step needs of the device's memory beside weights and KV cache, by arithmetic.

No trial run is made for it: that would cost a start seconds, and find the peak of one run only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nv_models import ModelConfig
from nv_runtime.cuda_graphs import (
    MAX_GRAPHS_AHEAD,
    batch_buckets,
    longest_graphed_step,
    token_buckets,
)

MIB = 1024**2

_GRAPH_BYTES = 2 * MIB
"""The driver's own memory of one graph of some hundred kernels, and its outputs: measured 0.9 MiB
for Qwen3-0.6B on an H200."""
_WORKSPACE_BYTES = 128 * MIB
"""cuBLAS (32 MiB per stream on Hopper), partial results of attention, rounding of allocations."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a step needs at its peak.

    Args:
        activation_bytes: Intermediate results of the longest step.
        sampling_bytes: Logits of a full batch, and the tables and sorts beside them.
        graph_bytes: What captured graphs hold on to; 0 without graphs.
        workspace_bytes: What libraries take for themselves; 0 on a CPU.
    """

    activation_bytes: int
    sampling_bytes: int
    graph_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        parts = (self.activation_bytes, self.sampling_bytes, self.graph_bytes, self.workspace_bytes)
        return sum(parts)


def estimate_step_memory(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_num_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    use_graphs: bool,
) -> StepMemory:
    """Works out what a step needs, from the shapes.

    Sampling holds the logits in the model's dtype, and at most six 32-bit values beside each: the
    tables of counts and biases, which stay once a request has needed them, and a sort where more
    than 32 log-probabilities are asked for (its indices count double). Graphs have memory pools of
    their own, one for decode steps and one for steps with prompts, each as large as the longest
    step that has a graph needs.

    Args:
        config: The model.
        dtype: Of the activations.
        device: Where it runs.
        max_num_tokens: Most tokens in one step.
        max_num_seqs: Most rows that are sampled in one step.
        tensor_parallel_size: How many ranks share the model; the more, the longer are the steps
            that are worth a graph.
        use_graphs: Whether steps run as CUDA graphs.
    """
    logits_bytes = config.vocab_size * dtype.itemsize
    graph_bytes = 0
    if use_graphs:
        max_graphed = min(longest_graphed_step(config, tensor_parallel_size), max_num_tokens)
        num_decode_graphs = MAX_GRAPHS_AHEAD * len(batch_buckets(max_num_seqs))
        num_graphs = num_decode_graphs + len(token_buckets(max_graphed))
        graph_bytes = num_graphs * _GRAPH_BYTES
        graph_bytes += mixed_pool_bytes(config, dtype, max_graphed)
        graph_bytes += decode_pool_bytes(config, dtype, max_num_seqs)
    return StepMemory(
        activation_bytes=max_num_tokens * _token_bytes(config, dtype),
        sampling_bytes=max_num_seqs
        * (logits_bytes + config.vocab_size * 6 * torch.float32.itemsize),
        graph_bytes=graph_bytes,
        workspace_bytes=_WORKSPACE_BYTES if device.type == "cuda" else 0,
    )


def mixed_pool_bytes(config: ModelConfig, dtype: torch.dtype, max_tokens: int) -> int:
    """Bytes that a graph of a step with prompts needs while it runs.

    Args:
        config: The model.
        dtype: Of the activations.
        max_tokens: Most tokens in the step.
    """
    return max_tokens * _token_bytes(config, dtype)


def decode_pool_bytes(config: ModelConfig, dtype: torch.dtype, max_num_seqs: int) -> int:
    """Bytes that a graph of a decode step, sampling included, needs while it runs.

    Half as much again as activations and logits, for partial results of attention and sampling;
    measured on an H200 are 102 of 121 MiB for Qwen3-0.6B, and 136 of 147 for Qwen3-8B.

    Args:
        config: The model.
        dtype: Of the activations.
        max_num_seqs: Most sequences in the step.
    """
    row_bytes = _token_bytes(config, dtype) + config.vocab_size * dtype.itemsize
    return max_num_seqs * row_bytes * 3 // 2


def _token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's activations at their peak.

    A layer's widest moment holds the residual, its input, the gate-and-up product and the
    activation; attention holds query, key, value and output.
    """
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = heads * config.head_dim * 2 + config.num_heads * config.head_dim
    mlp = 3 * config.intermediate_size
    return (3 * config.hidden_size + max(attention, mlp)) * dtype.itemsize
