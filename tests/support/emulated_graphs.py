"""CUDA graphs on a CPU: a "graph" here re-runs the captured function into its outputs.

That keeps everything but the speed: fixed addresses, padded sizes, inputs that are copied in, state
that a capture must not change, and outputs that the next replay overwrites.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nv_runtime.builder
import nv_runtime.captured_graphs
from nv_runtime.device_batch import DeviceBatch
from nv_runtime.sampler import SampledTokens

Output = Tensor | SampledTokens


def tensors_of(output: Output) -> list[Tensor]:
    """What a replay fills."""
    if isinstance(output, Tensor):
        return [output]
    logprobs = [] if output.logprobs is None else list(vars(output.logprobs).values())
    return [output.token_ids, *logprobs]


def state_of(batch: DeviceBatch) -> list[Tensor]:
    """All that a step may write, but for KV blocks."""
    tables = [table for table in vars(batch.tables).values() if isinstance(table, Tensor)]
    return [batch.rows, *tables]


class EmulatedGraph:
    """What `capture` returns in place of a graph."""

    def __init__(self, run: Callable[[], Output], output: Output) -> None:
        self._run = run
        self.output = output
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for kept, fresh in zip(tensors_of(self.output), tensors_of(self._run()), strict=True):
            kept.copy_(fresh)

    def reset(self) -> None:
        """Has nothing to free."""


class Emulator:
    """Patches captures; counts graphs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: list[EmulatedGraph] = []
        self.batches: list[DeviceBatch] = []
        make = DeviceBatch.__init__

        def remember(batch: DeviceBatch, **options: Any) -> None:  # noqa: ANN401
            make(batch, **options)
            self.batches.append(batch)

        patch.setattr(DeviceBatch, "__init__", remember)
        patch.setattr(nv_runtime.captured_graphs, "capture", self.capture)
        patch.setattr(nv_runtime.captured_graphs, "fill_pool", lambda *_, **__: None)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(nv_runtime.builder, "uses_graphs", lambda *_: True)

    def capture(self, run: Callable[[], Output], *_where: object) -> tuple[EmulatedGraph, Output]:
        # A capture runs nothing: whatever this run writes is put back.
        state = [tensor for batch in self.batches for tensor in state_of(batch)]
        before = [tensor.clone() for tensor in state]
        output = run()
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        self.graphs.append(EmulatedGraph(run, output))
        return self.graphs[-1], output

    @property
    def num_decode_graphs(self) -> int:
        return sum(isinstance(graph.output, SampledTokens) for graph in self.graphs)


def emulate_and(fault: Callable[[], None]) -> None:
    """Prepares a rank: patches captures for as long as its process lives, then does more."""
    Emulator(pytest.MonkeyPatch())
    fault()
