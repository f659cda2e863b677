"""Linear layers: replicated, and split over ranks by output (column) or by input (row).

A column-parallel layer gives each rank some of the outputs; a row-parallel one takes these as its
inputs, and its output is the sum over the ranks. A column layer followed by a row layer needs that
one sum only; whoever reads the output takes it (`RMSNorm.add_and_normalise`).

Names follow Megatron-LM (arXiv:1909.08053), which writes y = x A and splits A's columns; torch
stores A transposed, so "column" means rows of the weight here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from nv_core.errors import ConfigError
from nv_kernels import linear, linear_parts, pack_linear_weight
from nv_models.weight_target import TensorTarget, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nv_models.layers.placement import Placement
    from nv_models.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class OutputShare:
    """Which of one projection's outputs this rank computes.

    Args:
        total: Number of outputs of the whole projection.
        start: First output of this rank.
        count: Number of outputs of this rank.
    """

    total: int
    start: int
    count: int

    @classmethod
    def all_of(cls, total: int) -> OutputShare:
        """Every rank computes every output."""
        return cls(total, 0, total)

    @classmethod
    def split(cls, total: int, tensor_parallel: TensorParallel) -> OutputShare:
        """Each rank computes an equal part, rank 0 the first.

        Raises:
            ConfigError: `total` is not a multiple of the number of ranks.
        """
        count = _divide("number of outputs", total, tensor_parallel)
        return cls(total, tensor_parallel.rank * count, count)

    @classmethod
    def split_heads(
        cls, num_heads: int, head_dim: int, tensor_parallel: TensorParallel
    ) -> OutputShare:
        """Each rank computes an equal number of whole heads, rank 0 the first.

        Raises:
            ConfigError: `num_heads` is not a multiple of the number of ranks.
        """
        count = _divide("number of heads", num_heads, tensor_parallel)
        return cls(num_heads * head_dim, tensor_parallel.rank * count * head_dim, count * head_dim)

    @classmethod
    def share_heads(
        cls, num_heads: int, head_dim: int, tensor_parallel: TensorParallel
    ) -> OutputShare:
        """Like `split_heads`; with more ranks than heads, neighbouring ranks share a head each.

        Raises:
            ConfigError: Neither count is a multiple of the other.
        """
        if tensor_parallel.size <= num_heads:
            return cls.split_heads(num_heads, head_dim, tensor_parallel)
        if tensor_parallel.size % num_heads:
            raise ConfigError(
                f"number of key/value heads ({num_heads}) must divide the tensor parallel size "
                f"({tensor_parallel.size}) when it is the smaller one"
            )
        head = tensor_parallel.rank * num_heads // tensor_parallel.size
        return cls(num_heads * head_dim, head * head_dim, head_dim)


class FusedLinear(nn.Module):
    """Several projections of one input as one matrix product; each rank has a share of each.

    The base of all layers here that do not sum over ranks.

    Args:
        in_features: Size of the input.
        shares: This rank's share of each projection, in the order of the fused output.
        bias: Whether the projections have biases.
        placement: Where the weights live.
    """

    def __init__(
        self,
        in_features: int,
        shares: Sequence[OutputShare],
        *,
        bias: bool,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shares = tuple(shares)
        num_rows = sum(share.count for share in self.shares)
        self.weight = placement.empty_weight(num_rows, in_features)
        self.bias = placement.empty_weight(num_rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Applies the projections.

        Args:
            x: [num_tokens, in_features].

        Returns:
            [num_tokens, sum of this rank's outputs], projection after projection.
        """
        return linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Brings the loaded weight into the layout that products read fastest."""
        self.weight = packed(self.weight)

    def targets(self, *names: str) -> Iterator[TensorTarget]:
        """Yields where the checkpoint tensors of each projection go.

        Args:
            names: The projections' names in the checkpoint, without ".weight".
        """
        row = 0
        for name, share in zip(names, self.shares, strict=True):
            rows = (share.start, share.start + share.count)
            yield TensorTarget(
                name=f"{name}.weight",
                shape=(share.total, self.in_features),
                source=(rows, (0, self.in_features)),
                parameter=self.weight,
                first_row=row,
                num_rows=share.count,
            )
            if self.bias is not None:
                yield TensorTarget(
                    name=f"{name}.bias",
                    shape=(share.total,),
                    source=(rows,),
                    parameter=self.bias,
                    first_row=row,
                    num_rows=share.count,
                )
            row += share.count


class ReplicatedLinear(FusedLinear):
    """A projection that every rank computes whole.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        bias: Whether there is a bias.
        placement: Where the weights live.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, placement: Placement
    ) -> None:
        super().__init__(
            in_features, [OutputShare.all_of(out_features)], bias=bias, placement=placement
        )


class MergedColumnParallelLinear(FusedLinear):
    """Several projections of one input, the outputs of each split over the ranks.

    Args:
        in_features: Size of the input, the same on every rank.
        out_features: Size of each projection's output over all ranks.
        bias: Whether the projections have biases.
        placement: Where the weights live.

    Raises:
        ConfigError: An output size is not a multiple of the number of ranks.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool, placement: Placement
    ) -> None:
        shares = [OutputShare.split(size, placement.tensor_parallel) for size in out_features]
        super().__init__(in_features, shares, bias=bias, placement=placement)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A projection whose outputs are split over the ranks.

    Args:
        in_features: Size of the input, the same on every rank.
        out_features: Size of the output over all ranks.
        bias: Whether there is a bias.
        placement: Where the weights live.

    Raises:
        ConfigError: `out_features` is not a multiple of the number of ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, placement: Placement
    ) -> None:
        super().__init__(in_features, [out_features], bias=bias, placement=placement)


class QKVParallelLinear(FusedLinear):
    """The query, key and value projections, split over the ranks by heads.

    With more ranks than key/value heads, each of these heads is replicated over the ranks whose
    query heads it serves.

    Args:
        hidden_size: Size of the input, the same on every rank.
        head_dim: Size of a head.
        num_heads: Number of query heads over all ranks.
        num_kv_heads: Number of key/value heads over all ranks, before replication.
        bias: Whether the projections have biases.
        placement: Where the weights live.

    Attributes:
        num_heads: Number of query heads of this rank.
        num_kv_heads: Number of key/value heads of this rank.

    Raises:
        ConfigError: The heads cannot be shared by this number of ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        placement: Placement,
    ) -> None:
        query = OutputShare.split_heads(num_heads, head_dim, placement.tensor_parallel)
        key = value = OutputShare.share_heads(num_kv_heads, head_dim, placement.tensor_parallel)
        super().__init__(hidden_size, [query, key, value], bias=bias, placement=placement)
        self.num_heads = query.count // head_dim
        self.num_kv_heads = key.count // head_dim


class RowParallelLinear(nn.Module):
    """A projection whose inputs are split over the ranks; the sum over them is its output.

    Args:
        in_features: Size of the input over all ranks.
        out_features: Size of the output, the same on every rank.
        bias: Whether there is a bias. Every rank holds it whole, and only rank 0 adds it, so that
            it counts once in the sum.
        placement: Where the weights live.

    Raises:
        ConfigError: `in_features` is not a multiple of the number of ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.tensor_parallel = placement.tensor_parallel
        self.in_features = in_features
        self.out_features = out_features
        self.in_features_per_rank = _divide("number of inputs", in_features, self.tensor_parallel)
        self.weight = placement.empty_weight(out_features, self.in_features_per_rank)
        self.bias = placement.empty_weight(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Applies the projection.

        Args:
            x: This rank's inputs, [num_tokens, in_features / number of ranks].

        Returns:
            Parts of this rank's part of the output, [num_parts, num_tokens, out_features] (see
            `nv_kernels.linear_parts`): the output is the sum over all parts of all ranks, which is
            left to the reader so that it can be one operation with what follows.
        """
        if self.bias is None or self.tensor_parallel.rank != 0:
            return linear_parts(x, self.weight)
        return linear(x, self.weight, self.bias)[None]

    def pack(self) -> None:
        """Brings the loaded weight into the layout that products read fastest."""
        self.weight = packed(self.weight)

    def targets(self, name: str) -> Iterator[TensorTarget]:
        """Yields where the checkpoint tensors of the projection go.

        Args:
            name: The projection's name in the checkpoint, without ".weight".
        """
        start = self.tensor_parallel.rank * self.in_features_per_rank
        yield TensorTarget(
            name=f"{name}.weight",
            shape=(self.out_features, self.in_features),
            source=((0, self.out_features), (start, start + self.in_features_per_rank)),
            parameter=self.weight,
            first_row=0,
            num_rows=self.out_features,
        )
        if self.bias is not None:
            yield TensorTarget(
                name=f"{name}.bias",
                shape=(self.out_features,),
                source=whole((self.out_features,)),
                parameter=self.bias,
                first_row=0,
                num_rows=self.out_features,
            )


def packed(weight: nn.Parameter) -> nn.Parameter:
    """Returns a parameter that `linear` reads fastest in place of another."""
    return nn.Parameter(pack_linear_weight(weight.data), requires_grad=False)


def _divide(what: str, total: int, tensor_parallel: TensorParallel) -> int:
    if total % tensor_parallel.size:
        raise ConfigError(
            f"{what} ({total}) must be a multiple of the tensor parallel size "
            f"({tensor_parallel.size})"
        )
    return total // tensor_parallel.size
