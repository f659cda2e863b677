"""Random weights for benchmarks and walk-throughs, where only shapes matter.

Activations keep their size through the layers, so that logits are finite and differ between tokens
as a trained model's do. The values depend on the seed, the tensor's name and the device type, and
not on the number of ranks: a rank gets its share of what a single rank would get.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from nv_models.decoder import CausalLM
    from nv_models.weight_target import TensorTarget

# Rows drawn at once. Bounds the memory needed beside the weights; another number draws others.
_ROWS_PER_DRAW = 4096


def fill_dummy_weights(
    model: CausalLM, *, seed: int, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Overwrites all weights of a model with random ones.

    Norm weights are 1 and biases 0. A projection draws from a uniform distribution of standard
    deviation 1 / sqrt(number of inputs).

    Args:
        model: The model; its weights are changed in place.
        seed: Two models with the same seed and shapes get the same weights.
        on_progress: Called with (bytes done, bytes in all) after each tensor.
    """
    targets = list(model.targets())
    num_bytes = [target.num_elements * target.parameter.element_size() for target in targets]
    done, total = 0, sum(num_bytes)
    for target, size in zip(targets, num_bytes, strict=True):
        if len(target.shape) == 1:
            target.region.fill_(0.0 if target.name.endswith(".bias") else 1.0)
        else:
            _fill_matrix(target, seed)
        done += size
        if on_progress is not None:
            on_progress(done, total)


def _fill_matrix(target: TensorTarget, seed: int) -> None:
    (start, stop), columns = target.source
    device, dtype = target.parameter.device, target.parameter.dtype
    target.region[stop - start :].zero_()  # padding
    bound = (3 / target.shape[1]) ** 0.5  # of a uniform distribution with that deviation
    generator = torch.Generator(device)
    for number in range(start // _ROWS_PER_DRAW, -(-stop // _ROWS_PER_DRAW)):
        first = number * _ROWS_PER_DRAW
        num_rows = min(_ROWS_PER_DRAW, target.shape[0] - first)
        generator.manual_seed(zlib.crc32(f"{seed}/{target.name}/{number}".encode()))
        drawn = torch.empty((num_rows, target.shape[1]), dtype=dtype, device=device)
        drawn.uniform_(-bound, bound, generator=generator)
        begin, end = max(start, first), min(stop, first + num_rows)
        target.region[begin - start : end - start].copy_(
            drawn[begin - first : end - first, slice(*columns)]
        )
