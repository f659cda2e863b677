"""DecodeGraphs: captures decode steps when they are first needed, and replays them after that.

A graph is captured for a padded batch size, an upper bound of the context and whether it samples.
Capturing takes tens of milliseconds, so a start captures nothing, and an engine that never sees a
large batch never pays for one. All graphs share one memory pool: only one runs at a time.
"""

from __future__ import annotations

import logging
from bisect import bisect_left

import torch
from torch import Tensor

from nv_runtime.decode_step import DecodeOutput, DecodeStep

logger = logging.getLogger(__name__)

_SMALLEST_CONTEXT_BOUND = 1024
"""Contexts up to this length share a graph; longer ones go in steps of four times."""


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Padded batch sizes: fine where steps are short, and always up to `max_num_seqs`.

    Returns:
        Ascending sizes; every batch of 1 to `max_num_seqs` has one that is at least as large, and
        none is larger than `max_num_seqs`.
    """
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def context_bound(max_context_len: int, max_model_len: int) -> int:
    """Upper bound that contexts of about this length share."""
    bound = _SMALLEST_CONTEXT_BOUND
    while bound < max_context_len:
        bound *= 4
    return min(bound, max_model_len)


class DecodeGraphs:
    """Runs decode steps of any size by replaying graphs."""

    def __init__(
        self, step: DecodeStep, *, padding_row: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        """Captures nothing yet.

        Args:
            step: What to capture.
            padding_row: Row that a warm-up run may use without harm.
            max_num_seqs: Largest batch.
            max_model_len: Longest context.
        """
        self._step = step
        self._padding_row = padding_row
        self._max_model_len = max_model_len
        self._buckets = batch_buckets(max_num_seqs)
        self._graphs: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}
        # One pool from the start, so that the first graph shares it too.
        self._pool = torch.cuda.graph_pool_handle()

    def padded_size(self, batch_size: int) -> int:
        """The smallest captured size that holds a batch."""
        return self._buckets[bisect_left(self._buckets, batch_size)]

    def run(self, batch: Tensor, *, max_context_len: int, samples: bool) -> DecodeOutput:
        """Replays the step's graph, capturing it first if need be.

        Args:
            batch: The arena's batch, cut to a padded size; graphs read this very memory.
            max_context_len: Longest context of the batch, this step's token included.
            samples: See `DecodeStep`.

        Returns:
            The graph's own output tensors; the next replay of the same graph overwrites them.
        """
        bound = context_bound(max_context_len, self._max_model_len)
        key = (batch.shape[0], bound, samples)
        if key not in self._graphs:
            self._graphs[key] = self._capture(batch, max_context_len=bound, samples=samples)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def _capture(
        self, batch: Tensor, *, max_context_len: int, samples: bool
    ) -> tuple[torch.cuda.CUDAGraph, DecodeOutput]:
        """Captures one graph.

        A run on padding rows comes first: it compiles kernels and lets libraries set themselves up,
        neither of which may happen during a capture.
        """
        logger.debug("capturing a decode graph for %d rows", batch.shape[0])
        padding = torch.full_like(batch, self._padding_row)
        self._step(padding, max_context_len=max_context_len, samples=samples)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._step(batch, max_context_len=max_context_len, samples=samples)
        return graph, output
