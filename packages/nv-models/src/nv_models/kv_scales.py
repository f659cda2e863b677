"""The scales of an fp8 KV cache, where a checkpoint ships them.

Tools that calibrate a model for an fp8 cache store one number for the keys of each layer and one
for its values, under one of several names. Without them both are 1.
"""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING

import torch

from nv_kernels.kv_quantisation import MAX_SCALE, MIN_SCALE
from nv_models.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nv_models.checkpoint import Checkpoint, CheckpointTensor

logger = logging.getLogger(__name__)

KVScales = tuple[tuple[float, float], ...]
"""For each layer what cached keys and what cached values are to be multiplied by."""

# `k_scale` stands beside the projections or below `attn` or `k_proj`, `kv_scale` means both; the
# first tools called the former the scale of the projection's output.
_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)"
)
# What quantised attention itself would need.
_UNUSED = re.compile(
    r"model\.layers\.\d+\.self_attn\.(attn\.|q_proj\.)?(q_scale|prob_scale|q_proj\.output_scale)"
)


def is_scale_name(name: str) -> bool:
    """Tells whether a tensor is no weight but a scale for an fp8 cache or attention."""
    return bool(_NAME.fullmatch(name) or _UNUSED.fullmatch(name))


def read_kv_scales(
    checkpoint: Checkpoint, num_layers: int, *, log_missing: bool = True
) -> KVScales:
    """Reads the scales of an fp8 KV cache.

    Args:
        checkpoint: The checkpoint.
        num_layers: Decoder layers of the model.
        log_missing: Whether the log says that scales are missing.

    Returns:
        The scales of each layer; 1.0 where the checkpoint has none.

    Raises:
        WeightError: A scale is no single positive number in the range of fp32, a layer has two for
            the same thing, or the model has no such layer.
    """
    found: dict[tuple[int, str], tuple[str, float]] = {}
    names = [name for name in checkpoint.tensor_infos() if _NAME.fullmatch(name)]
    for tensor in checkpoint.tensors(names):
        match = _NAME.fullmatch(tensor.info.name)
        if match is None:
            continue
        layer, kinds = int(match[1]), match[2] or match[3]
        value = _read_scale(tensor, checkpoint.path)
        if layer >= num_layers:
            raise WeightError(f"{tensor.info.name}: the model has {num_layers} layers only")
        for kind in kinds:
            other, _ = found.setdefault((layer, kind), (tensor.info.name, value))
            if other != tensor.info.name:
                raise WeightError(
                    f"{other} and {tensor.info.name} are scales of the same thing; keep one"
                )
    if log_missing:
        _log_missing(checkpoint.path, num_found=len(found), num_wanted=2 * num_layers)
    one = ("", 1.0)
    return tuple(
        (found.get((layer, "k"), one)[1], found.get((layer, "v"), one)[1])
        for layer in range(num_layers)
    )


def _log_missing(path: Path, *, num_found: int, num_wanted: int) -> None:
    if num_found == 0:
        logger.info("%s has no scales for an fp8 KV cache: 1.0 is used", path)
    elif num_found < num_wanted:
        logger.warning(
            "%s has %d of %d scales for an fp8 KV cache: 1.0 is used for the others",
            path,
            num_found,
            num_wanted,
        )


def _read_scale(tensor: CheckpointTensor, path: Path) -> float:
    shape: Sequence[int] = tensor.info.shape
    if math.prod(shape) != 1:
        raise WeightError(
            f"{tensor.info.name} in {path} has shape {list(shape)}, but a scale of the KV cache "
            "must be one number for the layer; calibrate again per tensor, or use "
            "kv_cache_dtype='auto'"
        )
    stored = torch.empty(tuple(shape), dtype=torch.float32)
    tensor.copy_to(stored, [(0, size) for size in shape])
    scale = stored.item()
    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise WeightError(
            f"{tensor.info.name} in {path} is {scale}, but a scale must be positive and from "
            f"{MIN_SCALE:.3g} to {MAX_SCALE:.3g}; download the checkpoint again, or use "
            "kv_cache_dtype='auto'"
        )
    return scale
