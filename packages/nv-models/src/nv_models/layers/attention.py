"""Self-attention over a paged KV cache, for this rank's heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nv_kernels import rotate_and_store
from nv_models.layers.linear import QKVParallelLinear, RowParallelLinear
from nv_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nv_kernels import AttentionBackend, AttentionMetadata, LayerKVCache
    from nv_models.config import ModelConfig
    from nv_models.layers.placement import Placement
    from nv_models.layers.rotary import StepRotary
    from nv_models.weight_target import TensorTarget


class Attention(nn.Module):
    """Projects, rotates, stores this step's keys and values, and attends.

    Args:
        config: The model.
        backend: Computes attention over the paged cache.
        placement: Where the weights live.
    """

    def __init__(
        self, config: ModelConfig, *, backend: AttentionBackend, placement: Placement
    ) -> None:
        super().__init__()
        self.backend = backend
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.norm_eps = config.rms_norm_eps
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.qkv_bias,
            placement=placement,
        )
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, eps=config.rms_norm_eps, placement=placement)
            if config.qk_norm
            else None
            for _ in range(2)
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.o_proj_bias,
            placement=placement,
        )

    def forward(
        self,
        hidden: Tensor,
        rotary: StepRotary,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Runs the layer on one step's tokens.

        Args:
            hidden: [num_tokens, hidden_size].
            rotary: The step's rotation.
            kv_cache: This layer's cache; this step's keys and values are written into it.
            metadata: The step's batch.

        Returns:
            Parts of the output, [num_parts, num_tokens, hidden_size]; see `RowParallelLinear`.
        """
        qkv: Tensor = self.qkv_proj(hidden)
        query = rotate_and_store(
            qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim),
            rotary.rows,
            rotary.cos_sin,
            kv_cache.key,
            kv_cache.value,
            metadata.slot_mapping,
            query_weight=None if self.q_norm is None else self.q_norm.weight,
            key_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=self.norm_eps,
            k_scale=kv_cache.k_scale,
            v_scale=kv_cache.v_scale,
            derived=metadata.derived,
            is_settled=metadata.is_settled,
        )
        attended = self.backend.attend(query, kv_cache, metadata, scale=self.scale)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output

    def targets(self, prefix: str) -> Iterator[TensorTarget]:
        """Yields where the checkpoint tensors below `prefix` go."""
        yield from self.qkv_proj.targets(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.targets(f"{prefix}.q_norm")
            yield from self.k_norm.targets(f"{prefix}.k_norm")
        yield from self.o_proj.targets(f"{prefix}.o_proj")
