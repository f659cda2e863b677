"""FrozenHeap: keeps Python's cyclic collector away from all that is there before a run of steps.

A full collection walks over all objects of the process: with torch and a model loaded some 175,000
on a CPU, which takes 0.1 s, in the middle of steps of 5 ms. What was there before the first request
is not going to become garbage while requests run, so it is set aside until the last one has ended.
Collections of what comes into being meanwhile go on.
"""

from __future__ import annotations

import gc


class FrozenHeap:
    """Freezes the heap of this process and gives it back; see `gc.freeze`.

    The heap belongs to the whole program: where somebody has frozen it already, nothing is done.
    """

    def __init__(self) -> None:
        """Freezes nothing yet."""
        self._is_held = False
        self._is_ours = False

    def freeze(self) -> None:
        """Sets aside what is there; calling it again does nothing."""
        if self._is_held:
            return
        self._is_held = True
        # Asked once per run: it counts what is frozen, one by one.
        if gc.get_freeze_count() == 0:
            gc.freeze()
            self._is_ours = True

    def unfreeze(self) -> None:
        """Gives back what `freeze` has set aside; calling it again does nothing."""
        self._is_held = False
        if self._is_ours:
            self._is_ours = False
            gc.unfreeze()

    def __del__(self) -> None:
        """An engine that is dropped with requests in it leaves nothing frozen."""
        self.unfreeze()
