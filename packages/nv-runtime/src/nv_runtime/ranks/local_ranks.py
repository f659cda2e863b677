"""LocalRanks: rank 0 and the ranks that it starts on this host, "mp".

Rank 0 schedules, and sends each step's news through the ring before it runs its own part. When
anything goes wrong that leaves the ranks out of step, all of them are taken down: the requests fail
with the reason, the process goes on, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nv_core import ConfigError, StepPlan
from nv_models import TensorParallel
from nv_runtime.captured_graphs import CapturedGraphs
from nv_runtime.engine_config import EngineConfig
from nv_runtime.interrupts import interrupts_deferred
from nv_runtime.model_runner import ModelRunner, StepHandle
from nv_runtime.ranks.agreement import Agreement
from nv_runtime.ranks.errors import RankError, refuse_forked_child
from nv_runtime.ranks.plan_encoder import PlanEncoder
from nv_runtime.ranks.process_group import (
    RankGroup,
    host_store,
    join_group,
    resolve_collective_backend,
)
from nv_runtime.ranks.processes import RankProcess
from nv_runtime.ranks.rank_main import StartMessage, options_for_rank
from nv_runtime.ranks.ring import RingLayout, RingWriter, spin_seconds
from nv_runtime.ranks.segment import SharedSegment
from nv_runtime.ranks.watch import RankWatch
from nv_runtime.ranks.wire import CommandKind, pack_command

_STOP_S = 5.0
"""How long the ranks may take, all together, to end when they are told to."""
_CAUSE_S = 3.0
"""How long the reason of a failed collective may take to arrive."""


class LocalRanks:
    """Starts the other ranks; `join` waits for them, `shutdown` ends them."""

    def __init__(self, config: EngineConfig, model_path: Path, device: torch.device) -> None:
        """Starts the processes, which import what they need while this one goes on.

        Args:
            config: The engine's options.
            model_path: The checkpoint on this machine.
            device: Where rank 0 computes; on CUDA the others take the devices behind it.

        Raises:
            ConfigError: There are not as many devices as ranks.
        """
        self._config = config
        self._device = device
        self._backend = resolve_collective_backend(config.collective_backend, device)
        # An interrupt between a process's start and its place in the list would leave it behind.
        with interrupts_deferred():
            self._group = _Group(config, model_path, device, self._backend)
            self._finalizer = weakref.finalize(self, self._group.close)

    def join(self) -> tuple[TensorParallel, Agreement]:
        """Waits until the other ranks have started, and joins their group.

        Raises:
            RankError: One failed, or took too long.
        """
        return self._group.join(self._config, self._device, self._backend)

    def make_executor(self, runner: ModelRunner) -> LocalExecutor:
        """Makes what runs steps on all ranks.

        Args:
            runner: Rank 0's own.
        """
        self._finalizer.detach()
        self._group.note_serving(runner.graphs)
        return LocalExecutor(runner, self._group, timeout_s=self._config.rank_timeout_s)

    def shutdown(self) -> None:
        """Ends the ranks; calling it again does nothing."""
        self._group.close()


class LocalExecutor:
    """Runs each step on rank 0 and on the ranks that it has started."""

    def __init__(self, runner: ModelRunner, group: _Group, *, timeout_s: float) -> None:
        """Takes rank 0's runner and the other ranks.

        Args:
            runner: Runs rank 0's part.
            group: The other ranks, ready; ended when this executor is.
            timeout_s: How long a step may take.
        """
        self._runner = runner
        self._group = group
        self._timeout_s = timeout_s
        self._encoder = PlanEncoder()
        self._num_collected = 0
        # Runs at exit as well, and when the engine is dropped.
        self._finalizer = weakref.finalize(self, group.close)

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [process.pid for process in self._group.processes]

    def check(self) -> None:
        """See `Executor`.

        Raises:
            RankError: A rank is gone, or this is not the process that started them.
        """
        self._group.check()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step on every rank; see `Executor`.

        Raises:
            RankError: A rank is gone, now or since earlier; the message says which, and why.
        """
        self._group.check()
        message = self._encoder.encode(plan, num_collected=self._num_collected)
        command = pack_command(CommandKind.STEP, message.pack())
        # From the command on, rank 0 must not be the only one that stops.
        with self._all_or_none(BaseException):
            self._num_collected = 0
            self._group.send(command)
            return self._runner.launch(plan)

    def collect(self, handle: StepHandle) -> dict[int, int]:
        """See `Executor`.

        Raises:
            RankError: A rank is gone; the message says which, and why.
        """
        self._group.check()
        with self._all_or_none(Exception):
            tokens = self._runner.collect(handle)
            # The collectives of a group that was taken down end with any result.
            self._group.check()
        self._num_collected += 1
        return tokens

    @property
    def num_graphs_ahead(self) -> int:
        """See `Executor`."""
        return self._runner.num_graphs_ahead

    def capture_next_graph(self) -> bool:
        """See `Executor`.

        Raises:
            RankError: A rank is gone, now or since earlier; the message says which, and why.
        """
        if self._runner.num_graphs_ahead == 0:
            return False
        self._group.check()
        with self._all_or_none(BaseException):
            self._group.send(pack_command(CommandKind.CAPTURE))
            has_captured = self._runner.capture_next_graph()
            self._group.check()
        return has_captured

    def reset(self) -> None:
        """See `Executor`."""
        self._encoder.forget()
        self._num_collected = 0
        self._runner.reset()
        # If a rank is gone, the next launch says so.
        with contextlib.suppress(RankError):
            self._group.check()
            self._group.send(pack_command(CommandKind.RESET))

    def shutdown(self) -> None:
        """Ends the other ranks; calling it again does nothing."""
        self._group.close()

    @contextmanager
    def _all_or_none(self, kind: type[BaseException]) -> Iterator[None]:
        """If rank 0 fails, the others must not go on; if it fails because of one, says of which.

        The ranks have a deadline as long as rank 0 is in here and may wait for them. Between two
        calls nobody waits, and whoever reads a stream may take any time.
        """
        try:
            self._group.expect_progress(self._timeout_s)
            yield
        except kind as error:
            if isinstance(error, RankError):
                raise
            is_known = isinstance(error, RuntimeError) and self._group.wait_for_failure(_CAUSE_S)
            if not is_known:
                self._group.fail(f"rank 0 failed with {type(error).__name__}: {error}")
                raise
            self._group.check()
        finally:
            self._group.expect_progress(None)


class _Group:
    """The other ranks and all that is shared with them; holds neither model nor engine.

    Attributes:
        processes: The other ranks.
    """

    def __init__(
        self, config: EngineConfig, model_path: Path, device: torch.device, backend: str
    ) -> None:
        size = config.tensor_parallel_size
        devices = _devices_of_ranks(device, size, backend)
        layout = RingLayout(num_readers=size - 1)
        self._owner_pid = os.getpid()
        self._start_timeout_s = config.rank_start_timeout_s
        self._give_up_at = time.monotonic() + config.rank_start_timeout_s
        self._rank_group: RankGroup | None = None
        self._graphs: CapturedGraphs | None = None
        self._is_serving = False
        self._is_closed = False
        self.processes: list[RankProcess] = []
        self._store, port = host_store(config.rank_start_timeout_s)
        self._segment = SharedSegment.create(layout.size_bytes)
        self._writer = RingWriter(self._segment.memory, layout, wake=self._wake)
        try:
            for rank in range(1, size):
                options = options_for_rank(config, devices[rank])
                start = StartMessage(
                    rank=rank,
                    size=size,
                    store_port=port,
                    collective_backend=backend,
                    options=options | {"model": str(model_path), "revision": None},
                    spin_s=spin_seconds(size),
                    timeout_s=config.rank_start_timeout_s,
                )
                self.processes.append(
                    RankProcess(rank, start.to_json(), segment_fd=self._segment.fd)
                )
            self._watch = RankWatch(
                self.processes, describe_late=self._describe_late, abort=self.abort
            )
        except BaseException:
            for process in self.processes:
                process.kill()
                process.close(_STOP_S)
            self._writer.close()
            self._segment.close()
            raise

    def join(
        self, config: EngineConfig, device: torch.device, backend: str
    ) -> tuple[TensorParallel, Agreement]:
        """Waits for the other ranks and joins their group."""
        self._watch.wait_until_ready(max(0.0, self._give_up_at - time.monotonic()))
        size = config.tensor_parallel_size
        self._rank_group = join_group(
            self._store,
            rank=0,
            size=size,
            backend=backend,
            device=device,
            timeout_s=config.rank_start_timeout_s,
            is_watched=True,
            fuses=config.fused_all_reduce,
        )
        agreement = Agreement(self._store, rank=0, size=size, check=self._check_start)
        return self._rank_group.tensor_parallel, agreement

    def note_serving(self, graphs: CapturedGraphs) -> None:
        """Notes that the ranks are about to listen to commands.

        Args:
            graphs: Rank 0's, which end with the group.
        """
        self._graphs = graphs
        self._is_serving = True

    def check(self) -> None:
        """Raises if a rank is gone, all were ended, or they are another process's."""
        refuse_forked_child(self._owner_pid)
        if self._is_closed:
            raise RankError("the ranks of this engine have been shut down; make a new one")
        self._watch.check()

    def fail(self, reason: str) -> None:
        """Takes the ranks down."""
        self._watch.fail(reason)

    def wait_for_failure(self, timeout_s: float) -> bool:
        """Waits until it is known that a rank is gone; returns whether one is."""
        return self._watch.wait_for_failure(timeout_s)

    def expect_progress(self, timeout_s: float | None) -> None:
        """Gives the ranks so long to finish what they have; None when they have nothing."""
        self._watch.set_deadline(timeout_s)

    def send(self, command: bytes) -> None:
        """Sends a command to every rank, waiting for the slowest where it must."""
        self._writer.write(command, on_full=self._watch.check)

    def abort(self) -> None:
        """Ends the collectives in which this process may be waiting."""
        if self._rank_group is not None:
            self._rank_group.abort(self._graphs)

    def close(self) -> None:
        """Ends the ranks and gives back all that they shared; calling it again does nothing."""
        # A forked child has this object, but neither the threads nor the ranks.
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        if self._watch.is_this_thread:
            # The collector drops an engine in any thread, also in the one that is to be waited for.
            threading.Thread(target=self.close, name="end of ranks").start()
            return
        self._is_closed = True
        self._watch.stop()
        give_up_at = time.monotonic() + _STOP_S
        if not self._stop_politely(give_up_at):
            for process in self.processes:
                process.kill()
        for process in self.processes:
            process.close(max(0.0, give_up_at - time.monotonic()))
        self.abort()
        self._rank_group = None
        self._writer.close()
        self._segment.close()

    def _stop_politely(self, give_up_at: float) -> bool:
        """Tells the ranks to end; returns whether they will hear it.

        While they load they do not: they wait for rank 0, or read weights.
        """
        if not self._is_serving or self._watch.wait_for_failure(0):
            return False
        try:
            self._writer.write(pack_command(CommandKind.STOP), on_full=_until(give_up_at))
        except RankError:
            return False
        return True

    def _check_start(self) -> None:
        if time.monotonic() > self._give_up_at:
            self._watch.fail(
                f"the ranks were not ready within {self._start_timeout_s:g} s; raise "
                "rank_start_timeout_s if loading may take so long"
            )
        self._watch.check()

    def _wake(self, reader: int) -> None:
        self.processes[reader].channel.wake()

    def _describe_late(self) -> str:
        late = [
            f"rank {process.rank} (process {process.pid})"
            for reader, process in enumerate(self.processes)
            if self._writer.num_completed(reader) < self._writer.num_written
        ]
        return ", ".join(late) or "the device of rank 0"


def _until(give_up_at: float) -> Callable[[], None]:
    def check() -> None:
        if time.monotonic() > give_up_at:
            raise RankError("the ranks take no more commands")

    return check


def _devices_of_ranks(device: torch.device, size: int, backend: str) -> list[str]:
    """Names each rank's device: on CUDA those from rank 0's on; gloo lets ranks share them."""
    if device.type != "cuda":
        return [str(device)] * size
    first, count = device.index, torch.cuda.device_count()
    if backend == "nccl" and first + size > count:
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} CUDA devices from {device} on, and {count} "
            "are visible; lower tensor_parallel_size, or make more devices visible"
        )
    return [f"cuda:{(first + rank) % count}" for rank in range(size)]
