"""KernelWatch: which Triton kernels a process compiles, and which it finds in Triton's cache.

It listens where Triton reports both. It costs nothing but at the first use of a kernel, and knows
nothing of what the kernels are for.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from nv_kernels.dispatch import triton_unavailable_reason

if TYPE_CHECKING:
    import torch


class KernelWatch:
    """Counts from the moment it is made until it is closed.

    Attributes:
        num_compiled: Kernels that were compiled.
        num_from_cache: Kernels whose compiled code was in Triton's cache.
        seconds: What both took, the way of the code to the device included.
    """

    def __init__(self, device: torch.device) -> None:
        """Begins to count; imports Triton if the device is CUDA.

        Args:
            device: Where kernels will run. Where Triton has no compiler for, all counts stay 0.
        """
        self.num_compiled = 0
        self.num_from_cache = 0
        self.seconds = 0.0
        self._load_began = 0.0
        self._previous: Any = None
        self._is_open = device.type == "cuda" and triton_unavailable_reason(device) is None
        if self._is_open:
            knobs = _knobs()
            self._previous = knobs.compilation.listener
            knobs.compilation.listener = self._note_code
            knobs.runtime.kernel_load_start_hook.add(self._note_load_start)
            knobs.runtime.kernel_load_end_hook.add(self._note_load_end)

    def close(self) -> None:
        """Ends the counting; calling it again does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        knobs = _knobs()
        # One that has come later keeps calling this one, which hands on what it hears.
        if knobs.compilation.listener == self._note_code:
            knobs.compilation.listener = self._previous
        knobs.runtime.kernel_load_start_hook.remove(self._note_load_start)
        knobs.runtime.kernel_load_end_hook.remove(self._note_load_end)

    def _note_code(self, *, times: Any, cache_hit: bool, **report: Any) -> None:  # noqa: ANN401 - Triton's types
        if self._previous is not None:
            self._previous(times=times, cache_hit=cache_hit, **report)
        if self._is_open:
            self.num_from_cache += cache_hit
            self.num_compiled += not cache_hit
            self.seconds += times.total / 1e6

    def _note_load_start(self, *_: object) -> None:
        self._load_began = monotonic()

    def _note_load_end(self, *_: object) -> None:
        self.seconds += monotonic() - self._load_began


def _knobs() -> Any:  # noqa: ANN401 - Triton has no types
    # Imported here: importing nv_kernels must not bring Triton.
    from triton import knobs  # type: ignore[import-untyped]

    return knobs
