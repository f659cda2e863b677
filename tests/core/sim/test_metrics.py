"""Metrics against a log small enough for arithmetic by hand, and against a slow second opinion."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest

from nv_core import ConfigError, SchedulerConfig
from nv_core.sim import (
    SLO,
    AffineLatency,
    ConstantLatency,
    Workload,
    WorkRequest,
    compare_table,
    measure,
    request_times,
    simulate,
    summarise,
)
from nv_core.sim.metrics import format_ms
from nv_core.sim.summary import sparkline
from nv_core.step_log import StepLog


def two_requests() -> StepLog:
    """One step a second: A (3 tokens) comes at 0, B (2 tokens) at 0.5 and is admitted at 1."""
    requests = (
        WorkRequest(0, 8, 3, request_id="A", user="a"),
        WorkRequest(0.5, 4, 2, request_id="B", user="b"),
    )
    config = SchedulerConfig(num_blocks=10, block_size=4, max_num_batched_tokens=8)
    return simulate(Workload("two", requests), config, ConstantLatency(1.0))


def test_latencies_by_hand() -> None:
    metrics = measure(two_requests())
    # A's tokens come at 1, 2, 3; B's at 2 and 3.
    assert metrics.ttft_s.mean == pytest.approx((1 + 1.5) / 2)
    assert metrics.tpot_s.mean == pytest.approx(1.0)
    assert metrics.itl_s.count == 3
    assert metrics.itl_s.mean == pytest.approx(1.0)
    assert metrics.e2e_s.mean == pytest.approx((3 + 2.5) / 2)
    assert metrics.queue_s.mean == pytest.approx((0 + 0.5) / 2)
    assert metrics.duration_s == 3
    assert metrics.output_tokens_per_s == pytest.approx(5 / 3)
    assert metrics.total_tokens_per_s == pytest.approx(17 / 3)
    assert metrics.requests_per_s == pytest.approx(2 / 3)
    assert metrics.num_steps == 3
    assert metrics.busy_share == 1
    assert metrics.mean_batch_size == pytest.approx((1 + 2 + 2) / 3)
    # Blocks: 2 in the first step, then 3 + 1 and 3 + 2.
    assert metrics.mean_kv_use == pytest.approx((2 + 4 + 5) / 3 / 10)
    assert metrics.peak_kv_use == 0.5


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (SLO(), 2),
        (SLO(ttft_s=1.0), 1),
        (SLO(ttft_s=1.5), 2),
        (SLO(tpot_s=0.9), 0),
        (SLO(e2e_s=2.6), 1),
        (SLO(ttft_s=1.0, e2e_s=2.6), 0),
    ],
)
def test_goodput_counts_who_meets_every_objective(slo: SLO, num_good: int) -> None:
    metrics = measure(two_requests(), slo=slo)
    assert metrics.attainment == num_good / 2
    assert metrics.goodput_per_s == pytest.approx(num_good / 3)


def test_a_single_token_has_no_time_per_token() -> None:
    config = SchedulerConfig(num_blocks=10, block_size=4)
    log = simulate(Workload("one", (WorkRequest(0, 4, 1),)), config, ConstantLatency(1.0))
    metrics = measure(log, slo=SLO(tpot_s=1e-9))
    assert metrics.tpot_s.count == 0
    assert metrics.attainment == 1


def test_requests_can_be_chosen_by_their_arrival() -> None:
    metrics = measure(two_requests(), between_s=(0.25, 10))
    assert metrics.num_requests == 1
    assert metrics.ttft_s.mean == pytest.approx(1.5)
    assert metrics.itl_s.count == 1


def test_nothing_at_all() -> None:
    config = SchedulerConfig(num_blocks=10, block_size=4)
    metrics = measure(simulate(Workload("none", ()), config, ConstantLatency(1.0)))
    assert metrics.num_requests == metrics.num_steps == 0
    assert metrics.attainment == metrics.ttft_s.mean == metrics.hit_rate == 0


def busy_log(seed: int, *, ahead: int = 0) -> StepLog:
    draw = random.Random(seed)
    requests = tuple(
        WorkRequest(
            draw.uniform(0, 3),
            8 + draw.randint(1, 40),
            draw.randint(1, 40),
            segments=((1 + draw.randint(0, 2), 8),),
            user=f"user {draw.randint(0, 2)}",
        )
        for _ in range(60)
    )
    latency = AffineLatency(step_s=0.01, token_s=2e-4)
    config = SchedulerConfig(num_blocks=60, block_size=4, max_num_batched_tokens=64)
    return simulate(Workload("busy", requests), config, latency, num_steps_ahead=ahead)


def percentile(values: list[float], share: float) -> float:
    """Linear between the neighbours, as everybody's percentile."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_a_slow_second_opinion(seed: int, ahead: int) -> None:
    log = busy_log(seed, ahead=ahead)
    metrics = measure(log)
    ttft, tpot, itl, queue = [], [], [], []
    reached: dict[int, int] = {}
    computed_twice = total = 0
    for seq_id, request in log.requests.items():
        assert request.finished_s is not None
        times = [
            s.done_s for s in log.steps if seq_id in s.sampled and s.done_s <= request.finished_s
        ]
        assert len(times) == request.max_tokens
        ttft.append(times[0] - request.arrival_s)
        if len(times) > 1:
            tpot.append((times[-1] - times[0]) / (len(times) - 1))
        itl += [b - a for a, b in pairwise(times)]
        queue.append(
            next(s.launched_s for s in log.steps if seq_id in s.seq_ids) - request.arrival_s
        )
    for step in log.steps:
        for seq_id, computed, scheduled in zip(
            step.seq_ids, step.computed, step.scheduled, strict=True
        ):
            for position in range(computed, computed + scheduled):
                computed_twice += position < reached.get(seq_id, 0)
            reached[seq_id] = max(reached.get(seq_id, 0), computed + scheduled)
            total += scheduled
    for distribution, values in (
        (metrics.ttft_s, ttft),
        (metrics.tpot_s, tpot),
        (metrics.itl_s, itl),
        (metrics.queue_s, queue),
    ):
        assert distribution.count == len(values)
        assert distribution.mean == pytest.approx(statistics.fmean(values))
        for share, got in (
            (0.5, distribution.p50),
            (0.9, distribution.p90),
            (0.99, distribution.p99),
        ):
            assert got == pytest.approx(percentile(values, share))
    assert metrics.num_preemptions == sum(r.num_preemptions for r in log.requests.values()) > 0
    assert metrics.recompute_share == pytest.approx(computed_twice / total)
    assert computed_twice > 0
    found = sum(r.num_cached_tokens for r in log.requests.values())
    asked = sum(r.num_prompt_tokens for r in log.requests.values())
    assert metrics.hit_rate == pytest.approx(found / asked)
    assert found > 0


def heavy_and_light(policy: str) -> StepLog:
    """One user sends ten times as many requests as the other, all at once."""
    requests = [WorkRequest(0, 40, 20, user="heavy") for _ in range(100)]
    requests += [WorkRequest(0, 40, 20, user="light") for _ in range(100)]
    config = SchedulerConfig(200, 16, max_num_seqs=8, max_num_batched_tokens=64, policy=policy)
    return simulate(Workload("two", tuple(requests)), config, ConstantLatency(0.01))


def test_fairness_tells_a_fair_policy_from_another() -> None:
    first_come = measure(heavy_and_light("mixed"), window_s=1.0).fairness
    fair = measure(heavy_and_light("fair"), window_s=1.0).fairness
    assert first_come.num_users == fair.num_users == 2
    # First come, first served: the heavy user's hundred stand before the light one's.
    assert first_come.jain_index < 0.6
    assert fair.jain_index > 0.95
    assert fair.service_gap < first_come.service_gap / 3


def test_jain_index_by_hand() -> None:
    """Two users throughout: one gets a token a step, the other waits, as there is one slot."""
    requests = (WorkRequest(0, 4, 100, user="a"), WorkRequest(0, 4, 100, user="b"))
    config = SchedulerConfig(100, 4, max_num_seqs=1)
    log = simulate(Workload("slot", requests), config, ConstantLatency(1.0), until_s=100)
    fairness = measure(log, window_s=10).fairness
    assert fairness.jain_index == pytest.approx(0.5)
    # Ten output tokens of weight 2 and, in the first window, a prompt of four.
    assert fairness.service_gap == pytest.approx(24, abs=2.1)


def test_objectives_are_checked() -> None:
    with pytest.raises(ConfigError, match="tpot_s must be positive"):
        SLO(tpot_s=0)
    assert str(SLO(ttft_s=0.5, e2e_s=2)) == "TTFT <= 500 ms, E2E <= 2000 ms"


def test_the_screen_says_it_all() -> None:
    text = summarise(busy_log(1), slo=SLO(ttft_s=0.2))
    assert max(len(line) for line in text.splitlines()) <= 110
    assert len(text.splitlines()) <= 30
    for word in (
        "TTFT",
        "TPOT",
        "ITL",
        "E2E",
        "goodput",
        "hit rate",
        "recomputed",
        "Jain",
        "waiting",
    ):
        assert word in text


def test_a_sparkline_shows_the_greatest_of_each_stretch() -> None:
    assert sparkline([1, 2, 3, 4], [0, 8, 4, 1], width=4) == " █▄▁"
    assert sparkline([1, 2, 3, 4], [0, 8, 4, 1], width=2) == "█▄"
    assert sparkline([], [], width=3) == "   "


def test_two_logs_side_by_side() -> None:
    lines = compare_table({"a": busy_log(1), "longer name": busy_log(2)}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "longer name" in lines[0]


def test_times_for_people() -> None:
    assert [format_ms(value) for value in (0.0123, 9.9, 12.0)] == ["12.3 ms", "9900.0 ms", "12.0 s"]


def test_tokens_that_came_too_late_do_not_count() -> None:
    """With a step ahead, the last plan of a stopped request yields a token for nobody."""
    log = two_requests()
    log.requests[0].finished_s = 2.0
    times = request_times(log)
    assert list(times.num_output_tokens) == [2, 2]
