"""Guards of chunked prefill: any cut of a prompt gives the same answer, and no answer early."""

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, Step
from nv_core.testing import KVOracle, reference_tokens, run_until_idle

LENGTH = 11


class Chunks:
    """Cuts prompts to a fixed size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def schedule(self, step: Step) -> None:
        for seq in [*step.running, *step.waiting]:
            step.take(seq, self.size)


@pytest.mark.parametrize("size", range(1, LENGTH + 1))
@pytest.mark.parametrize("depth", [1, 2])
def test_every_chunk_size_gives_the_same_tokens(size: int, depth: int) -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4, policy=Chunks(size)))
    seq = scheduler.add(range(LENGTH), SamplingParams(max_tokens=6))
    plans = run_until_idle(scheduler, KVOracle(8, 4), depth=depth)
    assert seq.output_token_ids == reference_tokens(range(LENGTH), 6)
    assert len(plans) == -(-LENGTH // size) + 5


def test_each_chunk_ends_where_the_next_begins() -> None:
    """A chunk that counts the whole prompt as its context reads slots not yet written."""
    scheduler = Scheduler(SchedulerConfig(8, 4, max_num_batched_tokens=4))
    scheduler.add(range(10), SamplingParams(max_tokens=1))
    entries = [p.sequences[0] for p in run_until_idle(scheduler, KVOracle(8, 4))]
    assert [(e.num_computed_tokens, e.num_scheduled_tokens) for e in entries] == [
        (0, 4),
        (4, 4),
        (8, 2),
    ]
    assert [e.token_ids for e in entries] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


def test_middle_chunk_yields_and_takes_no_token() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4, max_num_batched_tokens=4))
    seq = scheduler.add(range(10), SamplingParams(max_tokens=1))
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        assert [entry.samples for entry in plan.sequences] == [False]
        events = scheduler.commit(plan, {})
        assert events.sampled == ()
        assert seq.num_output_tokens == seq.num_pending_tokens == 0
    plan = scheduler.schedule()
    assert plan is not None
    assert [entry.samples for entry in plan.sequences] == [True]


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_last_chunk_of_one_token_is_still_a_prompt(policy: str) -> None:
    """Taken for a decode, it would run beside decodes, or wait behind every other prompt."""
    scheduler = Scheduler(SchedulerConfig(8, 4, max_num_batched_tokens=4, policy=policy))
    seq = scheduler.add(range(5), SamplingParams(max_tokens=3))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, {})
    assert seq.is_prefilling
    assert seq.num_uncomputed_tokens == 1
    last = scheduler.schedule()
    assert last is not None
    assert last.sequences[0].num_scheduled_tokens == 1
    assert not seq.is_prefilling
    scheduler.commit(last, {seq.seq_id: 7})
    assert seq.num_output_tokens == 1


def test_middle_chunks_do_not_disturb_others() -> None:
    scheduler = Scheduler(SchedulerConfig(32, 4, max_num_batched_tokens=3))
    decoding = scheduler.add([1], SamplingParams(max_tokens=12))
    prompt = scheduler.add(range(20), SamplingParams(max_tokens=2))
    run_until_idle(scheduler, KVOracle(32, 4))
    assert decoding.output_token_ids == reference_tokens([1], 12)
    assert prompt.output_token_ids == reference_tokens(range(20), 2)
