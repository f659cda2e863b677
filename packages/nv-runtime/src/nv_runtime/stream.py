"""OutputStream: an iterator over the growing answers of some requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import TracebackType

from nv_runtime.engine import Engine
from nv_runtime.interrupts import interrupts_deferred
from nv_runtime.one_thread import OneThread
from nv_runtime.outputs import RequestOutput
from nv_runtime.request import Request


class OutputStream(Iterator[RequestOutput]):
    """Drives the engine and yields each request's output, of its kind, when it has news.

    Several streams may share an engine: whichever is advanced runs the steps of all. Closing a
    stream, leaving its `with` block or dropping it aborts the requests that are unfinished.
    """

    def __init__(self, engine: Engine, requests: list[Request], one_thread: OneThread) -> None:
        """Takes requests that the engine has accepted.

        Args:
            engine: The engine.
            requests: The requests to follow.
            one_thread: Guards the engine; shared by all that drive it.
        """
        self._engine = engine
        self._open = deque(requests)
        self._one_thread = one_thread

    def __next__(self) -> RequestOutput:
        """Runs steps until a request has news.

        Raises:
            StopIteration: All requests have ended.
            ConcurrentUseError: Another thread is using the engine; the stream stays as it is.
        """
        with self._one_thread:
            return self._next()

    def _next(self) -> RequestOutput:
        while self._open:
            for _ in range(len(self._open)):
                # Those looked at go to the end: the next call begins with the others. None is out
                # of the queue before it has ended: an interrupt then would leave it behind.
                request = self._open[0]
                self._open.rotate(-1)
                if request.has_news:
                    return request.take_output()
                if request.is_finished:
                    self._open.pop()
            if self._open:
                self._engine.step()
        raise StopIteration

    def close(self) -> None:
        """Aborts what is unfinished; calling it again does nothing.

        Raises:
            ConcurrentUseError: Another thread is using the engine; the stream stays as it is.
        """
        if self._open:
            with self._one_thread:
                self._abort()

    def _abort(self) -> None:
        with interrupts_deferred():
            self._engine.abort_unfinished(self._open)
            self._open.clear()

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Wherever the collector runs, perhaps in the middle of a step.
        if self._open:
            self._one_thread.when_free(self._abort)
