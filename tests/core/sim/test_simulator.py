"""The simulator is the real scheduler under a virtual clock: nothing of the schedule is its own."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nv_core import ConfigError, Mixed, SamplingParams, Scheduler, SchedulerConfig, Step
from nv_core.sim import (
    ConstantLatency,
    RooflineLatency,
    StepWork,
    Workload,
    WorkRequest,
    find_hardware,
    find_model,
    fit,
    measure,
    replay_blocks,
    simulate,
    summarise,
)
from nv_core.sim.perfetto import trace_events
from nv_core.sim.report import report_data
from nv_core.step_log import (
    RequestRecord,
    StepLog,
    StepLogError,
    StepLogWriter,
    read_step_log,
)

GOLDEN = Path(__file__).parents[2] / "data" / "nano_vllm_schedules.json.gz"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(GOLDEN.read_bytes()))


def random_workload(seed: int, *, num_requests: int = 40) -> Workload:
    draw = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        shared = draw.randint(0, 3)
        segments = tuple((100 + i, 6) for i in range(shared))
        requests.append(
            WorkRequest(
                draw.uniform(0, 30),
                6 * shared + draw.randint(1, 30),
                draw.randint(1, 25),
                segments=segments,
                user=f"user {draw.randint(0, 2)}",
            )
        )
    return Workload("random", tuple(requests))


def small_config(**options: Any) -> SchedulerConfig:  # noqa: ANN401 - the config's own
    return SchedulerConfig(
        **{"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 24, **options}
    )


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_golden_schedules_come_out_of_the_simulator(case: dict[str, Any]) -> None:
    """A step a second, so that times are step numbers; block ids included."""
    given = case["workload"]
    requests = [
        WorkRequest(
            float(request["arrival_step"]),
            len(request["prompt"]),
            len(output),
            prompt_token_ids=tuple(request["prompt"]),
            output_token_ids=tuple(output),
            request_id=str(index),
        )
        for index, (request, output) in enumerate(
            zip(given["requests"], case["outputs"], strict=True)
        )
    ]
    config = SchedulerConfig(
        num_blocks=given["num_blocks"],
        block_size=given["block_size"],
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        policy="prefill_first",
    )
    log = simulate(Workload("g", tuple(requests)), config, ConstantLatency(1.0), record_blocks=True)
    number = {seq_id: int(request.request_id) for seq_id, request in log.requests.items()}
    steps = [
        {
            "step": round(step.launched_s),
            "batch": [
                {
                    "request": number[seq_id],
                    "cached": computed,
                    "scheduled": scheduled,
                    "block_table": list(pool.tables[seq_id]),
                }
                for seq_id, computed, scheduled in zip(
                    step.seq_ids, step.computed, step.scheduled, strict=True
                )
            ],
            "preempted": sorted(number[seq_id] for seq_id in step.preempted),
        }
        for step, pool in replay_blocks(log)
    ]
    expected = [{k: s[k] for k in ("step", "batch", "preempted")} for s in case["steps"]]
    assert steps == expected


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_same_run_gives_the_same_log(ahead: int) -> None:
    logs = [
        simulate(
            random_workload(1).faster(200),
            small_config(),
            RooflineLatency(find_model("qwen3-0.6b"), find_hardware("h200")),
            num_steps_ahead=ahead,
        )
        for _ in range(2)
    ]
    assert logs[0] == logs[1]
    assert any(step.preempted for step in logs[0].steps)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_clock_follows_the_engine_s_loop(ahead: int) -> None:
    log = simulate(random_workload(2), small_config(), ConstantLatency(0.25), num_steps_ahead=ahead)
    for step, later in zip(log.steps, log.steps[1:], strict=False):
        assert later.launched_s >= step.done_s  # one device
        assert later.planned_s >= step.planned_s
        # A plan that only takes blocks away needs no device.
        assert step.done_s - step.launched_s == pytest.approx(0.25 if step.seq_ids else 0)
        # Without a step ahead the host waits for the tokens, with one it does not.
        assert (later.planned_s >= step.done_s) or ahead
    for request in log.requests.values():
        assert request.finish_reason == "length"
        first = next(s for s in log.steps if request.seq_id in s.seq_ids)
        assert first.planned_s >= request.arrival_s


def test_every_request_gets_its_tokens() -> None:
    workload = random_workload(3)
    log = simulate(workload, small_config(), ConstantLatency(0.1))
    for number, request in enumerate(workload):
        record = log.requests[number]
        num_tokens = sum(number in step.sampled for step in log.steps)
        assert record.max_tokens == request.num_output_tokens == num_tokens
        assert record.num_prompt_tokens == request.num_prompt_tokens


def test_idle_time_is_jumped_over() -> None:
    requests = (WorkRequest(0, 4, 2), WorkRequest(1000, 4, 2))
    log = simulate(Workload("gap", requests), small_config(), ConstantLatency(1.0))
    assert [step.launched_s for step in log.steps] == [0, 1, 1000, 1001]


def test_what_can_never_fit_is_rejected_and_counted() -> None:
    requests = (WorkRequest(0, 5000, 2, request_id="huge"), WorkRequest(0, 4, 2))
    log = simulate(Workload("huge", requests), small_config(), ConstantLatency(1.0))
    (rejected,) = log.rejected
    assert rejected.request_id == "huge"
    assert "can never fit" in (rejected.message or "")
    metrics = measure(log)
    assert (metrics.num_requests, metrics.num_served, metrics.num_dropped) == (2, 1, 1)
    assert metrics.attainment == 0.5


class DropsTheThird(Mixed):
    """Refuses one request."""

    def schedule(self, step: Step) -> None:
        for seq in list(step.waiting):
            if seq.request_id == "2":
                step.drop(seq, "not today")
        super().schedule(step)


def test_what_the_policy_drops_ends_in_the_log() -> None:
    requests = tuple(WorkRequest(0, 4, 3) for _ in range(4))
    config = small_config(policy=DropsTheThird())
    log = simulate(Workload("drop", requests), config, ConstantLatency(1.0))
    assert log.requests[2].finish_reason == "error"
    assert log.requests[2].message == "not today"
    assert measure(log).num_dropped == 1


def test_a_run_can_end_early() -> None:
    requests = tuple(WorkRequest(0, 4, 30) for _ in range(3))
    log = simulate(Workload("w", requests), small_config(), ConstantLatency(1.0), until_s=5)
    metrics = measure(log)
    assert metrics.num_unfinished == 3
    assert metrics.attainment == 0
    assert len(log.steps) == 5


def test_scripted_answers_are_found_by_later_turns() -> None:
    first = WorkRequest(0, 8, 8, segments=((1, 8),), output_segment=2)
    second = WorkRequest(100, 20, 1, segments=((1, 8), (2, 8), (3, 4)))
    log = simulate(Workload("turns", (first, second)), small_config(), ConstantLatency(1.0))
    # Of the answer's eight tokens the last is never computed, so its block stays unpublished.
    assert log.requests[1].num_cached_tokens == 12


def test_a_latency_model_that_makes_no_sense_is_refused() -> None:
    class Negative:
        def seconds(self, work: StepWork) -> float:
            del work
            return -1.0

    with pytest.raises(ConfigError, match=r"step 0 takes -1\.0 s"):
        simulate(Workload("w", (WorkRequest(0, 4, 2),)), small_config(), Negative())


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_log_survives_its_file(tmp_path: Path, name: str) -> None:
    requests = (*random_workload(4).requests, WorkRequest(3, 9999, 1, request_id="huge"))
    log = simulate(
        Workload("w", requests),
        small_config(policy=DropsTheThird()),
        ConstantLatency(0.125),
        record_blocks=True,
        model=find_model("qwen3-0.6b"),
    )
    log.save(tmp_path / name)
    assert read_step_log(tmp_path / name) == log


def test_whatever_a_caller_may_ask_for_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    scheduler = Scheduler(small_config())
    log = simulate(Workload("none", ()), small_config(), ConstantLatency(1.0))
    for priority, max_tokens, deadline in (
        (-(10**30), 10**30, -1e300),
        (10**30, 1, float("inf")),
        (0, None, None),
    ):
        seq = scheduler.add(
            [1], SamplingParams(max_tokens=max_tokens), priority=priority, deadline=deadline
        )
        log.add_request(RequestRecord.of(seq, 0.0))
    log.save(path)
    assert read_step_log(path) == log
    # A browser reads no NaN and no infinity.
    json.dumps(report_data(log, name="log"), allow_nan=False)


def test_a_log_can_be_written_while_it_comes_about(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    config = small_config()
    plain = simulate(random_workload(5), config, ConstantLatency(0.125))
    with StepLogWriter(path, plain.header) as writer:
        simulate(random_workload(5), config, ConstantLatency(0.125), sinks=[writer])
    assert read_step_log(path) == plain


def test_a_log_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    simulate(random_workload(6), small_config(), ConstantLatency(0.125)).save(path)
    text = path.read_text()
    path.write_text(text[: text.rindex('"event"')])
    log = read_step_log(path)
    assert log.is_truncated
    assert log.steps


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"event":"dance"}', "unknown event 'dance'"),
        ('{"event":"finish","seq_id":7}', "KeyError"),
        ('{"event":"step","step_id":1}', "KeyError"),
        ('{"event":"add","seq_id":0,"colour":1}', "TypeError"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    simulate(Workload("none", ()), small_config(), ConstantLatency(1.0)).save(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(StepLogError, match=message):
        read_step_log(path)


DAMAGES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e308, 10**30, float("nan"), "x", "", [], {}, [[]], [0, 0], [-1]),
    *(2**53, [10**9], {"1": [3]}, {"x": [0]}, {"0": [99]}),
)
"""What a field of a damaged or foreign log may hold."""


def read_and_use(path: Path) -> None:
    log = read_step_log(path)
    summarise(log)
    trace_events(log)
    # Some damages show only when blocks are followed, or leave too few steps for a fit.
    for use in (partial(report_data, name="log"), fit):
        with contextlib.suppress(ConfigError):
            use(log)


@pytest.mark.parametrize("event", ["header", "add", "reject", "step", "finish"])
def test_a_log_is_refused_or_can_be_used_whatever_a_field_holds(tmp_path: Path, event: str) -> None:
    path = tmp_path / "log.jsonl"
    requests = [WorkRequest(0.1 * i, 7 + i, 9, user=f"user {i % 2}") for i in range(4)]
    workload = Workload("w", (*requests, WorkRequest(0, 999, 1)))
    config = small_config(num_blocks=8, max_num_batched_tokens=8)
    simulate(
        workload,
        config,
        ConstantLatency(0.1),
        record_blocks=True,
        model=find_model("qwen3-0.6b"),
    ).save(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    read_and_use(path)
    # One line of each shape: what is as in most steps is left out.
    shapes = {
        tuple(line): i for i, line in enumerate(lines) if line.get("event", "header") == event
    }
    num_refused = 0
    for i in shapes.values():
        for name in lines[i]:
            others = {key: value for key, value in lines[i].items() if key != name}
            for damaged in (others, *({**lines[i], name: value} for value in DAMAGES)):
                texts = map(json.dumps, [*lines[:i], damaged, *lines[i + 1 :]])
                path.write_text("\n".join(texts) + "\n")
                try:
                    read_and_use(path)
                except StepLogError:
                    num_refused += 1
    assert num_refused > 10 * len(shapes)


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_log_is_refused_or_read_in_part_wherever_its_file_is_damaged(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    log = simulate(random_workload(6), small_config(), ConstantLatency(0.125))
    log.save(path)
    whole = path.read_bytes()
    draw = random.Random(0)
    kinds: Counter[str] = Counter()
    for size in draw.sample(range(len(whole)), 40):
        path.write_bytes(whole[:size])
        try:
            part = read_step_log(path)
        except StepLogError:
            kinds["cut before the end of the header"] += 1
        else:
            assert part.steps == log.steps[: len(part.steps)]
            kinds["cut"] += part.is_truncated
    for place in draw.sample(range(len(whole)), 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(StepLogError):
            read_step_log(path)
            kinds["not noticed"] += 1
    assert kinds["cut"] > 30
    # A packed file has a checksum; of a text, every byte that is changed so is no text any more.
    assert kinds["not noticed"] <= (name.endswith(".gz"))


def test_a_log_that_breaks_off_before_anything_ran_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = simulate(
        Workload("w", tuple(WorkRequest(0, 4, 2, user=user) for user in "ab")),
        small_config(),
        ConstantLatency(0.1),
    )
    log.save(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    read_and_use(path)
    assert measure(read_step_log(path)).num_unfinished == 2


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08\x00", b"\xff\xfe\x00", bytes(range(256)), b""])
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_a_binary_file_is_no_log(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(StepLogError, match=r"x\.jsonl.* is no step log"):
        read_step_log(path)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("num_blocks", 2**24),
        ("block_size", 2**31 - 1),
        ("max_num_seqs", 2**31 - 1),
        ("max_num_batched_tokens", 2**31 - 1),
    ],
)
def test_a_header_has_sizes_that_a_machine_can_have(tmp_path: Path, name: str, most: int) -> None:
    path = tmp_path / "log.jsonl"
    log = simulate(Workload("none", ()), small_config(), ConstantLatency(1.0))
    changes: dict[str, Any] = {name: most + 1}
    log.header = replace(log.header, **changes)
    log.save(path)
    with pytest.raises(StepLogError, match=f"{name} must be at most {most}, got {most + 1}"):
        read_step_log(path)


@pytest.mark.parametrize("text", ["", "hello\n", '{"format":"nv-step-log","version":99}\n', "[]\n"])
def test_another_file_is_no_log(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(StepLogError, match="no step log of version 1"):
        read_step_log(path)


def check_replay(log: StepLog) -> None:
    """The replayed pool has the counts that the scheduler itself gave each plan."""
    for step, pool in replay_blocks(log):
        assert pool.num_used == step.num_used_blocks
        assert log.header.num_blocks - pool.num_used == step.num_free_blocks
        assert len(pool.cached) == step.num_cached_blocks
        found = len([b for ids in pool.hits.values() for b in ids])
        assert found * log.header.block_size == step.num_hit_tokens


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_the_block_map_agrees_with_the_scheduler(seed: int, ahead: int) -> None:
    log = simulate(
        random_workload(seed),
        small_config(policy=("mixed", "fair", "least_recompute")[seed % 3]),
        ConstantLatency(0.2),
        num_steps_ahead=ahead,
        record_blocks=True,
    )
    check_replay(log)
    assert any(step.num_hit_tokens for step in log.steps)
    assert any(step.preempted for step in log.steps)


def test_the_block_map_of_a_pool_without_cache() -> None:
    config = small_config(enable_prefix_caching=False)
    log = simulate(random_workload(7), config, ConstantLatency(0.2), record_blocks=True)
    check_replay(log)


def test_a_log_without_blocks_has_no_map() -> None:
    log = simulate(random_workload(8), small_config(), ConstantLatency(0.2))
    with pytest.raises(ConfigError, match="record_blocks=True"):
        next(iter(replay_blocks(log)))


def test_workloads_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="at least one prompt token"):
        WorkRequest(0, 0, 1)
    with pytest.raises(ConfigError, match="arrival_s"):
        WorkRequest(-1, 1, 1)
    with pytest.raises(ConfigError, match="arrivals must differ"):
        Workload("w", (WorkRequest(0, 1, 1),)).at_rate(3)


def test_a_workload_at_another_rate() -> None:
    workload = random_workload(9).at_rate(8.0)
    assert workload.rate_per_s == pytest.approx(8.0)
    assert workload.first(3).requests == workload.requests[:3]
    told = workload.with_predictions().requests[0]
    assert told.predicted_output_tokens == told.num_output_tokens


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_that_cannot_be_served_is_never_made(*, caching: bool) -> None:
    # A list of 10**15 tokens would not fit any memory.
    workload = Workload("w", (WorkRequest(0.0, 10**15, 3), WorkRequest(0.0, 9, 3)))
    config = SchedulerConfig(10, 4, max_model_len=20, enable_prefix_caching=caching)
    log = simulate(workload, config, ConstantLatency(0.1))
    (rejected,) = log.rejected
    assert "1000000000000000 tokens" in str(rejected.message)
    assert "max_model_len = 20" in str(rejected.message)
    assert [request.finish_reason for request in log.requests.values()] == ["length"]
