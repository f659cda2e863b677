"""Guards of preemption by recompute: whoever comes back goes on as if nothing had happened."""

import pickle

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, Sequence, Step
from nv_core.testing import KVOracle, reference_tokens, run_until_idle

POLICIES = ["mixed", "prefill_first"]


class PreemptsAt:
    """Runs everything; preempts a sequence whenever it has reached the next number of outputs."""

    def __init__(self, *num_output_tokens: int) -> None:
        self.remaining = list(num_output_tokens)

    def schedule(self, step: Step) -> None:
        for seq in list(step.running):
            if self.remaining and seq.num_output_tokens >= self.remaining[0]:
                self.remaining.pop(0)
                step.preempt(seq)
        for seq in [*step.running, *step.waiting]:
            step.take(seq)


def run_alone(
    prompt: list[int], max_tokens: int, *preempt_at: int, depth: int = 1, num_blocks: int = 16
) -> Sequence:
    policy = PreemptsAt(*preempt_at)
    scheduler = Scheduler(SchedulerConfig(num_blocks, 4, policy=policy))
    seq = scheduler.add(prompt, SamplingParams(max_tokens=max_tokens))
    run_until_idle(scheduler, KVOracle(num_blocks, 4), depth=depth)
    assert seq.output_token_ids == reference_tokens(prompt, max_tokens)
    assert not policy.remaining
    assert scheduler.num_free_blocks == num_blocks
    return seq


@pytest.mark.parametrize("length", range(5, 10))
def test_resume_on_its_own_cached_blocks_computes_the_rest_and_no_more(length: int) -> None:
    """Tokens to schedule that were counted before the hit reach beyond the block table."""
    scheduler = Scheduler(SchedulerConfig(16, 4, policy=PreemptsAt(3)))
    seq = scheduler.add(range(length), SamplingParams(max_tokens=6))
    plans = run_until_idle(scheduler, KVOracle(16, 4))
    (again,) = [i for i, plan in enumerate(plans) if plan.preempted]
    (entry,) = plans[again + 1].sequences
    assert entry.num_computed_tokens == (length + 2) // 4 * 4
    assert entry.num_computed_tokens + entry.num_scheduled_tokens == length + 3
    assert len(entry.block_table) == -(-(length + 3) // 4)
    assert seq.num_cached_tokens == 0, "its own blocks are no hit of the request"


def test_resumed_sequence_brings_all_tokens_that_it_must_compute() -> None:
    """A runner that takes it for a decode, because it has outputs, lacks its token ids."""
    scheduler = Scheduler(SchedulerConfig(16, 4, policy=PreemptsAt(3), enable_prefix_caching=False))
    seq = scheduler.add([1, 2, 3], SamplingParams(max_tokens=6))
    plans = run_until_idle(scheduler, KVOracle(16, 4))
    (again,) = [i for i, plan in enumerate(plans) if plan.preempted]
    (entry,) = plans[again + 1].sequences
    assert entry.num_computed_tokens == 0
    assert entry.token_ids == tuple(seq.token_ids[:6])
    assert pickle.loads(pickle.dumps(entry.token_ids)) == entry.token_ids


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_right_at_a_block_boundary(length: int, depth: int) -> None:
    """The last block may be full, just begun, or published already."""
    for outputs in range(1, 6):
        run_alone(list(range(length)), 8, outputs, depth=depth)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_forced_preemption_changes_neither_tokens_nor_their_number(policy: str, depth: int) -> None:
    """Counting only the prompt after a resume loses or repeats outputs."""
    scheduler = Scheduler(SchedulerConfig(8, 4, policy=policy))
    prompts = [[i] * (5 + i) for i in range(4)]
    params = SamplingParams(max_tokens=14)
    sequences = [scheduler.add(prompt, params) for prompt in prompts]
    run_until_idle(scheduler, KVOracle(8, 4), depth=depth)
    assert sum(seq.num_preemptions for seq in sequences) >= 2
    for prompt, seq in zip(prompts, sequences, strict=True):
        assert seq.output_token_ids == reference_tokens(prompt, 14)
        assert seq.prompt_token_ids == prompt


def test_events_deliver_each_token_once_whatever_was_preempted() -> None:
    """A stream must not start again after a resume."""
    scheduler = Scheduler(SchedulerConfig(6, 4))
    oracle = KVOracle(6, 4)
    sequences = [scheduler.add([i] * 5, SamplingParams(max_tokens=12)) for i in range(3)]
    streamed: dict[int, list[int]] = {seq.seq_id: [] for seq in sequences}
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        for seq in scheduler.commit(plan, oracle.execute(plan)).sampled:
            streamed[seq.seq_id].append(seq.token_ids[-1])
    assert sum(seq.num_preemptions for seq in sequences) >= 1
    for i, seq in enumerate(sequences):
        assert streamed[seq.seq_id] == seq.output_token_ids == reference_tokens([i] * 5, 12)


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_left_to_preempt_is_no_crash(policy: str) -> None:
    scheduler = Scheduler(SchedulerConfig(1, 4, policy=policy))
    seq = scheduler.add([1, 2, 3], SamplingParams(max_tokens=50))
    run_until_idle(scheduler, KVOracle(1, 4), max_steps=10)
    assert seq.finish_reason == "length"
    assert seq.num_tokens == 5


@pytest.mark.parametrize("policy", POLICIES)
def test_long_sequence_is_not_resumed_for_one_chunk_and_evicted_again(policy: str) -> None:
    """Room for a chunk is not enough: it would be thrown out, and come back, for ever."""
    scheduler = Scheduler(SchedulerConfig(12, 4, max_num_batched_tokens=8, policy=policy))
    old = scheduler.add([1] * 4, SamplingParams(max_tokens=40))
    long = scheduler.add([2] * 30, SamplingParams(max_tokens=10))
    run_until_idle(scheduler, KVOracle(12, 4), max_steps=200)
    assert old.num_preemptions == 0
    assert 1 <= long.num_preemptions <= 2
    assert long.output_token_ids == reference_tokens([2] * 30, 10)


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_again_and_again(depth: int) -> None:
    """Before the first decode, after outputs, twice in a row: nothing is lost or sampled early."""
    seq = run_alone(list(range(6)), 10, 1, 3, 3, 4, 7, depth=depth)
    assert seq.num_preemptions == 5
    seq = run_alone(list(range(6)), 4, 0, depth=2)
    assert seq.num_preemptions == 1


def test_resume_that_does_not_fit_yet_leaves_everything_as_it_is() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 4))
    oracle = KVOracle(4, 4)
    old, young = (scheduler.add([i] * 7, SamplingParams(max_tokens=9)) for i in (1, 2))
    refused = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        if young.num_preemptions and young.wait_reason == "blocks":
            refused += 1
            assert young.block_table == []
            assert young.num_computed_tokens == 0
        scheduler.commit(plan, oracle.execute(plan))
        scheduler.check_invariants()
    assert refused > 0
    assert young.output_token_ids == reference_tokens([2] * 7, 9)
    assert old.output_token_ids == reference_tokens([1] * 7, 9)


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_keeps_its_place_before_later_arrivals(policy: str) -> None:
    scheduler = Scheduler(SchedulerConfig(6, 4, max_num_seqs=2, policy=policy))
    oracle = KVOracle(6, 4)
    first, preempted = (scheduler.add([i] * 7, SamplingParams(max_tokens=12)) for i in (1, 2))
    later = [scheduler.add([i], SamplingParams(max_tokens=12)) for i in (3, 4)]
    plans = run_until_idle(scheduler, oracle)
    assert preempted.num_preemptions >= 1
    (eviction, *_) = [plan.step_id for plan in plans if preempted.seq_id in plan.preempted]
    entries = [entry for plan in plans[eviction + 1 :] for entry in plan.sequences]
    others = [entry.seq_id for entry in entries if entry.seq_id != first.seq_id]
    assert others[0] == preempted.seq_id
    assert all(seq.is_finished for seq in later)


def test_output_that_arrives_after_the_preemption_is_found_in_the_cache_too() -> None:
    """Keys must not end with the blocks that the sequence itself has published."""
    policy = PreemptsAt()
    scheduler = Scheduler(SchedulerConfig(16, 4, policy=policy))
    oracle = KVOracle(16, 4)
    tokens = [*range(6), *reference_tokens(range(6), 4)]
    scheduler.add(tokens, SamplingParams(max_tokens=1))
    run_until_idle(scheduler, oracle)
    seq = scheduler.add(range(6), SamplingParams(max_tokens=5))
    plans = [scheduler.schedule() for _ in range(3)]
    policy.remaining = [0]
    plans.append(scheduler.schedule())
    preempted: list[int] = []
    for plan in plans:
        assert plan is not None
        preempted += plan.preempted
        scheduler.commit(plan, oracle.execute(plan))
    assert preempted == [seq.seq_id]
    assert seq.num_tokens == 9
    back = scheduler.schedule()
    assert back is not None
    assert back.sequences[0].num_computed_tokens == 8
