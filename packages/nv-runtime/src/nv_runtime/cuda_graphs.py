"""CUDA graphs of steps: captured when they are needed, replayed after that.

Launching a step's few hundred kernels one by one takes the host longer than short steps take the
device. A graph launches them all at once, for one padded size. Capturing takes tens of
milliseconds, so a start captures nothing, and an engine that never sees a large batch never pays
for one. Graphs of a kind share one memory pool (`GraphPool`): only one runs at a time.

`DecodeGraphs` captures a size when it first occurs, since decode steps repeat. `MixedGraphs` waits
until a size occurs again, so that a single prompt does not pay for a graph that nobody replays; if
a larger one is there, steps are padded into it meanwhile.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from nv_core import StepPlan
from nv_models import ModelConfig, TensorParallel
from nv_runtime.captured_graphs import CapturedGraphs, GraphPool, is_out_of_memory
from nv_runtime.decode_step import DecodeStep
from nv_runtime.input_builder import StepLayout
from nv_runtime.mixed_step import MixedStep
from nv_runtime.sampler import SampledTokens
from nv_runtime.sampling_needs import SamplingNeeds
from nv_runtime.sampling_tables import SamplingTables

logger = logging.getLogger(__name__)

_Captured = TypeVar("_Captured")

_SMALLEST_CONTEXT_BOUND = 4096
"""Contexts up to this length share a graph, as they share attention's kernels; longer ones go in
steps of four times."""
_OCCURRENCES_TO_CAPTURE = 2
_OCCURRENCES_TO_CAPTURE_HELD = 8
"""The same where a captured graph of at most twice the tokens can be replayed meanwhile: capturing
takes ten times as long as its padding."""
_LONG_QUERY = 2048
"""Attention treats steps with longer queries differently (`nv_kernels.triton.attention`)."""
_SMALL_TOKEN_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512)


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Padded batch sizes: fine where steps are short, and always up to `max_num_seqs`.

    Returns:
        Ascending sizes; every batch of 1 to `max_num_seqs` has one that is at least as large, and
        none is larger than `max_num_seqs`.
    """
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def token_buckets(max_tokens: int) -> list[int]:
    """Padded numbers of tokens of steps with prompts: four to a doubling, and `max_tokens`.

    Returns:
        Ascending sizes, none larger than `max_tokens`, the largest.
    """
    sizes = {*_SMALL_TOKEN_BUCKETS, max_tokens}
    start = _SMALL_TOKEN_BUCKETS[-1]
    while start < max_tokens:
        sizes |= {start * quarters // 4 for quarters in (5, 6, 7, 8)}
        start *= 2
    return sorted(size for size in sizes if size <= max_tokens)


def longest_graphed_step(config: ModelConfig, tensor_parallel_size: int) -> int:
    """Number of tokens from which on a graph of a step with prompts saves nothing.

    Launching a layer eagerly takes the host some 0.9 ms (measured beside an H200, where that is ten
    kernels); a device of 600 TFLOP/s that needs longer than that for a layer waits for nothing.
    Anything of this order will do: what it decides between differs little there.

    Args:
        config: The model.
        tensor_parallel_size: How many ranks share each layer.
    """
    num_weights = config.num_layer_weights / tensor_parallel_size
    return int(0.9e-3 * 600e12 / (2 * num_weights))


def seq_buckets(max_num_seqs: int) -> list[int]:
    """Padded numbers of sequences of steps with prompts: powers of four, and `max_num_seqs`."""
    sizes = {max_num_seqs}
    size = 1
    while size < max_num_seqs:
        sizes.add(size)
        size *= 4
    return sorted(sizes)


def context_bound(max_context_len: int, max_model_len: int) -> int:
    """Upper bound that contexts of about this length share.

    Returns:
        At least `max_context_len`; otherwise at most `max_model_len`.
    """
    bound = _SMALLEST_CONTEXT_BOUND
    while bound < max_context_len:
        bound *= 4
    return max(min(bound, max_model_len), max_context_len)


MAX_GRAPHS_AHEAD = 2
"""How many times the number of batch sizes there may be decode graphs before none is captured
ahead any more: requests with other needs of sampling would otherwise fill the memory."""

_DecodeKey: TypeAlias = "tuple[int, int, SamplingNeeds, tuple[int, ...]]"
"""Padded batch size, context bound, needs of sampling, and the shape of the banned words."""


class DecodeGraphs:
    """Runs decode steps of any size by replaying graphs."""

    def __init__(
        self,
        step: DecodeStep,
        *,
        tables: SamplingTables,
        captured: CapturedGraphs,
        attempts: CaptureAttempts,
        pool: GraphPool,
        padding_row: int,
        max_num_seqs: int,
        max_model_len: int,
        usual_needs: SamplingNeeds,
    ) -> None:
        """Captures nothing yet.

        Args:
            step: What to capture.
            tables: What its sampling reads; a graph goes with the tables of its time.
            captured: Holds them.
            attempts: Captures them.
            pool: Their memory.
            padding_row: Row that a warm-up run may use without harm.
            max_num_seqs: Largest batch.
            max_model_len: Longest context.
            usual_needs: What is captured ahead until a step has shown what is asked for.
        """
        self._step = step
        self._tables = tables
        self._padding_row = padding_row
        self._max_model_len = max_model_len
        self._buckets = batch_buckets(max_num_seqs)
        self._graphs: dict[_DecodeKey, tuple[torch.cuda.CUDAGraph, SampledTokens]] = {}
        self._captured = captured
        self._attempts = attempts
        # What steps are like: bound of the context and needs of the last one.
        self._newest = (context_bound(1, max_model_len), usual_needs)
        self._pool = pool

    def padded_size(self, batch_size: int) -> int:
        """The smallest captured size that holds a batch."""
        return _padded(batch_size, self._buckets)

    def run(self, batch: Tensor, *, max_context_len: int, needs: SamplingNeeds) -> SampledTokens:
        """Replays the step's graph, capturing it first if need be.

        Args:
            batch: The arena's batch, cut to a padded size; graphs read this very memory.
            max_context_len: Longest context of the batch, this step's token included.
            needs: See `DecodeStep`.

        Returns:
            The graph's own output tensors; the next replay of the same graph overwrites them. New
            ones, of an eager run, where there is no memory left for a graph.
        """
        bound = context_bound(max_context_len, self._max_model_len)
        self._newest = (bound, needs)
        key = self._key(batch.shape[0])
        if key not in self._graphs:
            captured = self._capture(batch, max_context_len=bound, needs=needs)
            if captured is None:
                return self._step(batch, max_context_len=max_context_len, needs=needs)
            self._graphs[key] = captured
        graph, output = self._graphs[key]
        self._captured.replay(graph)
        return output

    @property
    def num_ahead(self) -> int:
        """Graphs that `capture_next` would capture: those of all sizes for steps like the last.

        The same on every rank, since all run the same steps.
        """
        if not self._attempts.has_memory:
            return 0
        num_missing = sum(self._key(size) not in self._graphs for size in self._buckets)
        return min(num_missing, max(0, MAX_GRAPHS_AHEAD * len(self._buckets) - len(self._graphs)))

    def capture_next(self, batch: Tensor) -> bool:
        """Captures one graph that no step has needed yet, the smallest first.

        Args:
            batch: The arena's batch, uncut.

        Returns:
            Whether there was one, and memory for it.
        """
        if self.num_ahead == 0:
            return False
        bound, needs = self._newest
        self._tables.make(needs)
        size = next(size for size in self._buckets if self._key(size) not in self._graphs)
        captured = self._capture(batch[:size], max_context_len=bound, needs=needs)
        if captured is None:
            return False
        self._graphs[self._key(size)] = captured
        return True

    def _key(self, size: int) -> _DecodeKey:
        """What a graph for steps like the last one is filed under."""
        bound, needs = self._newest
        return (size, bound, needs, self._tables.banned_shape * needs.banned_words)

    def _capture(
        self, batch: Tensor, *, max_context_len: int, needs: SamplingNeeds
    ) -> tuple[torch.cuda.CUDAGraph, SampledTokens] | None:
        """Captures one graph, after a run on padding rows that does no harm."""

        def run(rows: Tensor) -> SampledTokens:
            return self._step(rows, max_context_len=max_context_len, needs=needs)

        return self._attempts.capture(
            warm_up=lambda: run(torch.full_like(batch, self._padding_row)),
            record=lambda: self._captured.capture(lambda: run(batch), self._pool),
        )


@dataclass(frozen=True)
class MixedShape:
    """What a graph of a step with prompts was captured for; whatever fits in it can run as it.

    Attributes:
        layout: How the step's numbers are packed.
        max_query_len: Longest query, in tokens.
    """

    layout: StepLayout
    max_query_len: int

    def holds(self, other: MixedShape) -> bool:
        """Whether whatever fits in the other shape fits in this one."""
        ours, theirs = self.layout, other.layout
        return (
            ours.num_tokens >= theirs.num_tokens
            and ours.num_seqs >= theirs.num_seqs
            and ours.num_blocks >= theirs.num_blocks
            and self.max_query_len >= other.max_query_len
        )


class MixedGraphs:
    """Runs steps with prompts in them by replaying graphs."""

    def __init__(
        self,
        step: MixedStep,
        *,
        captured: CapturedGraphs,
        attempts: CaptureAttempts,
        pool: GraphPool,
        max_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        """Captures nothing yet.

        Args:
            step: What to capture.
            captured: Holds them.
            attempts: Captures them.
            pool: Their memory.
            max_tokens: Longest step to capture, in tokens.
            max_num_seqs: Most sequences in one step.
            max_model_len: Longest context.
            block_size: Tokens per KV block.
        """
        self._step = step
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._token_buckets = token_buckets(max_tokens)
        self._seq_buckets = seq_buckets(max_num_seqs)
        self._num_occurrences: Counter[MixedShape] = Counter()
        self._graphs: dict[MixedShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._inputs: dict[MixedShape, Tensor] = {}
        self._captured = captured
        self._attempts = attempts
        self._pool = pool

    def shape_for(self, plan: StepPlan) -> MixedShape | None:
        """The shape whose graph runs a plan; None if it should run eagerly.

        That is so for long steps, which keep the device busy anyway, and for a shape that occurs
        for the first time and fits in none that is captured. The shape may be a larger one.
        """
        num_tokens = plan.num_scheduled_tokens
        if num_tokens > self._token_buckets[-1]:
            return None
        # A sequence may hold blocks for more than it has computed: its table must fit as well.
        longest = self._block_size * max(plan.sequences.num_blocks)
        bound = context_bound(longest, self._max_model_len)
        layout = StepLayout(
            num_tokens=_padded(num_tokens, self._token_buckets),
            num_seqs=_padded(len(plan.sequences), self._seq_buckets),
            num_blocks=-(-bound // self._block_size),
        )
        longest_query = max(plan.sequences.num_scheduled_tokens)
        max_query_len = layout.num_tokens
        if longest_query <= _LONG_QUERY:
            max_query_len = min(max_query_len, _LONG_QUERY)
        shape = MixedShape(layout, max_query_len)
        if shape in self._graphs:
            return shape
        self._num_occurrences[shape] += 1
        holder = self._smallest_captured(shape)
        is_tight = holder is not None and holder.layout.num_tokens <= 2 * layout.num_tokens
        enough = _OCCURRENCES_TO_CAPTURE_HELD if is_tight else _OCCURRENCES_TO_CAPTURE
        return holder if self._num_occurrences[shape] < enough else shape

    def _smallest_captured(self, wanted: MixedShape) -> MixedShape | None:
        """A captured shape that holds another: even much padding costs less than launching."""
        return min(
            (shape for shape in self._graphs if shape.holds(wanted)),
            key=lambda shape: (shape.layout.num_tokens, shape.layout.num_seqs),
            default=None,
        )

    def run(self, packed: Tensor, shape: MixedShape) -> Tensor:
        """Replays the shape's graph, capturing it first if need be.

        Args:
            packed: The step's numbers on the device; copied into the graph's own memory.
            shape: What it fits in; `packed` is packed as its layout says.

        Returns:
            Hidden states of the rows to sample, [shape.layout.num_seqs, hidden_size], those of
            padding meaningless; the next replay of the same graph overwrites them. New ones, of an
            eager run, where there is no memory left for a graph.
        """
        if shape not in self._graphs:
            self._inputs[shape] = packed.clone()
            captured = self._capture(shape)
            if captured is None:
                return self._run_eagerly(self._inputs.pop(shape), shape)
            self._graphs[shape] = captured
        self._inputs[shape].copy_(packed)
        graph, hidden = self._graphs[shape]
        self._captured.replay(graph)
        return hidden

    def _capture(self, shape: MixedShape) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Captures one graph, after a run on the step itself: it writes what the replay will."""
        packed = self._inputs[shape]

        def run() -> Tensor:
            return self._run_eagerly(packed, shape)

        return self._attempts.capture(
            warm_up=run, record=lambda: self._captured.capture(run, self._pool)
        )

    def _run_eagerly(self, packed: Tensor, shape: MixedShape) -> Tensor:
        layout = shape.layout
        hidden, sample_rows = self._step(
            packed,
            layout,
            num_samples=layout.num_seqs,
            max_query_len=shape.max_query_len,
            max_context_len=min(layout.num_blocks * self._block_size, self._max_model_len),
        )
        return hidden[sample_rows]


def _padded(size: int, buckets: list[int]) -> int:
    """The smallest bucket that holds a size."""
    return buckets[bisect_left(buckets, size)]


class CaptureAttempts:
    """Captures graphs until a device has no memory for one more.

    A capture runs nothing, and the run before it changes nothing that the step itself will not
    write again, so a step whose capture has failed can run eagerly.

    Ranks must capture the same graphs: what one runs eagerly and another replays would not be the
    same collectives. So they agree on each attempt, and one without memory stops all of them.

    Attributes:
        has_memory: Whether an attempt may succeed.
    """

    def __init__(self, ranks: TensorParallel, device: torch.device) -> None:
        """Starts with memory for graphs.

        Args:
            ranks: Those that run the same steps.
            device: This rank's.
        """
        self._ranks = ranks
        self._device = device
        self.has_memory = True

    def capture(
        self, *, warm_up: Callable[[], object], record: Callable[[], _Captured]
    ) -> _Captured | None:
        """Makes an attempt.

        Args:
            warm_up: Runs the step; see `CapturedGraphs`. With several ranks it must not fail: a
                rank that leaves it early leaves the others in a collective.
            record: Captures a graph and returns it.

        Returns:
            What `record` returned; None if there was no memory for it, now or before, here or on
            another rank.
        """
        if not self.has_memory:
            return None
        captured: _Captured | None = None
        is_warm = False
        try:
            warm_up()
            is_warm = True
            captured = record()
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            is_out_of_step = self._ranks.size > 1 and not is_warm
            if is_out_of_step or not is_out_of_memory(error):
                raise
        if self._is_there_for_all(captured):
            return captured
        self.has_memory = False
        torch.cuda.empty_cache()
        logger.warning(
            "no memory is left to capture a CUDA graph; steps of new sizes run without one, "
            "slower and with the same results. Lower gpu_memory_utilization or max_num_seqs"
        )
        return None

    def _is_there_for_all(self, captured: object | None) -> bool:
        if self._ranks.size == 1:
            return captured is not None
        is_missing = torch.tensor([int(captured is None)], device=self._device)
        return int(self._ranks.all_reduce_max(is_missing)) == 0
