"""load_model: from a checkpoint to a model that can run.

The checkpoint's list of tensors is compared with what the model needs before any weight is read,
so that a wrong checkpoint fails at once and with all that is wrong in one message. Then tensors
stream from disk into the fused parameters, one at a time; each rank reads its share only.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Literal

import torch

from nv_core.errors import ConfigError
from nv_models.checkpoint import plain_copy
from nv_models.config import DTYPES
from nv_models.decoder import CausalLM
from nv_models.dummy_weights import fill_dummy_weights
from nv_models.errors import WeightError
from nv_models.kv_scales import is_scale_name, read_kv_scales
from nv_models.parallel import SINGLE_RANK, TensorParallel
from nv_models.staging import StagedCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nv_kernels import AttentionBackend
    from nv_models.checkpoint import Checkpoint, CheckpointTensor, Copy, TensorInfo
    from nv_models.weight_target import TensorTarget

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

LOAD_FORMATS: tuple[LoadFormat, ...] = ("auto", "safetensors", "gguf", "dummy")

# Buffers that old versions of transformers saved although they follow from the config.
_HARMLESS_EXTRAS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")

_MAX_NAMES_IN_MESSAGE = 8


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    attention_backend: AttentionBackend,
    tensor_parallel: TensorParallel = SINGLE_RANK,
    load_format: LoadFormat = "auto",
    max_model_len: int | None = None,
    seed: int = 0,
    load_kv_scales: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """Builds the model of a checkpoint and fills its weights.

    Args:
        checkpoint: What `open_checkpoint` returned.
        device: Device of the weights.
        dtype: Dtype of weights and activations; stored weights of another one are cast.
        attention_backend: Computes attention over the paged cache.
        tensor_parallel: This rank's place among those that share the model.
        load_format: "auto" takes the checkpoint's own; "safetensors" and "gguf" insist on one;
            "dummy" reads no weights and draws random ones.
        max_model_len: Longest sequence in tokens; None means what the model declares.
        seed: Seed of "dummy".
        load_kv_scales: Whether to read the scales of an fp8 KV cache into `model.kv_scales`, where
            the checkpoint has any. A cache of the model's dtype takes none.
        on_progress: Called with (bytes done, bytes in all) after each tensor. Counts bytes on disk,
            which all ranks count alike whatever their share; for "dummy", bytes of weights.

    Returns:
        The model in eval mode, its weights without gradients.

    Raises:
        ConfigError: An argument is out of range, or the ranks cannot share the model.
        WeightError: Weights are missing, left over, damaged, or of another shape.
    """
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}"
        )
    if load_format in ("safetensors", "gguf") and load_format != checkpoint.format:
        raise ConfigError(
            f"load_format is {load_format!r}, but {checkpoint.path} is a {checkpoint.format} "
            "checkpoint; use load_format='auto'"
        )
    model = CausalLM(
        checkpoint.config,
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
        tensor_parallel=tensor_parallel,
        max_model_len=max_model_len,
    ).eval()
    if load_format == "dummy":
        fill_dummy_weights(model, seed=seed, on_progress=on_progress)
    else:
        _fill_from_checkpoint(model, checkpoint, on_progress)
        if load_kv_scales:
            # One rank says what all of them find.
            model.kv_scales = read_kv_scales(
                checkpoint, checkpoint.config.num_layers, log_missing=tensor_parallel.rank == 0
            )
    logger.info(
        "loaded %s from %s: %.2f GiB of weights on %s",
        checkpoint.config.architecture,
        checkpoint.path,
        model.num_weight_bytes / 2**30,
        device,
    )
    return model


def _fill_from_checkpoint(
    model: CausalLM, checkpoint: Checkpoint, on_progress: Callable[[int, int], None] | None
) -> None:
    targets = list(model.targets())
    _check_coverage(model, targets)
    infos = checkpoint.tensor_infos()
    plan = _match(targets, infos, where=str(checkpoint.path))
    done, total = 0, sum(infos[name].num_bytes for name in plan)
    filled: set[str] = set()
    on_cuda = any(parameter.device.type == "cuda" for parameter in model.parameters())
    copy = StagedCopies().copy if on_cuda else plain_copy
    for tensor in checkpoint.tensors(plan):
        target = plan[tensor.info.name]
        if target.name in filled:
            _check_equal(tensor, target)
        else:
            _fill(tensor, target, copy)
            filled.add(target.name)
        done += tensor.info.num_bytes
        if on_progress is not None:
            on_progress(done, total)
    unread = sorted({target.name for target in targets} - filled)
    if unread:
        raise WeightError(f"{checkpoint.path} listed but did not hand out: {_names(unread)}")


def _fill(tensor: CheckpointTensor, target: TensorTarget, copy: Copy) -> None:
    destination = target.filled_region
    if destination.shape[0] > 0:  # a rank may have nothing but padding
        tensor.copy_to(destination, target.source, copy=copy)
    target.region[destination.shape[0] :].zero_()


def _check_equal(tensor: CheckpointTensor, target: TensorTarget) -> None:
    """Checks a second copy of a tensor that another name has already filled."""
    expected = target.filled_region
    found = torch.empty_like(expected)
    if found.shape[0] > 0:
        tensor.copy_to(found, target.source)
    if not torch.equal(found, expected):
        names = " and ".join((target.name, *target.aliases))
        raise WeightError(
            f"{names} differ, although config.json says tie_word_embeddings = true; "
            "if the model was trained with both, set tie_word_embeddings to false"
        )


def _check_coverage(model: CausalLM, targets: Iterable[TensorTarget]) -> None:
    """Checks that the targets fill every element of every parameter, once."""
    filled: dict[int, int] = {}
    for target in targets:
        key = id(target.parameter)
        filled[key] = filled.get(key, 0) + target.num_elements
    for name, parameter in model.named_parameters():
        num_elements = filled.get(id(parameter), 0)
        if num_elements != parameter.numel():
            raise WeightError(
                f"checkpoint tensors fill {num_elements} of the {parameter.numel()} elements of "
                f"parameter {name}: the layer that owns it must list a target for each part"
            )


def _match(
    targets: Iterable[TensorTarget], infos: Mapping[str, TensorInfo], *, where: str
) -> dict[str, TensorTarget]:
    """Finds the target of each stored tensor.

    Returns:
        Target by stored name. A target with aliases may appear more than once.

    Raises:
        WeightError: Names or shapes disagree; the message holds all that do.
    """
    plan: dict[str, TensorTarget] = {}
    missing, misshapen = [], []
    for target in targets:
        names = [name for name in (target.name, *target.aliases) if name in infos]
        if not names:
            missing.append(target.name)
        for name in names:
            plan[name] = target
            shape = infos[name].shape
            if shape != target.shape:
                misshapen.append(f"{name} (expected {_shape(target.shape)}, got {_shape(shape)})")
    unused = [name for name in infos if name not in plan and not _is_harmless(name)]
    problems = []
    if missing:
        problems.append(f"missing tensors: {_names(missing)}")
    if unused:
        problems.append(f"tensors that the model does not have: {_names(unused)}")
    if misshapen:
        problems.append(f"tensors of another shape: {_names(misshapen)}")
    if problems:
        raise WeightError(
            f"the weights in {where} do not belong to its configuration. {'; '.join(problems)}"
            f"{_advice(missing, unused)}"
        )
    return plan


def _is_harmless(name: str) -> bool:
    """Whether a tensor may be there although no weight is filled from it."""
    return _HARMLESS_EXTRAS.fullmatch(name) is not None or is_scale_name(name)


def _advice(missing: list[str], unused: list[str]) -> str:
    if missing == ["lm_head.weight"]:
        return ". A model without a head of its own has tie_word_embeddings = true in config.json"
    if any(name.endswith((".qweight", ".scales", "_scale", "_scale_inv")) for name in unused):
        return ". These look like quantised weights, which are not supported"
    return ""


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_IN_MESSAGE])
    more = len(names) - _MAX_NAMES_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
