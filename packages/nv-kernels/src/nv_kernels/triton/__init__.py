"""The Triton kernels: one file per op, imported only when a kernel is about to run.

Importing this package imports Triton, and decorates every kernel at once: Triton decides at that
moment whether a kernel is compiled or interpreted, and one process must not mix the two.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]

from nv_kernels.triton import (  # noqa: F401
    attention,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    store_kv,
)

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter (for tests on a CPU), not on a GPU."""
