"""RMSNorm, alone and together with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nv_kernels import add_rms_norm, rms_norm
from nv_models.weight_target import TensorTarget, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nv_models.layers.placement import Placement


class RMSNorm(nn.Module):
    """Divides by the root of the mean square over the last dimension, times a weight.

    Args:
        size: Size of the last dimension.
        eps: Added to the mean square.
        placement: Where the weight lives; every rank holds it whole.

    Source: arXiv:1910.07467.
    """

    def __init__(self, size: int, *, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.tensor_parallel = placement.tensor_parallel
        self.weight = placement.empty_weight(size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `x`, [..., size]; returns the same shape and dtype."""
        return rms_norm(x, self.weight, eps=self.eps)

    def add_and_normalise(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds what a row-parallel layer computed to the residual stream and normalises the sum.

        Args:
            partial: This rank's part of it, [num_tokens, size] or, in parts that add up,
                [num_parts, num_tokens, size]; may be overwritten.
            residual: The residual stream, [num_tokens, size], the same on every rank; left as it
                is.

        Returns:
            The normalised sum, and the sum: the new residual stream. Both are the same on every
            rank.
        """
        ranks = self.tensor_parallel
        if ranks.size > 1:
            if partial.dim() > residual.dim():
                partial = partial[0] if len(partial) == 1 else partial.sum(0).to(residual.dtype)
            if ranks.fused is not None and ranks.fused.fits(partial):
                weight, eps = self.weight, self.eps
                return ranks.fused.all_reduce_add_rms_norm(partial, residual, weight, eps=eps)
            partial = ranks.all_reduce(partial)
        return add_rms_norm(partial, residual, self.weight, eps=self.eps)

    def targets(self, name: str) -> Iterator[TensorTarget]:
        """Yields where the checkpoint tensor of the weight goes."""
        shape = tuple(self.weight.shape)
        yield TensorTarget(
            name=f"{name}.weight",
            shape=shape,
            source=whole(shape),
            parameter=self.weight,
            first_row=0,
            num_rows=shape[0],
        )
