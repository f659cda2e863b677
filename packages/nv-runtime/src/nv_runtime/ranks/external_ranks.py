"""ExternalRanks: ranks that somebody else has started, "external".

Under torchrun, on one host or several, every rank runs the same program: each makes the same `LLM`
and gives it the same requests. Each has a scheduler of its own, and since a scheduler is a pure
state machine, all make the same plans; nothing has to be sent. Every rank gets every answer.

That holds only while all ranks really do the same, so they compare their plans as they go.
"""

from __future__ import annotations

import os
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nv_core import ConfigError, StepPlan
from nv_models import TensorParallel
from nv_runtime.engine_config import EngineConfig
from nv_runtime.model_runner import ModelRunner, StepHandle
from nv_runtime.ranks.agreement import Agreement
from nv_runtime.ranks.errors import RankError, refuse_forked_child
from nv_runtime.ranks.plan_encoder import PlanEncoder
from nv_runtime.ranks.process_group import RankGroup, join_group, resolve_collective_backend

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process; its protocol, not our configuration."""
_STEPS_PER_COMPARISON = 16
_REPORT = "report"


def external_device(config: EngineConfig) -> torch.device:
    """Returns this rank's device: with `device` "auto" or "cuda", the one of its number."""
    local_rank = os.environ.get("LOCAL_RANK")
    device = config.resolve_device()
    if device.type == "cuda" and ":" not in config.device and local_rank is not None:
        return torch.device("cuda", int(local_rank) % torch.cuda.device_count())
    return device


class ExternalRanks:
    """This process as one of several that run the same program."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Reads from the environment which rank this is, and meets the others.

        Args:
            config: The engine's options, the same on every rank.
            device: Where this rank computes.

        Raises:
            ConfigError: This process was not started as a rank, or as one of another number.
        """
        self.rank, size = _place(config)
        self._config = config
        self._device = device
        timeout_s = config.rank_start_timeout_s
        self._give_up_at = time.monotonic() + timeout_s
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        # All ranks make their engines in the same order, each before any makes the next.
        number = (store.add("nv/engines", 1) - 1) // size
        self._store = PrefixStore(f"nv/{number}", store)
        self._group: RankGroup | None = None

    def join(self) -> tuple[TensorParallel, Agreement]:
        """Joins the group of all ranks."""
        config = self._config
        self._group = join_group(
            self._store,
            rank=self.rank,
            size=config.tensor_parallel_size,
            backend=resolve_collective_backend(config.collective_backend, self._device),
            device=self._device,
            timeout_s=config.rank_timeout_s,
            is_watched=False,
            fuses=config.fused_all_reduce,
        )
        agreement = Agreement(
            self._store, rank=self.rank, size=config.tensor_parallel_size, check=self._check_start
        )
        return self._group.tensor_parallel, agreement

    def make_executor(self, runner: ModelRunner) -> ExternalExecutor:
        """Makes what runs this rank's part of every step."""
        if self._group is None:
            raise RankError("the ranks have not been joined")
        return ExternalExecutor(runner, self._group, self._store)

    def shutdown(self) -> None:
        """Leaves the group; calling it again does nothing."""
        self._group = None

    def _check_start(self) -> None:
        if time.monotonic() > self._give_up_at:
            raise RankError(
                f"the other ranks were not ready within {self._config.rank_start_timeout_s:g} s; "
                "raise rank_start_timeout_s if loading may take so long"
            )


class ExternalExecutor:
    """Runs this rank's part of each step, and compares plans with the other ranks."""

    def __init__(self, runner: ModelRunner, group: RankGroup, store: PrefixStore) -> None:
        """Takes this rank's runner and the group.

        Args:
            runner: Runs this rank's part.
            group: All ranks.
            store: Where a rank that fails leaves its traceback.
        """
        self._runner = runner
        self._group = group
        self._store = store
        self._owner_pid = os.getpid()
        self._encoder = PlanEncoder()
        self._num_collected = 0
        self._num_launched = 0
        self._checksum = 0

    def check(self) -> None:
        """See `Executor`.

        Raises:
            RankError: This is not the process that joined the ranks.
        """
        refuse_forked_child(self._owner_pid)

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Executor`.

        Raises:
            RankError: Another rank failed, or plans something else.
        """
        # Not inside: the other ranks go on.
        self.check()
        with self._telling_others():
            message = self._encoder.encode(plan, num_collected=self._num_collected)
            self._num_collected = 0
            self._checksum = zlib.crc32(message.pack(), self._checksum)
            if self._num_launched % _STEPS_PER_COMPARISON == 0:
                self._compare()
            self._num_launched += 1
            return self._runner.launch(plan)

    def collect(self, handle: StepHandle) -> dict[int, int]:
        """See `Executor`."""
        self.check()
        with self._telling_others():
            tokens = self._runner.collect(handle)
        self._num_collected += 1
        return tokens

    @property
    def num_graphs_ahead(self) -> int:
        """See `Executor`."""
        return self._runner.num_graphs_ahead

    def capture_next_graph(self) -> bool:
        """See `Executor`; every rank has to call it at the same point of the program."""
        self.check()
        with self._telling_others():
            return self._runner.capture_next_graph()

    def reset(self) -> None:
        """See `Executor`."""
        self._encoder.forget()
        self._num_collected = 0
        self._runner.reset()

    def shutdown(self) -> None:
        """See `Executor`."""
        if os.getpid() == self._owner_pid:
            self._group.abort(self._runner.graphs)

    def _compare(self) -> None:
        host = self._group.host
        mine = torch.tensor([[self._num_launched, self._checksum]])
        everyone = host.all_gather_last_dim(mine).view(host.size, 2).tolist()
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise RankError(
                    f"rank {rank} does not plan what rank 0 plans (step and checksum {theirs}, "
                    f"rank 0 {everyone[0]}): with distributed_executor='external' every rank must "
                    "run the same program, with the same requests in the same order"
                )

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Leaves this rank's failure where others find it, and finds theirs."""
        rank = self._group.host.rank
        try:
            yield
        except RuntimeError as error:
            theirs = self._others_report()
            self._leave_report(f"rank {rank}:\n{traceback.format_exc()}")
            if theirs is None or isinstance(error, RankError):
                raise
            raise RankError(theirs) from error
        except BaseException:
            self._leave_report(f"rank {rank}:\n{traceback.format_exc()}")
            raise

    def _leave_report(self, text: str) -> None:
        # The first report is the cause of the others.
        self._store.compare_set(_REPORT, "", text)

    def _others_report(self) -> str | None:
        if not self._store.check([_REPORT]):
            return None
        return f"another rank failed first.\n{self._store.get(_REPORT).decode()}"


def _place(config: EngineConfig) -> tuple[int, int]:
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"distributed_executor='external' needs a launcher: {', '.join(missing)} are not set. "
            "Start the program with torchrun, or use distributed_executor='mp'"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size}, but the launcher started {size} "
            "processes; the two must be equal"
        )
    return rank, size
