"""A one-shot all-reduce, the residual addition and RMSNorm as one Triton kernel.

For messages so small that the way there and back costs more than the bytes. The ranks' buffers are
mapped into each other (symmetric memory); a block copies its row into this rank's buffer, tells the
same block of every other rank, waits for theirs, and sums all ranks' rows in the order of ranks, so
that every rank gets the same bits. Plain loads and stores only, no NVLink multicast.

One signal per block and call is enough because calls take turns between two buffers: a rank that
writes into a buffer again has waited in the call between for every other rank, which by then had
ended the call that read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from nv_kernels.triton.device import device_of

if TYPE_CHECKING:
    from torch import Tensor


def all_reduce_add_rms_norm(
    partial: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    buffers: Tensor,
    signals: Tensor,
    is_aborted: Tensor,
    rank: int,
    num_ranks: int,
) -> tuple[Tensor, Tensor]:
    """Sums over ranks, adds the residual and normalises; all ranks call it together.

    Args:
        partial: This rank's part of the sum, [num_rows, n], contiguous; not changed.
        residual: The residual stream, same shape and dtype, contiguous, the same on every rank;
            not changed.
        weight: Scale of each element, [n], same dtype.
        eps: Added to the mean square.
        buffers: Addresses of every rank's buffer of num_rows * n elements, [num_ranks] int64, as
            this device sees them; multiples of 16. Not the one of the call before.
        signals: Addresses of every rank's signals, num_rows * num_ranks int32, zero between calls;
            [num_ranks] int64.
        is_aborted: Whether not to wait for other ranks, [1] int32 on this device; a wait ends when
            it becomes 1. The result is then meaningless.
        rank: This rank.
        num_ranks: Number of ranks.

    Returns:
        The normalised sum and the sum itself, as `nv_kernels.add_rms_norm`.
    """
    num_rows, n = partial.shape
    output, total = torch.empty_like(partial), torch.empty_like(partial)
    if num_rows == 0:
        return output, total
    with device_of(partial):
        _all_reduce_add_rms_norm_kernel[(num_rows,)](
            partial,
            residual,
            weight,
            output,
            total,
            buffers,
            signals,
            is_aborted,
            eps,
            n=n,
            block_n=triton.next_power_of_2(n),
            rank=rank,
            num_ranks=num_ranks,
            num_warps=8,
        )
    return output, total


@triton.jit  # type: ignore[untyped-decorator]
def _all_reduce_add_rms_norm_kernel(
    partial_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_ptr: tl.tensor,
    total_ptr: tl.tensor,
    buffers_ptr: tl.tensor,
    signals_ptr: tl.tensor,
    is_aborted_ptr: tl.tensor,
    eps: tl.tensor,
    n: tl.constexpr,
    block_n: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block_n)
    inside = column < n
    place = row * n + column
    dtype = partial_ptr.dtype.element_ty

    # Said to the compiler, which cannot see it of an address that it loads: whole lines move then.
    own = tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(dtype)), 16)
    tl.store(own + place, tl.load(partial_ptr + place, mask=inside), mask=inside)
    # Every thread's stores come before the one thread's signal, which releases them all.
    tl.debug_barrier()
    for peer in tl.static_range(num_ranks):
        if peer != rank:
            theirs = tl.load(signals_ptr + peer).to(tl.pointer_type(tl.int32))
            signal = theirs + row * num_ranks + rank
            _turn(signal, 0, 1, is_aborted_ptr, sem="release")
    mine = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(num_ranks):
        if peer != rank:
            signal = mine + row * num_ranks + peer
            _turn(signal, 1, 0, is_aborted_ptr, sem="acquire")
    tl.debug_barrier()

    total = tl.zeros([block_n], dtype=tl.float32)
    for peer in tl.static_range(num_ranks):
        buffer = tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(dtype)), 16)
        # Volatile: a cache of this device may still hold what a call before has read.
        total += tl.load(buffer + place, mask=inside, other=0.0, volatile=True).to(tl.float32)
    # Rounded where an all-reduce and an addition would round, so that the result is theirs.
    reduced = total.to(dtype).to(tl.float32)
    residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    stream = (reduced + residual).to(dtype)
    tl.store(total_ptr + place, stream, mask=inside)
    wide = stream.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / n
    normal = (wide * tl.rsqrt(mean_square + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output_ptr + place, (normal * weight).to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(
    signal: tl.tensor,
    before: tl.constexpr,
    after: tl.constexpr,
    is_aborted_ptr: tl.tensor,
    sem: tl.constexpr,
) -> None:
    """Waits until a signal is `before`, and makes it `after`; or until the wait is aborted."""
    waits = tl.atomic_cas(signal, before, after, sem=sem, scope="sys") != before
    while waits:
        is_late = tl.atomic_cas(signal, before, after, sem=sem, scope="sys") != before
        waits = is_late & (tl.load(is_aborted_ptr, volatile=True) == 0)
