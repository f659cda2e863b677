"""The ways to sum over ranks and normalise, timed per message size; for `multi_gpu.py`."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from nv_kernels import add_rms_norm
from nv_runtime.ranks.process_group import host_store, join_group, join_store

HIDDEN = 4096
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
_TIMEOUT_S = 300.0
_NUM_CALLS = 40
"""Calls in one graph; even, as `FusedAllReduce` wants it."""


def measure_all_reduce(size: int) -> dict[str, Any]:
    """Measures with `size` GPUs.

    Returns:
        Microseconds by way and by number of rows of 4,096 bf16, and the greatest difference of the
        fused kernel from NCCL and `add_rms_norm`.
    """
    store, port = host_store(_TIMEOUT_S)
    with TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_run_rank, args=(rank, size, port, folder))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_TIMEOUT_S)
            process.kill()
        del store
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return result


def _run_rank(rank: int, size: int, port: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = join_group(
        join_store(port, _TIMEOUT_S),
        rank=rank,
        size=size,
        backend="nccl",
        device=device,
        timeout_s=_TIMEOUT_S,
        is_watched=False,
        fuses=True,
    )
    ranks = group.tensor_parallel
    fused = ranks.fused
    torch.manual_seed(0)
    weight = torch.rand(HIDDEN, device=device).bfloat16()
    result: dict[str, Any] = {"fused_is_there": fused is not None, "us": {}, "max_difference": 0.0}
    for rows in ROWS:
        partial = torch.randn(rows, HIDDEN, device=device).bfloat16() + rank
        residual = torch.ones(rows, HIDDEN, device=device).bfloat16()

        def nccl(partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> Any:  # noqa: ANN401
            work = partial.clone()
            dist.all_reduce(work, group=ranks.group)
            return add_rms_norm(work, residual, weight, eps=1e-6)

        def copy_only(partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> Any:  # noqa: ANN401
            return add_rms_norm(partial.clone(), residual, weight, eps=1e-6)

        times = {"copy and norm": _time(copy_only), "nccl, then norm": _time(nccl)}
        if fused is not None and fused.fits(partial):

            def ours(partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> Any:  # noqa: ANN401
                if fused is None:
                    return None
                return fused.all_reduce_add_rms_norm(partial, residual, weight, eps=1e-6)

            expected, found = nccl(), ours()
            ours()  # an even number
            for ours_part, theirs in zip(found, expected, strict=True):
                difference = float((ours_part.float() - theirs.float()).abs().max())
                result["max_difference"] = max(result["max_difference"], difference)
            times["fused"] = _time(ours)
        result["us"][rows] = times
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    group.abort(None)


def _time(run: Callable[[], Any]) -> float:
    """Microseconds of one call inside a CUDA graph; the best of several replays."""
    for _ in range(4):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_NUM_CALLS):
            run()
    best = float("inf")
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return 1e3 * best / _NUM_CALLS
