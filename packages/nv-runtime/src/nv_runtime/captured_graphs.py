"""CapturedGraphs: all CUDA graphs of a runner, and the lock under which they may be given up.

With several ranks, graphs hold collectives. A communicator does not end while a graph holds its
collectives, and when a rank is gone it is another thread that must end it, since this one waits for
the device. So whoever ends the communicator gives up the graphs, and the lock keeps this thread
from replaying or capturing one meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

_Output = TypeVar("_Output")


class CapturedGraphs:
    """Captures and replays graphs, until they are given up.

    Attributes:
        num_graphs: Graphs captured so far.
        seconds: What that took, without the runs before the captures, in which kernels may be
            compiled.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.num_graphs = 0
        self.seconds = 0.0
        self._lock = Lock()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream: torch.cuda.Stream | None = None
        self._is_released = False

    def capture(
        self,
        run: Callable[[], _Output],
        pool: GraphPool,
    ) -> tuple[torch.cuda.CUDAGraph, _Output]:
        """Captures what a function launches.

        Args:
            run: See `capture`.
            pool: Its memory.

        Returns:
            The graph, for `replay`, and what `run` returned: tensors that each replay fills.

        Raises:
            RuntimeError: The graphs were released.
        """
        if torch.cuda.is_available():
            # Not under the lock: what runs may wait for a rank that is gone.
            torch.cuda.current_stream().synchronize()
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with self._lock:
            self._check()
            start = monotonic()
            graph, output = capture(run, pool.handle(self._stream), self._stream)
            self.seconds += monotonic() - start
            self.num_graphs += 1
            self._graphs.append(graph)
        return graph, output

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Launches a captured graph.

        Raises:
            RuntimeError: The graphs were released.
        """
        with self._lock:
            self._check()
            graph.replay()

    def release(self, first: Callable[[], None] | None = None) -> None:
        """Gives all graphs up; calling it again does no more than `first`.

        Args:
            first: Is called when no graph is being replayed or captured, and none will be.
        """
        with self._lock:
            self._is_released = True
            if first is not None:
                first()
            for graph in self._graphs:
                graph.reset()
            self._graphs.clear()

    def _check(self) -> None:
        if self._is_released:
            raise RuntimeError(
                "the CUDA graphs of this engine have been released, because its ranks were ended; "
                "make a new engine"
            )


class GraphPool:
    """The memory that graphs share for what they need while they run; only one runs at a time.

    It is taken in one piece before the first capture. Otherwise each size that is larger than all
    before it would add a piece that only it fits into: 1,220 MiB for the decode graphs of
    Qwen3-0.6B captured in ascending order on an H200, and 134 MiB so.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Takes nothing yet.

        Args:
            num_bytes: What the largest graph needs.
            device: Where the graphs run.
        """
        self._num_bytes = num_bytes
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self._is_filled = False
        # Keeps the pool alive.
        self._first_graph: torch.cuda.CUDAGraph | None = None

    def handle(self, stream: torch.cuda.Stream | None) -> Any:  # noqa: ANN401 - has no public type
        """What `capture` is given; the first call takes the memory if there is so much left.

        Args:
            stream: See `capture`.
        """
        if not self._is_filled:
            self._is_filled = True
            self._first_graph = fill_pool(
                self._handle, stream, num_bytes=self._num_bytes, device=self._device
            )
        return self._handle


def fill_pool(
    handle: Any,  # noqa: ANN401 - has no public type
    stream: torch.cuda.Stream | None,
    *,
    num_bytes: int,
    device: torch.device,
) -> torch.cuda.CUDAGraph | None:
    """Takes memory into a pool by capturing a graph that allocates it and lets it go.

    Returns:
        The graph, never to be replayed; None if the device has no such piece, and the pool has to
        grow as it may.
    """

    def allocate() -> Tensor:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return torch.zeros(1, device=device)  # an empty graph would be warned of

    try:
        graph, _ = capture(allocate, handle, stream)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not is_out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        return None
    return graph


def capture(
    run: Callable[[], _Output],
    pool: Any,  # noqa: ANN401 - has no public type
    stream: torch.cuda.Stream | None,
) -> tuple[torch.cuda.CUDAGraph, _Output]:
    """Captures what a function launches; the device must be idle.

    Args:
        run: Launches the work. It must have run once before: that compiles kernels and lets
            libraries set themselves up, neither of which may happen during a capture.
        pool: Handle of the memory pool.
        stream: Where to capture, on the current device. Without one, torch takes the stream of the
            first capture of the process, whatever device that was on.

    Returns:
        The graph, and what `run` returned: tensors that each replay fills.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        output = run()
    return graph, output


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is a lack of memory."""
    # What ends a capture reports the failed capture, with the reason as its context.
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
