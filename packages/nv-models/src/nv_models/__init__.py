"""Decoder models (Qwen3, Qwen2, Llama, Mistral) on nv-kernels, with checkpoint loading.

`open_checkpoint` reads a configuration, `load_model` makes a model of it. Read `decoder.py` for the
model, `layers/` for its parts, `loader.py` for the way weights take.
"""

from nv_models.checkpoint import Checkpoint, CheckpointTensor, TensorInfo, open_checkpoint
from nv_models.config import DTYPES, ModelConfig
from nv_models.decoder import CausalLM
from nv_models.errors import UnsupportedModelError, WeightError
from nv_models.gguf_metadata import GGUFTokenizerData
from nv_models.kv_scales import KVScales
from nv_models.loader import LOAD_FORMATS, LoadFormat, load_model
from nv_models.parallel import (
    SINGLE_RANK,
    TensorParallel,
    check_tensor_parallel_size,
    heads_per_rank,
)
from nv_models.rope import RopeConfig

__version__ = "0.1.0"

__all__ = [
    "DTYPES",
    "LOAD_FORMATS",
    "SINGLE_RANK",
    "CausalLM",
    "Checkpoint",
    "CheckpointTensor",
    "GGUFTokenizerData",
    "KVScales",
    "LoadFormat",
    "ModelConfig",
    "RopeConfig",
    "TensorInfo",
    "TensorParallel",
    "UnsupportedModelError",
    "WeightError",
    "__version__",
    "check_tensor_parallel_size",
    "heads_per_rank",
    "load_model",
    "open_checkpoint",
]
