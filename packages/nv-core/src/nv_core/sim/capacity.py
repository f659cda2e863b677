"""Capacity: what a GPU holds of a model, and what to expect of it, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nv_core.errors import ConfigError
from nv_core.sim.hardware import Hardware
from nv_core.sim.model_shape import ModelShape

WORKSPACE_BYTES = 128 * 2**20
"""What libraries take for themselves."""

NUM_DECODE_GRAPHS = 2 * 35
"""CUDA graphs of decode steps for which the engine keeps memory, with its default limits."""

GRAPHED_OPERATIONS = 0.9e-3 * 600e12
"""Operations of one layer from which on a step with prompts has no graph: a GPU is busy for longer
than the host needs to launch the layer."""

GRAPH_BYTES = 2 * 2**20
"""The driver's own memory of a graph."""


@dataclass(frozen=True)
class Capacity:
    """What fits.

    Attributes:
        memory_bytes: Bytes of all GPUs that may be filled.
        weight_bytes: Bytes of all weights.
        activation_bytes: Bytes of what a step allocates, on all GPUs.
        graph_bytes: Bytes of CUDA graphs and workspace, on all GPUs.
        kv_bytes_per_token: Bytes of keys and values of a token, on all GPUs.
        num_blocks: KV blocks that fit; 0 if the weights alone do not.
        block_size: Tokens per block.
        max_model_len: Most tokens of a sequence.
    """

    memory_bytes: int
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def fits(self) -> bool:
        """Whether at least one sequence of full length fits."""
        return self.num_kv_tokens >= self.max_model_len

    def concurrency(self, num_tokens: int) -> float:
        """How many sequences of a length fit at once."""
        return self.num_kv_tokens / num_tokens


def plan_capacity(
    model: ModelShape,
    hardware: Hardware,
    *,
    tensor_parallel_size: int = 1,
    memory_share: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    max_model_len: int = 32768,
    block_size: int = 16,
    num_blocks: int | None = None,
) -> Capacity:
    """Works out what fits, as the engine would, for a model and a GPU that need not be here.

    Args:
        model: The model.
        hardware: The GPU.
        tensor_parallel_size: How many GPUs share the model.
        memory_share: Share of the memory that may be filled.
        max_num_batched_tokens: Token budget of a step.
        max_num_seqs: Most sequences at once.
        max_model_len: Most tokens of a sequence.
        block_size: Tokens per KV block.
        num_blocks: Size of the pool, whatever memory there is; None to work it out.

    Raises:
        ConfigError: A value makes no sense.
    """
    if not 0 < memory_share <= 1:
        raise ConfigError(f"memory_share must be in (0, 1], got {memory_share!r}")
    model.check_ranks(tensor_parallel_size)
    ranks = tensor_parallel_size
    memory = int(hardware.memory_bytes * memory_share) * ranks
    heads = (3 * model.num_heads + 4 * model.num_kv_heads) * model.head_dim
    per_token = 3 * model.hidden_size + max(heads, 3 * model.intermediate_size)
    token_bytes = per_token * model.dtype_bytes
    logits_bytes = model.vocab_size * model.dtype_bytes
    most_tokens = max(max_num_batched_tokens, max_num_seqs)
    # Sampling makes four float32 tensors of the logits' shape, one of them with its indices.
    sampling = max_num_seqs * (logits_bytes + model.vocab_size * 6 * 4)
    activations = ranks * (most_tokens * token_bytes + sampling)
    # Graphs of decodes and of steps with prompts share one pool each, as large as the largest.
    layer_operations = 2 * model.num_matmul_parameters / model.num_layers / ranks
    most_graphed = min(most_tokens, int(GRAPHED_OPERATIONS / layer_operations))
    pools = most_graphed * token_bytes + max_num_seqs * (token_bytes + logits_bytes) * 3 // 2
    num_graphs = NUM_DECODE_GRAPHS + _num_mixed_graphs(most_graphed)
    graphs = ranks * (pools + num_graphs * GRAPH_BYTES + WORKSPACE_BYTES)
    left = memory - model.weight_bytes - activations - graphs
    kv_bytes_per_token = model.kv_bytes_per_token_on(ranks)
    if num_blocks is None:
        num_blocks = max(0, left) // (kv_bytes_per_token * block_size)
        num_blocks = min(num_blocks, max_num_seqs * -(-max_model_len // block_size))
    return Capacity(
        memory_bytes=memory,
        weight_bytes=model.weight_bytes,
        activation_bytes=activations,
        graph_bytes=graphs,
        kv_bytes_per_token=kv_bytes_per_token,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )


def _num_mixed_graphs(most_tokens: int) -> int:
    """How many sizes of steps with prompts have a graph: eight up to 512, then four a doubling."""
    if most_tokens <= 512:
        return 8
    doublings = math.floor(math.log2(most_tokens / 512))
    return 8 + 4 * doublings + math.ceil(4 * (most_tokens / (512 << doublings) - 1))
