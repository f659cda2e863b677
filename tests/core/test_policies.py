"""The shipped policies do what their docstrings say."""

import random
from typing import Any

import pytest

from nv_core import (
    ConfigError,
    Fair,
    Mixed,
    Policy,
    PrefillFirst,
    Priority,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SkipAhead,
    Step,
    StepPlan,
)
from nv_core.policies import SHIPPED_POLICIES, check_policy, make_policy
from nv_core.testing import KVOracle, run_until_idle


class World:
    """A scheduler and its oracle."""

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
        self.num_added = 0

    def add(
        self,
        num_tokens: int,
        max_tokens: int = 100,
        shared: int = 0,
        **request: Any,  # noqa: ANN401 - as `Scheduler.add` takes it
    ) -> Sequence:
        """Adds a prompt of which only the first `shared` tokens are those of others."""
        self.num_added += 1
        seed = self.num_added
        tokens = [random.Random(seed + i * 7919).randrange(10**6) for i in range(num_tokens)]
        tokens[:shared] = range(shared)
        return self.scheduler.add(tokens, SamplingParams(max_tokens=max_tokens), **request)

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


# All -----------------------------------------------------------------------------------------


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


def test_mixed_cuts_prompts_to_chunks() -> None:
    world = World(Mixed(max_chunk_tokens=3))
    first, second = world.add(7), world.add(4)
    assert [world.step() for _ in range(3)] == [
        {first.seq_id: 3, second.seq_id: 3},
        {first.seq_id: 3, second.seq_id: 1},
        {second.seq_id: 1, first.seq_id: 1},
    ]


def test_mixed_cuts_no_more_prompts_at_a_time_than_it_may() -> None:
    world = World(Mixed(max_chunk_tokens=3, max_partial_prompts=1))
    first, second, third = world.add(7), world.add(2), world.add(2)
    assert [world.step() for _ in range(3)] == [
        {first.seq_id: 3},
        {first.seq_id: 3},
        {first.seq_id: 1, second.seq_id: 2, third.seq_id: 2},
    ]


def test_mixed_admits_a_part_of_a_prompt_if_it_may() -> None:
    world = World(Mixed(whole_prompts=False), num_blocks=4, max_num_batched_tokens=8)
    small, large = world.add(5, max_tokens=3), world.add(12)
    assert world.step() == {small.seq_id: 5, large.seq_id: 3}
    assert world.step() == {small.seq_id: 1, large.seq_id: 5}
    assert len(large.block_table) == 2


def test_mixed_keeps_the_watermark_free_while_anything_runs() -> None:
    world = World(Mixed(watermark=0.3), num_blocks=10)
    first, second, third = world.add(28), world.add(4), world.add(1)
    assert world.step() == {first.seq_id: 16}
    assert world.step() == {first.seq_id: 12}
    assert world.step() == {first.seq_id: 1}, "two blocks are free, and three must be"
    world.scheduler.abort(first.seq_id)
    assert world.step() == {second.seq_id: 4, third.seq_id: 1}
    alone = World(Mixed(watermark=0.9), num_blocks=4)
    seq = alone.add(13)
    assert alone.step() == {seq.seq_id: 13}, "nothing runs beside it"


@pytest.mark.parametrize("cooldown_steps", [0, 3])
def test_mixed_cools_down_after_a_preemption(cooldown_steps: int) -> None:
    world = World(SkipAhead(cooldown_steps=cooldown_steps), num_blocks=5)
    old = world.add(7, max_tokens=12)
    world.add(7, max_tokens=12)
    plans = [world.plan() for _ in range(2)]
    while not plans[-1].preempted:
        plans.append(world.plan())
    late = world.add(1, max_tokens=2)
    preempted_at = plans[-1].step_id
    while not late.num_computed_tokens and not old.is_finished:
        plans.append(world.plan())
    resumed = next(plan for plan in plans[preempted_at + 1 :] if len(plan.sequences) > 1)
    assert resumed.step_id - preempted_at == cooldown_steps + 1


def test_mixed_does_not_cool_down_while_nothing_runs() -> None:
    world = World(Mixed(cooldown_steps=10**6), num_blocks=4)
    sequences = [world.add(7, max_tokens=9), world.add(7, max_tokens=9)]
    plans = run_until_idle(world.scheduler, world.oracle)
    assert sequences[1].num_preemptions == 1
    assert len(plans) < 25


@pytest.mark.parametrize(
    "options",
    [
        {"max_chunk_tokens": 0},
        {"max_partial_prompts": 0},
        {"cooldown_steps": -1},
        {"watermark": 1.0},
        {"watermark": -0.1},
        {"max_chunk_tokens": 1.5},
    ],
)
def test_mixed_refuses_options_out_of_range(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} must be"):
        Mixed(**options)
    with pytest.raises(ConfigError, match=f"{name} must be"):
        Priority(**options)


# skip_ahead -----------------------------------------------------------------------------------


def test_skip_ahead_lets_small_prompts_pass_one_that_does_not_fit() -> None:
    world = World("skip_ahead", num_blocks=4)
    running, large, small = world.add(6), world.add(12), world.add(2)
    assert world.step() == {running.seq_id: 6, small.seq_id: 2}
    assert large.wait_reason == "blocks"


def test_skip_ahead_lets_nobody_pass_when_patience_is_at_an_end() -> None:
    world = World(SkipAhead(patience=2), num_blocks=4)
    running, large = world.add(6), world.add(12, max_tokens=2)
    passed = []
    for _ in range(5):
        small = world.add(1, max_tokens=1)
        passed.append(small.seq_id in world.step())
    assert passed == [True, True, True, False, False]
    world.scheduler.abort(running.seq_id)
    assert large.seq_id in world.step()


# least_recompute ------------------------------------------------------------------------------


def test_least_recompute_preempts_who_loses_least() -> None:
    for policy, expected in (("mixed", "young"), ("least_recompute", "short")):
        world = World(policy, num_blocks=6)
        sequences = {
            "short": world.add(3, max_tokens=30),
            "old": world.add(7, max_tokens=30),
            "young": world.add(11, max_tokens=30),
        }
        plan = world.plan()
        while not plan.preempted:
            plan = world.plan()
        assert plan.preempted == (sequences[expected].seq_id,)


def test_least_recompute_leaves_out_what_others_hold_too() -> None:
    """Losing its blocks costs the longer one less, since most of them stay."""
    world = World("least_recompute", num_blocks=6)
    first = world.add(9, max_tokens=30, shared=8)
    world.step()
    sharing, alone = world.add(10, max_tokens=30, shared=8), world.add(5, max_tokens=30)
    plan = world.plan()
    while not plan.preempted:
        plan = world.plan()
    assert plan.preempted == (sharing.seq_id,) or plan.preempted == (first.seq_id,)
    assert alone.num_preemptions == 0


# priority -------------------------------------------------------------------------------------


def order_of_service(policy: str | Policy, requests: list[dict[str, Any]]) -> list[int]:
    """Indices of requests that arrive together and run one at a time, in the order they run."""
    world = World(policy, num_blocks=64, max_num_seqs=1)
    for request in requests:
        world.add(request.pop("num_tokens", 3), max_tokens=1, **request)
    order: list[int] = []
    while world.scheduler.has_unfinished:
        order += world.step()
    return order


def test_priority_serves_the_most_urgent_first() -> None:
    requests = [{"priority": p} for p in (2, 0, 1, 0)]
    assert order_of_service("priority", requests) == [1, 3, 2, 0]


def test_priority_preempts_the_least_urgent() -> None:
    world = World("priority", num_blocks=4)
    low, high = world.add(7, priority=1), world.add(7, priority=0)
    assert list(world.step()) == [high.seq_id, low.seq_id]
    plans = [world.plan(), world.plan()]
    assert [plan.preempted for plan in plans] == [(), (low.seq_id,)]


@pytest.mark.parametrize("preemptive", [True, False])
def test_priority_makes_room_for_the_urgent_if_it_may(preemptive: bool) -> None:  # noqa: FBT001
    world = World(Priority(preemptive=preemptive), max_num_seqs=2)
    low, middle = world.add(5, priority=5), world.add(5, priority=3)
    world.step()
    same, high = world.add(5, priority=3), world.add(5, priority=1)
    plan = world.plan()
    assert plan.preempted == ((low.seq_id,) if preemptive else ())
    assert (high.num_computed_tokens > 0) is preemptive
    assert (middle.num_preemptions, same.num_computed_tokens) == (0, 0)


def test_priority_preempts_nobody_in_vain() -> None:
    world = World(Priority(preemptive=True), num_blocks=4)
    low = world.add(5, priority=5)
    equal = world.add(5, priority=0)
    world.step()
    world.add(12, priority=0)
    assert world.plan().preempted == (), "without the equal one's blocks it would not fit"
    assert (low.num_preemptions, equal.num_preemptions) == (0, 0)


# shortest_first, deadline, longest_prefix -----------------------------------------------------


def test_shortest_first_goes_by_prompt_and_prediction() -> None:
    requests: list[dict[str, Any]] = [
        {"num_tokens": 8, "predicted_output_tokens": 10},
        {"num_tokens": 3, "predicted_output_tokens": 10},
        {"num_tokens": 3},
        {"num_tokens": 9, "predicted_output_tokens": 0},
    ]
    assert order_of_service("shortest_first", requests) == [3, 1, 0, 2]


def test_deadline_serves_the_earliest_first() -> None:
    requests: list[dict[str, Any]] = [{}, {"deadline": 3.5}, {"deadline": 1}, {"deadline": 2.0}]
    assert order_of_service("deadline", requests) == [2, 3, 1, 0]


def test_longest_prefix_serves_cached_prompts_first() -> None:
    world = World("longest_prefix", num_blocks=64, max_num_seqs=1)
    world.add(9, max_tokens=1, shared=9)
    world.step()
    unknown, short, long = (
        world.add(12, max_tokens=1),
        world.add(12, max_tokens=1, shared=4),
        world.add(12, max_tokens=1, shared=8),
    )
    order = [next(iter(world.step())) for _ in range(3)]
    assert order == [long.seq_id, short.seq_id, unknown.seq_id]


# fair -----------------------------------------------------------------------------------------


def test_fair_takes_turns_between_users() -> None:
    requests: list[dict[str, Any]] = [{"user": user} for user in "aaaabb"]
    assert order_of_service("fair", requests) == [0, 4, 1, 5, 2, 3]


def test_fair_admits_by_turns_within_one_step() -> None:
    world = World("fair", max_num_seqs=4, max_num_batched_tokens=100)
    many = [world.add(3, user="many") for _ in range(4)]
    few = [world.add(3, user="few") for _ in range(2)]
    assert list(world.step()) == [seq.seq_id for seq in (many[0], few[0], many[1], few[1])]


def test_fair_shares_tokens_and_not_requests() -> None:
    world = World("fair", num_blocks=64, max_num_seqs=1, max_num_batched_tokens=100)
    for _ in range(20):
        world.add(30, max_tokens=1, user="long")
        world.add(3, max_tokens=1, user="short")
    served = {"long": 0, "short": 0}
    for _ in range(22):
        for seq_id, num_tokens in world.step().items():
            served["long" if seq_id % 2 == 0 else "short"] += num_tokens
    assert abs(served["long"] - served["short"]) <= 30


def test_fair_saves_nothing_up_for_who_was_away() -> None:
    policy = Fair()
    world = World(policy, num_blocks=64, max_num_seqs=1)
    for _ in range(10):
        world.add(10, max_tokens=1, user="present")
        world.step()
    assert policy.served == {"present": 100}
    waiting = [world.add(10, max_tokens=1, user=user) for user in ("present", "back") * 3]
    order = [next(iter(world.step())) for _ in range(6)]
    assert order == [seq.seq_id for seq in waiting], "by turns, and not three times the newcomer"


def test_fair_forgets_users_that_it_need_not_remember() -> None:
    policy = Fair()
    world = World(policy, num_blocks=64)
    for user in range(50):
        world.add(4, max_tokens=1, user=str(user))
        world.step()
    assert len(policy.served) <= 2


def test_fair_preempts_who_got_most() -> None:
    world = World("fair", num_blocks=4)
    world.add(7, user="a"), world.add(3, user="b")
    plan = world.plan()
    while not plan.preempted:
        plan = world.plan()
    assert plan.preempted == (0,)


def test_a_prompt_of_which_one_token_was_left_is_a_decode_afterwards() -> None:
    policy = Mixed(max_partial_prompts=1)
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=64, block_size=4, max_num_batched_tokens=8, policy=policy)
    )
    scheduler.add(range(9), SamplingParams(max_tokens=20, ignore_eos=True))
    second = scheduler.add(range(50, 53), SamplingParams(max_tokens=2, ignore_eos=True))
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, dict.fromkeys(plan.sampled_seq_ids, 7))
    assert second.num_output_tokens > 0


class AsksForRoom(Mixed):
    """Notes whether each waiting sequence fits, before it plans."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, list[bool]] = {}

    def schedule(self, step: Step) -> None:
        for seq in step.waiting:
            self.answers.setdefault(seq.seq_id, []).append(step.fits(seq))
        super().schedule(step)


def test_a_fork_does_not_fit_while_it_waits_for_its_sibling() -> None:
    # A policy that preempts for whoever fits afterwards would preempt for nothing.
    policy = AsksForRoom()
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=64, block_size=4, max_num_batched_tokens=8, policy=policy)
    )
    first = scheduler.add(range(24), SamplingParams(max_tokens=3, ignore_eos=True))
    fork = scheduler.fork(first)
    while plan := scheduler.schedule():
        scheduler.commit(plan, dict.fromkeys(plan.sampled_seq_ids, 7))
    *early, last = policy.answers[fork.seq_id]
    # Before the first step nobody computes the prompt yet: either could.
    assert early == [True, False, False]
    assert last
