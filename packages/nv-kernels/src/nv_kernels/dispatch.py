"""Which implementation of an op runs.

The one place that knows the rule for the elementwise ops; attention has its own registry in
`attention/registry.py`, because its backends also differ in what they can compute.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

from nv_kernels.errors import KernelInputError

if TYPE_CHECKING:
    import torch


def choose_implementation(backend: str, device: torch.device) -> Literal["torch", "triton"]:
    """Turns the `backend` argument of an op into the implementation that runs.

    Args:
        backend: "auto" (Triton on CUDA where it can be imported, else PyTorch), "torch", "triton".
        device: The device of the op's tensors.

    Returns:
        The name of the implementation.

    Raises:
        KernelInputError: The name is unknown, or Triton was asked for and cannot run.
    """
    if backend == "torch":
        return "torch"
    if backend == "auto":
        if device.type == "cuda" and triton_unavailable_reason(device) is None:
            return "triton"
        return "torch"
    if backend == "triton":
        reason = triton_unavailable_reason(device)
        if reason is not None:
            raise KernelInputError(
                f"backend is 'triton', but {reason}. Use backend='auto' or 'torch', which run here."
            )
        return "triton"
    raise KernelInputError(
        f"backend is {backend!r}, but must be 'auto', 'torch' or 'triton'. "
        "'auto' takes the fastest one present."
    )


def triton_unavailable_reason(device: torch.device) -> str | None:
    """Says why our Triton kernels cannot run on a device.

    Args:
        device: The device of the tensors.

    Returns:
        The reason as a clause, or None when they can run.
    """
    error = _triton_import_error()
    if error is not None:
        return f"Triton cannot be imported here ({error})"
    if device.type == "cuda" or _triton_is_interpreted():
        return None
    return (
        f"Triton has no compiler for {device.type} tensors (its interpreter, for tests, needs "
        "TRITON_INTERPRET=1 before the first import of triton)"
    )


@cache
def _triton_import_error() -> str | None:
    # Cached because a failing import searches the whole path again on every call.
    try:
        import nv_kernels.triton  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@cache
def _triton_is_interpreted() -> bool:
    from nv_kernels.triton import INTERPRETED

    return INTERPRETED
