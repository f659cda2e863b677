"""LLM inference operators: a contract, a PyTorch reference and a Triton kernel for each.

Tensors in, tensors out. Knows nothing of models or scheduling. Read `ops/` for the contracts,
`reference/` for the maths and `triton/` for the speed.
"""

from nv_kernels.attention.backend import AttentionBackend
from nv_kernels.attention.registry import available_attention_backends, select_attention_backend
from nv_kernels.errors import KernelInputError
from nv_kernels.kernel_watch import KernelWatch
from nv_kernels.logit_rules import LogitAdjustments, TokenFilters
from nv_kernels.metadata import AttentionMetadata, FreshKV, LayerKVCache
from nv_kernels.ops.attention import paged_attention
from nv_kernels.ops.decode_state import (
    DecodeState,
    StateColumns,
    advance_decode_state,
    read_decode_state,
)
from nv_kernels.ops.linear import linear, linear_parts, pack_linear_weight
from nv_kernels.ops.logprobs import token_logprobs
from nv_kernels.ops.rms_norm import add_rms_norm, rms_norm
from nv_kernels.ops.rotary_embedding import rotary_embedding
from nv_kernels.ops.rotate_and_store import rotate_and_store
from nv_kernels.ops.sampling import sample_shard, sample_tokens, winning_tokens
from nv_kernels.ops.silu_and_mul import silu_and_mul
from nv_kernels.ops.store_kv import store_kv
from nv_kernels.reference.logprobs import TokenLogprobs

__version__ = "0.1.0"

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "DecodeState",
    "FreshKV",
    "KernelInputError",
    "KernelWatch",
    "LayerKVCache",
    "LogitAdjustments",
    "StateColumns",
    "TokenFilters",
    "TokenLogprobs",
    "__version__",
    "add_rms_norm",
    "advance_decode_state",
    "available_attention_backends",
    "linear",
    "linear_parts",
    "pack_linear_weight",
    "paged_attention",
    "read_decode_state",
    "rms_norm",
    "rotary_embedding",
    "rotate_and_store",
    "sample_shard",
    "sample_tokens",
    "select_attention_backend",
    "silu_and_mul",
    "store_kv",
    "token_logprobs",
    "winning_tokens",
]
