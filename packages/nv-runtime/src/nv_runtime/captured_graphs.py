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
        pool: Any,  # noqa: ANN401 - has no public type
    ) -> tuple[torch.cuda.CUDAGraph, _Output]:
        """Captures what a function launches.

        Args:
            run: See `capture`.
            pool: See `capture`.

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
            graph, output = capture(run, pool, self._stream)
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
