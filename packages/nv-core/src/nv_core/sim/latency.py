"""Latency models: how long a step takes, from the work that is in it.

A model is any object with a method `seconds(work)`. Three ship: `ConstantLatency` and
`AffineLatency` for tests and for fits without a model's shape, and `RooflineLatency`, which knows
the model and the GPU. `nv_core.sim.fit` fits the latter two to a log of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nv_core.errors import ConfigError
from nv_core.sim.hardware import Hardware
from nv_core.sim.model_shape import ModelShape
from nv_core.step_log import StepRecord


class StepWork(NamedTuple):
    """What a step computes, in the sums that its time depends on.

    A sequence computes q tokens, behind c that are in the KV cache. Those with q = 1 are decodes,
    whether or not a policy would call them that: they do the same work.

    Attributes:
        num_tokens: Sum of q.
        num_seqs: Sequences.
        num_sampled: Sequences that get a token.
        decode_context: Sum of c over decodes: cached tokens that they read.
        chunk_context: Sum of c over all others.
        chunk_pairs: Sum of q (c + q / 2) over all others: pairs of a query and a key.
    """

    num_tokens: int
    num_seqs: int
    num_sampled: int
    decode_context: int
    chunk_context: int
    chunk_pairs: float


def work_of(step: StepRecord) -> StepWork:
    """Sums up what a step computes."""
    num_seqs = len(step.seq_ids)
    num_sampled = len(step.sampled)
    context = sum(step.computed)
    if step.num_scheduled_tokens == num_seqs:
        return StepWork(num_seqs, num_seqs, num_sampled, context, 0, 0.0)
    chunk_context, chunk_pairs = 0, 0.0
    for computed, scheduled in zip(step.computed, step.scheduled, strict=True):
        if scheduled > 1:
            chunk_context += computed
            chunk_pairs += scheduled * (computed + scheduled / 2)
    return StepWork(
        step.num_scheduled_tokens,
        num_seqs,
        num_sampled,
        context - chunk_context,
        chunk_context,
        chunk_pairs,
    )


class LatencyModel(Protocol):
    """Predicts the time of a step."""

    def seconds(self, work: StepWork) -> float:
        """Returns the time from one step's end to the next one's, while there is work."""


@dataclass(frozen=True)
class ConstantLatency:
    """Every step takes the same time.

    Args:
        step_s: That time.
    """

    step_s: float

    def seconds(self, work: StepWork) -> float:
        """See `LatencyModel`."""
        del work
        return self.step_s


@dataclass(frozen=True, kw_only=True)
class AffineLatency:
    """A fixed cost, and a cost of each token, sequence, cached token read and pair.

    Args:
        step_s: Cost of a step.
        token_s: Cost of a token.
        seq_s: Cost of a sequence.
        context_token_s: Cost of a cached token that a decode reads.
        pair_s: Cost of a pair of a query and a key in a chunk.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    seq_s: float = 0.0
    context_token_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """See `LatencyModel`."""
        return (
            self.step_s
            + self.token_s * work.num_tokens
            + self.seq_s * work.num_seqs
            + self.context_token_s * work.decode_context
            + self.pair_s * work.chunk_pairs
        )


class RooflineLatency:
    """A smooth roofline: what a model's step costs on a GPU, from first principles and six shares.

    Matrix products are limited by arithmetic or by reading the weights; near the knee both count,
    which a p-norm of the two describes. Decodes add the reading of their contexts, chunks the
    arithmetic of their attention and the reading of theirs, ranks the exchange of activations.
    """

    def __init__(
        self, model: ModelShape, hardware: Hardware, *, tensor_parallel_size: int = 1
    ) -> None:
        """Works out the coefficients.

        Args:
            model: The model.
            hardware: The GPU.
            tensor_parallel_size: How many GPUs share the model.

        Raises:
            ConfigError: The GPUs cannot share it.
        """
        if tensor_parallel_size < 1 or (tensor_parallel_size > 1 and not hardware.link_bytes_per_s):
            raise ConfigError(
                f"tensor_parallel_size must be at least 1, and 1 on hardware without a link, got "
                f"{tensor_parallel_size!r} on {hardware.name}"
            )
        model.check_ranks(tensor_parallel_size)
        self.model = model
        self.hardware = hardware
        ranks = tensor_parallel_size
        flops = hardware.flops_per_s * ranks
        bandwidth = hardware.bytes_per_s * ranks
        self._norm = hardware.norm
        self._token_s = 2 * model.num_matmul_parameters / (flops * hardware.flops_share)
        self._sample_s = 2 * model.num_head_parameters / (flops * hardware.flops_share)
        read_bytes = (model.num_matmul_parameters + model.num_head_parameters) * model.dtype_bytes
        self._read_s = read_bytes / (bandwidth * hardware.bytes_share)
        context_bytes = model.kv_bytes_per_token_on(ranks)
        self._context_s = context_bytes / (bandwidth * hardware.kv_share)
        attention_flops = 4 * model.num_layers * model.num_heads * model.head_dim
        self._pair_s = attention_flops / (flops * hardware.attention_share)
        self._fixed_s = model.num_layers * hardware.layer_overhead_s + hardware.step_overhead_s
        self._seq_s = hardware.seq_overhead_s
        self._exchange_s = 0.0
        if ranks > 1:
            # Two all-reduces a layer, each moving 2 (ranks - 1) / ranks of the activations.
            moved = 4 * model.num_layers * model.hidden_size * model.dtype_bytes
            self._exchange_s = moved * (ranks - 1) / ranks / hardware.link_bytes_per_s

    def __repr__(self) -> str:
        return f"RooflineLatency({self.model.name} on {self.hardware.name})"

    def linear_seconds(self, num_tokens: float, num_sampled: float) -> float:
        """Time of the matrix products of a step."""
        compute = self._token_s * num_tokens + self._sample_s * num_sampled
        norm = self._norm
        return float((compute**norm + self._read_s**norm) ** (1 / norm))

    def seconds(self, work: StepWork) -> float:
        """See `LatencyModel`."""
        return (
            self.linear_seconds(work.num_tokens, work.num_sampled)
            + self._context_s * (work.decode_context + work.chunk_context)
            + self._pair_s * work.chunk_pairs
            + self._exchange_s * work.num_tokens
            + self._seq_s * work.num_seqs
            + self._fixed_s
        )
