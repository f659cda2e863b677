"""What a model is, what it needs, and what a memory holds of it: arithmetic on its config.

The sizes are those that the engine will use: weights in the dtype they are loaded in, and the KV
cache in what is left. Brings torch; import it inside functions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nv_models import Checkpoint, ModelConfig, WeightError
from nv_runtime.builder import select_backend, uses_graphs
from nv_runtime.kv_cache import (
    CPU_DEFAULT_BYTES,
    available_cpu_bytes,
    kv_bytes_per_token,
)
from nv_runtime.step_memory import estimate_step_memory

if TYPE_CHECKING:
    from nv_runtime.engine_config import EngineConfig

__all__ = ["Fit", "ModelFacts", "count_parameters", "fit_memory", "gather_facts"]


@dataclass(frozen=True)
class ModelFacts:
    """What a checkpoint says about its model.

    Args:
        architecture: Name as in config.json.
        path: Where the checkpoint is.
        stored_as: Format and dtypes of the files, as in "safetensors, BF16"; None without files.
        stored_bytes: Bytes of all tensors on disk; None without files.
        num_parameters: Elements of all weights, shared ones once.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Elements of a head.
        vocab_size: Token ids.
        max_position_embeddings: Tokens of context.
        tie_word_embeddings: Whether the LM head is the embedding.
        dtype: Dtype that the weights would be loaded in.
        weight_bytes: Bytes of the weights in that dtype.
        kv_cache_dtype: Dtype of the KV cache.
        kv_bytes_per_token: Bytes of keys and values that one token takes in all layers.
    """

    architecture: str
    path: str
    stored_as: str | None
    stored_bytes: int | None
    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    weight_bytes: int
    kv_cache_dtype: str
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Fit:
    """What a memory holds beside the weights.

    Args:
        memory: What memory it is, in words.
        memory_bytes: Bytes that the engine may fill.
        activation_bytes: Bytes kept for the rest of a step.
        kv_cache_bytes: Bytes of the KV cache; negative if the weights alone are too much.
        num_kv_tokens: Tokens that it holds.
    """

    memory: str
    memory_bytes: int
    activation_bytes: int
    kv_cache_bytes: int
    num_kv_tokens: int


def count_parameters(config: ModelConfig) -> int:
    """Counts the elements of all weights of a decoder, shared ones once."""
    hidden = config.hidden_size
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * config.num_layer_weights + embeddings + hidden


def gather_facts(
    checkpoint: Checkpoint, dtype: torch.dtype, kv_cache_dtype: torch.dtype
) -> ModelFacts:
    """Collects what a checkpoint says, without reading weights.

    Args:
        checkpoint: The checkpoint; its weight files may be missing.
        dtype: What the weights would be loaded in.
        kv_cache_dtype: What keys and values would be cached in.
    """
    config = checkpoint.config
    try:
        tensors = list(checkpoint.tensor_infos().values())
    except WeightError:
        # A config.json alone is enough to plan with.
        tensors = []
    kinds = " and ".join(sorted({tensor.dtype for tensor in tensors}))
    num_parameters = count_parameters(config)
    return ModelFacts(
        architecture=config.architecture,
        path=str(checkpoint.path),
        stored_as=f"{checkpoint.format}, {kinds}" if tensors else None,
        stored_bytes=sum(tensor.num_bytes for tensor in tensors) if tensors else None,
        num_parameters=num_parameters,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        dtype=_name(dtype),
        weight_bytes=num_parameters * dtype.itemsize,
        kv_cache_dtype=_name(kv_cache_dtype),
        kv_bytes_per_token=kv_bytes_per_token(config, kv_cache_dtype),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fit_memory(
    config: ModelConfig,
    engine: EngineConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    memory_bytes: int | None = None,
) -> Fit:
    """Works out the KV cache that the engine would make.

    Args:
        config: The model.
        engine: The limits, the share of memory and the dtype of the KV cache.
        device: Where it would run.
        dtype: Of weights and activations.
        memory_bytes: Memory of such a device to plan for; None for what `device` has now.
    """
    weight_bytes = count_parameters(config) * dtype.itemsize
    token_bytes = kv_bytes_per_token(config, engine.resolve_kv_cache_dtype(dtype))
    reserve = estimate_step_memory(
        config,
        dtype=dtype,
        device=device,
        max_num_tokens=max(engine.max_num_batched_tokens, engine.max_num_seqs),
        max_num_seqs=engine.max_num_seqs,
        tensor_parallel_size=engine.tensor_parallel_size,
        use_graphs=_uses_graphs(config, engine, device, dtype, is_here=memory_bytes is None),
    ).total_bytes
    share = engine.gpu_memory_utilization
    if device.type == "cpu":
        memory, usable = "memory to plan for", memory_bytes
        if usable is None:
            memory, usable = "free memory of this machine", available_cpu_bytes()
        one_sequence = config.max_position_embeddings * token_bytes
        left = min((usable - weight_bytes) // 2, max(CPU_DEFAULT_BYTES, one_sequence))
    elif memory_bytes is not None:
        memory, usable = "memory to plan for", int(memory_bytes * share)
        left = usable - weight_bytes - reserve
    else:
        free, total = torch.cuda.mem_get_info(device)
        memory = f"{torch.cuda.get_device_name(device)}, {share:.0%} of it less what is in use"
        usable = int(total * share) - (total - free)
        left = usable - weight_bytes - reserve
    # The engine makes no more than all sequences at full length could use.
    useful = engine.max_num_seqs * config.max_position_embeddings * token_bytes
    left = min(left, useful)
    return Fit(
        memory=memory,
        memory_bytes=usable,
        activation_bytes=reserve,
        kv_cache_bytes=left,
        num_kv_tokens=max(left, 0) // token_bytes,
    )


def _uses_graphs(
    config: ModelConfig,
    engine: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_here: bool,
) -> bool:
    """Whether the engine would run CUDA graphs; a GPU that is not here is taken for a new one."""
    if device.type != "cuda" or not is_here:
        return device.type == "cuda" and not engine.enforce_eager
    backend, _ = select_backend(
        engine,
        config,
        device=device,
        dtype=dtype,
        kv_cache_dtype=engine.resolve_kv_cache_dtype(dtype),
    )
    return uses_graphs(engine, device, backend)
