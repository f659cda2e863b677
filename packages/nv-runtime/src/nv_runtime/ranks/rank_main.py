"""What a started rank does: build its part of the engine, then run the steps that it is told.

It has no scheduler, no requests and no text. It ends when it is told to, when it fails, and when
rank 0 is gone, whatever it is doing then.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from nv_runtime.ranks.channel import Channel, readable
from nv_runtime.ranks.ring import RingReader
from nv_runtime.ranks.segment import SharedSegment
from nv_runtime.ranks.wire import CommandKind, StepMessage, unpack_command

if TYPE_CHECKING:
    import torch

    from nv_core import StepPlan
    from nv_runtime.captured_graphs import CapturedGraphs
    from nv_runtime.engine_config import EngineConfig
    from nv_runtime.model_runner import ModelRunner, StepHandle
    from nv_runtime.ranks.process_group import RankGroup

_PARENT_LOOK_S = 1.0
"""How often a rank looks whether its parent is still the same, beside the broken pipe."""


@dataclass(frozen=True)
class StartMessage:
    """What a rank is told at its start.

    Attributes:
        rank: Its number.
        size: Number of ranks.
        store_port: Where the ranks meet.
        collective_backend: "nccl" or "gloo".
        options: The engine's options, as plain data.
        spin_s: How long it looks for a command before it sleeps.
        timeout_s: How long it waits for other ranks.
    """

    rank: int
    size: int
    store_port: int
    collective_backend: str
    options: dict[str, Any]
    spin_s: float
    timeout_s: float

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StartMessage:
        """Reads what `to_json` returned."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})


def main(line_fd: int, lifeline_fd: int, segment_fd: int) -> None:
    """Runs one rank until it ends.

    Args:
        line_fd: The socket to rank 0.
        lifeline_fd: A pipe that breaks when rank 0's process ends.
        segment_fd: The ring's memory.
    """
    # From the keyboard it cannot come, but whoever sends it to all processes means rank 0.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent(lifeline_fd)
    channel = Channel(socket.socket(fileno=line_fd))
    data = channel.receive()
    if data is None:
        return
    try:
        _run(StartMessage.from_json(data), channel, SharedSegment(segment_fd))
    except BaseException:  # noqa: BLE001 - whatever it is, rank 0 must hear of it
        report = {"kind": "failed", "time": time.monotonic(), "traceback": traceback.format_exc()}
        with suppress(OSError):  # of a rank 0 that is gone
            channel.send(report)
        # Not by way of destructors: they may wait for ranks that wait for this one.
        os._exit(1)
    os._exit(0)


def _run(start: StartMessage, channel: Channel, segment: SharedSegment) -> None:
    # Here, where a failure of an import is reported like any other.
    import torch

    from nv_models import open_checkpoint
    from nv_runtime.builder import build_rank
    from nv_runtime.ranks.agreement import Agreement
    from nv_runtime.ranks.process_group import join_group, join_store

    channel.send({"kind": "ready"})
    config = _config_from(start.options)
    device = config.resolve_device()
    if device.type == "cuda":
        # The process is this rank's alone; without this, some libraries would also open device 0.
        torch.cuda.set_device(device)
    store = join_store(start.store_port, start.timeout_s)
    group = join_group(
        store,
        rank=start.rank,
        size=start.size,
        backend=start.collective_backend,
        device=device,
        timeout_s=start.timeout_s,
        is_watched=True,
        fuses=config.fused_all_reduce,
    )
    agreement = Agreement(store, rank=start.rank, size=start.size, check=_nothing_to_check)
    checkpoint = open_checkpoint(config.model)
    part = build_rank(config, checkpoint, group.tensor_parallel, agreement, device=device)
    reader = RingReader(segment.memory, start.rank - 1, sleep=channel.sleep, spin_s=start.spin_s)
    RankLoop(part.runner, reader).run()
    _leave(group, part.runner.graphs, device)


class RankLoop:
    """Runs the commands of rank 0 one after the other."""

    def __init__(self, runner: ModelRunner, reader: RingReader) -> None:
        """Takes what runs steps and where commands come from."""
        from nv_runtime.ranks.plan_replica import PlanReplica

        self._runner = runner
        self._reader = reader
        self._replica = PlanReplica()
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()

    def run(self) -> None:
        """Runs commands until told to stop."""
        while True:
            kind, body = unpack_command(self._reader.read())
            if kind == CommandKind.STOP:
                return
            if kind == CommandKind.STEP:
                self._step(StepMessage.unpack(body))
            elif kind == CommandKind.CAPTURE:
                self._runner.capture_next_graph()
            else:
                self._in_flight.clear()
                self._replica.forget()
                self._runner.reset()
            self._reader.mark_completed()

    def _step(self, message: StepMessage) -> None:
        for _ in range(message.num_collected):
            _, handle = self._in_flight.popleft()
            self._replica.append_tokens(self._runner.collect(handle))
        plan = self._replica.follow(message)
        self._in_flight.append((plan, self._runner.launch(plan)))


def options_for_rank(config: EngineConfig, device: str) -> dict[str, Any]:
    """Returns the options of an engine as plain data for another rank.

    Args:
        config: The engine's.
        device: The rank's own device.
    """
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    # Rank 0 schedules and reads text alone; its policy may be an object that cannot travel.
    options |= {"scheduling_policy": "mixed", "skip_tokenizer_init": True, "step_log": None}
    options |= {"show_progress": False}
    options |= {"device": device, "dtype": str(config.dtype).removeprefix("torch.")}
    return options


def _config_from(options: dict[str, Any]) -> EngineConfig:
    from nv_runtime.engine_config import EngineConfig

    return EngineConfig(**options)


def _leave(group: RankGroup, graphs: CapturedGraphs, device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    group.abort(graphs)


def _nothing_to_check() -> None:
    """Rank 0 ends this rank when the others have failed or taken too long."""


def _end_with_parent(lifeline_fd: int) -> None:
    """Ends this process at once when its parent has ended, even inside a collective."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            if readable([lifeline_fd], _PARENT_LOOK_S):
                break
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
