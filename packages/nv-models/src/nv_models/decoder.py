"""CausalLM: the one decoder that every supported architecture is a setting of.

Per layer: norm, attention, add and norm, MLP, add and norm. The additions belong to the norm that
follows (`add_and_normalise`), so a layer hands on two tensors: what is still to be added, and the
residual stream.

Everything a forward pass reads arrives as an argument: tokens, positions, the KV caches and the
batch's metadata. The model holds weights and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nv_core.errors import ConfigError
from nv_models.layers.attention import Attention
from nv_models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nv_models.layers.linear import FusedLinear, RowParallelLinear
from nv_models.layers.mlp import GatedMLP
from nv_models.layers.norm import RMSNorm
from nv_models.layers.placement import Placement
from nv_models.layers.rotary import RotaryEmbedding
from nv_models.parallel import SINGLE_RANK, TensorParallel, check_tensor_parallel_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nv_kernels import AttentionBackend, AttentionMetadata, LayerKVCache
    from nv_models.config import ModelConfig
    from nv_models.kv_scales import KVScales
    from nv_models.layers.rotary import StepRotary
    from nv_models.weight_target import TensorTarget


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm.

    Args:
        config: The model.
        attention_backend: Computes attention over the paged cache.
        placement: Where the weights live.
    """

    def __init__(
        self, config: ModelConfig, *, attention_backend: AttentionBackend, placement: Placement
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps=eps, placement=placement)
        self.attention = Attention(config, backend=attention_backend, placement=placement)
        self.post_attention_norm = RMSNorm(size, eps=eps, placement=placement)
        self.mlp = GatedMLP(config, placement=placement)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: StepRotary,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on one step's tokens.

        Args:
            hidden: What the layer before adds to the residual stream, in parts that add up (see
                `RowParallelLinear`), [num_parts, num_tokens, hidden_size].
            residual: The residual stream before that addition, [num_tokens, hidden_size]; None in
                the first layer, whose `hidden` is the stream itself, of that shape.
            rotary: The step's rotation.
            kv_cache: This layer's cache; written.
            metadata: The step's batch.

        Returns:
            What this layer adds to the residual stream (again in parts), and the stream before that
            addition.
        """
        if residual is None:
            normed, residual = self.input_norm(hidden), hidden
        else:
            normed, residual = self.input_norm.add_and_normalise(hidden, residual)
        attended = self.attention(normed, rotary, kv_cache, metadata)
        normed, residual = self.post_attention_norm.add_and_normalise(attended, residual)
        return self.mlp(normed), residual

    def targets(self, prefix: str) -> Iterator[TensorTarget]:
        """Yields where the checkpoint tensors below `prefix` go."""
        yield from self.input_norm.targets(f"{prefix}.input_layernorm")
        yield from self.attention.targets(f"{prefix}.self_attn")
        yield from self.post_attention_norm.targets(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.targets(f"{prefix}.mlp")


class CausalLM(nn.Module):
    """A decoder-only language model with uninitialised weights; `load_model` fills them.

    Args:
        config: The model.
        device: Device of the weights; "meta" allocates nothing, to count bytes.
        dtype: Dtype of weights and activations.
        attention_backend: Computes attention over the paged cache.
        tensor_parallel: This rank's place among those that share the model.
        max_model_len: Longest sequence in tokens; positions must stay below it. None means
            `config.max_position_embeddings`.

    Attributes:
        config: As given.
        dtype: As given.
        tensor_parallel: As given.
        max_model_len: As given, or what None means.
        num_heads: Number of query heads of this rank.
        num_kv_heads: Number of key/value heads of this rank: those that its KV caches hold.
        kv_scales: What an fp8 KV cache of each layer is to be made with: factors of keys and of
            values. `load_model` reads them if it is told to; they are 1 without.

    Raises:
        ConfigError: The model cannot be shared by this number of ranks, or `max_model_len` is
            below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        attention_backend: AttentionBackend,
        tensor_parallel: TensorParallel = SINGLE_RANK,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        check_tensor_parallel_size(config, tensor_parallel.size)
        placement = Placement(
            device=torch.device(device), dtype=dtype, tensor_parallel=tensor_parallel
        )
        self.config = config
        self.dtype = dtype
        self.tensor_parallel = tensor_parallel
        if max_model_len is None:
            max_model_len = config.max_position_embeddings
        if max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1, got {max_model_len}")
        self.max_model_len = max_model_len
        self.kv_scales: KVScales = ((1.0, 1.0),) * config.num_layers
        self.embedding = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, placement=placement
        )
        self.rotary = RotaryEmbedding(
            config.rope,
            head_dim=config.head_dim,
            num_positions=self.max_model_len,
            device=placement.device,
        )
        layers = [
            DecoderLayer(config, attention_backend=attention_backend, placement=placement)
            for _ in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.num_heads = layers[0].attention.num_heads
        self.num_kv_heads = layers[0].attention.num_kv_heads
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, placement=placement)
        self.lm_head = ParallelLMHead(
            self.embedding, tied=config.tie_word_embeddings, placement=placement
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Runs one step over a ragged batch of sequences.

        Args:
            token_ids: The tokens of all sequences, one after the other, [num_tokens] int64.
            positions: Position of each token in its sequence, [num_tokens] int64, below
                `max_model_len`.
            kv_caches: One cache for each layer; this step's keys and values are written into them.
            metadata: Which tokens belong to which sequence, and where its cache is.

        Returns:
            Hidden states after the final norm, [num_tokens, hidden_size].
        """
        rotary = self.rotary(positions, metadata)
        hidden: Tensor = self.embedding(token_ids)
        residual: Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, rotary, kv_cache, metadata)
        normed, _ = self.norm.add_and_normalise(hidden, cast("Tensor", residual))
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Projects hidden states onto the vocabulary.

        Args:
            hidden: Rows of what `forward` returned, [num_rows, hidden_size].

        Returns:
            Logits over the whole vocabulary, [num_rows, vocab_size], the same on every rank.
        """
        return self.gather_logits(self.compute_logits_shard(hidden))

    def compute_logits_shard(self, hidden: Tensor) -> Tensor:
        """Projects hidden states onto this rank's part of the vocabulary.

        Args:
            hidden: Rows of what `forward` returned, [num_rows, hidden_size].

        Returns:
            [num_rows, tokens per rank]: logits of `num_shard_tokens` tokens from `first_token` on,
            and padding behind them where the vocabulary does not divide.
        """
        shard: Tensor = self.lm_head(hidden)
        return shard

    def gather_logits(self, shard: Tensor) -> Tensor:
        """Joins what `compute_logits_shard` returned on each rank.

        Returns:
            Logits over the whole vocabulary, [num_rows, vocab_size], the same on every rank.
        """
        return self.lm_head.gather(shard)

    @property
    def first_token(self) -> int:
        """First token id of this rank's part of the vocabulary."""
        return self.lm_head.rows.first_token

    @property
    def num_shard_tokens(self) -> int:
        """Number of token ids in this rank's part of the vocabulary; 0 if it is all padding."""
        return self.lm_head.rows.num_tokens

    def pack_weights(self) -> None:
        """Brings the loaded weights into the layout that products read fastest on their device.

        Changes something on a CPU only. No weight can be read or loaded after that, and a tied LM
        head takes its memory a second time.
        """
        for module in self.modules():
            if isinstance(module, (FusedLinear, RowParallelLinear, ParallelLMHead)):
                module.pack()

    @property
    def kv_depends_on_length(self) -> bool:
        """Whether keys depend on how long their sequence was in the step that computed them.

        Only with `dynamic` rotary scaling beyond its original length. Cached blocks must then not
        be shared between sequences, and the chunks that a prompt is cut into change its result.
        """
        return self.rotary.depends_on_length

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of this rank's weights; a tied matrix counts once."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def targets(self) -> Iterator[TensorTarget]:
        """Yields where every checkpoint tensor goes on this rank."""
        tied = self.config.tie_word_embeddings
        yield from self.embedding.targets(
            "model.embed_tokens", aliases=("lm_head.weight",) if tied else ()
        )
        for index, layer in enumerate(self.layers):
            yield from cast("DecoderLayer", layer).targets(f"model.layers.{index}")
        yield from self.norm.targets("model.norm")
        if not tied:
            yield from self.lm_head.targets("lm_head")
