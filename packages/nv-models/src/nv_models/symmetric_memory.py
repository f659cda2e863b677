"""FusedAllReduce: all-reduce, residual addition and norm at once, over symmetric memory.

Optional and off unless asked for. It needs GPUs that can read each other's memory, and parts of
torch that are not public yet; `make_fused_all_reduce` tries all of it once, and says what is
missing.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

    from nv_models.parallel import TensorParallel

logger = logging.getLogger(__name__)

MAX_ROWS = 64
"""Most rows of one call; each is one block of threads, and all of them must run at once."""
MAX_BYTES = 512 * 1024
"""Larger messages are faster in NCCL, which sends each byte once."""

_NUM_BUFFERS = 2
_NAME_KEY = "symmetric memory name"


class FusedAllReduce:
    """This rank's end of the ranks' common memory.

    Calls take turns between two buffers, so every rank must make the same calls in the same order,
    and every forward pass an even number of them (two per layer): a CUDA graph fixes the turns of
    its calls.
    """

    def __init__(self, ranks: TensorParallel, store: Store, device: torch.device) -> None:
        """Allocates the memory and exchanges it with the other ranks, which must do the same.

        Args:
            ranks: The ranks.
            store: Where they meet.
            device: This rank's.

        Raises:
            RuntimeError: This machine or this torch cannot do it.
        """
        from torch._C._distributed_c10d import PrefixStore, _SymmetricMemory

        # Read where the memory is exchanged, and nowhere else to be set; see the module above.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._rank, self._num_ranks = ranks.rank, ranks.size
        signal_bytes = 4 * MAX_ROWS * ranks.size
        size = _NUM_BUFFERS * MAX_BYTES + signal_bytes
        if ranks.rank == 0:
            store.set(_NAME_KEY, f"nv {secrets.token_hex(8)}")
        name = store.get(_NAME_KEY).decode()
        exchange = PrefixStore("symmetric memory exchange", store)
        _SymmetricMemory.set_group_info(name, ranks.rank, ranks.size, exchange)
        self._memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        with _registered(name, ranks.group):
            self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        starts = self._handle.buffer_ptrs

        def addresses(offset: int) -> Tensor:
            return torch.tensor(
                [start + offset for start in starts], dtype=torch.int64, device=device
            )

        self._buffers = [addresses(turn * MAX_BYTES) for turn in range(_NUM_BUFFERS)]
        self._signals = addresses(_NUM_BUFFERS * MAX_BYTES)
        self._turn = 0
        self._is_aborted = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        # Work on it overtakes whatever waits on the others.
        self._abort_stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def fits(self, partial: Tensor) -> bool:
        """Whether a message is small enough to gain from this."""
        num_bytes = partial.numel() * partial.element_size()
        return partial.shape[0] <= MAX_ROWS and num_bytes <= MAX_BYTES

    def abort(self) -> None:
        """Lets every call that waits for another rank end, with nonsense; so will all later ones.

        May be called from any thread.
        """
        with torch.cuda.stream(self._abort_stream):
            self._is_aborted.copy_(self._one, non_blocking=True)

    def all_reduce_add_rms_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Sums over the ranks, adds the residual and normalises.

        Args:
            partial: This rank's part, [num_rows, n], contiguous; one that `fits`.
            residual: The residual stream, same shape.
            weight: Of the norm, [n].
            eps: Of the norm.

        Returns:
            The normalised sum, and the sum.
        """
        from nv_kernels.triton.all_reduce import all_reduce_add_rms_norm

        buffers = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        return all_reduce_add_rms_norm(
            partial.contiguous(),
            residual.contiguous(),
            weight,
            eps=eps,
            buffers=buffers,
            signals=self._signals,
            is_aborted=self._is_aborted,
            rank=self._rank,
            num_ranks=self._num_ranks,
        )


@contextmanager
def _registered(name: Any, group: Any) -> Iterator[None]:  # noqa: ANN401 - types vary with torch
    """Lets torch find a group by a name, as newer versions do when memory is exchanged.

    No longer than that: the registry would keep the group, and its communicator, alive.
    """
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    _register_process_group(name, group)
    try:
        yield
    finally:
        _unregister_process_group(name)


def make_fused_all_reduce(
    ranks: TensorParallel, store: Store, device: torch.device
) -> FusedAllReduce | None:
    """Makes this rank's end, if every rank can; all ranks call it together.

    Args:
        ranks: The ranks, over NCCL.
        store: Where they meet.
        device: This rank's.

    Returns:
        None, with a warning, where some rank cannot.
    """
    reason = _missing(ranks, device)
    # A rank that cannot must not let the others wait for it.
    if not _all_can(ranks, device, reason is None):
        logger.warning("no fused all-reduce: %s", reason or "another rank cannot")
        return None
    fused: FusedAllReduce | None = None
    try:
        fused = FusedAllReduce(ranks, store, device)
    except RuntimeError as error:
        reason = str(error)
    if not _all_can(ranks, device, fused is not None):
        logger.warning("no fused all-reduce: %s", reason or "another rank cannot")
        return None
    return fused


def _missing(ranks: TensorParallel, device: torch.device) -> str | None:
    """Says what is missing for symmetric memory, as far as it shows without trying."""
    if device.type != "cuda":
        return "it needs CUDA devices"
    if ranks.stages_on_host or not dist.is_nccl_available():
        return "it needs ranks on GPUs of their own, which talk over NCCL"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    if not hasattr(_SymmetricMemory, "set_group_info"):
        return f"torch {torch.__version__} has another kind of symmetric memory"
    first = (device.index or 0) - ranks.rank
    peers = [first + rank for rank in range(ranks.size)]
    visible = torch.cuda.device_count()
    for peer in peers:
        if peer == device.index:
            continue
        if not 0 <= peer < visible or not torch.cuda.can_device_access_peer(device, peer):
            return f"{device} cannot read the memory of device {peer}"
    return None


def _all_can(ranks: TensorParallel, device: torch.device, can: bool) -> bool:  # noqa: FBT001
    device = torch.device("cpu") if ranks.stages_on_host else device
    cannot = torch.tensor([0 if can else 1], device=device)
    return int(ranks.all_reduce_max(cannot)) == 0
