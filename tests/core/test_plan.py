"""StepPlan: frozen when it is made, whatever happens to the sequences afterwards."""

import dataclasses

import pytest

from nv_core import FinishReason, SamplingParams, Scheduler, SchedulerConfig, StepPlan


def make_scheduler(max_num_batched_tokens: int = 64, max_num_seqs: int = 8) -> Scheduler:
    return Scheduler(SchedulerConfig(8, 4, max_num_seqs, max_num_batched_tokens))


def scheduled(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def test_entry_of_a_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add([1, 2, 3, 4, 5])
    (entry,) = scheduled(scheduler).sequences
    assert (entry.seq_id, entry.num_computed_tokens, entry.num_scheduled_tokens) == (0, 0, 5)
    assert entry.samples is True
    assert entry.block_table == (0, 1)
    assert entry.token_ids == (1, 2, 3, 4, 5)


def test_counts_of_a_plan() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=7, max_num_seqs=2)
    for _ in range(3):
        scheduler.add([1, 2, 3])
    plan = scheduled(scheduler)
    assert plan.step_id == 0
    assert plan.num_scheduled_tokens == 6
    assert (plan.num_waiting, plan.num_running, plan.num_free_blocks) == (1, 2, 6)
    assert plan.preempted == ()


def test_counts_add_up_while_prompts_are_cut_shared_and_preempted() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12, max_num_seqs=3)
    first = scheduler.add(list(range(9)), SamplingParams(max_tokens=2))
    plan = scheduled(scheduler)
    assert (plan.token_budget, plan.num_scheduled_tokens, plan.num_hit_tokens) == (12, 9, 0)
    assert (plan.num_used_blocks, plan.num_free_blocks, plan.num_cached_blocks) == (3, 5, 0)
    assert plan.sampled_seq_ids == (first.seq_id,)
    scheduler.commit(plan, {first.seq_id: 7})
    again = scheduler.add(list(range(9)) + [50] * 13, SamplingParams(max_tokens=2))
    plan = scheduled(scheduler)
    assert (plan.num_scheduled_tokens, plan.num_hit_tokens) == (12, 8)
    assert [entry.num_scheduled_tokens for entry in plan.sequences] == [1, 11]
    assert plan.sampled_seq_ids == (first.seq_id,), "the other one's prompt is cut"
    # 22 tokens need 6 blocks, of which 2 are among the first one's 3.
    assert (plan.num_used_blocks, plan.num_free_blocks, plan.num_cached_blocks) == (7, 1, 2)
    assert (plan.num_running, plan.num_waiting) == (2, 0)
    scheduler.commit(plan, {first.seq_id: 8})
    assert first.is_finished
    assert again.num_cached_tokens == 8


def test_steps_are_numbered_from_0() -> None:
    scheduler = make_scheduler()
    scheduler.add([1])
    for step_id in range(3):
        plan = scheduled(scheduler)
        assert plan.step_id == step_id
        scheduler.commit(plan, {0: 5})


def test_entry_does_not_change_when_its_sequence_goes_on() -> None:
    scheduler = make_scheduler()
    scheduler.add([1, 2, 3, 4], SamplingParams(max_tokens=9))
    prompt = scheduled(scheduler)
    scheduler.commit(prompt, {0: 5})
    decode = scheduled(scheduler)
    scheduler.commit(decode, {0: 6})
    assert prompt.sequences[0].block_table == (0,)
    assert prompt.sequences[0].num_blocks == 1
    assert prompt.sequences[0].block_ids_from(0) == [0]
    assert prompt.sequences[0].block_ids_from(1) == []
    assert decode.sequences[0].num_blocks == 2
    assert decode.sequences[0].block_ids_from(1) == [1]
    assert prompt.sequences[0].token_ids == (1, 2, 3, 4)
    assert decode.sequences[0].block_table == (0, 1)
    assert decode.sequences[0].token_ids == (5,)
    scheduler.abort(0)
    assert decode.sequences[0].block_table == (0, 1)
    assert decode.sequences[0].num_computed_tokens == 4


def test_token_of_a_plan_that_runs_ahead_is_not_known_yet() -> None:
    scheduler = make_scheduler()
    scheduler.add([1, 2, 3])
    first = scheduled(scheduler)
    ahead = scheduled(scheduler)
    assert ahead.sequences[0].num_scheduled_tokens == 1
    assert ahead.sequences[0].token_ids == ()
    scheduler.commit(first, {0: 9})
    assert ahead.sequences[0].token_ids == ()


def test_plan_is_frozen() -> None:
    scheduler = make_scheduler()
    scheduler.add([1])
    plan = scheduled(scheduler)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step_id = 3  # type: ignore[misc]


def test_repr_of_an_entry() -> None:
    scheduler = make_scheduler()
    scheduler.add([1, 2])
    assert repr(scheduled(scheduler).sequences[0]) == (
        "ScheduledSequence(seq_id=0, num_computed_tokens=0, num_scheduled_tokens=2, "
        "samples=True, block_table=(0,))"
    )


def test_released_names_every_sequence_that_lost_its_blocks_once() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8, block_size=2, max_num_batched_tokens=64))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    ended, aborted, waiting = (scheduler.add([i] * 4, params) for i in (1, 2, 3))
    waiting_aborted = scheduler.add([4] * 16, params)
    first = scheduler.schedule()
    assert first is not None
    assert first.released == ()
    tokens = {entry.seq_id: 9 for entry in first.sequences}
    scheduler.finish(ended.seq_id, FinishReason.STOP)
    scheduler.abort(aborted.seq_id)
    scheduler.abort(waiting_aborted.seq_id)
    scheduler.commit(first, tokens)
    second = scheduler.schedule()
    assert second is not None
    assert second.released == (ended.seq_id, aborted.seq_id)
    scheduler.commit(second, {waiting.seq_id: 9})
    third = scheduler.schedule()
    assert third is not None
    assert third.released == ()


def test_a_step_that_plans_nothing_keeps_what_is_released_for_the_next() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8, block_size=2))
    seq = scheduler.add([1] * 4, SamplingParams(max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, {seq.seq_id: 5})
    assert scheduler.schedule() is None
    scheduler.add([2] * 4, SamplingParams(max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.released == (seq.seq_id,)
