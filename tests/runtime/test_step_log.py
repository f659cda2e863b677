"""The engine's step log tells what the engine did: the plans, the tokens, the times, the ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nv_core.step_log
import tiny_checkpoints
from nv_core import ConfigError, SamplingParams, StepPlan
from nv_core.step_log import RequestRecord, StepLog, StepLogWriter, read_step_log
from nv_runtime import LLM
from tiny_engines import assert_idle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_llm(checkpoint: Path, log: Path, **options: Any) -> LLM:  # noqa: ANN401 - LLM's own
    return LLM(
        str(checkpoint),
        device="cpu",
        block_size=4,
        max_model_len=128,
        max_num_batched_tokens=32,
        skip_tokenizer_init=True,
        show_progress=False,
        step_log=log,
        **{"num_gpu_blocks_override": 20, **options},
    )


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [
        [(7 * index + position) % 100 for position in range(length)]
        for index, length in enumerate(lengths)
    ]


def keep_plans(llm: LLM) -> list[StepPlan]:
    """Keeps the plans that the engine makes from now on."""
    plans: list[StepPlan] = []
    scheduler = llm._open_parts().engine.scheduler
    schedule = scheduler.schedule

    def keeping() -> StepPlan | None:
        plan = schedule()
        if plan is not None:
            plans.append(plan)
        return plan

    scheduler.schedule = keeping  # type: ignore[method-assign]
    return plans


def num_tokens_of(log: StepLog, seq_id: int) -> int:
    end = log.requests[seq_id].finished_s
    assert end is not None
    return sum(seq_id in step.sampled for step in log.steps if step.done_s <= end)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_log_is_what_the_engine_did(
    checkpoint: Path,
    tmp_path: Path,
    ahead: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    path = tmp_path / "log.jsonl"
    prompts = prompts_of([5, 40, 3, 17, 9, 26])
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 12, 1, 30, 14, 3)]
    with make_llm(checkpoint, path, async_scheduling=ahead) as llm:
        plans = keep_plans(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        log = read_step_log(path)  # complete while the engine lives, since it is idle
    assert log.header.source == "engine"
    assert log.header.num_steps_ahead == ahead
    assert log.header.num_blocks == 20
    assert log.header.model is not None
    assert log.header.model["num_layers"] == 2
    assert len(log.steps) == len(plans)
    tables: dict[int, list[int]] = {}
    for step, plan in zip(log.steps, plans, strict=True):
        for seq_id in step.released:
            tables.pop(seq_id, None)
        for seq_id, block_ids in step.new_blocks.items():
            tables.setdefault(seq_id, []).extend(block_ids)
        shares = list(zip(step.seq_ids, step.computed, step.scheduled, strict=True))
        assert shares == [tuple(entry[1:4]) for entry in plan.sequences]
        assert tuple(step.sampled) == plan.sampled_seq_ids
        assert tuple(step.preempted) == plan.preempted
        assert [tuple(pair) for pair in step.refused] == [(i, str(r)) for i, r in plan.refused]
        assert step.num_free_blocks == plan.num_free_blocks
        for entry in plan.sequences:
            assert tuple(tables[entry.seq_id]) == entry.block_table
    assert any(step.preempted for step in log.steps), "the pool is small enough to preempt"
    assert any(step.refused for step in log.steps)
    for seq_id, output in enumerate(outputs):
        request = log.requests[seq_id]
        assert request.request_id == output.request_id
        assert request.num_prompt_tokens == len(prompts[seq_id])
        assert request.finish_reason == output.outputs[0].finish_reason
        assert num_tokens_of(log, seq_id) == len(output.outputs[0].token_ids)


def test_times_follow_each_other(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with make_llm(checkpoint, path, async_scheduling=True) as llm:
        llm.generate(prompts_of([9] * 3), SamplingParams(max_tokens=8), use_tqdm=False)
    log = read_step_log(path)
    for step, later in zip(log.steps, log.steps[1:], strict=False):
        assert 0 <= step.planned_s <= step.launched_s <= step.done_s <= later.done_s
        assert step.planned_s < later.planned_s
    assert any(
        later.planned_s < step.done_s for step, later in zip(log.steps, log.steps[1:], strict=False)
    ), "a step is planned while another is in flight"
    assert all(r.arrival_s <= log.steps[0].planned_s for r in log.requests.values())


def test_the_report_of_the_engine_is_made_from_its_log(checkpoint: Path, tmp_path: Path) -> None:
    sim = pytest.importorskip("nv_core.sim", reason="needs the extra nv-core[sim]")
    path = tmp_path / "log.jsonl"
    with make_llm(checkpoint, path, async_scheduling=True) as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts_of([30, 5, 40, 8]), params, use_tqdm=False)
    log = read_step_log(path)
    metrics = sim.measure(log)
    assert metrics.num_served == len(outputs)
    assert metrics.itl_s.count == sum(len(o.outputs[0].token_ids) - 1 for o in outputs)
    assert 0 < metrics.ttft_s.mean < metrics.e2e_s.mean < metrics.duration_s
    assert 0 < metrics.busy_share <= 1
    page = sim.write_report(log, tmp_path / "report.html").read_text("utf-8")
    assert "engine, policy mixed: 4 requests" in page
    # The device runs one step after the other, though they are launched ahead.
    begins = log.begins_s()
    assert any(step.launched_s < begin for step, begin in zip(log.steps, begins, strict=True))
    for step, begin in zip(log.steps, begins[1:], strict=False):
        assert begin >= step.done_s
    # The pool that is drawn is the pool that the scheduler counted.
    for step, pool in sim.replay_blocks(log):
        assert pool.num_used == step.num_used_blocks
        assert len(pool.cached) == step.num_cached_blocks


def test_a_dropped_and_an_aborted_request_end_in_the_log(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with make_llm(checkpoint, path) as llm:
        stream = llm.stream(prompts_of([5, 6]), SamplingParams(max_tokens=50))
        next(stream)
        stream.close()
    log = read_step_log(path)
    assert [r.finish_reason for r in log.requests.values()] == ["abort", "abort"]


@pytest.mark.parametrize("num_noted", [0, 1])
def test_a_request_that_cannot_be_noted_leaves_a_log_that_can_be_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_noted: int
) -> None:
    path = tmp_path / "log.jsonl"
    original, calls = StepLogWriter.add_request, 0

    def fail(writer: StepLogWriter, request: RequestRecord) -> None:
        nonlocal calls
        calls += 1
        if calls > num_noted:
            raise ValueError("cannot be written out")
        original(writer, request)

    several = SamplingParams(n=2, temperature=0.5, max_tokens=2)
    with make_llm(checkpoint, path) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(StepLogWriter, "add_request", fail)
            with pytest.raises(ValueError, match="cannot be written out"):
                llm.generate(prompts_of([5]), several, use_tqdm=False)
        assert_idle(llm._open_parts().engine, num_blocks=20)
        llm.generate(prompts_of([6]), several, use_tqdm=False)
    log = read_step_log(path)
    reasons = [request.finish_reason for request in log.requests.values()]
    assert reasons == ["abort"] * num_noted + ["length", "length"]


def test_a_failed_step_ends_its_requests_in_the_log(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with make_llm(checkpoint, path) as llm:
        runner = llm._open_parts().engine.runner
        collect = runner.collect

        def fail(handle: object) -> dict[int, int]:
            raise RuntimeError("no such device")

        runner.collect = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no such device"):
            llm.generate(prompts_of([5]), SamplingParams(max_tokens=2), use_tqdm=False)
        runner.collect = collect  # type: ignore[method-assign]
        llm.generate(prompts_of([6]), SamplingParams(max_tokens=2), use_tqdm=False)
    log = read_step_log(path)
    assert [r.finish_reason for r in log.requests.values()] == ["error", "length"]
    assert num_tokens_of(log, 1) == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_that_a_failed_step_took_away_are_away_in_the_log(
    checkpoint: Path,
    tmp_path: Path,
    ahead: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A sequence that it preempted comes back later, with a new table."""
    sim = pytest.importorskip("nv_core.sim", reason="needs the extra nv-core[sim]")
    path = tmp_path / "log.jsonl"
    failed: list[StepPlan] = []
    with make_llm(checkpoint, path, async_scheduling=ahead) as llm:
        runner = llm._open_parts().engine.runner
        launch = runner.launch

        def fail_once(plan: StepPlan) -> Any:  # noqa: ANN401 - a handle
            if plan.preempted and not failed:
                failed.append(plan)
                raise RuntimeError("no such device")
            return launch(plan)

        runner.launch = fail_once  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        streams = [llm.stream(prompt, params) for prompt in prompts_of([17, 19, 23])]
        with pytest.raises(RuntimeError, match="no such device"):
            list(streams[0])
        for stream in streams:
            list(stream)
        llm.generate(prompts_of([5]), params, use_tqdm=False)
    log = read_step_log(path)
    (preempted,) = failed[0].preempted
    # One step ahead, it is still in the step before, which is lost as well.
    assert log.requests[preempted].finish_reason == ("error" if ahead else "length")
    for step, pool in sim.replay_blocks(log):
        assert pool.num_used == step.num_used_blocks


def test_a_file_that_may_not_be_written_is_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(nv_core.step_log, "_open", refuse)
    with pytest.raises(
        ConfigError, match=r"step_log=.* cannot be written: Permission denied; name"
    ):
        make_llm(checkpoint, tmp_path / "log.jsonl")


def test_what_is_no_path_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="step_log must be a path or None, got 7"):
        LLM(str(checkpoint), step_log=7)


def test_a_file_that_cannot_be_made_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_log=.*does not exist; make the folder"):
        LLM("no/such/model", step_log=tmp_path / "none" / "log.jsonl")
    for name in ("a\0b", "a\ud800b"):
        with pytest.raises(ConfigError, match=r"step_log=.* is no path \(.*name another file"):
            LLM("no/such/model", step_log=name)
    with pytest.raises(ConfigError, match=r"step_log=.*is a folder"):
        LLM("no/such/model", step_log=tmp_path)
