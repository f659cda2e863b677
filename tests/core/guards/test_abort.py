"""Guards of abort and identity: any request may go at any time, once or twice."""

import random

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig
from nv_core.testing import KVOracle, reference_tokens, run_until_idle


def test_abort_before_the_first_step() -> None:
    """It holds no blocks yet, so there is nothing to free."""
    scheduler = Scheduler(SchedulerConfig(8, 4))
    gone, stays = scheduler.add([1, 2]), scheduler.add([3])
    scheduler.abort(gone.seq_id)
    scheduler.check_invariants()
    assert gone.finish_reason == "abort"
    plan = scheduler.schedule()
    assert plan is not None
    assert [entry.seq_id for entry in plan.sequences] == [stays.seq_id]


@pytest.mark.parametrize("order", ["abort first", "token first"])
def test_abort_and_end_of_sequence_in_the_same_step_free_once(order: str) -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4, eos_token_ids=(0,)))
    seq = scheduler.add([1, 2, 3, 4, 5])
    plan = scheduler.schedule()
    assert plan is not None
    if order == "abort first":
        scheduler.abort(seq.seq_id)
        scheduler.commit(plan, {seq.seq_id: 0})
    else:
        scheduler.commit(plan, {seq.seq_id: 0})
        scheduler.abort(seq.seq_id)
    scheduler.check_invariants()
    assert scheduler.num_free_blocks == 8
    assert seq.finish_reason == ("abort" if order == "abort first" else "stop")
    assert seq.output_token_ids == ([] if order == "abort first" else [0])


def test_abort_twice_and_abort_of_a_stranger_do_nothing() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4))
    seq = scheduler.add([1])
    assert scheduler.abort(seq.seq_id) is seq
    assert scheduler.abort(seq.seq_id) is None
    assert scheduler.abort(12345) is None
    assert scheduler.abort(-1) is None


def test_two_requests_under_one_name_do_not_mix() -> None:
    scheduler = Scheduler(SchedulerConfig(16, 4))
    one, two = (
        scheduler.add([i] * 5, SamplingParams(max_tokens=5), request_id="x") for i in (1, 2)
    )
    assert one.request_id == two.request_id == "x"
    run_until_idle(scheduler, KVOracle(16, 4))
    assert one.output_token_ids == reference_tokens([1] * 5, 5)
    assert two.output_token_ids == reference_tokens([2] * 5, 5)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_thousand_cancelled_requests_leave_no_block_behind(depth: int) -> None:
    """A leak of one block for each cancelled request shows only after many."""
    rng = random.Random(depth)
    scheduler = Scheduler(SchedulerConfig(24, 4, max_num_seqs=6, max_num_batched_tokens=20))
    oracle = KVOracle(24, 4)
    alive: list[int] = []
    for i in range(1000):
        prompt = [i % 5] * rng.randrange(1, 20)
        alive.append(scheduler.add(prompt, SamplingParams(max_tokens=9)).seq_id)
        in_flight = [plan for plan in (scheduler.schedule() for _ in range(depth)) if plan]
        if rng.random() < 0.8:
            scheduler.abort(alive.pop(rng.randrange(len(alive))))
        for plan in in_flight:
            scheduler.commit(plan, oracle.execute(plan))
    scheduler.check_invariants()
    run_until_idle(scheduler, oracle, depth=depth)
    assert scheduler.num_free_blocks == 24
