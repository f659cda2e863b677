"""`fits` says what `take` would find, and `drop` ends what a policy will not serve."""

from collections.abc import Callable

import pytest

from nv_core import (
    FinishReason,
    Mixed,
    RequestError,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulingError,
    Sequence,
    SequenceStatus,
    Step,
    StepPlan,
)


class Scripted:
    """A policy that does what the test says."""

    def __init__(self) -> None:
        self.action: Callable[[Step], object] = lambda _step: None

    def schedule(self, step: Step) -> None:
        self.action(step)


class World:
    def __init__(self, num_blocks: int = 8, max_num_seqs: int = 4) -> None:
        self.policy = Scripted()
        self.scheduler = Scheduler(
            SchedulerConfig(num_blocks, 4, max_num_seqs=max_num_seqs, policy=self.policy)
        )

    def add(self, num_tokens: int, *, first: int = 1) -> Sequence:
        return self.scheduler.add(range(first, first + num_tokens), SamplingParams(max_tokens=None))

    def plan(self, action: Callable[[Step], object]) -> StepPlan:
        self.policy.action = action
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.check_invariants()
        return plan

    def run(self, action: Callable[[Step], object]) -> StepPlan:
        plan = self.plan(action)
        self.scheduler.commit(plan, dict.fromkeys(plan.sampled_seq_ids, 99))
        self.scheduler.check_invariants()
        return plan

    def ask(self, question: Callable[[Step], object]) -> object:
        """What a policy would be told; the step runs nothing."""
        answers: list[object] = []
        self.policy.action = lambda step: answers.append(question(step))
        with pytest.raises(SchedulingError, match="ran nothing"):
            self.scheduler.schedule()
        return answers[0]


# fits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "fits"), [(1, True), (8, True), (9, False)])
def test_fits_counts_blocks_of_all_tokens(num_tokens: int, fits: bool) -> None:  # noqa: FBT001
    world = World(num_blocks=4)
    world.add(8)
    world.run(lambda step: step.take(step.waiting.first()))  # type: ignore[arg-type]
    new = world.add(num_tokens, first=100)
    assert world.ask(lambda step: step.fits(new)) is fits
    assert new.status is SequenceStatus.WAITING


def test_fits_after_preempting() -> None:
    world = World(num_blocks=6)
    one, two = world.add(8), world.add(12, first=50)
    world.run(lambda step: [step.take(one), step.take(two)])
    new = world.add(15, first=100)
    assert world.ask(lambda step: step.fits(new)) is False
    assert world.ask(lambda step: step.fits(new, after=[one])) is False
    assert world.ask(lambda step: step.fits(new, after=[two])) is True
    assert world.ask(lambda step: step.fits(new, after=[one, two], keep_free=2)) is True
    assert world.ask(lambda step: step.fits(new, after=[one, two], keep_free=3)) is False
    assert [seq.status.value for seq in (one, two)] == ["running", "running"]


def test_blocks_that_others_hold_too_are_not_freed_by_a_victim() -> None:
    world = World(num_blocks=5)
    one = world.add(9)
    world.run(lambda step: step.take(one))
    two = world.add(9)
    world.run(lambda step: [step.take(one), step.take(two)])
    assert one.block_table[:2] == two.block_table[:2]
    new = world.add(8, first=100)
    # One block is free; of each one's three blocks two are shared.
    assert world.ask(lambda step: step.fits(new)) is False
    assert world.ask(lambda step: step.fits(new, after=[one])) is True
    large = world.add(16, first=200)
    assert world.ask(lambda step: step.fits(large, after=[one])) is False
    assert world.ask(lambda step: step.fits(large, after=[one, two])) is True


def test_hits_need_no_block_unless_they_are_free() -> None:
    world = World(num_blocks=3)
    one = world.add(9)
    world.run(lambda step: step.take(one))
    same = world.add(9)
    assert world.ask(lambda step: step.fits(same)) is False
    assert world.ask(lambda step: step.fits(same, after=[one])) is True
    world.scheduler.abort(one.seq_id)
    other = world.add(4, first=100)
    world.run(lambda step: step.take(other))
    assert world.ask(lambda step: step.fits(same)) is False


def test_a_sibling_that_would_be_preempted_shares_nothing() -> None:
    world = World(num_blocks=5)
    seq, other = world.add(9), world.add(4, first=50)
    world.plan(lambda step: [step.take(seq), step.take(other)])
    fork = world.scheduler.fork(seq)
    # Its plan is in flight, so that the cache holds none of its blocks. One block is free.
    world.policy.action = lambda step: answers.extend(
        [step.fits(fork), step.fits(fork, after=[seq]), step.fits(fork, after=[seq], keep_free=2)]
    )
    answers: list[bool] = []
    assert world.scheduler.schedule() is None
    assert answers == [True, True, False]


def test_fits_needs_a_slot() -> None:
    world = World(max_num_seqs=1)
    one = world.add(2)
    world.run(lambda step: step.take(one))
    two = world.add(2, first=9)
    assert world.ask(lambda step: step.fits(two)) is False
    assert world.ask(lambda step: step.fits(two, after=[one])) is True


def test_fits_of_running_and_finished_sequences() -> None:
    world = World(num_blocks=2)
    one, two = world.add(4), world.add(4, first=9)
    world.run(lambda step: [step.take(one), step.take(two)])
    assert world.ask(lambda step: step.fits(one)) is False
    assert world.ask(lambda step: step.fits(one, after=[two])) is True
    assert world.ask(lambda step: step.fits(one, after=[one])) is False
    world.scheduler.abort(two.seq_id)
    assert world.ask(lambda step: step.fits(one)) is True
    assert world.ask(lambda step: step.fits(two)) is False


def test_keep_free_leaves_blocks_to_the_others() -> None:
    world = World(num_blocks=4)
    seq = world.add(8)
    assert world.ask(lambda step: step.take(seq, keep_free=3, reserve=8)) == 0
    assert seq.wait_reason == "blocks"
    plan = world.run(lambda step: step.take(seq, keep_free=2, reserve=8))
    assert plan.num_free_blocks == 2


# drop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "running", "granted", "in flight"])
def test_dropped_sequence_ends_with_its_reason_and_the_plan_names_it(state: str) -> None:
    world = World()
    seq, other = world.add(6), world.add(2, first=50)
    in_flight = None
    if state in ("running", "granted"):
        world.run(lambda step: step.take(seq))
    if state == "in flight":
        in_flight = world.plan(lambda step: step.take(seq))

    def drop(step: Step) -> None:
        step.take(other)
        if state == "granted":
            assert step.take(seq) == 1
        step.drop(seq, "too late")
        assert seq.status is SequenceStatus.FINISHED
        assert step.take(seq) == 0

    plan = world.plan(drop)
    assert plan.dropped == (seq,)
    assert (seq.finish_reason, seq.drop_reason) == (FinishReason.ERROR, "too late")
    assert [entry.seq_id for entry in plan.sequences] == [other.seq_id]
    assert (seq.seq_id in plan.released) == (state != "waiting")
    assert plan.num_scheduled_tokens == 2
    if in_flight is not None:
        events = world.scheduler.commit(in_flight, {seq.seq_id: 5})
        assert events.sampled == ()
    world.scheduler.commit(plan, {other.seq_id: 5})
    world.scheduler.check_invariants()
    assert world.scheduler.abort(seq.seq_id) is None
    with pytest.raises(RequestError, match="not an unfinished sequence"):
        world.scheduler.explain(seq.seq_id)
    assert world.run(lambda step: step.take(other)).dropped == ()


def test_plan_that_only_drops_runs_nothing_and_is_committed() -> None:
    world = World()
    seq = world.add(6)
    plan = world.run(lambda step: step.drop(seq, "no"))
    assert (len(plan.sequences), plan.dropped) == (0, (seq,))
    assert not world.scheduler.has_unfinished
    world.policy.action = lambda _step: None
    assert world.scheduler.schedule() is None


def test_drop_outlives_an_error_of_the_policy() -> None:
    world = World()
    seq, other = world.add(6), world.add(2, first=50)

    def drop_and_fail(step: Step) -> None:
        step.drop(seq, "no")
        raise KeyError(0)

    with pytest.raises(KeyError):
        world.plan(drop_and_fail)
    world.scheduler.check_invariants()
    assert seq.is_finished
    assert world.run(lambda step: step.take(other)).dropped == (seq,)


def test_what_cannot_be_dropped() -> None:
    world = World()
    seq, stranger = world.add(6), World().add(6)
    ended = world.add(6)
    world.scheduler.abort(ended.seq_id)

    def drop_all(step: Step) -> None:
        for wrong in (stranger, ended):
            with pytest.raises(SchedulingError, match="drop needs an unfinished sequence"):
                step.drop(wrong, "no")
        with pytest.raises(SchedulingError, match="a text that says why"):
            step.drop(seq, "")
        step.take(seq)

    assert world.run(drop_all).dropped == ()
    assert not stranger.is_finished


class ShortQueue(Mixed):
    """Admission control in three lines."""

    def schedule(self, step: Step) -> None:
        for seq in list(step.waiting)[4:]:
            step.drop(seq, "the queue is full")
        super().schedule(step)


def test_policy_that_keeps_its_queue_short() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4, max_num_seqs=2, policy=ShortQueue()))
    sequences = [scheduler.add([i]) for i in range(7)]
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.dropped == tuple(sequences[4:])
    assert (plan.num_running, plan.num_waiting) == (2, 2)


# What a policy must not know ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sampling_params", "max_total_tokens"])
def test_policy_cannot_see_how_long_the_answer_will_be(name: str) -> None:
    world = World()
    seq = world.add(6)
    assert getattr(seq, name)

    def peek(step: Step) -> None:
        with pytest.raises(SchedulingError, match=f"a policy must not read {name}"):
            getattr(seq, name)
        step.take(seq)

    plan = world.run(peek)
    assert getattr(plan.sequences[0].sequence, name), "whoever runs the plan may"


def test_curtain_opens_again_after_an_error() -> None:
    world = World()
    seq = world.add(6)
    with pytest.raises(SchedulingError, match="must not read"):
        world.plan(lambda _step: seq.sampling_params)
    assert seq.sampling_params.max_tokens is None
