"""The gated MLP: SiLU(gate) * up, projected back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nv_kernels import silu_and_mul
from nv_models.layers.linear import MergedColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nv_models.config import ModelConfig
    from nv_models.layers.placement import Placement
    from nv_models.weight_target import TensorTarget


class GatedMLP(nn.Module):
    """Two projections up, one product, one projection down.

    Args:
        config: The model.
        placement: Where the weights live.

    Source: "GLU Variants Improve Transformer" (arXiv:2002.05202).
    """

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size, config.intermediate_size],
            bias=config.mlp_bias,
            placement=placement,
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            placement=placement,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [num_tokens, hidden_size] to parts of the output; see `RowParallelLinear`."""
        output: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
        return output

    def targets(self, prefix: str) -> Iterator[TensorTarget]:
        """Yields where the checkpoint tensors below `prefix` go."""
        yield from self.gate_up_proj.targets(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        yield from self.down_proj.targets(f"{prefix}.down_proj")
