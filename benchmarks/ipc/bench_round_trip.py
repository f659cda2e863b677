"""Round trip of one command to other ranks: our ring, beside pickle in a fixed buffer with events.

The command is that of a steady decode step of 256 sequences. A trip ends when rank 0 sees that
every rank has it. The other way is nano-vLLM's: the command pickled into shared memory, and a
`multiprocessing.Event` per rank; as it has no answer, each rank answers with an event of its own.

    python benchmarks/ipc/bench_round_trip.py --ranks 3 --count 5000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Event
from typing import Any, cast

from nv_runtime.ranks.channel import Channel
from nv_runtime.ranks.ring import RingLayout, RingReader, RingWriter, spin_seconds
from nv_runtime.ranks.segment import SharedSegment
from nv_runtime.ranks.wire import CommandKind, StepMessage, pack_command

_STOP = pack_command(CommandKind.STOP)
_PICKLE_BYTES = 2**20
_BATCH = 256


def main() -> None:
    """Runs both ways and prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=3, help="other ranks (default 3)")
    parser.add_argument("--count", type=int, default=5000, help="commands (default 5000)")
    parser.add_argument("--pause-us", type=float, default=0.0, help="between commands (default 0)")
    parser.add_argument("--spin-us", type=float, help="before a rank sleeps (as in the engine)")
    arguments = parser.parse_args()
    if arguments.spin_us is None:
        arguments.spin_us = 1e6 * spin_seconds(1 + arguments.ranks)
    result = {
        "benchmark": "ipc round trip",
        "options": vars(arguments),
        "cpu": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "ring": measure_ring(arguments),
        "pickle_and_events": measure_pickle(arguments),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def measure_ring(arguments: argparse.Namespace) -> dict[str, float]:
    """Measures our ring, with sockets to wake readers that sleep."""
    layout = RingLayout(num_readers=arguments.ranks)
    segment = SharedSegment.create(layout.size_bytes)
    pairs = [socket.socketpair() for _ in range(arguments.ranks)]
    channels = [Channel(ours) for ours, _ in pairs]
    writer = RingWriter(segment.memory, layout, wake=lambda reader: channels[reader].wake())
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_read_ring, args=(_Fds(segment.fd, theirs.fileno()), reader, arguments.spin_us)
        )
        for reader, (_, theirs) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    step = StepMessage(step_id=1, num_collected=1, continues=True)
    command = pack_command(CommandKind.STEP, step.pack())

    def trip() -> None:
        writer.write(command, on_full=_nothing)
        published = writer.num_published
        for reader in range(arguments.ranks):
            while writer.num_consumed(reader) < published:
                os.sched_yield()

    result = _time(trip, arguments)
    writer.write(_STOP, on_full=_nothing)
    for process in processes:
        process.join()
    return {"command_bytes": len(command), **result}


def measure_pickle(arguments: argparse.Namespace) -> dict[str, float]:
    """Measures pickle in a shared buffer with an event per rank, and one per rank back."""
    context = multiprocessing.get_context("spawn")
    memory = SharedMemory(create=True, size=_PICKLE_BYTES)
    buffer = cast("memoryview[int]", memory.buf)
    there = [context.Event() for _ in range(arguments.ranks)]
    back = [context.Event() for _ in range(arguments.ranks)]
    processes = [
        context.Process(target=_read_pickle, args=(memory.name, *events))
        for events in zip(there, back, strict=True)
    ]
    for process in processes:
        process.start()
    # What a decode step pickles there: for each sequence its length, its table and its last token.
    sequences = [(100, 20, [1] * 7, 5) for _ in range(_BATCH)]

    def send(method: str, *values: object) -> int:
        data = pickle.dumps([method, *values])
        buffer[0:4] = len(data).to_bytes(4, "little")
        buffer[4 : 4 + len(data)] = data
        for event in there:
            event.set()
        return len(data)

    def trip() -> None:
        send("run", sequences, 0)
        for event in back:
            event.wait()
            event.clear()

    result = _time(trip, arguments)
    send("exit")
    for process in processes:
        process.join()
    num_bytes = len(pickle.dumps(["run", sequences, 0]))
    buffer.release()
    memory.close()
    memory.unlink()
    return {"command_bytes": num_bytes, **result}


def _time(trip: Callable[[], None], arguments: argparse.Namespace) -> dict[str, float]:
    for _ in range(200):  # the readers have started when these have come back
        trip()
    times = []
    for _ in range(arguments.count):
        if arguments.pause_us:
            time.sleep(arguments.pause_us * 1e-6)
        start = time.perf_counter()
        trip()
        times.append(1e6 * (time.perf_counter() - start))
    ordered = sorted(times)
    return {"median_us": statistics.median(times), "p99_us": ordered[int(0.99 * len(ordered))]}


class _Fds:
    """File descriptors on their way to a process."""

    def __init__(self, *fds: int) -> None:
        self.fds = fds

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, tuple(DupFd(fd) for fd in self.fds)


def _detach(*duplicates: Any) -> list[int]:  # noqa: ANN401 - a private class of multiprocessing
    return [duplicate.detach() for duplicate in duplicates]


def _read_ring(fds: list[int], reader: int, spin_us: float) -> None:
    segment_fd, line_fd = fds
    channel = Channel(socket.socket(fileno=line_fd))
    memory = SharedSegment(segment_fd).memory
    ring = RingReader(memory, reader, sleep=channel.sleep, spin_s=spin_us * 1e-6)
    while ring.read() != _STOP:
        ring.mark_completed()


def _read_pickle(name: str, there: Event, back: Event) -> None:
    memory = SharedMemory(name=name)
    buffer = cast("memoryview[int]", memory.buf)
    while True:
        there.wait()
        there.clear()
        length = int.from_bytes(buffer[0:4], "little")
        method, *_ = pickle.loads(bytes(buffer[4 : 4 + length]))
        back.set()
        if method == "exit":
            buffer.release()
            memory.close()
            return


def _nothing() -> None:
    """A full ring is waited for."""


if __name__ == "__main__":
    main()
