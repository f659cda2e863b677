"""Forks of one prompt: it is computed once, its full blocks are shared, and nothing is copied."""

import itertools
import random

import pytest

from nv_core import (
    Mixed,
    RequestError,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Step,
    StepPlan,
    WaitReason,
)
from nv_core.testing import KVMismatchError, KVOracle, reference_tokens, run_until_idle


class World:
    def __init__(self, num_blocks: int = 32, **options: object) -> None:
        config = SchedulerConfig(num_blocks, 4, **options)  # type: ignore[arg-type]
        self.scheduler = Scheduler(config)
        self.oracle = KVOracle(num_blocks, 4)

    def add(self, num_tokens: int, n: int, *, max_tokens: int = 6) -> list[Sequence]:
        seq = self.scheduler.add(range(num_tokens), SamplingParams(max_tokens=max_tokens))
        return [seq, *(self.scheduler.fork(seq) for _ in range(n - 1))]

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.check_invariants()
        return plan

    def commit(self, plan: StepPlan) -> None:
        self.scheduler.commit(plan, self.oracle.execute(plan))
        self.scheduler.check_invariants()

    def step(self) -> dict[int, int]:
        plan = self.plan()
        self.commit(plan)
        return {entry.seq_id: entry.num_scheduled_tokens for entry in plan.sequences}

    def finish(self, depth: int = 1) -> None:
        run_until_idle(self.scheduler, self.oracle, depth=depth)
        assert self.scheduler.num_free_blocks == self.scheduler.config.num_blocks


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_prompt_is_computed_once_and_its_full_blocks_are_shared(
    enable_prefix_caching: bool,  # noqa: FBT001
) -> None:
    world = World(enable_prefix_caching=enable_prefix_caching)
    first, *forks = world.add(10, 4)
    assert world.step() == {first.seq_id: 10}
    assert [fork.wait_reason for fork in forks[:1]] == [WaitReason.SIBLING]
    # Two of three blocks are full; tokens 8 and 9 are each one's own.
    assert world.step() == {first.seq_id: 1, **{fork.seq_id: 2 for fork in forks}}
    assert {tuple(fork.block_table[:2]) for fork in forks} == {tuple(first.block_table[:2])}
    assert len({seq.block_table[2] for seq in (first, *forks)}) == 4
    assert [seq.num_cached_tokens for seq in (first, *forks)] == [0, 8, 8, 8]
    assert world.scheduler.num_free_blocks == 32 - 2 - 4
    world.finish()


def test_prompt_that_fills_its_blocks_computes_its_last_block_anew() -> None:
    """The last token's logits are needed, and a shared block is never written."""
    world = World()
    first, fork = world.add(8, 2)
    world.step()
    assert world.step() == {first.seq_id: 1, fork.seq_id: 4}
    assert fork.block_table[0] == first.block_table[0]
    assert fork.block_table[1] != first.block_table[1]
    world.finish()


def test_prompt_shorter_than_a_block_has_nothing_to_wait_for() -> None:
    world = World()
    sequences = world.add(3, 3)
    assert world.step() == {seq.seq_id: 3 for seq in sequences}


def test_blocks_are_shared_before_their_plan_is_committed() -> None:
    """Plans run in order, so what an earlier one computes is there for a later one."""
    world = World()
    first, fork = world.add(10, 2)
    one, two = world.plan(), world.plan()
    assert [entry.seq_id for entry in two.sequences] == [first.seq_id, fork.seq_id]
    assert two.num_hit_tokens == 8
    world.scheduler.abort(first.seq_id)
    world.scheduler.check_invariants()
    world.commit(one)
    world.commit(two)
    # The sibling that computed them is gone, so the fork published what it shares.
    assert len(fork.prefixes) == 2
    world.finish()
    again = world.scheduler.add(range(10), SamplingParams(max_tokens=1))
    world.step()
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4, 9, 30])
def test_every_fork_gets_what_it_would_get_alone(
    depth: int,
    enable_prefix_caching: bool,  # noqa: FBT001
    num_tokens: int,
) -> None:
    world = World(
        num_blocks=14, max_num_batched_tokens=7, enable_prefix_caching=enable_prefix_caching
    )
    sequences = world.add(num_tokens, 4, max_tokens=12)
    world.finish(depth)
    for seq in sequences:
        assert seq.output_token_ids == reference_tokens(range(num_tokens), 12)


def test_forks_wait_while_a_prompt_is_computed_in_chunks_and_let_others_pass() -> None:
    world = World(max_num_batched_tokens=8, policy="mixed")
    first, fork = world.add(21, 2)
    other = world.scheduler.add([99], SamplingParams(max_tokens=1))
    steps = [world.step() for _ in range(4)]
    assert steps == [
        {first.seq_id: 8},
        {first.seq_id: 8},
        {first.seq_id: 5, other.seq_id: 1},
        {first.seq_id: 1, fork.seq_id: 1},
    ]


def test_next_in_line_takes_over_when_the_first_is_aborted() -> None:
    world = World(max_num_batched_tokens=8)
    first, second, third = world.add(21, 3)
    world.step()
    world.scheduler.abort(first.seq_id)
    # What was computed and published so far is in the cache.
    assert world.step() == {second.seq_id: 8}
    assert second.num_cached_tokens == 8
    assert world.step() == {second.seq_id: 5}
    assert world.step() == {second.seq_id: 1, third.seq_id: 1}
    world.finish()


class PreemptsWhatItTook:
    """Takes the first, takes the second, and then takes the first one's step back."""

    def schedule(self, step: Step) -> None:
        for seq in [*step.running, *step.waiting]:
            step.take(seq)
        if step.step_id == 0:
            step.preempt(next(iter(step.running)))
        if not step.has_grants:
            step.take(list(step.waiting)[-1])


def test_blocks_granted_in_the_same_step_are_not_shared() -> None:
    """Their grant can still be taken back, and then nobody would compute them."""
    world = World(policy=PreemptsWhatItTook())
    sequences = world.add(10, 3)
    world.step()
    world.finish()
    for seq in sequences:
        assert seq.output_token_ids == reference_tokens(range(10), 6)


def test_fork_of_a_running_sequence_starts_from_the_prompt() -> None:
    world = World()
    (first,) = world.add(10, 1)
    for _ in range(3):
        world.step()
    fork = world.scheduler.fork(first, SamplingParams(max_tokens=2), request_id="again")
    assert (fork.request_id, fork.token_ids, fork.max_total_tokens) == (
        "again",
        first.token_ids[:10],
        12,
    )
    assert world.step() == {first.seq_id: 1, fork.seq_id: 2}
    world.finish()
    assert fork.output_token_ids == first.output_token_ids[:2]


def test_fork_inherits_what_its_request_said() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4))
    seq = scheduler.add(
        [1] * 9,
        priority=3,
        user="u",
        arrival_time=1.5,
        deadline=9.0,
        predicted_output_tokens=4,
        cache_salt="s",
    )
    fork = scheduler.fork(seq)
    for name in ("priority", "user", "arrival_time", "deadline", "cache_salt", "arrival_step"):
        assert getattr(fork, name) == getattr(seq, name)
    assert fork.predicted_output_tokens == 4
    assert fork.keys.hashes == seq.keys.hashes
    assert fork.seq_id == 1
    assert fork.request_id == "1"


def test_preempted_fork_finds_the_shared_blocks_again() -> None:
    world = World(num_blocks=7, enable_prefix_caching=False)
    sequences = world.add(9, 3, max_tokens=10)
    plans = run_until_idle(world.scheduler, world.oracle)
    assert any(plan.preempted for plan in plans)
    assert {seq.output_token_ids == reference_tokens(range(9), 10) for seq in sequences} == {True}
    # Without sharing, each of them would have computed its own prompt at least once.
    assert sum(plan.num_hit_tokens for plan in plans) >= 16


def test_content_of_before_a_reset_is_not_shared() -> None:
    world = World()
    first, fork = world.add(10, 2)
    world.step()
    world.oracle.retire_contents()
    world.scheduler.reset_prefix_cache()
    assert world.step() == {first.seq_id: 1, fork.seq_id: 10}
    world.finish()


def test_only_unfinished_sequences_can_be_forked() -> None:
    world = World()
    (seq,) = world.add(5, 1)
    stranger = World().add(5, 1)[0]
    with pytest.raises(RequestError, match="only an unfinished sequence can be forked"):
        world.scheduler.fork(stranger)
    world.scheduler.abort(seq.seq_id)
    with pytest.raises(RequestError, match="only an unfinished sequence can be forked"):
        world.scheduler.fork(seq)


def test_ended_forks_leave_no_reference_behind() -> None:
    world = World()
    sequences = world.add(10, 4)
    world.step()
    world.step()
    for seq, left in zip(sequences, itertools.count(3, -1), strict=False):
        world.scheduler.abort(seq.seq_id)
        world.scheduler.check_invariants()
        shared = world.scheduler._blocks.ref_count(0)
        assert shared == max(0, left)
    assert world.scheduler.num_free_blocks == 32
    assert all(seq._family is None for seq in sequences)


class Fickle:
    """Plans a step as `mixed` does, and then takes some of it back."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sensible = Mixed()

    def schedule(self, step: Step) -> None:
        self.sensible.schedule(step)
        if step.has_grants and self.random.random() < 0.3:
            step.preempt(self.random.choice(list(step.grants)).sequence)


def run_families(seed: int) -> None:
    rng = random.Random(seed)
    world = World(
        num_blocks=40,
        max_num_batched_tokens=40,
        policy=Fickle(seed),
        enable_prefix_caching=seed % 2 == 0,
    )
    for _ in range(3):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        seq = world.scheduler.add(tokens, SamplingParams(max_tokens=4))
        for _ in range(3):
            world.scheduler.fork(seq)
    world.finish(depth=1 + seed % 3)


def test_fickle_policy_harms_no_family() -> None:
    for seed in range(400):
        run_families(seed)


def test_sharing_what_the_same_step_computes_would_be_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test of the test: forks that build on a grant before the step is over."""
    monkeypatch.setattr(Step, "_computed_before", lambda _self, seq: seq.num_computed_tokens)
    caught = 0
    for seed in range(400):
        try:
            run_families(seed)
        except KVMismatchError:
            caught += 1
    assert caught >= 5
