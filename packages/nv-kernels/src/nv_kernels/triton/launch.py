"""Launches that overlap: a kernel is set up while the one before it on the stream still ends.

Between two small kernels a GPU idles for about a microsecond, and a decode step has hundreds of
them. On Hopper and later a kernel may therefore be launched early ("programmatic dependent launch"
in CUDA). It then has to wait by itself for whatever came before:

- `launch_options` go into the launch, and
- `wait_for_previous` stands first in the kernel: all before it may only read what no kernel writes
  while the engine runs (weights), and may write nothing at all.

Every kernel that is launched early must wait, in every program, also where it returns at once. Only
then does waiting for one kernel mean waiting for all before it.
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
def wait_for_previous(overlaps: tl.constexpr) -> None:
    """Waits until all earlier kernels have ended, then lets the next one be set up.

    In this order: whoever starts early can rely on all but its direct predecessor having ended.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
