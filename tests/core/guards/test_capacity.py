"""Guards of the limits: one request may fail for lack of room, never the scheduler."""

import pytest

from nv_core import RequestError, SamplingParams, Scheduler, SchedulerConfig, SchedulingError, Step
from nv_core.testing import KVOracle, reference_tokens, run_until_idle

POLICIES = ["mixed", "prefill_first"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_request_that_outgrows_the_pool_ends_and_others_go_on(policy: str, depth: int) -> None:
    """Alone and without a free block it would preempt itself for ever, or break an assertion."""
    scheduler = Scheduler(SchedulerConfig(2, 4, policy=policy))
    oracle = KVOracle(2, 4)
    lone = scheduler.add(range(8), SamplingParams(max_tokens=50))
    behind = scheduler.add([1, 2], SamplingParams(max_tokens=3))
    run_until_idle(scheduler, oracle, depth=depth)
    assert lone.finish_reason == "length"
    assert lone.output_token_ids == reference_tokens(range(8), 1)
    assert behind.output_token_ids == reference_tokens([1, 2], 3)
    assert scheduler.num_free_blocks == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_prompt_that_can_never_fit_does_not_block_the_queue(policy: str) -> None:
    scheduler = Scheduler(SchedulerConfig(2, 4, policy=policy))
    with pytest.raises(RequestError, match="9 tokens and can never fit the KV pool"):
        scheduler.add(range(9))
    small = scheduler.add([1, 2], SamplingParams(max_tokens=3))
    run_until_idle(scheduler, KVOracle(2, 4))
    assert small.output_token_ids == reference_tokens([1, 2], 3)


def test_limit_is_what_the_pool_holds_not_what_the_model_declares() -> None:
    scheduler = Scheduler(SchedulerConfig(62, 16, max_model_len=4096))
    assert scheduler.max_prompt_tokens == 992
    with pytest.raises(RequestError, match="2000 tokens and can never fit the KV pool: 62 blocks"):
        scheduler.add(range(2000))


@pytest.mark.parametrize("depth", [1, 2])
def test_table_never_outgrows_the_model_length(depth: int) -> None:
    """A prompt of the whole model length would need a table wider than its buffer."""
    scheduler = Scheduler(SchedulerConfig(64, 4, max_model_len=16))
    with pytest.raises(RequestError, match=r"max_model_len=16 \(prompt and at least one output"):
        scheduler.add(range(16))
    seq = scheduler.add(range(15), SamplingParams(max_tokens=2))
    plans = run_until_idle(scheduler, KVOracle(64, 4), depth=depth)
    assert seq.finish_reason == "length"
    assert seq.num_tokens == 16
    assert max(len(e.block_table) for plan in plans for e in plan.sequences) == 4


class Stubborn:
    """Wants whole prompts only, whatever the budget."""

    def schedule(self, step: Step) -> None:
        for seq in list(step.waiting):
            if step.uncached_tokens(seq) <= step.budget:
                step.take(seq)


def test_no_progress_is_an_error_at_once_not_empty_steps_for_ever() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4, max_num_batched_tokens=4, policy=Stubborn()))
    scheduler.add(range(5))
    with pytest.raises(SchedulingError, match="policy Stubborn ran nothing although 1 sequences"):
        scheduler.schedule()


@pytest.mark.parametrize("policy", POLICIES)
def test_budget_smaller_than_any_prompt_still_makes_progress(policy: str) -> None:
    scheduler = Scheduler(SchedulerConfig(16, 4, max_num_batched_tokens=1, policy=policy))
    sequences = [scheduler.add([i] * 9, SamplingParams(max_tokens=3)) for i in range(3)]
    run_until_idle(scheduler, KVOracle(16, 4), max_steps=60)
    for i, seq in enumerate(sequences):
        assert seq.output_token_ids == reference_tokens([i] * 9, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_of_one_step_stay_within_the_budget(policy: str) -> None:
    """A counter of granted tokens that is never advanced lets all of them in at once."""
    scheduler = Scheduler(SchedulerConfig(1000, 4, max_num_batched_tokens=250, policy=policy))
    for i in range(10):
        scheduler.add([i] * 100, SamplingParams(max_tokens=1))
    plans = run_until_idle(scheduler, KVOracle(1000, 4))
    assert all(plan.num_scheduled_tokens <= 250 for plan in plans)
    for plan in plans:
        total = sum(entry.num_scheduled_tokens for entry in plan.sequences)
        assert total == plan.num_scheduled_tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_max_num_seqs_counts_all_that_hold_blocks(policy: str, depth: int) -> None:
    """A limit on the picks of one step lets one more in each step, and the last ones starve."""
    scheduler = Scheduler(SchedulerConfig(64, 4, max_num_seqs=2, policy=policy))
    oracle = KVOracle(64, 4)
    sequences = [scheduler.add([i] * 3, SamplingParams(max_tokens=8)) for i in range(5)]
    plans = run_until_idle(scheduler, oracle, depth=depth)
    assert max(plan.num_running for plan in plans) == 2
    assert max(len(plan.sequences) for plan in plans) == 2
    first_seen = {e.seq_id: plan.step_id for plan in reversed(plans) for e in plan.sequences}
    assert sorted(first_seen.values()) == [first_seen[seq.seq_id] for seq in sequences]
    assert all(len(seq.output_token_ids) == 8 for seq in sequences)


def test_result_of_a_request_that_is_gone_is_dropped_quietly() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4))
    seq = scheduler.add([1, 2])
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort(seq.seq_id)
    events = scheduler.commit(plan, {seq.seq_id: 5})
    assert events.sampled == events.finished == ()
    assert seq.output_token_ids == []
