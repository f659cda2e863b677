"""The Triton kernels: one file per op, imported only when a kernel is about to run.

Importing this package imports Triton, and decorates every kernel at once: Triton decides at that
moment whether a kernel is compiled or interpreted, and one process must not mix the two. Left out
is `hopper_prefill_attention.py`, whose language takes time to import and is always compiled.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]

from nv_kernels.triton import (  # noqa: F401
    all_reduce,
    attention,
    decode_state,
    linear,
    logprobs,
    prefill_items,
    rms_norm,
    rotary_embedding,
    rotate_and_store,
    sampling,
    silu_and_mul,
    store_kv,
)

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter (for tests on a CPU), not on a GPU."""
