"""The group through which ranks compute together.

It is made without torch's default group, so that a process can hold several engines, and one beside
a training job. The store, where the ranks meet, listens on the loopback address only, on a port
that the system picks and that is never free in between.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, TCPStore

from nv_core import ConfigError
from nv_models import TensorParallel
from nv_models.symmetric_memory import make_fused_all_reduce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nv_runtime.captured_graphs import CapturedGraphs

_LOOPBACK = "127.0.0.1"
_ABORT_S = 10.0
"""How long to wait for NCCL to free its memory; it needs a fraction of a second."""

# NCCL and torch read these, and nothing else, where they decide on NVLink multicast. We use none of
# it: a process that dies with multicast objects open can take the host's switch down with it.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# By default torch ends the process when a collective fails, and the caller's process with it. The
# engine watches its ranks itself and aborts the group.
_KEEP_PROCESS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


@dataclass(frozen=True)
class RankGroup:
    """One rank's membership in a group.

    Attributes:
        tensor_parallel: What the model computes with.
        host: The same ranks over gloo in host memory, for what they must agree on.
    """

    tensor_parallel: TensorParallel
    host: TensorParallel

    def abort(self, graphs: CapturedGraphs | None) -> None:
        """Ends every collective on the device that still waits, with an error or with nonsense.

        Those on the host end by themselves when a rank's process does.

        Args:
            graphs: All graphs that hold collectives; they are given up. NCCL stops the running
                collectives at once, then waits for the end of every graph that holds one.
        """
        group, fused = self.tensor_parallel.group, self.tensor_parallel.fused
        if group is None or group is self.host.group:
            return
        if fused is not None:
            fused.abort()
        ends = threading.Thread(target=group.abort, name="end of collectives", daemon=True)
        if graphs is None:
            ends.start()
        else:
            graphs.release(first=ends.start)
        ends.join(_ABORT_S)


def host_store(timeout_s: float) -> tuple[Store, int]:
    """Opens a store in this process.

    Args:
        timeout_s: How long its readers wait for a value.

    Returns:
        The store, and the port that the other ranks of this host find it at.
    """
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s),
        )
    return store, port


def join_store(port: int, timeout_s: float) -> Store:
    """Connects to the store that another process of this host opened."""
    return TCPStore(
        _LOOPBACK,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def resolve_collective_backend(name: str, device: torch.device) -> str:
    """Returns "nccl" or "gloo", which "auto" chooses by the kind of device.

    Raises:
        ConfigError: This torch or this device does not have it.
    """
    if name == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    if name == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"collective_backend='nccl' needs CUDA devices, got device {device}; use 'gloo'"
        )
    if name == "nccl" and not dist.is_nccl_available():
        raise ConfigError("this torch has no NCCL; use collective_backend='gloo'")
    return name


def join_group(
    store: Store,
    *,
    rank: int,
    size: int,
    backend: str,
    device: torch.device,
    timeout_s: float,
    is_watched: bool,
    fuses: bool,
) -> RankGroup:
    """Joins the group of all ranks; returns when every rank has.

    Args:
        store: Where the ranks meet; theirs alone.
        rank: This process's.
        size: Number of ranks.
        backend: "nccl" or "gloo", for the model's collectives.
        device: Where this rank computes.
        timeout_s: How long a collective may wait for the slowest rank.
        is_watched: Whether the engine itself notices ranks that are gone, and aborts the group. If
            not, torch ends this process when a collective on the device fails or waits too long.
        fuses: Whether to sum small messages over symmetric memory, where the devices can.
    """
    host = TensorParallel(rank, size, _gloo_group(store, "host", rank, size, timeout_s))
    if backend == "nccl":
        with _environment(_KEEP_PROCESS if is_watched else {}):
            # torch's limit would only see that a collective is late, not why.
            limit = timedelta(days=7) if is_watched else timedelta(seconds=timeout_s)
            group = _nccl_group(store, rank, size, device, limit)
        ranks = TensorParallel(rank, size, group)
        if fuses:
            ranks = replace(ranks, fused=make_fused_all_reduce(ranks, store, device))
        return RankGroup(ranks, host)
    stages = device.type != "cpu"
    return RankGroup(TensorParallel(rank, size, host.group, stages_on_host=stages), host)


def _gloo_group(store: Store, name: str, rank: int, size: int, timeout_s: float) -> ProcessGroup:
    prefixed = PrefixStore(name, store)
    backend = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=timeout_s))
    return _wrap(prefixed, rank, size, torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)


def _nccl_group(
    store: Store, rank: int, size: int, device: torch.device, limit: timedelta
) -> ProcessGroup:
    prefixed = PrefixStore("nccl", store)
    os.environ.update({k: v for k, v in _NO_MULTICAST.items() if k not in os.environ})
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    backend = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    group = _wrap(prefixed, rank, size, device, ProcessGroup.BackendType.NCCL, backend)
    # The first collective makes the communicator, which must not happen in a CUDA graph.
    with torch.cuda.device(device):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize()
    return group


def _wrap(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    kind: Any,  # noqa: ANN401 - a member of an enum that has no type
    backend: Any,  # noqa: ANN401 - one of torch's backends
) -> ProcessGroup:
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(device, kind, backend)
    return group


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that torch reads while a group is made, and restores them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
