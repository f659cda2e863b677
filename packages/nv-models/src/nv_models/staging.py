"""Copies from files to a device at the speed of both.

A plain copy from a mapped file to a CUDA device reads page after page on one thread, through a
buffer of the driver's, and waits for the end of each tensor. Here all cores bring a piece of the
file into pinned memory, the cast included, while the device fetches the piece before it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_BUFFER_BYTES = 32 * 2**20
_NUM_BUFFERS = 3


class StagedCopies:
    """Copies tensors in memory, or mapped from files, to a CUDA device through pinned buffers.

    Copies take place on the current stream, in order with whatever else runs there.
    """

    def __init__(
        self,
        *,
        buffer_bytes: int = _BUFFER_BYTES,
        num_buffers: int = _NUM_BUFFERS,
        pin_memory: bool = True,
    ) -> None:
        """Allocates the buffers, which takes some milliseconds for pinned ones.

        Args:
            buffer_bytes: Size of each.
            num_buffers: How many pieces may be on their way at once.
            pin_memory: Whether they are pinned, without which nothing overlaps.
        """
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pin_memory)
            for _ in range(num_buffers)
        ]
        self._fetched: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0

    def copy(self, destination: Tensor, values: Tensor) -> None:
        """Copies a tensor; when this returns, the values are read, but perhaps not yet written.

        Args:
            destination: Any device and float dtype.
            values: On the CPU, shape of `destination`, any float dtype and strides.
        """
        row_bytes = math.prod(destination.shape[1:]) * destination.element_size()
        num_rows = self._buffers[0].numel() // max(row_bytes, 1)
        if destination.dim() == 0 or num_rows == 0:
            destination.copy_(values)
            return
        for first in range(0, destination.shape[0], num_rows):
            piece = destination[first : first + num_rows]
            self._copy_piece(piece, values[first : first + num_rows])

    def _copy_piece(self, destination: Tensor, values: Tensor) -> None:
        number, self._next = self._next, (self._next + 1) % len(self._buffers)
        fetched = self._fetched[number]
        if fetched is not None:
            fetched.synchronize()
        num_bytes = destination.numel() * destination.element_size()
        staged = self._buffers[number][:num_bytes].view(destination.dtype).view(destination.shape)
        staged.copy_(values)
        destination.copy_(staged, non_blocking=True)
        if destination.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(destination.device))
            self._fetched[number] = event
