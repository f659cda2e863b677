"""OneThread: lets one thread at a time into what is not made for several, and refuses the others.

An engine's step takes many calls into the scheduler, the runner and the requests; a second thread
between two of them would mix up whose tokens are whose. It is refused, not made to wait: threads
that take turns at an `LLM` get none of the batching that they hope for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from nv_core import NvError


class ConcurrentUseError(NvError, RuntimeError):
    """A second thread called an `LLM` while another one was inside."""


class OneThread:
    """A guard that its holder's methods enter with `with`.

    The thread that is inside may enter again. Afterwards any other may: nothing is tied to the
    thread that came first.
    """

    def __init__(self) -> None:
        """Makes a guard with nobody inside."""
        self._lock = threading.RLock()
        self._depth = 0
        self._left_over: deque[Callable[[], object]] = deque()

    def __enter__(self) -> OneThread:
        """Goes inside.

        Raises:
            ConcurrentUseError: Another thread is inside.
        """
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUseError(
                "this LLM is in use by another thread, and one LLM serves one thread at a time; "
                "use AsyncLLM, which serves many callers at once and batches them, make one LLM "
                "for each thread, or hold a lock around your calls"
            )
        self._depth += 1
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Goes outside, and does what was left over."""
        try:
            if self._depth == 1:
                self._do_left_over()
        finally:
            self._depth -= 1
            self._lock.release()

    def when_free(self, action: Callable[[], object]) -> None:
        """Runs an action now, or, if any thread is inside, when it leaves.

        For `__del__`, which the collector may run in any thread, in the middle of a step.

        Args:
            action: What to do; it must not raise.
        """
        self._left_over.append(action)
        if self._lock.acquire(blocking=False):
            try:
                # The thread that is inside may be this one, further up its stack.
                if self._depth == 0:
                    with self:
                        pass
            finally:
                self._lock.release()

    def _do_left_over(self) -> None:
        while self._left_over:
            self._left_over.popleft()()
