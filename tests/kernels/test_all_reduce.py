"""The fused all-reduce against a sum and `add_rms_norm`; on one GPU, each rank is a stream."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from nv_kernels import add_rms_norm


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "n"), [(1, 4096), (5, 1024), (16, 257), (3, 64)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_as_streams_of_one_gpu(
    num_ranks: int, num_rows: int, n: int, dtype: torch.dtype
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from nv_kernels.triton.all_reduce import all_reduce_add_rms_norm

    torch.manual_seed(0)
    weight = torch.rand(n, device="cuda").to(dtype)
    signals = [
        torch.zeros(num_rows * num_ranks, dtype=torch.int32, device="cuda")
        for _ in range(num_ranks)
    ]
    # Two sets, used in turn; what is in them at first must not matter.
    buffers = [
        [torch.full((num_rows, n), torch.nan, dtype=dtype, device="cuda") for _ in range(num_ranks)]
        for _ in range(2)
    ]
    signal_addresses = addresses(signals)
    is_aborted = torch.zeros(1, dtype=torch.int32, device="cuda")
    buffer_addresses = [addresses(turn) for turn in buffers]
    streams = [torch.cuda.Stream() for _ in range(num_ranks)]  # type: ignore[no-untyped-call]
    residual = torch.randn(num_rows, n, device="cuda").to(dtype)

    def run(partials: list[Tensor], turn: int) -> list[tuple[Tensor, Tensor]]:
        outputs = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs.append(
                    all_reduce_add_rms_norm(
                        partials[rank],
                        residual,
                        weight,
                        eps=1e-6,
                        buffers=buffer_addresses[turn],
                        signals=signal_addresses,
                        is_aborted=is_aborted,
                        rank=rank,
                        num_ranks=num_ranks,
                    )
                )
        return outputs

    def make_partials() -> list[Tensor]:
        return [torch.randn(num_rows, n, device="cuda").to(dtype) for _ in range(num_ranks)]

    # Compiling takes the host long: each rank's kernel must be there before it waits for another's.
    for rank in range(num_ranks):
        own = torch.zeros(num_rows * num_ranks, dtype=torch.int32, device="cuda")
        own.view(num_rows, num_ranks)[:] = 1  # as if all others had come already
        others = [own if r == rank else torch.zeros_like(own) for r in range(num_ranks)]
        all_reduce_add_rms_norm(
            residual,
            residual,
            weight,
            eps=1e-6,
            buffers=buffer_addresses[0],
            signals=addresses(others),
            is_aborted=is_aborted,
            rank=rank,
            num_ranks=num_ranks,
        )
    torch.cuda.synchronize()
    batches = [make_partials() for _ in range(6)]
    torch.cuda.synchronize()
    results = [run(partials, call % 2) for call, partials in enumerate(batches)]
    torch.cuda.synchronize()
    for partials, outputs in zip(batches, results, strict=True):
        total = torch.stack([partial.float() for partial in partials]).sum(dim=0).to(dtype)
        expected = add_rms_norm(total, residual, weight, eps=1e-6, backend="torch")
        for output in outputs:
            for ours, theirs in zip(output, expected, strict=True):
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            # Every rank has the very same bits.
            assert all(map(torch.equal, output, outputs[0]))
    assert all(not bool(signal.any()) for signal in signals)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64])
def test_a_wait_for_a_rank_that_never_comes_can_be_ended(num_rows: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from nv_kernels.triton.all_reduce import all_reduce_add_rms_norm

    partial = torch.ones(num_rows, 64, device="cuda")
    buffers = [torch.zeros_like(partial) for _ in range(2)]
    signals = [torch.zeros(num_rows * 2, dtype=torch.int32, device="cuda") for _ in range(2)]
    is_aborted = torch.zeros(1, dtype=torch.int32, device="cuda")
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    other_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    arguments = {"buffers": addresses(buffers), "signals": addresses(signals)}
    torch.cuda.synchronize()
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for _ in range(3):  # the second call waits already for its own signal to be taken
        all_reduce_add_rms_norm(
            partial,
            partial,
            partial[0],
            eps=1e-6,
            **arguments,
            is_aborted=is_aborted,
            rank=0,
            num_ranks=2,
        )
    done.record()
    time.sleep(0.2)
    assert not done.query()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other_stream):
        is_aborted.copy_(one, non_blocking=True)
    done.synchronize()
