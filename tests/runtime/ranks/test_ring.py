"""The ring loses nothing and mixes nothing up: any sizes, slow readers, stores seen late."""

from __future__ import annotations

import os
import random
import stat
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import pytest

from nv_runtime.ranks.errors import ProtocolError, RankError
from nv_runtime.ranks.ring import SLOT_HEADER_BYTES, RingLayout, RingReader, RingWriter
from nv_runtime.ranks.segment import SharedSegment, memory_folder

SLOT_BYTES = 64
PIECE = SLOT_BYTES - SLOT_HEADER_BYTES


class Pair:
    """A ring in plain memory, its writer, and readers that nap."""

    def __init__(self, *, num_readers: int = 1, num_slots: int = 4) -> None:
        self.layout = RingLayout(
            num_readers=num_readers, num_slots=num_slots, slot_bytes=SLOT_BYTES
        )
        self.memory = memoryview(bytearray(self.layout.size_bytes))
        self.woken: list[int] = []
        self.writer = RingWriter(self.memory, self.layout, wake=self.woken.append)
        self.readers = [
            RingReader(self.memory, reader, sleep=self.nap, spin_s=0.0)
            for reader in range(num_readers)
        ]
        self.naps = 0

    def nap(self, seconds: float) -> None:
        self.naps += 1
        time.sleep(min(seconds, 0.0005))


def never() -> None:
    raise RankError("the ring is full")


def messages_of_all_sizes() -> list[bytes]:
    rng = random.Random(0)
    sizes = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 4 * PIECE, 4 * PIECE + 1, 40 * PIECE + 7]
    return [rng.randbytes(size) for size in sizes * 3]


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 4 * PIECE])
def test_a_message_that_fits_the_ring_arrives_whole(size: int) -> None:
    pair = Pair()
    message = random.Random(size).randbytes(size)
    for _ in range(5):  # the slots are used again
        pair.writer.write(message, on_full=never)
        assert pair.readers[0].read() == message
        assert pair.writer.num_consumed(0) == pair.writer.num_published


def test_messages_larger_than_the_ring_reach_several_readers_in_order() -> None:
    pair = Pair(num_readers=3)
    messages = messages_of_all_sizes()
    received: list[list[bytes]] = [[] for _ in pair.readers]

    def read(reader: int) -> None:
        rng = random.Random(reader)
        for _ in messages:
            received[reader].append(pair.readers[reader].read())
            if reader == 2:
                time.sleep(rng.random() * 0.002)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(3)]
    for thread in threads:
        thread.start()
    for message in messages:
        pair.writer.write(message, on_full=lambda: None)
    for thread in threads:
        thread.join(20)
    assert received == [messages] * 3


def test_a_full_ring_asks_whether_to_go_on_and_overwrites_nothing() -> None:
    pair = Pair(num_readers=2)
    for number in range(4):
        pair.writer.write(bytes([number]), on_full=never)
    assert [pair.readers[0].read() for _ in range(4)] == [b"\0", b"\1", b"\2", b"\3"]
    # The other reader has read nothing yet.
    with pytest.raises(RankError, match="the ring is full"):
        pair.writer.write(b"\4", on_full=never)
    assert [pair.readers[1].read() for _ in range(4)] == [b"\0", b"\1", b"\2", b"\3"]
    pair.writer.write(b"\5", on_full=never)
    assert [reader.read() for reader in pair.readers] == [b"\5", b"\5"]


def test_a_reader_that_sleeps_is_woken_and_one_that_does_not_is_left_alone() -> None:
    layout = RingLayout(num_readers=2, num_slots=4, slot_bytes=SLOT_BYTES)
    memory = memoryview(bytearray(layout.size_bytes))
    is_asleep, is_woken = threading.Event(), threading.Event()
    woken: list[int] = []

    def wake(reader: int) -> None:
        woken.append(reader)
        is_woken.set()

    def sleep(_seconds: float) -> None:
        is_asleep.set()
        assert is_woken.wait(10)

    writer = RingWriter(memory, layout, wake=wake)
    reader = RingReader(memory, 1, sleep=sleep, spin_s=0.001)
    writer.write(b"early", on_full=never)
    assert reader.read() == b"early"
    assert not is_asleep.is_set()
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(reader.read()))
    thread.start()
    assert is_asleep.wait(10)
    writer.write(b"late", on_full=never)
    thread.join(10)
    assert received == [b"late"]
    assert woken == [1]


def test_completed_messages_are_counted() -> None:
    pair = Pair(num_readers=2)
    pair.writer.write(b"a" * 2 * PIECE, on_full=never)
    assert pair.writer.num_written == 1
    pair.readers[1].read()
    assert [pair.writer.num_completed(reader) for reader in range(2)] == [0, 0]
    pair.readers[1].mark_completed()
    assert [pair.writer.num_completed(reader) for reader in range(2)] == [0, 1]


def corruptions(start: int, length: int) -> Iterator[Callable[[memoryview], None]]:
    """Flips one bit, in every byte of a slot that means something."""
    for offset in range(start, start + SLOT_HEADER_BYTES + length):

        def flip(memory: memoryview, offset: int = offset) -> None:
            memory[offset] ^= 0x10

        yield flip


def test_a_slot_whose_stores_have_not_all_arrived_is_not_believed() -> None:
    message = b"seventeen bytes.."
    pair = Pair()
    pair.writer.write(message, on_full=never)
    start = pair.layout.slot_start(0)
    for change in corruptions(start, len(message)):
        change(pair.memory)
        assert pair.readers[0]._look() is None
        change(pair.memory)
    assert pair.readers[0].read() == message


def test_a_count_that_arrives_before_the_slot_is_not_believed() -> None:
    """What a processor that reorders stores may show: the count of the next round, the old slot."""
    pair = Pair(num_slots=2)
    for number in range(2):
        pair.writer.write(bytes([number]), on_full=never)
        pair.readers[0].read()
    words = pair.memory.cast("Q")
    words[pair.layout.writer_word(0)] = 3
    assert pair.readers[0]._look() is None
    pair.writer.write(b"\2", on_full=never)
    assert pair.readers[0].read() == b"\2"


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (bytes(4), "4 bytes are too few"),
        (bytes(4096), "no ring|not a ring"),
        (struct.pack("<8sIIII", b"nv ring\0", 99, 1, 4, 64) + bytes(4096), "version 99"),
        (struct.pack("<8sIIII", b"nv ring\0", 1, 1, 400, 64) + bytes(64), "does not fit"),
        (struct.pack("<8sIIII", b"nv ring\0", 1, 1, 4, 7) + bytes(64), "multiple of 8"),
        (struct.pack("<8sIIII", b"nv ring\0", 1, 0, 4, 64) + bytes(64), "needs a reader"),
    ],
)
def test_foreign_memory_is_refused(memory: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        RingReader(memoryview(bytearray(memory)), 0, sleep=time.sleep, spin_s=0)


def test_a_reader_beyond_the_ring_is_refused() -> None:
    pair = Pair(num_readers=2)
    with pytest.raises(ProtocolError, match="reader 2 is not in"):
        RingReader(pair.memory, 2, sleep=time.sleep, spin_s=0)


def test_a_segment_is_private_and_has_no_name() -> None:
    folder = memory_folder()
    before = set(os.listdir(folder)) if folder else set()
    segment = SharedSegment.create(8192)
    assert stat.S_IMODE(os.fstat(segment.fd).st_mode) == 0o600
    assert bytes(segment.memory) == bytes(8192)
    if folder:
        assert set(os.listdir(folder)) <= before
    assert not os.get_inheritable(segment.fd)
    segment.close()
    segment.close()


READER_PROGRAM = """
import sys, time, zlib
from nv_runtime.ranks.ring import RingReader
from nv_runtime.ranks.segment import SharedSegment
fd, number, count, nap_every = map(int, sys.argv[1:])
reader = RingReader(SharedSegment(fd).memory, number, sleep=lambda s: time.sleep(0.0002), spin_s=0)
checksum = 0
for i in range(count):
    checksum = zlib.crc32(reader.read(), checksum)
    if nap_every and i % nap_every == 0:
        time.sleep(0.005)
print(checksum)
"""


def test_ten_thousand_commands_to_processes_of_which_one_is_slow() -> None:
    layout = RingLayout(num_readers=2, num_slots=16, slot_bytes=SLOT_BYTES)
    segment = SharedSegment.create(layout.size_bytes)
    writer = RingWriter(segment.memory, layout, wake=lambda _: None)
    count = 10_000
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER_PROGRAM, *map(str, (segment.fd, number, count, nap))],
            pass_fds=[segment.fd],
            stdout=subprocess.PIPE,
        )
        for number, nap in enumerate((0, 200))
    ]
    rng = random.Random(1)
    checksum = 0
    for _ in range(count):
        message = rng.randbytes(rng.choice((3, 40, 100)))
        checksum = zlib.crc32(message, checksum)
        writer.write(message, on_full=lambda: None)
    for reader in readers:
        assert int(reader.communicate(timeout=60)[0]) == checksum
    writer.close()
    segment.close()
