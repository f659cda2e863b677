"""The shipped policies do what their docstrings say."""

import random

import pytest

from nv_core import (
    ConfigError,
    Mixed,
    Policy,
    PrefillFirst,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Step,
    StepPlan,
)
from nv_core.policies import SHIPPED_POLICIES, check_policy, make_policy
from nv_core.testing import KVOracle, run_until_idle


class World:
    def __init__(
        self,
        policy: str | Policy,
        num_blocks: int = 16,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks,
                4,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=policy,
            )
        )
        self.oracle = KVOracle(num_blocks, 4)

    def add(self, num_tokens: int, max_tokens: int = 100) -> Sequence:
        """Adds a prompt that shares no block with any other."""
        seed = self.scheduler.num_waiting + 100 * self.scheduler.num_running
        tokens = [random.Random(seed + i * 7919).randrange(10**6) for i in range(num_tokens)]
        return self.scheduler.add(tokens, SamplingParams(max_tokens=max_tokens))

    def step(self) -> dict[int, int]:
        """Runs one step; returns how many tokens each sequence got."""
        plan = self.plan()
        self.scheduler.check_invariants()
        return {entry.seq_id: entry.num_scheduled_tokens for entry in plan.sequences}

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(plan, self.oracle.execute(plan))
        return plan


# Both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(SHIPPED_POLICIES))
def test_first_come_first_served(policy: str) -> None:
    world = World(policy, max_num_seqs=1)
    sequences = [world.add(3, max_tokens=2) for _ in range(4)]
    finished: list[int] = []
    while world.scheduler.has_unfinished:
        plan = world.scheduler.schedule()
        assert plan is not None
        events = world.scheduler.commit(plan, world.oracle.execute(plan))
        finished += [seq.seq_id for seq in events.finished]
    assert finished == [seq.seq_id for seq in sequences]


@pytest.mark.parametrize("policy", sorted(SHIPPED_POLICIES))
def test_long_prompt_is_cut_to_the_budget(policy: str) -> None:
    world = World(policy, max_num_batched_tokens=10)
    world.add(25)
    assert [world.step()[0] for _ in range(4)] == [10, 10, 5, 1]


@pytest.mark.parametrize("policy", sorted(SHIPPED_POLICIES))
def test_prompt_is_admitted_only_when_all_of_it_fits(policy: str) -> None:
    world = World(policy, num_blocks=4, max_num_batched_tokens=8)
    small, large = world.add(5, max_tokens=4), world.add(12)
    assert world.step() == {small.seq_id: 5}
    assert world.step() == {small.seq_id: 1}, "two blocks are free, and three needed"
    assert large.block_table == []
    while not small.is_finished:
        world.step()
    assert world.step() == {large.seq_id: 8}
    assert len(large.block_table) == 3


@pytest.mark.parametrize("policy", sorted(SHIPPED_POLICIES))
@pytest.mark.parametrize("depth", [1, 2])
def test_youngest_makes_room_for_the_oldest(policy: str, depth: int) -> None:
    world = World(policy, num_blocks=4)
    old, young = world.add(7, max_tokens=9), world.add(7, max_tokens=9)
    run_until_idle(world.scheduler, world.oracle, depth=depth)
    assert old.num_preemptions == 0
    assert young.num_preemptions >= 1
    assert len(old.output_token_ids) == len(young.output_token_ids) == 9


def test_names_and_objects() -> None:
    assert isinstance(make_policy("mixed"), Mixed)
    assert isinstance(make_policy("prefill_first"), PrefillFirst)
    assert make_policy("mixed") is not make_policy("mixed")
    own = Mixed()
    assert make_policy(own) is own
    assert isinstance(own, Policy)
    check_policy(own)
    with pytest.raises(ConfigError, match="got 'other'"):
        make_policy("other")


@pytest.mark.parametrize(
    ("name", "policy"), [("mixed", Mixed()), ("prefill_first", PrefillFirst())]
)
def test_object_schedules_as_its_name_does(name: str, policy: Policy) -> None:
    logs = []
    for choice in (name, policy):
        world = World(choice, num_blocks=6)
        rng = random.Random(3)
        for _ in range(12):
            prompt = [rng.randrange(2)] * rng.randrange(1, 12)
            world.scheduler.add(prompt, SamplingParams(max_tokens=rng.randrange(1, 9)))
        plans = run_until_idle(world.scheduler, world.oracle)
        logs.append([(repr(plan.sequences), plan.preempted) for plan in plans])
    assert logs[0] == logs[1]


# prefill_first --------------------------------------------------------------------------------


def test_prefill_first_runs_prompts_alone_and_before_decodes() -> None:
    world = World("prefill_first")
    first = world.add(5)
    assert world.step() == {first.seq_id: 5}
    second = world.add(5)
    assert world.step() == {second.seq_id: 5}
    assert world.step() == {first.seq_id: 1, second.seq_id: 1}


def test_prefill_first_cuts_only_the_first_prompt_of_a_step() -> None:
    world = World("prefill_first", max_num_batched_tokens=10)
    first, second, third = world.add(12), world.add(6), world.add(4)
    assert world.step() == {first.seq_id: 10}
    assert world.step() == {first.seq_id: 2, second.seq_id: 6}, "2 tokens left would cut the third"
    assert world.step() == {third.seq_id: 4}


def test_prefill_first_decodes_every_sequence_whatever_the_budget() -> None:
    world = World("prefill_first", max_num_batched_tokens=3)
    for _ in range(5):
        world.add(1)
    assert [len(world.step()) for _ in range(3)] == [3, 2, 5]


def test_prefill_first_does_not_skip_a_prompt_that_does_not_fit() -> None:
    world = World("prefill_first", num_blocks=4)
    running, large, small = world.add(6), world.add(12), world.add(2)
    assert world.step() == {running.seq_id: 6}
    assert world.step() == {running.seq_id: 1}
    assert (large.num_computed_tokens, small.num_computed_tokens) == (0, 0)


# mixed ----------------------------------------------------------------------------------------


def test_mixed_decodes_first_and_fills_the_budget_with_prompts() -> None:
    world = World("mixed", max_num_batched_tokens=8)
    first = world.add(5)
    assert world.step() == {first.seq_id: 5}
    second, third = world.add(10), world.add(4)
    steps = [world.step() for _ in range(3)]
    assert steps == [
        {first.seq_id: 1, second.seq_id: 7},
        {first.seq_id: 1, second.seq_id: 3, third.seq_id: 4},
        {first.seq_id: 1, second.seq_id: 1, third.seq_id: 1},
    ]
    assert list(steps[1]) == [first.seq_id, second.seq_id, third.seq_id]


def test_mixed_goes_on_with_a_cut_prompt_before_it_admits_another() -> None:
    world = World("mixed", max_num_batched_tokens=6)
    first, second = world.add(13), world.add(3)
    assert world.step() == {first.seq_id: 6}
    assert world.step() == {first.seq_id: 6}
    assert world.step() == {first.seq_id: 1, second.seq_id: 3}


def test_mixed_keeps_within_the_budget_and_every_decode_advances() -> None:
    world = World("mixed", num_blocks=64, max_num_seqs=32, max_num_batched_tokens=4)
    for _ in range(10):
        world.add(2, max_tokens=12)
    decoding: set[int] = set()
    while world.scheduler.has_unfinished:
        plan = world.plan()
        assert plan.num_scheduled_tokens <= 4
        ran = {entry.seq_id for entry in plan.sequences}
        assert decoding <= ran
        decoding = {
            entry.seq_id
            for entry in plan.sequences
            if entry.samples and not entry.sequence.is_finished
        }


def test_mixed_admits_nobody_in_a_step_that_preempted() -> None:
    world = World("mixed", num_blocks=4)
    old, young, new = world.add(7, max_tokens=9), world.add(7), world.add(1)
    assert set(world.step()) == {old.seq_id, young.seq_id}
    world.step()
    assert new.num_computed_tokens == 0
    plan = world.plan()
    assert plan.preempted == (young.seq_id,)
    assert [entry.seq_id for entry in plan.sequences] == [old.seq_id]
    assert plan.num_free_blocks == 1, "there was room, but the step had to preempt"


def test_mixed_preempts_a_prompt_before_a_decoding_sequence() -> None:
    world = World("mixed", num_blocks=6, max_num_batched_tokens=6)
    decoding = [world.add(3, max_tokens=12), world.add(3, max_tokens=12)]
    world.step()
    prompt = world.add(16)
    plans = [world.plan() for _ in range(2)]
    assert prompt.num_preemptions == 1
    assert plans[1].preempted == (prompt.seq_id,)
    assert [seq.num_preemptions for seq in decoding] == [0, 0]


class SkipAhead:
    """Lets small requests pass one that does not fit."""

    def schedule(self, step: Step) -> None:
        for seq in list(step.running):
            step.take(seq)
        for seq in list(step.waiting):
            step.take(seq, reserve=len(seq.token_ids))


def test_own_policy_may_skip_ahead() -> None:
    world = World(SkipAhead(), num_blocks=4)
    running, large, small = world.add(6), world.add(12), world.add(2)
    assert world.step() == {running.seq_id: 6, small.seq_id: 2}
    assert large.wait_reason == "blocks"
