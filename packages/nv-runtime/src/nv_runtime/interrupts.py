"""Keeping Ctrl-C out of a stretch of code that must not be left in the middle."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class PatientHandler(ABC):
    """A handler of interrupts that may run anywhere: it takes a note, and others look at that.

    It raises at most when the user insists on not waiting any longer.
    """

    @abstractmethod
    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Takes the note."""


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Holds an interrupt from the keyboard back until the block is left.

    Only the main thread can be interrupted, so elsewhere there is nothing to do, and neither is
    there for a `PatientHandler`.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, PatientHandler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
