"""Ring: messages from one writer to several readers, in order, through shared memory.

    | header | writer's line | one line per reader | slot 0 | slot 1 | ... |

The writer counts the slots it has published, each reader those it has consumed. A slot is written
again only when every reader has consumed it, so a slow reader makes the writer wait and nothing is
lost. A message larger than a slot goes in pieces, through as many rounds of the ring as it takes.

Every slot carries its number, its length and a checksum of both and its content. A reader believes
a slot only when all of them fit, so it does not matter in which order another processor sees the
stores, nor whether a store is seen in halves.

A reader that waits spins first, then sleeps until it is woken. How it sleeps and how it is woken is
the caller's: a socket, in the engine.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable

from nv_runtime.ranks.errors import ProtocolError

MAGIC = b"nv ring\0"
VERSION = 1

LINE_BYTES = 64
"""What different processes write lies this far apart, so that they share no cache line."""

_HEADER = struct.Struct("<8sIIII")  # magic, version, readers, slots, bytes of a slot
_SLOT = struct.Struct("<QII")  # number, length, whether more pieces follow
_CHECKSUM = struct.Struct("<I")
SLOT_HEADER_BYTES = _SLOT.size + _CHECKSUM.size

_PUBLISHED = 0  # in the writer's line: slots published
_CONSUMED, _COMPLETED, _IS_ASLEEP = 0, 1, 2  # in a reader's line: slots, messages, flag

_SPINS_PER_LOOK = 16
"""Looks at the ring between two looks at the clock."""
_LONGEST_SLEEP_S = 0.1
"""A wake-up that is lost between processors costs no more than this."""
_WRITER_NAPS_S = (0.0, 0.0, 0.00005, 0.0002, 0.001)
"""A writer that finds the ring full naps this long, then longer; the last goes on."""


def spin_seconds(num_processes: int) -> float:
    """Returns how long a reader should spin before it sleeps.

    Spinning answers within microseconds and costs a processor: it is worth that for a moment where
    every process has a processor to itself, and harmful where they share.
    """
    return 0.0002 if (os.cpu_count() or 1) > num_processes else 0.0


class RingLayout:
    """Where things are.

    Args:
        num_readers: Processes that read.
        num_slots: Slots of the ring.
        slot_bytes: Size of a slot, its header included; a multiple of 8.
    """

    def __init__(self, *, num_readers: int, num_slots: int = 64, slot_bytes: int = 4096) -> None:
        if num_readers < 1 or num_slots < 1:
            raise ProtocolError(
                f"a ring needs a reader and a slot, got num_readers={num_readers} and "
                f"num_slots={num_slots}"
            )
        if slot_bytes <= SLOT_HEADER_BYTES or slot_bytes % 8:
            raise ProtocolError(
                f"slot_bytes must be a multiple of 8 above {SLOT_HEADER_BYTES}, got {slot_bytes}"
            )
        self.num_readers = num_readers
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.piece_bytes = slot_bytes - SLOT_HEADER_BYTES
        self._first_slot = (2 + num_readers) * LINE_BYTES
        self.size_bytes = self._first_slot + num_slots * slot_bytes

    def reader_word(self, reader: int, word: int) -> int:
        """Index of a word in a reader's line, in 8-byte words."""
        return ((2 + reader) * LINE_BYTES) // 8 + word

    def writer_word(self, word: int) -> int:
        """Index of a word in the writer's line, in 8-byte words."""
        return LINE_BYTES // 8 + word

    def slot_start(self, number: int) -> int:
        """Offset in bytes of the slot that holds the piece of this number."""
        return self._first_slot + number % self.num_slots * self.slot_bytes

    def write_header(self, memory: memoryview) -> None:
        """Describes the ring at the start of its memory."""
        _HEADER.pack_into(
            memory, 0, MAGIC, VERSION, self.num_readers, self.num_slots, self.slot_bytes
        )

    @classmethod
    def read_header(cls, memory: memoryview) -> RingLayout:
        """Reads how the memory is laid out.

        Raises:
            ProtocolError: It is no ring, or one of another version.
        """
        if len(memory) < _HEADER.size:
            raise ProtocolError(f"{len(memory)} bytes are too few to hold a ring")
        magic, version, num_readers, num_slots, slot_bytes = _HEADER.unpack_from(memory)
        if magic != MAGIC or version != VERSION:
            raise ProtocolError(
                f"this is not a ring of version {VERSION}: it begins with {magic!r}, version "
                f"{version}; all ranks must run the same code"
            )
        layout = cls(num_readers=num_readers, num_slots=num_slots, slot_bytes=slot_bytes)
        if layout.size_bytes > len(memory):
            raise ProtocolError(
                f"a ring of {layout.size_bytes} bytes does not fit in {len(memory)}"
            )
        return layout


class RingWriter:
    """The one process that writes."""

    def __init__(
        self, memory: memoryview, layout: RingLayout, *, wake: Callable[[int], None]
    ) -> None:
        """Makes a ring in fresh memory.

        Args:
            memory: At least `layout.size_bytes` zero bytes.
            layout: Where things are.
            wake: Wakes the reader of that number; called only for one that sleeps.
        """
        layout.write_header(memory)
        self._memory = memory
        self._words = memory[: layout.size_bytes].cast("Q")
        self._layout = layout
        self._wake = wake
        self._num_published = 0
        self._free_until = layout.num_slots
        self.num_written = 0
        """Messages written."""

    def write(self, message: bytes, *, on_full: Callable[[], None]) -> None:
        """Sends a message to every reader.

        Args:
            message: Any bytes, of any length.
            on_full: Called now and then while a reader is too slow; raises to give up. Nothing can
                be written after that.
        """
        size = self._layout.piece_bytes
        pieces = range(0, len(message), size) if message else range(1)
        for start in pieces:
            self._write_piece(message[start : start + size], start + size < len(message), on_full)
        self.num_written += 1

    def num_consumed(self, reader: int) -> int:
        """Counts the pieces that a reader has taken out of the ring."""
        return self._words[self._layout.reader_word(reader, _CONSUMED)]

    def num_completed(self, reader: int) -> int:
        """Counts the messages that a reader has dealt with."""
        return self._words[self._layout.reader_word(reader, _COMPLETED)]

    @property
    def num_published(self) -> int:
        """Counts the pieces written."""
        return self._num_published

    def close(self) -> None:
        """Lets go of the memory."""
        self._words.release()

    def _write_piece(self, piece: bytes, more: bool, on_full: Callable[[], None]) -> None:  # noqa: FBT001
        self._wait_for_slot(on_full)
        number = self._num_published
        start = self._layout.slot_start(number)
        header = _SLOT.pack(number, len(piece), more)
        content = start + SLOT_HEADER_BYTES
        self._memory[content : content + len(piece)] = piece
        checksum = zlib.crc32(piece, zlib.crc32(header))
        self._memory[start : start + SLOT_HEADER_BYTES] = header + _CHECKSUM.pack(checksum)
        self._num_published = number + 1
        self._words[self._layout.writer_word(_PUBLISHED)] = number + 1
        for reader in range(self._layout.num_readers):
            if self._words[self._layout.reader_word(reader, _IS_ASLEEP)]:
                self._wake(reader)

    def _wait_for_slot(self, on_full: Callable[[], None]) -> None:
        naps = 0
        while self._num_published >= self._free_until:
            slowest = min(map(self.num_consumed, range(self._layout.num_readers)))
            self._free_until = slowest + self._layout.num_slots
            if self._num_published < self._free_until:
                return
            on_full()
            time.sleep(_WRITER_NAPS_S[min(naps, len(_WRITER_NAPS_S) - 1)])
            naps += 1


class RingReader:
    """One of the processes that read."""

    def __init__(
        self,
        memory: memoryview,
        reader: int,
        *,
        sleep: Callable[[float], None],
        spin_s: float,
    ) -> None:
        """Joins a ring that its writer has made.

        Args:
            memory: The ring's memory.
            reader: This reader's number, from 0.
            sleep: Sleeps until the writer wakes this reader, or so many seconds.
            spin_s: How long to look again and again before sleeping; see `spin_seconds`.

        Raises:
            ProtocolError: The memory holds no ring of this version, or not this reader.
        """
        self._layout = RingLayout.read_header(memory)
        if not 0 <= reader < self._layout.num_readers:
            raise ProtocolError(
                f"reader {reader} is not in [0, {self._layout.num_readers}), the ring's readers"
            )
        self._memory = memory
        self._words = memory[: self._layout.size_bytes].cast("Q")
        self._reader = reader
        self._sleep = sleep
        self._spin_s = spin_s
        self._num_consumed = 0
        self._num_completed = 0

    def read(self) -> bytes:
        """Waits for the next message and returns it."""
        pieces = []
        more = True
        while more:
            piece, more = self._wait_for_piece()
            pieces.append(piece)
            self._num_consumed += 1
            self._set(_CONSUMED, self._num_consumed)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def mark_completed(self) -> None:
        """Tells the writer that the last message has been dealt with."""
        self._num_completed += 1
        self._set(_COMPLETED, self._num_completed)

    def close(self) -> None:
        """Lets go of the memory."""
        self._words.release()

    def _wait_for_piece(self) -> tuple[bytes, bool]:
        give_up_spinning = time.monotonic() + self._spin_s
        while True:
            for _ in range(_SPINS_PER_LOOK):
                found = self._look()
                if found is not None:
                    return found
            if time.monotonic() < give_up_spinning:
                os.sched_yield()
                continue
            self._set(_IS_ASLEEP, 1)
            # The writer may have missed that: look once more before sleeping.
            found = self._look()
            if found is None:
                self._sleep(_LONGEST_SLEEP_S)
            self._set(_IS_ASLEEP, 0)
            if found is not None:
                return found

    def _look(self) -> tuple[bytes, bool] | None:
        """Returns the next piece and whether more follow; None if it is not there in full."""
        number = self._num_consumed
        if self._words[self._layout.writer_word(_PUBLISHED)] <= number:
            return None
        start = self._layout.slot_start(number)
        header = bytes(self._memory[start : start + SLOT_HEADER_BYTES])
        found, length, more = _SLOT.unpack_from(header)
        if found != number or length > self._layout.piece_bytes:
            return None
        content = start + SLOT_HEADER_BYTES
        piece = bytes(self._memory[content : content + length])
        checksum = zlib.crc32(piece, zlib.crc32(header[: _SLOT.size]))
        if checksum != _CHECKSUM.unpack_from(header, _SLOT.size)[0]:
            return None
        return piece, bool(more)

    def _set(self, word: int, value: int) -> None:
        self._words[self._layout.reader_word(self._reader, word)] = value
