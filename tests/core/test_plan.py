"""StepPlan: frozen when it is made, whatever happens to the sequences afterwards."""

import dataclasses

import pytest

from nv_core import (
    FinishReason,
    SamplingParams,
    ScheduledBatch,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)


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


def mixed_plan() -> StepPlan:
    """A decode that runs ahead, a prompt with a cached block that ends, and one that is cut."""
    scheduler = make_scheduler(max_num_batched_tokens=9)
    scheduler.add([1, 2, 3, 4, 5])
    scheduler.commit(scheduled(scheduler), {0: 6})
    scheduled(scheduler)
    scheduler.add([1, 2, 3, 4, 7, 8])
    scheduler.add([10] * 12)
    return scheduled(scheduler)


def test_batch_reads_as_a_tuple_of_entries() -> None:
    batch = mixed_plan().sequences
    entries = tuple(batch)
    assert [tuple(entry)[1:7] for entry in entries] == [
        (0, 6, 1, True, 2, 1),
        (1, 4, 2, True, 2, 0),
        (2, 0, 6, False, 3, 0),
    ]
    assert all(isinstance(entry, ScheduledSequence) for entry in entries)
    assert len(batch) == 3
    assert [batch[place] for place in range(-3, 3)] == [*entries, *entries]
    assert batch[1:] == entries[1:]
    assert batch[::-1] == entries[::-1] == tuple(reversed(batch))
    assert entries[1] in batch
    assert batch.index(entries[2]) == 2
    assert repr(batch) == repr(entries)
    with pytest.raises(IndexError):
        batch[3]


def test_batch_equals_a_tuple_of_the_same_entries() -> None:
    batch = mixed_plan().sequences
    assert batch == tuple(batch)
    assert tuple(batch) == batch
    assert batch == ScheduledBatch.of(batch)
    assert batch != tuple(batch)[:2]
    assert batch != ScheduledBatch()
    assert batch != list(batch), "as of tuples"
    assert ScheduledBatch.of([]) == ScheduledBatch() == ()
    assert not ScheduledBatch()
    with pytest.raises(TypeError, match="unhashable"):
        hash(batch)


def test_columns_say_what_the_entries_say() -> None:
    batch = mixed_plan().sequences
    names = [field.name for field in dataclasses.fields(ScheduledBatch)]
    for name, of_entry in zip(names, ScheduledSequence._fields, strict=True):
        assert name in (of_entry, f"{of_entry}s")
        column = getattr(batch, name)
        assert list(column) == [getattr(entry, of_entry) for entry in batch]
    assert batch.sampled_seq_ids == (0, 1)
    assert [seq.seq_id for seq in batch.sampled_sequences] == [0, 1]


def test_decode_is_told_from_all_other_plans() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    scheduler.add([1])
    plans = []
    for prompt in ([2], [3], [4, 5]):
        plans.append(scheduled(scheduler))
        scheduler.commit(plans[-1], dict.fromkeys(plans[-1].sampled_seq_ids, 9))
        scheduler.add(prompt)
    kinds = [([tuple(e[2:5]) for e in plan.sequences], plan.is_decode) for plan in plans]
    assert kinds == [
        # One token that yields the next is a decode to whoever runs it, also if it is a prompt.
        ([(0, 1, True)], True),
        ([(1, 1, True), (0, 1, True)], True),
        ([(2, 1, True), (1, 1, True)], True),
    ]
    assert not mixed_plan().is_decode
