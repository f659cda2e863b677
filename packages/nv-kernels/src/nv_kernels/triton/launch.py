"""Launches that overlap: a kernel is set up while the one before it on the stream still ends.

Between two small kernels a GPU idles for about a microsecond, and a decode step has hundreds of
them. On Hopper and later a kernel may therefore be launched early ("programmatic dependent launch"
in CUDA). It then has to wait by itself for whatever came before:

- `launch_options` go into the launch, and
- `wait_for_previous` stands before all that depends on the kernel launched directly before. What
  stands before it may read what no kernel writes while the engine runs (weights), or what the
  caller promises was written earlier (`AttentionMetadata.is_settled`), and may write nothing.

Every kernel that is launched early must wait, in every program, also where it returns at once. Only
then does waiting for one kernel mean waiting for all before it.

A kernel that keeps the GPU busy for long calls `let_next_start` at its end, instead of at its start
with the wait: programs of the next kernel take places on processors, so that the programs after
those would be spread unevenly.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from torch import Tensor


def launch_options(tensor: Tensor) -> dict[str, Any]:
    """Options for a kernel that begins with `wait_for_previous(overlaps)`.

    Args:
        tensor: Any argument of the launch.

    Returns:
        Keyword arguments of the launch, the kernel's constant `overlaps` among them.
    """
    if _can_overlap(tensor.device):
        return {"overlaps": True, "launch_pdl": True}
    return {"overlaps": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_previous(
    overlaps: tl.constexpr,
    lets_next_start: tl.constexpr = True,  # noqa: FBT002 - a constant of the kernel
) -> None:
    """Waits until all earlier kernels have ended, then (if wanted) lets the next one be set up.

    In this order: whoever starts early can rely on all but its direct predecessor having ended.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        if lets_next_start:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def let_next_start(overlaps: tl.constexpr) -> None:
    """Lets the next kernel be set up as soon as all programs of this one are here, or at an end.

    Only after `wait_for_previous`.
    """
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
