"""Placement: where a layer's weights live, and which rank's share of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nv_models.parallel import SINGLE_RANK, TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device, dtype and rank of the weights that a layer is about to allocate.

    Args:
        device: Device of the weights; "meta" allocates nothing, to count bytes.
        dtype: Dtype of the weights and of the activations.
        tensor_parallel: This rank's place among those that share the layer.
    """

    device: torch.device
    dtype: torch.dtype
    tensor_parallel: TensorParallel = SINGLE_RANK

    def empty_weight(self, *shape: int) -> nn.Parameter:
        """Allocates an uninitialised weight that takes no gradient."""
        return nn.Parameter(
            torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False
        )
