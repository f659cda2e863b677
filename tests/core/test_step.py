"""Step: clamps what a policy asks for, says why it refuses, and lets nothing be corrupted."""

from collections.abc import Callable, Iterator

import pytest

from nv_core import (
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulingError,
    Sequence,
    SequenceStatus,
    Step,
    StepPlan,
    WaitReason,
)
from nv_core.step import WaitingQueue


class Scripted:
    """A policy that does what the test says."""

    def __init__(self) -> None:
        self.action: Callable[[Step], object] = lambda _step: None

    def schedule(self, step: Step) -> None:
        self.action(step)


class World:
    def __init__(
        self,
        num_blocks: int = 8,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.policy = Scripted()
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks,
                4,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_prefix_caching=enable_prefix_caching,
                policy=self.policy,
            )
        )

    def add(self, num_tokens: int, *, first: int = 1) -> Sequence:
        tokens = range(first, first + num_tokens)
        return self.scheduler.add(tokens, SamplingParams(max_tokens=None))

    def plan(self, action: Callable[[Step], object]) -> StepPlan:
        self.policy.action = action
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        assert plan is not None
        return plan

    def run(self, action: Callable[[Step], object]) -> StepPlan:
        plan = self.plan(action)
        self.scheduler.commit(plan, {e.seq_id: 99 for e in plan.sequences if e.samples})
        self.scheduler.check_invariants()
        return plan

    def grant(self, action: Callable[[Step], int]) -> int:
        """What one call of `take` returns, in a step that is committed if it ran anything."""
        granted: list[int] = []
        self.policy.action = lambda step: granted.append(action(step))
        try:
            plan = self.scheduler.schedule()
        except SchedulingError:
            plan = None
        if plan is not None:
            self.scheduler.commit(plan, {e.seq_id: 99 for e in plan.sequences if e.samples})
        self.scheduler.check_invariants()
        return granted[0]


# Taking ---------------------------------------------------------------------------------------


def test_admission_grants_the_whole_prompt() -> None:
    world = World()
    seq = world.add(6)
    assert world.grant(lambda step: step.take(seq)) == 6
    assert seq.status is SequenceStatus.RUNNING
    assert seq.block_table == [0, 1]
    assert seq.output_token_ids == [99]


@pytest.mark.parametrize(("n", "granted"), [(1, 1), (5, 5), (6, 6), (7, 6), (10**9, 6)])
def test_grant_is_clamped_to_the_tokens_there_are(n: int, granted: int) -> None:
    world = World()
    seq = world.add(6)
    assert world.grant(lambda step: step.take(seq, n)) == granted
    assert seq.num_output_tokens == (granted == 6)


def test_chunk_gets_only_the_blocks_that_it_needs() -> None:
    world = World()
    seq = world.add(12)
    world.run(lambda step: step.take(seq, 3))
    assert seq.block_table == [0]
    world.run(lambda step: step.take(seq, 2))
    assert seq.block_table == [0, 1]


def test_grant_is_clamped_to_the_budget() -> None:
    world = World(max_num_batched_tokens=10)
    one, two, three = (world.add(6, first=10 * i) for i in range(3))
    grants: list[int] = []
    plan = world.run(lambda step: grants.extend(step.take(seq) for seq in (one, two, three)))
    assert grants == [6, 4, 0]
    assert plan.num_scheduled_tokens == 10
    assert three.wait_reason is WaitReason.BUDGET
    assert one.wait_reason is None


def test_grant_is_clamped_to_the_free_blocks() -> None:
    world = World(num_blocks=2)
    one, two = world.add(4), world.add(7, first=20)
    grants: list[int] = []
    world.run(lambda step: grants.extend([step.take(one), step.take(two), step.take(two)]))
    assert grants == [4, 4, 0]
    assert two.num_computed_tokens == 4
    # Both need a third block now.
    assert world.grant(lambda step: step.take(two)) == 0
    assert two.wait_reason is WaitReason.BLOCKS


@pytest.mark.parametrize(("reserve", "granted"), [(0, 4), (4, 4), (5, 0), (8, 0), (10**9, 0)])
def test_reserve_admits_only_what_fits_as_a_whole(reserve: int, granted: int) -> None:
    world = World(num_blocks=2)
    one, two = world.add(4), world.add(7, first=20)
    world.run(lambda step: step.take(one))
    assert world.grant(lambda step: step.take(two, reserve=reserve)) == granted
    if not granted:
        assert two.wait_reason is WaitReason.BLOCKS
        assert two.status is SequenceStatus.WAITING
        assert world.scheduler.num_free_blocks == 1


def test_reserved_blocks_are_used_by_later_chunks() -> None:
    world = World(num_blocks=3)
    seq = world.add(9)
    world.run(lambda step: step.take(seq, 1, reserve=9))
    assert seq.block_table == [0, 1, 2]
    assert world.scheduler.num_free_blocks == 0
    assert world.grant(lambda step: step.take(seq)) == 8


def test_reserve_counts_cached_tokens() -> None:
    world = World(num_blocks=4)
    first = world.add(9)
    world.run(lambda step: step.take(first))
    again = world.add(9)
    # Two of its three blocks are there already, and one is free.
    assert world.grant(lambda step: step.take(again, reserve=9)) == 1
    assert again.num_cached_tokens == 8


def test_slots_limit_the_sequences_that_hold_blocks() -> None:
    world = World(max_num_seqs=2)
    sequences = [world.add(2, first=10 * i) for i in range(3)]
    grants: list[int] = []
    world.run(lambda step: grants.extend(step.take(seq) for seq in sequences))
    assert grants == [2, 2, 0]
    assert sequences[2].wait_reason is WaitReason.SLOTS
    assert world.grant(lambda step: step.take(sequences[2])) == 0
    world.scheduler.abort(sequences[0].seq_id)
    assert world.grant(lambda step: step.take(sequences[2])) == 2


def test_one_grant_per_step() -> None:
    world = World()
    seq = world.add(8)
    grants: list[int] = []
    plan = world.run(lambda step: grants.extend(step.take(seq, n) for n in (3, None, 1)))
    assert grants == [3, 0, 0]
    assert len(plan.sequences) == 1


def test_order_of_the_batch_is_the_order_of_the_grants() -> None:
    world = World()
    sequences = [world.add(2, first=10 * i) for i in range(4)]
    order = [2, 0, 3, 1]
    plan = world.run(lambda step: [step.take(sequences[i]) for i in order])
    assert [entry.seq_id for entry in plan.sequences] == order


def test_grants_are_what_the_step_runs_so_far() -> None:
    world = World()
    decoding, second, third = (world.add(2, first=10 * i) for i in range(3))
    world.run(lambda step: step.take(decoding))
    seen: list[list[tuple[object, ...]]] = []

    def action(step: Step) -> None:
        snapshots = []
        for act in (
            lambda: step.take_all([decoding]),
            lambda: step.take(second, 1),
            lambda: step.preempt(decoding),
            lambda: step.take(third),
        ):
            act()
            snapshots.append(step.grants)
        seen.extend([tuple(entry)[1:5] for entry in grants] for grants in snapshots)

    plan = world.run(action)
    one, two, three = (0, 2, 1, True), (1, 0, 1, False), (2, 0, 2, True)
    assert seen == [[one], [one, two], [two], [two, three]], "none changes when another is made"
    assert [tuple(entry)[1:5] for entry in plan.sequences] == [two, three]


def test_running_ahead_waits_for_nothing_but_the_last_token() -> None:
    world = World()
    seq = world.scheduler.add([1, 2, 3], SamplingParams(max_tokens=2))
    plans = [world.plan(lambda step: step.take(seq)) for _ in range(2)]
    assert world.grant(lambda step: step.take(seq)) == 0
    assert seq.wait_reason is WaitReason.IN_FLIGHT
    for plan, token_id in zip(plans, (7, 8), strict=True):
        world.scheduler.commit(plan, {seq.seq_id: token_id})
    assert seq.output_token_ids == [7, 8]
    assert seq.is_finished


def test_exceed_budget_lets_decodes_through_but_no_prompt() -> None:
    world = World(max_num_batched_tokens=4)
    one, two, prompt = world.add(2), world.add(2, first=20), world.add(9, first=40)
    world.run(lambda step: [step.take(one), step.take(two)])
    grants: list[int] = []

    def action(step: Step) -> None:
        grants.append(step.take(prompt))
        grants.extend(step.take(seq, exceed_budget=True) for seq in (one, two))

    plan = world.run(action)
    assert grants == [4, 1, 1]
    assert plan.num_scheduled_tokens == 6
    grants.clear()

    def prompt_last(step: Step) -> None:
        step.budget = 0
        grants.extend([step.take(one), step.take(one, exceed_budget=True)])
        grants.append(step.take(prompt, exceed_budget=True))

    world.run(prompt_last)
    assert grants == [0, 1, 0]


@pytest.mark.parametrize("n", [0, -1, -(10**9)])
def test_asking_for_nothing_grants_nothing(n: int) -> None:
    world = World()
    running, waiting = world.add(6), world.add(6, first=20)
    world.run(lambda step: step.take(running, 3))
    for seq in (running, waiting):
        before = seq.num_computed_tokens
        assert world.grant(lambda step, seq=seq: step.take(seq, n)) == 0  # type: ignore[misc]
        assert seq.wait_reason is WaitReason.POLICY
        assert seq.num_computed_tokens == before


@pytest.mark.parametrize("wrong", [1.5, "2", float("nan"), [1]])
@pytest.mark.parametrize("argument", ["n", "reserve"])
def test_fractions_and_texts_are_refused_before_anything_changes(
    argument: str, wrong: object
) -> None:
    world = World()
    running, waiting = world.add(6), world.add(6, first=20)
    world.run(lambda step: step.take(running, 3))
    for seq in (waiting, running) if argument == "n" else (waiting,):
        with pytest.raises(TypeError):
            world.plan(lambda step, seq=seq: step.take(seq, **{argument: wrong}))  # type: ignore[misc]
        world.scheduler.check_invariants()
    assert world.scheduler.num_free_blocks == 7
    assert world.grant(lambda step: step.take(waiting)) == 6


def test_finished_sequence_is_refused() -> None:
    world = World()
    done, other = world.add(3), world.add(3)
    world.run(lambda step: step.take(done))
    world.scheduler.abort(done.seq_id)
    grants: list[int] = []
    world.run(lambda step: grants.extend([step.take(done), step.take(other)]))
    assert grants == [0, 3]


def test_sequence_of_another_scheduler_cannot_be_admitted() -> None:
    world, foreign = World(), World().add(3)
    world.add(3)
    foreign.seq_id = 77
    with pytest.raises(SchedulingError, match="sequence 77 is not in this scheduler's queue"):
        world.plan(lambda step: step.take(foreign))
    world.scheduler.check_invariants()
    assert world.scheduler.num_free_blocks == 8


# Preempting -----------------------------------------------------------------------------------


def test_preempted_sequence_loses_blocks_and_keeps_tokens() -> None:
    world = World()
    victim, other = world.add(5), world.add(3, first=20)
    world.run(lambda step: [step.take(victim), step.take(other)])

    def action(step: Step) -> None:
        step.preempt(victim)
        assert step.free_blocks == 7
        assert step.take(victim) == 0
        step.take(other)

    plan = world.run(action)
    assert plan.preempted == (victim.seq_id,)
    assert victim.status is SequenceStatus.WAITING
    assert victim.wait_reason is WaitReason.PREEMPTED
    assert (victim.num_preemptions, victim.num_computed_tokens) == (1, 0)
    assert victim.block_table == []
    assert victim.output_token_ids == [99]
    assert world.grant(lambda step: step.take(victim)) == 2  # 4 of its 6 tokens are cached.


def test_preempting_takes_a_grant_of_the_step_back() -> None:
    world = World(max_num_batched_tokens=8)
    one, two = world.add(6), world.add(6, first=20)

    def action(step: Step) -> None:
        assert step.take(one) == 6
        assert step.budget == 2
        step.preempt(one)
        assert step.budget == 8
        assert not step.has_grants
        assert step.take(two) == 6

    plan = world.run(action)
    assert [entry.seq_id for entry in plan.sequences] == [two.seq_id]
    assert plan.preempted == (one.seq_id,)
    assert plan.num_scheduled_tokens == 6
    assert one.num_pending_tokens == 0
    assert one.output_token_ids == []


@pytest.mark.parametrize("status", ["waiting", "preempted", "finished"])
def test_only_running_sequences_can_be_preempted(status: str) -> None:
    world = World()
    seq, other = world.add(3), world.add(3, first=20)
    if status != "waiting":
        world.run(lambda step: step.take(seq))
    if status == "finished":
        world.scheduler.abort(seq.seq_id)

    def action(step: Step) -> None:
        if status == "preempted":
            step.preempt(seq)
        with pytest.raises(SchedulingError, match="cannot be preempted: it is not running"):
            step.preempt(seq)
        step.take(other)

    world.run(action)


def test_preempted_come_first_and_in_order_of_age() -> None:
    """The last preempted goes to the front: victims are preempted youngest first."""
    world = World()
    old, young, new = (world.add(2, first=10 * i) for i in range(3))
    world.run(lambda step: [step.take(old), step.take(young)])

    def action(step: Step) -> None:
        step.preempt(young)
        step.preempt(old)
        assert list(step.waiting) == [old, young, new]
        assert step.waiting.first() is old

    plan = world.run(action)
    assert plan.sequences == ()
    assert plan.preempted == (young.seq_id, old.seq_id)


def test_preempted_sequence_whose_token_is_in_flight_waits_for_it() -> None:
    world = World()
    seq, other = world.add(3), world.add(3, first=20)
    in_flight = world.plan(lambda step: step.take(seq))

    def instead(step: Step) -> None:
        step.preempt(seq)
        step.take(other)

    ahead = world.plan(instead)
    assert world.grant(lambda step: step.take(seq)) == 0
    assert seq.wait_reason is WaitReason.IN_FLIGHT
    world.scheduler.commit(in_flight, {seq.seq_id: 50})
    assert seq.output_token_ids == [50]
    assert world.scheduler.num_in_flight == 1
    back = world.plan(lambda step: step.take(seq))
    assert back.sequences[0].num_scheduled_tokens == 4
    assert back.sequences[0].token_ids == (1, 2, 3, 50)
    world.scheduler.commit(ahead, {other.seq_id: 51})
    world.scheduler.commit(back, {seq.seq_id: 52})
    assert seq.output_token_ids == [50, 52]


# Reading --------------------------------------------------------------------------------------


def test_what_a_policy_can_read() -> None:
    world = World(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=20)
    one, two, three = (world.add(5, first=10 * i) for i in range(3))
    world.run(lambda step: [step.take(two), step.take(one)])

    def action(step: Step) -> None:
        assert step.step_id == 1
        assert list(step.running) == [two, one]
        assert list(step.waiting) == [three]
        assert three in step.waiting
        assert one not in step.waiting
        assert (step.budget, step.slots) == (20, 1)
        assert (step.free_blocks, step.num_blocks, step.block_size) == (4, 8, 4)
        assert step.uncached_tokens(one) == 1
        assert step.uncached_tokens(three) == 5
        assert list(step.preempted) == []
        step.take(one)

    world.run(action)


def test_uncached_tokens_of_a_waiting_sequence_leave_out_hits() -> None:
    world = World()
    first = world.add(10)
    world.run(lambda step: step.take(first))
    again = world.add(10)
    assert world.grant(lambda step: step.uncached_tokens(again) + 100 * step.take(again)) == 202


def test_caching_switched_off_finds_nothing() -> None:
    world = World(enable_prefix_caching=False)
    first = world.add(9)
    world.run(lambda step: step.take(first))
    again = world.add(9)
    assert world.grant(lambda step: step.take(again)) == 9
    assert again.num_cached_tokens == 0
    assert again.keys.packed == []


# Policies that fail ---------------------------------------------------------------------------


def test_error_in_a_policy_takes_the_step_back() -> None:
    world = World()
    running, granted, victim, waiting = (world.add(6, first=10 * i) for i in range(4))
    world.run(lambda step: [step.take(running), step.take(victim)])

    def action(step: Step) -> None:
        step.take(running)
        step.take(granted, 3)
        step.preempt(victim)
        step.take(waiting)
        raise RuntimeError("a bug in the policy")

    world.policy.action = action
    with pytest.raises(RuntimeError, match="a bug in the policy"):
        world.scheduler.schedule()
    world.scheduler.check_invariants()
    assert world.scheduler.num_in_flight == 0
    assert [seq.num_pending_tokens for seq in (running, granted, victim, waiting)] == [0] * 4
    assert [seq.num_computed_tokens for seq in (running, granted, victim, waiting)] == [6, 0, 0, 0]
    assert [seq.status.value for seq in (granted, waiting)] == ["waiting", "waiting"]
    assert list(world.scheduler._step.waiting) == [granted, waiting, victim]

    plan = world.run(lambda step: [step.take(seq) for seq in (running, granted, waiting)])
    assert plan.step_id == 1
    assert plan.preempted == (victim.seq_id,), "whoever runs the plans must hear of it"
    assert [entry.num_scheduled_tokens for entry in plan.sequences] == [1, 6, 6]
    assert world.run(lambda step: step.take(victim)).preempted == ()


def test_a_step_that_was_taken_back_has_granted_nothing() -> None:
    world = World()
    seq = world.add(6)

    def action(step: Step) -> None:
        step.take(seq)
        raise RuntimeError("a bug in the policy")

    world.policy.action = action
    with pytest.raises(RuntimeError, match="a bug in the policy"):
        world.scheduler.schedule()
    step = world.scheduler._step
    assert not step.has_grants
    assert len(step.grants) == 0
    assert step.budget == 64


def test_take_refuses_a_sequence_that_another_scheduler_runs() -> None:
    world, other = World(), World()
    ours, theirs = world.add(3), other.add(3)
    for _ in range(2):
        other.run(lambda step: step.take(theirs))

    def action(step: Step) -> None:
        with pytest.raises(SchedulingError, match="a sequence of this scheduler"):
            step.take(theirs)
        step.take(ours)

    assert world.run(action).sequences[0].sequence is ours
    assert [seq.num_computed_tokens for seq in (ours, theirs)] == [3, 4]


# The queue ------------------------------------------------------------------------------------


def test_waiting_queue() -> None:
    world = World()
    a, b, c, d = (world.add(1) for _ in range(4))
    queue = WaitingQueue()
    assert not queue
    assert queue.first() is None
    for seq in (a, b):
        queue.append(seq)
    for seq in (c, d):
        queue.append_front(seq)
    assert list(queue) == [d, c, a, b]
    assert len(queue) == 4
    queue.remove(c)
    queue.remove(a)
    assert list(queue) == [d, b]
    assert queue
    with pytest.raises(SchedulingError, match="not in this scheduler's queue"):
        queue.remove(a)
    assert object() not in queue


# Taking many at once --------------------------------------------------------------------------


def running_world(
    num_blocks: int = 8, *, max_num_batched_tokens: int = 64
) -> tuple[World, list[Sequence]]:
    """Three sequences of 3 tokens, which decode from now on."""
    world = World(num_blocks, max_num_batched_tokens=max_num_batched_tokens)
    sequences = [world.add(3, first=10 * i) for i in range(3)]
    world.run(lambda step: [step.take(seq) for seq in sequences])
    return world, sequences


def test_take_all_grants_what_take_would_grant() -> None:
    world, sequences = running_world()
    twin, twins = running_world()
    for _ in range(6):
        plan = world.run(lambda step: step.take_all(sequences))
        assert repr(plan) == repr(twin.run(lambda step: [step.take(seq) for seq in twins]))
        assert [seq.block_table for seq in sequences] == [seq.block_table for seq in twins]
        assert [seq.token_ids for seq in sequences] == [seq.token_ids for seq in twins]


def test_take_all_returns_the_rest_from_the_first_that_lacks_a_block() -> None:
    world, sequences = running_world(num_blocks=4)
    world.run(lambda step: step.take_all(sequences))
    rests: list[list[Sequence]] = []
    plan = world.run(lambda step: rests.append(step.take_all(sequences)))
    assert rests == [sequences[1:]]
    assert plan.sampled_seq_ids == (0,)
    assert [seq.wait_reason for seq in sequences] == [None, WaitReason.BLOCKS, None]


def test_take_all_counts_what_it_granted_before_its_iterable_raised() -> None:
    world, sequences = running_world(max_num_batched_tokens=2)

    def broken() -> Iterator[Sequence]:
        yield sequences[0]
        raise ValueError("a bug in the policy")

    def action(step: Step) -> None:
        with pytest.raises(ValueError, match="a bug in the policy"):
            step.take_all(broken())
        step.take_all(sequences)

    plan = world.run(action)
    assert sum(plan.sequences.num_scheduled_tokens) == plan.num_scheduled_tokens == 2


def test_grants_are_a_copy() -> None:
    world, sequences = running_world()
    world.run(lambda step: step.take_all(sequences))  # what the next plan shares columns with

    def action(step: Step) -> None:
        step.take_all(sequences)
        for column in step.grants._columns:
            if isinstance(column, list):
                column.clear()

    plan = world.run(action)
    assert [entry.num_blocks for entry in plan.sequences] == [2, 2, 2]
    assert plan.is_decode


def test_a_plan_that_only_takes_blocks_away_is_no_decode() -> None:
    world, sequences = running_world()
    plan = world.run(lambda step: step.preempt(sequences[0]))
    assert not plan.is_empty
    assert not plan.is_decode


def test_take_all_grants_once_a_step() -> None:
    world, sequences = running_world()

    def action(step: Step) -> None:
        step.take(sequences[1])
        step.take_all([*sequences, *sequences])
        step.take_all(sequences)

    # At every place in a block.
    for num_tokens in range(5, 10):
        plan = world.run(action)
        assert [entry.seq_id for entry in plan.sequences] == [1, 0, 2]
        assert plan.num_scheduled_tokens == 3
        assert [seq.num_tokens for seq in sequences] == [num_tokens] * 3


def test_take_all_forgets_why_a_sequence_was_refused() -> None:
    world, sequences = running_world(max_num_batched_tokens=9)
    prompt = world.add(8, first=100)
    world.run(lambda step: [step.take(prompt), step.take_all(sequences)])
    assert [seq.wait_reason for seq in sequences] == [None, WaitReason.BUDGET, WaitReason.BUDGET]
    plan = world.run(lambda step: step.take_all(sequences))
    assert plan.sampled_seq_ids == (0, 1, 2)
    assert [seq.wait_reason for seq in sequences] == [None, None, None]


@pytest.mark.parametrize(("exceed_budget", "granted"), [(False, 2), (True, 3)])
def test_take_all_keeps_within_the_budget_unless_told_otherwise(
    exceed_budget: bool,  # noqa: FBT001
    granted: int,
) -> None:
    world = World(max_num_batched_tokens=2)
    sequences = [world.add(2, first=10 * i) for i in range(3)]
    for seq in sequences:
        world.run(lambda step, seq=seq: step.take(seq))  # type: ignore[misc]
    rests: list[list[Sequence]] = []
    plan = world.run(
        lambda step: rests.append(step.take_all(sequences, exceed_budget=exceed_budget))
    )
    assert rests == [[]], "what the budget refuses is passed over"
    assert plan.num_scheduled_tokens == len(plan.sequences) == granted
    if not exceed_budget:
        assert sequences[2].wait_reason is WaitReason.BUDGET


def test_take_all_admits_and_continues_prompts_as_take_does() -> None:
    world, sequences = running_world(max_num_batched_tokens=9)
    new = world.add(1, first=100)
    long = world.add(7, first=200)
    world.scheduler.abort(0)
    plan = world.run(lambda step: step.take_all([new, *sequences, long]))
    assert [(e.seq_id, e.num_scheduled_tokens) for e in plan.sequences] == [
        (new.seq_id, 1),
        (1, 1),
        (2, 1),
        (long.seq_id, 6),
    ]
    assert len(new.block_table) == 1
    assert world.run(lambda step: step.take_all([long])).num_scheduled_tokens == 1


def test_running_sequences_are_decoding_or_prefilling() -> None:
    world, sequences = running_world(max_num_batched_tokens=9)
    long = world.add(20, first=100)
    world.run(lambda step: step.take(long))

    def look(step: Step) -> None:
        assert step.decoding == sequences
        assert step.prefilling == [long]
        assert step.num_prefilling == 1
        step.preempt(long)
        assert (step.prefilling, step.num_prefilling) == ([], 0)
        step.take_all(step.decoding)

    world.run(look)
