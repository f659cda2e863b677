"""How kernel benchmarks take the time of one call."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS_PER_GRAPH = 10


def median_us(
    step: Callable[[int], object], num_caches: int, device: torch.device, repeats: int
) -> float:
    """Times one call.

    On CUDA that is the median over replays of a graph of calls, divided by their number; elsewhere
    the median over calls.

    Args:
        step: Makes the call whose number it is given, with other inputs from call to call.
        num_caches: How many different inputs there are.
        device: Where it runs.
        repeats: How many times to take.

    Returns:
        Microseconds.
    """
    for call in range(3):
        step(call)
    if device.type != "cuda":
        seconds = []
        for call in range(repeats):
            start = time.perf_counter()
            step(call)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e6
    num_calls = max(num_caches, CALLS_PER_GRAPH)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(num_calls):
            step(call)
    graph.replay()
    times = []
    for _ in range(repeats):
        before, after = cuda_timer(), cuda_timer()
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize(device)
        times.append(float(before.elapsed_time(after)) * 1e3 / num_calls)
    return statistics.median(times)


def cuda_timer() -> torch.cuda.Event:
    """Makes an event that notes the time when the stream reaches it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
