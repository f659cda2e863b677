"""Tensor parallelism as a value: which rank of how many, and the group they talk through.

Layers receive a `TensorParallel` and never ask torch for a default group. With `size` 1 no method
touches `torch.distributed`, so a single process needs no set-up at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from nv_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nv_models.config import ModelConfig
    from nv_models.symmetric_memory import FusedAllReduce


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place among those that share each layer.

    Args:
        rank: This process, from 0 to `size` - 1.
        size: Number of ranks.
        group: The ranks' process group, where this process has the rank named here; required
            when `size` is above 1, ignored otherwise.
        stages_on_host: Whether tensors on a device travel through host memory, because the group
            knows host memory only. For tests: it is slow, and no CUDA graph can hold it.
        fused: Sums small messages together with what follows them; None to leave it to the group.

    Raises:
        ConfigError: `rank` is not below `size`, or the group is missing.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    stages_on_host: bool = False
    fused: FusedAllReduce | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"tensor parallel size must be at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"tensor parallel rank must be from 0 to size - 1 = {self.size - 1}, "
                f"got {self.rank}"
            )
        if self.size > 1 and self.group is None:
            raise ConfigError(
                f"tensor parallel size {self.size} needs a process group: pass the group of the "
                f"{self.size} ranks"
            )

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sums a tensor over the ranks.

        Args:
            partial: This rank's part of the sum; overwritten with the sum.

        Returns:
            The sum over all ranks, the same tensor object as `partial`, bit for bit the same on
            every rank.
        """
        return self._reduce(partial, ReduceOp.SUM)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Takes the maximum over the ranks of each element.

        Args:
            values: This rank's; overwritten with the maxima.

        Returns:
            The maxima, the same tensor object as `values`.
        """
        return self._reduce(values, ReduceOp.MAX)

    def broadcast(self, values: Tensor) -> Tensor:
        """Gives every rank the values of rank 0.

        Args:
            values: Of the same shape and dtype on every rank; overwritten.

        Returns:
            The values of rank 0, the same tensor object as `values`.
        """
        if self.size > 1:
            moved = self._to_wire(values)
            dist.broadcast(moved, group_src=0, group=self.group)
            self._from_wire(moved, values)
        return values

    def all_gather_last_dim(self, part: Tensor) -> Tensor:
        """Joins the ranks' columns.

        Args:
            part: This rank's columns, [num_rows, num_columns], the same shape on every rank.

        Returns:
            [num_rows, size * num_columns], rank after rank; `part` itself for a single rank.
        """
        if self.size == 1:
            return part
        num_rows, num_columns = part.shape
        moved = self._to_wire(part.contiguous())
        parts = torch.empty(
            (self.size * num_rows, num_columns), dtype=moved.dtype, device=moved.device
        )
        _all_gather(parts, moved, group=self.group)
        columns = parts.view(self.size, num_rows, num_columns).transpose(0, 1)
        return columns.reshape(num_rows, self.size * num_columns).to(part.device)

    def _reduce(self, values: Tensor, op: ReduceOp.RedOpType) -> Tensor:
        if self.size > 1:
            moved = self._to_wire(values)
            dist.all_reduce(moved, op=op, group=self.group)
            self._from_wire(moved, values)
        return values

    def _to_wire(self, values: Tensor) -> Tensor:
        return values.cpu() if self.stages_on_host else values

    def _from_wire(self, moved: Tensor, values: Tensor) -> None:
        if moved is not values:
            values.copy_(moved)


# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SINGLE_RANK = TensorParallel()
"""No tensor parallelism: the default wherever a `TensorParallel` is asked for."""


def check_tensor_parallel_size(config: ModelConfig, size: int) -> None:
    """Checks that a model can be shared by `size` ranks, before anything is allocated.

    Attention heads and the MLP's width must divide; key/value heads must divide, or be replicated
    over a whole number of ranks each. The vocabulary may have any size: it is padded.

    Raises:
        ConfigError: A count does not divide (the message names every such count), or `size` is
            below 1.
    """
    if size < 1:
        raise ConfigError(f"tensor parallel size must be at least 1, got {size}")
    problems = []
    if config.num_heads % size:
        problems.append(f"num_attention_heads = {config.num_heads} is not a multiple of it")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        problems.append(
            f"num_key_value_heads = {config.num_kv_heads} is neither a multiple nor a divisor of it"
        )
    if config.intermediate_size % size:
        problems.append(f"intermediate_size = {config.intermediate_size} is not a multiple of it")
    if problems:
        fitting = [str(n) for n in range(1, config.num_heads + 1) if _divides(config, n)]
        raise ConfigError(
            f"tensor parallel size {size} does not fit this model: {'; '.join(problems)}. "
            f"Sizes that fit: {', '.join(fitting)}"
        )


def heads_per_rank(config: ModelConfig, size: int) -> tuple[int, int]:
    """Counts one rank's query heads, and its key/value heads, replicated ones included.

    Args:
        config: The model.
        size: Number of ranks; one that `check_tensor_parallel_size` accepts.
    """
    return config.num_heads // size, max(1, config.num_kv_heads // size)


def _divides(config: ModelConfig, size: int) -> bool:
    return (
        config.num_heads % size == 0
        and config.intermediate_size % size == 0
        and (config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0)
    )
