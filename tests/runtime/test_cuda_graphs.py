"""Which graph serves which batch, and that ranks capture the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest
import torch

import nv_runtime.builder
import nv_runtime.captured_graphs
from nv_core import SamplingParams, Scheduler, SchedulerConfig
from nv_kernels import select_attention_backend
from nv_kernels.attention.torch_backend import TorchAttention
from nv_kernels.attention.triton_backend import TritonAttention
from nv_models import TensorParallel
from nv_runtime import EngineConfig
from nv_runtime.captured_graphs import CapturedGraphs, GraphPool
from nv_runtime.cuda_graphs import (
    CaptureAttempts,
    MixedGraphs,
    MixedShape,
    batch_buckets,
    context_bound,
    seq_buckets,
    token_buckets,
)
from nv_runtime.input_builder import StepLayout

if TYPE_CHECKING:
    from torch import Tensor

    from nv_runtime.mixed_step import MixedStep


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 12, 100, 200, 255, 256, 257, 300, 1000])
def test_every_batch_has_a_bucket_and_none_is_too_large(max_num_seqs: int) -> None:
    buckets = batch_buckets(max_num_seqs)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == max_num_seqs
    for size in range(1, max_num_seqs + 1):
        padded = min(bucket for bucket in buckets if bucket >= size)
        assert padded - size < 16
        assert padded < 2 * size or padded <= 8


def test_small_batches_are_hardly_padded() -> None:
    assert batch_buckets(256)[:5] == [1, 2, 4, 8, 16]
    assert len(batch_buckets(256)) == 35


@pytest.mark.parametrize("max_model_len", [10, 1024, 5000, 40960])
def test_the_context_bound_holds_every_context(max_model_len: int) -> None:
    bounds = {context_bound(n, max_model_len) for n in range(1, max_model_len + 1)}
    assert len(bounds) <= 4
    for length in (1, max_model_len // 2 + 1, max_model_len):
        assert length <= context_bound(length, max_model_len) <= max_model_len


@pytest.mark.parametrize("max_tokens", [1, 16, 20, 512, 513, 1000, 8192, 10_000])
def test_every_step_with_prompts_has_a_bucket_that_it_fills_well(max_tokens: int) -> None:
    buckets = token_buckets(max_tokens)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == max_tokens
    for size in range(1, max_tokens + 1):
        padded = min(bucket for bucket in buckets if bucket >= size)
        assert padded - size < max(64, size / 4) or padded <= 512


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 200, 256, 1000])
def test_every_number_of_sequences_has_a_bucket(max_num_seqs: int) -> None:
    buckets = seq_buckets(max_num_seqs)
    assert buckets == sorted(set(buckets))
    assert (buckets[0], buckets[-1]) == (1, max_num_seqs)
    assert len(buckets) <= 6


def test_a_shape_holds_another_only_if_it_is_as_large_in_everything() -> None:
    shape = MixedShape(StepLayout(num_tokens=64, num_seqs=16, num_blocks=8), max_query_len=64)
    assert shape.holds(shape)
    assert shape.holds(MixedShape(StepLayout(32, 4, 8), max_query_len=32))
    for layout in (StepLayout(65, 16, 8), StepLayout(64, 17, 8), StepLayout(64, 16, 9)):
        assert not shape.holds(MixedShape(layout, max_query_len=64))
    assert not shape.holds(MixedShape(shape.layout, max_query_len=65))


class OtherRank(TensorParallel):
    """One of two ranks, beside one that lacks memory or does not."""

    def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp(min=int(self.stages_on_host))  # a field that nothing reads here


def attempts_beside(lacks_memory: int) -> CaptureAttempts:
    group = cast("torch.distributed.ProcessGroup", object())
    ranks = OtherRank(0, 2, group, stages_on_host=bool(lacks_memory))
    return CaptureAttempts(ranks, torch.device("cpu"))


def out_of_memory() -> str:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("here", [False, True])
def test_one_rank_without_memory_ends_the_captures_of_all(here: bool) -> None:  # noqa: FBT001
    attempts = attempts_beside(0 if here else 1)
    runs: list[str] = []
    record: Callable[[], str] = out_of_memory if here else lambda: "graph"
    assert attempts.capture(warm_up=lambda: runs.append("first"), record=record) is None
    # What another rank does not run, this one must not run either.
    assert attempts.capture(warm_up=lambda: runs.append("second"), record=lambda: "graph") is None
    assert runs == ["first"]


def test_ranks_that_all_have_memory_capture() -> None:
    attempts = attempts_beside(0)
    assert attempts.capture(warm_up=lambda: None, record=lambda: "graph") == "graph"


def test_a_rank_that_fails_among_collectives_must_not_go_on() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        attempts_beside(0).capture(warm_up=out_of_memory, record=lambda: "graph")
    alone = CaptureAttempts(TensorParallel(), torch.device("cpu"))
    assert alone.capture(warm_up=out_of_memory, record=lambda: "graph") is None


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_the_memory_of_graphs_is_taken_in_one_piece_before_the_first(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    taken: list[int] = []

    def capture(run: Callable[[], Tensor], *where: object) -> tuple[str, Tensor]:
        assert where == ("pool", None)
        if error is not None:
            raise error
        return "graph", run()

    def empty(num_bytes: int, **_: object) -> None:
        taken.append(num_bytes)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(nv_runtime.captured_graphs, "capture", capture)
    pool = GraphPool(1234, torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", empty)
    assert taken == []
    # Where there is no such piece, the pool grows as it may.
    assert [pool.handle(None) for _ in range(3)] == ["pool"] * 3
    assert taken == ([1234] if error is None else [])


def test_other_errors_of_the_pool_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(nv_runtime.captured_graphs, "capture", capture)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        GraphPool(1234, torch.device("cpu")).handle(None)


def test_a_new_size_runs_in_a_larger_graph_until_it_is_worth_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = MixedGraphs(
        cast("MixedStep", None),
        pool=GraphPool(0, torch.device("cpu")),
        max_tokens=512,
        max_num_seqs=4,
        max_model_len=512,
        block_size=16,
        captured=CapturedGraphs(),
        attempts=cast("CaptureAttempts", None),
    )

    def shape_for(num_tokens: int) -> MixedShape | None:
        scheduler = Scheduler(SchedulerConfig(num_blocks=40, block_size=16))
        scheduler.add(range(num_tokens), SamplingParams())
        plan = scheduler.schedule()
        assert plan is not None
        return graphs.shape_for(plan)

    assert shape_for(500) is None
    large = shape_for(500)
    assert large is not None
    graphs._graphs[large] = cast("tuple[torch.cuda.CUDAGraph, Tensor]", ())
    # At most half of the graph would be padding: it is worth more than an early capture.
    assert [shape_for(300) for _ in range(7)] == [large] * 7
    own = shape_for(300)
    assert own is not None
    assert own.layout.num_tokens == 384
    # Nearly all of it would be: the size gets its own graph as soon as it occurs again.
    assert shape_for(20) == large
    assert shape_for(20) not in (None, large)


def test_no_graphs_with_attention_that_waits_for_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """What "auto" falls back to, say for an fp8 cache on an older GPU."""
    backend = select_attention_backend(
        "torch",
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
        head_dim=64,
        num_heads=2,
        num_kv_heads=1,
        block_size=16,
    )
    config = EngineConfig(model="m")
    caplog.set_level("INFO", "nv_runtime")
    assert not nv_runtime.builder.uses_graphs(config, torch.device("cuda"), backend)
    (message,) = caplog.messages
    assert message.startswith("no CUDA graphs: attention backend 'torch' waits for the host")
    # The others are captured, and where there are no graphs anyway nothing is said.
    device = torch.device("cuda")
    assert nv_runtime.builder.uses_graphs(config, device, TritonAttention())
    eager = EngineConfig(model="m", enforce_eager=True)
    assert not nv_runtime.builder.uses_graphs(eager, device, backend)
    assert not nv_runtime.builder.uses_graphs(config, torch.device("cpu"), backend)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_of_several_ranks_one_says_that_there_are_no_graphs(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Ranks that talk through gloo wait for the host, whatever their attention does."""
    device, config = torch.device("cuda"), EngineConfig(model="m")
    backend = TorchAttention() if name == "torch" else TritonAttention()
    caplog.set_level("INFO", "nv_runtime")
    for rank in range(2):
        group = cast("torch.distributed.ProcessGroup", object())
        ranks = TensorParallel(rank, 2, group, stages_on_host=True)
        assert not nv_runtime.builder.uses_graphs(config, device, backend, ranks)
    (message,) = caplog.messages
    assert "waits for the host" in message or "gloo wait for the host" in message
