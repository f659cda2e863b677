"""Scheduler: requests in, plans out, tokens back; with one plan in flight or several."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest

from nv_core import (
    Explanation,
    FinishReason,
    RequestError,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulingError,
    Sequence,
    SequenceStatus,
    Step,
    StepEvents,
    StepPlan,
    WaitReason,
)
from nv_core.testing import KVOracle, reference_tokens, run_until_idle

EOS = 0


def make_scheduler(
    num_blocks: int = 16,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int | None = None,
    vocab_size: int | None = None,
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks,
            4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            vocab_size=vocab_size,
        )
    )


def schedule(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, token_id: int) -> StepEvents:
    events = scheduler.commit(plan, {e.seq_id: token_id for e in plan.sequences if e.samples})
    scheduler.check_invariants()
    return events


def feed(scheduler: Scheduler, token_ids: Iterable[int]) -> StepEvents:
    """Runs one step for each token, which all sequences get."""
    events = StepEvents((), ())
    for token_id in token_ids:
        events = commit(scheduler, schedule(scheduler), token_id)
    return events


# The documented surface -----------------------------------------------------------------------


def test_documented_loop() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    seq = scheduler.add(
        [5, 6, 7],
        SamplingParams(max_tokens=2),
        request_id=None,
        priority=0,
        user=None,
        arrival_time=None,
    )
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        for entry in plan.sequences:
            assert isinstance(entry.seq_id, int)
            assert isinstance(entry.num_computed_tokens, int)
            assert isinstance(entry.num_scheduled_tokens, int)
            assert isinstance(entry.block_table, tuple)
            assert isinstance(entry.samples, bool)
        assert isinstance(plan.preempted, tuple)
        scheduler.commit(plan, {entry.seq_id: 9 for entry in plan.sequences if entry.samples})
        scheduler.check_invariants()
    assert seq.prompt_token_ids == [5, 6, 7]
    assert seq.output_token_ids == [9, 9]
    assert seq.finish_reason == "length"
    assert seq.num_cached_tokens == 0
    assert seq.block_table == []
    assert scheduler.schedule() is None
    scheduler.abort(seq.seq_id)


def test_only_the_first_two_arguments_of_add_are_positional() -> None:
    parameters = list(inspect.signature(Scheduler.add).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["self", "prompt_token_ids", "sampling_params"]


# Adding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt_token_ids is empty; a prompt needs at least one token"),
        ("text", "got text; tokenize it first"),
        (b"text", "got text; tokenize it first"),
        (None, "prompt_token_ids must be token ids, got None"),
        (5, "prompt_token_ids must be token ids, got 5"),
        ([1, -1], r"holds -1; token ids are integers in \[0, 100\)"),
        ([1, 100], "holds 100"),
        ([2**31], "holds 2147483648"),
        ([2**32], "holds 4294967296"),
        ([2**63], "holds 9223372036854775808"),
        ([2**70], "holds"),
        ([1.5], "holds 1.5"),
        ([None], "holds None"),
        (["1"], "holds '1'"),
        ([[1, 2]], r"holds \[1, 2\]"),
        (
            list(range(65)),
            r"65 tokens and can never fit the KV pool: 16 blocks of 4 tokens",
        ),
    ],
)
def test_bad_prompt_is_refused_and_changes_nothing(prompt: object, message: str) -> None:
    scheduler = make_scheduler(vocab_size=100)
    with pytest.raises(RequestError, match=message):
        scheduler.add(prompt)  # type: ignore[arg-type]
    assert not scheduler.has_unfinished
    scheduler.check_invariants()
    good = scheduler.add([1, 2, 3])
    assert good.seq_id == 0
    feed(scheduler, [7, EOS])
    assert good.output_token_ids == [7, EOS]


def test_ids_are_checked_without_a_vocabulary_too() -> None:
    scheduler = make_scheduler()
    scheduler.add([2**32 - 1])
    with pytest.raises(RequestError, match=r"holds 4294967296; .* \[0, 4294967296\)"):
        scheduler.add([1, 2**32])


@pytest.mark.parametrize("prompt", [range(3), (0, 1, 2), iter([0, 1, 2]), {0: "a", 1: "b", 2: ""}])
def test_any_iterable_of_ids_will_do(prompt: Iterable[int]) -> None:
    assert make_scheduler().add(prompt).prompt_token_ids == [0, 1, 2]


def test_foreign_integer_types_become_int() -> None:
    class Own:
        def __index__(self) -> int:
            return 7

    prompt: list[int] = [True, Own()]  # type: ignore[list-item]
    seq = make_scheduler(vocab_size=10).add(prompt)
    assert [(type(t), t) for t in seq.prompt_token_ids] == [(int, 1), (int, 7)]


def test_message_for_a_prompt_beyond_the_model() -> None:
    scheduler = make_scheduler(max_model_len=10)
    assert scheduler.max_prompt_tokens == 9
    scheduler.add(list(range(9)))
    with pytest.raises(
        RequestError, match="10 tokens and can never fit max_model_len=10"
    ) as caught:
        scheduler.add(list(range(10)))
    assert "shorten it to 9 tokens or raise that limit" in str(caught.value)


def test_message_names_the_limit_that_counts() -> None:
    for max_model_len, limit in ((9, "max_model_len=9"), (10, "the KV pool"), (99, "the KV pool")):
        scheduler = make_scheduler(num_blocks=2, max_model_len=max_model_len)
        assert scheduler.max_prompt_tokens == 8
        with pytest.raises(RequestError, match=f"9 tokens and can never fit {limit}"):
            scheduler.add(list(range(9)))


@pytest.mark.parametrize("salt", ["", 5, b"salt", ["a"]])
def test_salt_must_be_text(salt: object) -> None:
    with pytest.raises(RequestError, match="cache_salt must be a non-empty str or None, got"):
        make_scheduler().add([1], cache_salt=salt)  # type: ignore[arg-type]


def test_same_request_id_twice_is_two_requests() -> None:
    scheduler = make_scheduler()
    one, two = (scheduler.add([i, i], request_id="same") for i in (1, 2))
    assert one.seq_id != two.seq_id
    plan = schedule(scheduler)
    scheduler.commit(plan, {one.seq_id: 5, two.seq_id: 6})
    assert (one.output_token_ids, two.output_token_ids) == ([5], [6])


# Ending ---------------------------------------------------------------------------------------


def test_ends_at_max_tokens() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1], SamplingParams(max_tokens=3))
    assert feed(scheduler, [5, 6, 7]).finished == (seq,)
    assert seq.output_token_ids == [5, 6, 7]
    assert seq.finish_reason is FinishReason.LENGTH
    assert seq.stop_reason is None
    assert seq.status is SequenceStatus.FINISHED
    assert scheduler.num_free_blocks == 16


def test_ends_at_end_of_sequence_which_stays_in_the_output() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1])
    feed(scheduler, [5, EOS])
    assert seq.output_token_ids == [5, EOS]
    assert seq.finish_reason is FinishReason.STOP
    assert seq.stop_reason is None


def test_ignore_eos_goes_on() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1], SamplingParams(ignore_eos=True, max_tokens=3))
    feed(scheduler, [EOS, EOS, EOS])
    assert seq.output_token_ids == [EOS] * 3
    assert seq.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ends_at_a_stop_token_and_names_it(ignore_eos: bool) -> None:  # noqa: FBT001
    scheduler = make_scheduler()
    params = SamplingParams(stop_token_ids=(8, 9), ignore_eos=ignore_eos)
    seq = scheduler.add([1], params)
    feed(scheduler, [5, 9])
    assert (seq.finish_reason, seq.stop_reason) == (FinishReason.STOP, 9)


def test_eos_asked_for_as_a_stop_token_is_named_only_when_it_is_no_eos() -> None:
    for ignore_eos, stop_reason in ((False, None), (True, EOS)):
        scheduler = make_scheduler()
        params = SamplingParams(stop_token_ids=(EOS,), ignore_eos=ignore_eos)
        seq = scheduler.add([1], params)
        feed(scheduler, [EOS])
        assert (seq.finish_reason, seq.stop_reason) == (FinishReason.STOP, stop_reason)


def test_any_of_several_eos_tokens_ends() -> None:
    scheduler = Scheduler(SchedulerConfig(4, eos_token_ids=(5, 6)))
    seq = scheduler.add([1])
    feed(scheduler, [7, 6])
    assert seq.finish_reason is FinishReason.STOP


def test_min_tokens_are_all_there_before_any_stop_counts() -> None:
    """With min_tokens=4 the fifth token is the first that may end the request."""
    scheduler = make_scheduler()
    seq = scheduler.add([1], SamplingParams(min_tokens=4, stop_token_ids=(9,)))
    feed(scheduler, [EOS, 9, EOS, 9])
    assert not seq.is_finished
    feed(scheduler, [EOS])
    assert seq.finish_reason is FinishReason.STOP
    assert seq.num_output_tokens == 5


def test_min_tokens_equal_to_max_tokens_ends_by_length() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1], SamplingParams(min_tokens=2, max_tokens=2))
    feed(scheduler, [EOS, EOS])
    assert seq.finish_reason is FinishReason.LENGTH


def test_stop_at_the_very_limit_is_a_stop() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1], SamplingParams(max_tokens=2))
    feed(scheduler, [5, EOS])
    assert seq.finish_reason is FinishReason.STOP


def test_ends_at_max_model_len() -> None:
    scheduler = make_scheduler(max_model_len=10)
    seq = scheduler.add(list(range(1, 8)), SamplingParams(max_tokens=None))
    feed(scheduler, [5, 6, 7])
    assert seq.num_tokens == 10
    assert seq.finish_reason is FinishReason.LENGTH


def test_ends_when_the_pool_cannot_hold_more() -> None:
    """The last token needs no slot: a pool of 8 holds sequences of 9."""
    scheduler = make_scheduler(num_blocks=2)
    seq = scheduler.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=None))
    feed(scheduler, [9, 9, 9, 9])
    assert seq.num_tokens == 9
    assert seq.finish_reason is FinishReason.LENGTH
    assert scheduler.num_free_blocks == 2


def test_caller_ends_a_sequence_for_its_own_reason() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1, 2])
    feed(scheduler, [5])
    assert scheduler.finish(seq.seq_id, FinishReason.STOP) is seq
    assert seq.finish_reason is FinishReason.STOP
    assert seq.output_token_ids == [5]
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == 16
    assert scheduler.finish(seq.seq_id, FinishReason.ERROR) is None
    assert seq.finish_reason is FinishReason.STOP


def test_reason_may_be_given_as_text_but_must_be_one() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1, 2])
    with pytest.raises(ValueError, match="nonsense"):
        scheduler.finish(seq.seq_id, "nonsense")  # type: ignore[arg-type]
    assert not seq.is_finished
    scheduler.finish(seq.seq_id, "error")  # type: ignore[arg-type]
    assert seq.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_abort_at_any_time(when: str) -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, seq = (scheduler.add([i] * 7, SamplingParams(max_tokens=9)) for i in (1, 2))
    if when != "waiting":
        feed(scheduler, [5] * (3 if when == "preempted" else 1))
    assert seq.num_preemptions == (when == "preempted")
    assert scheduler.abort(seq.seq_id) is seq
    scheduler.check_invariants()
    assert seq.finish_reason is FinishReason.ABORT
    assert seq.block_table == []
    feed(scheduler, [5] * (9 - old.num_output_tokens))
    assert old.num_output_tokens == 9
    assert scheduler.num_free_blocks == 4


def test_abort_of_what_is_not_there_does_nothing() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1])
    assert scheduler.abort(99) is None
    scheduler.abort(seq.seq_id)
    assert scheduler.abort(seq.seq_id) is None
    scheduler.check_invariants()


# Events ---------------------------------------------------------------------------------------


def test_events_name_who_got_a_token_and_who_ended() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=9)
    short = scheduler.add([1, 2], SamplingParams(max_tokens=1))
    other = scheduler.add([3, 4])
    long = scheduler.add([5] * 9)
    events = commit(scheduler, schedule(scheduler), 7)
    assert events.sampled == (short, other)
    assert events.finished == (short,)
    events = commit(scheduler, schedule(scheduler), 7)
    assert events.sampled == (other, long)
    assert events.finished == ()


# The protocol ---------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished
    seq = scheduler.add([1], SamplingParams(max_tokens=1))
    plan = schedule(scheduler)
    assert scheduler.schedule() is None, "its only token is in flight"
    scheduler.commit(plan, {seq.seq_id: 5})
    assert scheduler.schedule() is None


def test_plans_are_committed_once_and_in_order() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1], SamplingParams(max_tokens=5))
    first, second = schedule(scheduler), schedule(scheduler)
    assert scheduler.plans_in_flight == (first, second)
    assert scheduler.num_in_flight == 2
    with pytest.raises(SchedulingError, match="plan 1 is not the oldest plan in flight"):
        scheduler.commit(second, {seq.seq_id: 5})
    scheduler.commit(first, {seq.seq_id: 5})
    with pytest.raises(SchedulingError, match="plan 0 is not the oldest plan in flight"):
        scheduler.commit(first, {seq.seq_id: 5})
    scheduler.commit(second, {seq.seq_id: 6})
    with pytest.raises(SchedulingError, match="commit every plan once"):
        scheduler.commit(second, {seq.seq_id: 6})
    assert seq.output_token_ids == [5, 6]


@pytest.mark.parametrize("tokens", [{}, {0: 5}, {0: 5, 1: 6, 2: 7}, {0: 5, 2: 7}])
def test_tokens_must_be_exactly_those_of_the_plan(tokens: dict[int, int]) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    one, two, chunk = (scheduler.add([i] * 2) for i in range(3))
    plan = schedule(scheduler)
    assert [entry.samples for entry in plan.sequences] == [True, True, False]
    message = f"yields tokens for the sequences [0, 1], got tokens for {list(tokens)}"
    with pytest.raises(SchedulingError, match=re.escape(message)):
        scheduler.commit(plan, tokens)
    scheduler.check_invariants()
    assert one.num_output_tokens == two.num_output_tokens == chunk.num_output_tokens == 0
    scheduler.commit(plan, {0: 5, 1: 6})
    assert (one.output_token_ids, two.output_token_ids) == ([5], [6])


class Idle:
    """A policy that does nothing until told to."""

    works = False

    def schedule(self, step: Step) -> None:
        if self.works:
            for seq in list(step.waiting):
                step.take(seq)


def test_policy_that_runs_nothing_is_an_error_that_names_it() -> None:
    policy = Idle()
    scheduler = Scheduler(SchedulerConfig(4, policy=policy))
    scheduler.add([1])
    with pytest.raises(SchedulingError, match="Idle ran nothing although 1 sequences") as caught:
        scheduler.schedule()
    assert "sequence 0 waits: not considered" in str(caught.value)
    policy.works = True
    feed(scheduler, [5])


def test_policy_may_run_nothing_while_a_plan_is_in_flight() -> None:
    policy = Idle()
    scheduler = Scheduler(SchedulerConfig(4, policy=policy))
    policy.works = True
    seq = scheduler.add([1], SamplingParams(max_tokens=1))
    plan = schedule(scheduler)
    policy.works = False
    scheduler.add([2])
    assert scheduler.schedule() is None
    scheduler.commit(plan, {seq.seq_id: 5})
    with pytest.raises(SchedulingError, match="ran nothing"):
        scheduler.schedule()


# Plans in flight ------------------------------------------------------------------------------


def test_decoding_runs_ahead_of_the_device() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1, 2, 3])
    plans = [schedule(scheduler) for _ in range(4)]
    entries = [plan.sequences[0] for plan in plans]
    assert [e.num_computed_tokens for e in entries] == [0, 3, 4, 5]
    assert [e.num_scheduled_tokens for e in entries] == [3, 1, 1, 1]
    assert [e.block_table for e in entries] == [(0,), (0,), (0, 1), (0, 1)]
    assert all(e.samples for e in entries)
    assert (seq.num_tokens, seq.num_pending_tokens) == (3, 4)
    for token_id, plan in enumerate(plans, start=10):
        commit(scheduler, plan, token_id)
    assert seq.output_token_ids == [10, 11, 12, 13]


def test_end_by_length_is_known_ahead() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1, 2, 3], SamplingParams(max_tokens=3))
    plans = [schedule(scheduler) for _ in range(3)]
    assert scheduler.schedule() is None
    assert seq.wait_reason is WaitReason.IN_FLIGHT
    for plan in plans:
        commit(scheduler, plan, 5)
    assert seq.finish_reason is FinishReason.LENGTH
    assert seq.num_output_tokens == 3


def test_surplus_token_after_a_late_stop_is_dropped() -> None:
    scheduler = make_scheduler(num_blocks=2)
    seq = scheduler.add([1, 2, 3])
    first, second = schedule(scheduler), schedule(scheduler)
    assert commit(scheduler, first, EOS).finished == (seq,)
    assert scheduler.num_free_blocks == 2
    other = scheduler.add([7, 8, 9, 10, 11], SamplingParams(max_tokens=1))
    third = schedule(scheduler)
    assert set(third.sequences[0].block_table) == {0, 1}, "blocks are handed over in plan order"
    events = commit(scheduler, second, 99)
    assert events == StepEvents((), ())
    assert seq.output_token_ids == [EOS]
    assert commit(scheduler, third, 5).finished == (other,)
    assert scheduler.num_free_blocks == 2


def test_abort_between_schedule_and_commit() -> None:
    scheduler = make_scheduler()
    gone, stays = scheduler.add([1, 2]), scheduler.add([3, 4])
    plan = schedule(scheduler)
    scheduler.abort(gone.seq_id)
    scheduler.check_invariants()
    with pytest.raises(SchedulingError, match="yields tokens for the sequences"):
        scheduler.commit(plan, {stays.seq_id: 5})
    events = scheduler.commit(plan, {gone.seq_id: 9, stays.seq_id: 5})
    assert events.sampled == (stays,)
    assert gone.output_token_ids == []
    assert gone.finish_reason is FinishReason.ABORT


def test_blocks_of_an_aborted_plan_are_never_published() -> None:
    scheduler = make_scheduler(num_blocks=4)
    prompt = list(range(1, 10))
    gone = scheduler.add(prompt)
    plan = schedule(scheduler)
    scheduler.abort(gone.seq_id)
    commit(scheduler, plan, 5)
    again = scheduler.add(prompt)
    schedule(scheduler)
    assert again.num_cached_tokens == 0


def test_blocks_are_published_when_their_plan_is_committed_not_earlier() -> None:
    scheduler = make_scheduler()
    prompt = list(range(1, 10))
    scheduler.add(prompt)
    first = schedule(scheduler)
    before = scheduler.add(prompt)
    second = schedule(scheduler)
    commit(scheduler, first, 5)
    after = scheduler.add(prompt)
    schedule(scheduler)
    assert (before.num_cached_tokens, after.num_cached_tokens) == (0, 8)
    commit(scheduler, second, 5)


def test_preempted_with_a_plan_in_flight_keeps_its_token_and_nothing_else() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, young = (scheduler.add([i] * 7, SamplingParams(max_tokens=6)) for i in (1, 2))
    first, second = schedule(scheduler), schedule(scheduler)
    third = schedule(scheduler)
    assert third.preempted == (young.seq_id,)
    assert young.num_pending_tokens == 2
    commit(scheduler, first, 10)
    commit(scheduler, second, 11)
    assert young.output_token_ids == [10, 11]
    assert young.prefixes == []
    commit(scheduler, third, 12)
    while scheduler.has_unfinished:
        commit(scheduler, schedule(scheduler), 13)
    assert old.output_token_ids == [10, 11, 12, 13, 13, 13]
    assert young.output_token_ids == [10, 11, 13, 13, 13, 13]


class Scripted:
    """Does one thing in each step, and then nothing."""

    def __init__(self, *actions: Callable[[Step], object]) -> None:
        self.actions = list(actions)

    def schedule(self, step: Step) -> None:
        self.actions.pop(0)(step)


def test_old_plan_publishes_nothing_of_the_blocks_that_came_later() -> None:
    """A chunk in flight, a preemption, and the same chunk again in other blocks."""
    policy = Scripted(
        lambda step: step.take(next(iter(step.waiting)), 4),
        lambda step: step.preempt(next(iter(step.running))),
        lambda step: step.take(next(iter(step.waiting)), 4),
    )
    scheduler = Scheduler(SchedulerConfig(8, 4, policy=policy))
    scheduler.add(list(range(12)))
    plans = [scheduler.schedule() for _ in range(3)]
    cached = []
    for plan in plans:
        assert plan is not None
        scheduler.commit(plan, {})
        scheduler.check_invariants()
        cached.append(scheduler._blocks.num_cached_blocks)
    assert cached == [0, 0, 1]


def test_stop_that_arrives_after_the_preemption_ends_it_from_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, young = (scheduler.add([i] * 7, SamplingParams(max_tokens=6)) for i in (1, 2))
    first, second = schedule(scheduler), schedule(scheduler)
    third = schedule(scheduler)
    assert third.preempted == (young.seq_id,)
    events = scheduler.commit(first, {old.seq_id: 10, young.seq_id: EOS})
    assert events.finished == (young,)
    scheduler.check_invariants()
    assert scheduler.num_waiting == 0
    commit(scheduler, second, 11)
    assert young.output_token_ids == [EOS]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_min_tokens_with_plans_in_flight(depth: int) -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1], SamplingParams(min_tokens=3, max_tokens=9))
    plans: list[StepPlan] = []
    while not seq.is_finished:
        while len(plans) < depth:
            plans.append(schedule(scheduler))
        commit(scheduler, plans.pop(0), EOS)
    assert seq.num_output_tokens == 4
    for plan in plans:
        commit(scheduler, plan, EOS)
    assert seq.num_output_tokens == 4
    assert scheduler.num_in_flight == 0


def test_chunks_of_one_prompt_may_all_be_in_flight() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    oracle = KVOracle(16, 4)
    prompt = list(range(1, 12))
    seq = scheduler.add(prompt, SamplingParams(max_tokens=1))
    plans = [schedule(scheduler) for _ in range(3)]
    assert [plan.sequences[0].num_computed_tokens for plan in plans] == [0, 4, 8]
    for plan in plans:
        scheduler.commit(plan, oracle.execute(plan))
    assert seq.output_token_ids == reference_tokens(prompt, 1)


# Explaining -----------------------------------------------------------------------------------


def test_explain_says_why_and_how_much_is_missing() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
    running, large, third = (
        scheduler.add(list(range(first, first + n))) for first, n in ((0, 9), (100, 6), (200, 3))
    )
    fresh = scheduler.explain(large.seq_id)
    assert fresh.wait_reason is WaitReason.NOT_CONSIDERED
    feed(scheduler, [7])
    assert scheduler.explain(running.seq_id) == Explanation(
        SequenceStatus.RUNNING, None, 0, 0, num_free_blocks=1
    )
    assert scheduler.explain(large.seq_id) == Explanation(
        SequenceStatus.WAITING, WaitReason.BLOCKS, 0, 2, num_free_blocks=1
    )
    assert scheduler.explain(third.seq_id) == Explanation(
        SequenceStatus.WAITING, WaitReason.NOT_CONSIDERED, 6, 1, num_free_blocks=1
    )
    feed(scheduler, [7, 7])
    assert len(running.block_table) == 3
    assert scheduler.explain(running.seq_id).num_blocks_needed == 0
    feed(scheduler, [7])
    assert running.num_tokens == 13
    assert scheduler.explain(running.seq_id).num_blocks_needed == 1


def test_explanation_does_not_outlive_the_step_that_gave_it() -> None:
    class First:
        """Asks for the first waiting sequence in the first step only."""

        def schedule(self, step: Step) -> None:
            for seq in list(step.running):
                step.take(seq)
            for seq in list(step.waiting) if step.step_id == 0 else []:
                step.take(seq)

    scheduler = Scheduler(SchedulerConfig(8, 4, max_num_seqs=1, policy=First()))
    scheduler.add([1, 2])
    seq = scheduler.add([3])
    feed(scheduler, [7])
    assert scheduler.explain(seq.seq_id).wait_reason is WaitReason.SLOTS
    feed(scheduler, [7])
    assert scheduler.explain(seq.seq_id).wait_reason is WaitReason.NOT_CONSIDERED


@pytest.mark.parametrize("ended", [True, False])
def test_explain_knows_only_the_unfinished(ended: bool) -> None:  # noqa: FBT001
    scheduler = make_scheduler()
    if ended:
        scheduler.add([1], SamplingParams(max_tokens=1))
        feed(scheduler, [5])
    with pytest.raises(RequestError, match="seq_id 0 is not an unfinished sequence"):
        scheduler.explain(0)


# Resetting and salting the prefix cache ---------------------------------------------------------


def test_reset_makes_freed_and_used_content_unfindable() -> None:
    scheduler = make_scheduler()
    done, running = list(range(100, 109)), list(range(9))
    scheduler.add(done, SamplingParams(max_tokens=1))
    seq = scheduler.add(running, SamplingParams(max_tokens=20))
    feed(scheduler, [5])
    scheduler.reset_prefix_cache()
    scheduler.check_invariants()
    again = [scheduler.add(prompt, SamplingParams(max_tokens=1)) for prompt in (done, running)]
    feed(scheduler, [5])
    assert [s.num_cached_tokens for s in again] == [0, 0]
    third = [scheduler.add(prompt, SamplingParams(max_tokens=1)) for prompt in (done, running)]
    feed(scheduler, [5])
    assert [s.num_cached_tokens for s in third] == [8, 8], "what is computed anew is found anew"
    assert not seq.is_finished


def test_reset_also_hides_what_running_sequences_publish_later() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1, 2, 3], SamplingParams(max_tokens=20))
    in_flight = schedule(scheduler)
    scheduler.reset_prefix_cache()
    commit(scheduler, in_flight, 4)
    feed(scheduler, range(5, 14))
    assert seq.token_ids == list(range(1, 14))
    again = scheduler.add(seq.token_ids, SamplingParams(max_tokens=1))
    feed(scheduler, [99])
    assert again.num_cached_tokens == 0


def test_sequence_that_starts_again_after_a_reset_publishes_again() -> None:
    class Preempts:
        def __init__(self) -> None:
            self.victim: Sequence | None = None

        def schedule(self, step: Step) -> None:
            if self.victim is not None:
                step.preempt(self.victim)
                self.victim = None
            for seq in [*step.running, *step.waiting]:
                step.take(seq)

    policy = Preempts()
    scheduler = Scheduler(SchedulerConfig(16, 4, policy=policy))
    seq = scheduler.add(list(range(1, 10)), SamplingParams(max_tokens=20))
    feed(scheduler, [50])
    scheduler.reset_prefix_cache()
    policy.victim = seq
    schedule_only = schedule(scheduler)
    assert schedule_only.preempted == (seq.seq_id,)
    scheduler.commit(schedule_only, {})
    feed(scheduler, [51])
    assert seq.num_computed_tokens == 10
    again = scheduler.add(list(range(1, 10)), SamplingParams(max_tokens=1))
    feed(scheduler, [52])
    assert again.num_cached_tokens == 8


def cached_tokens(scheduler: Scheduler, prompt: list[int], salt: str | None) -> int:
    seq = scheduler.add(prompt, SamplingParams(max_tokens=1), cache_salt=salt)
    feed(scheduler, [5])
    return seq.num_cached_tokens


@pytest.mark.parametrize("constant_hash", [False, True])
def test_salts_never_share(constant_hash: bool) -> None:  # noqa: FBT001
    config = SchedulerConfig(64, 4)
    if constant_hash:
        scheduler = Scheduler(config, hash_block=lambda _tokens, _parent: 1)
    else:
        scheduler = Scheduler(config)
    prompt = list(range(13))
    salts = [None, "a", "b", "ab", "cache_salt", "None", "\x00"]
    assert [cached_tokens(scheduler, prompt, salt) for salt in salts] == [0] * len(salts)
    assert [cached_tokens(scheduler, prompt, salt) for salt in salts] == [12] * len(salts)
    assert cached_tokens(scheduler, prompt[:9], "a") == 8


def test_salt_covers_output_blocks_too() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add([1, 2], SamplingParams(max_tokens=8), cache_salt="a")
    assert seq.cache_salt == "a"
    feed(scheduler, range(3, 11))
    assert cached_tokens(scheduler, list(range(1, 11)), None) == 0
    assert cached_tokens(scheduler, list(range(1, 11)), "a") == 8


# Checking itself ------------------------------------------------------------------------------


def break_queue(scheduler: Scheduler, seq: Sequence) -> None:
    scheduler._step.waiting.append(seq)


def break_slots(scheduler: Scheduler, seq: Sequence) -> None:
    scheduler._step.slots += 1


def break_pending(scheduler: Scheduler, seq: Sequence) -> None:
    seq.num_pending_tokens += 1


def break_computed(scheduler: Scheduler, seq: Sequence) -> None:
    seq.num_computed_tokens += 10


def break_table(scheduler: Scheduler, seq: Sequence) -> None:
    seq.block_table[0] = seq.block_table[1]


def break_finished(scheduler: Scheduler, seq: Sequence) -> None:
    seq.finish_reason = FinishReason.STOP


def break_content(scheduler: Scheduler, seq: Sequence) -> None:
    seq.prefixes.reverse()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_queue, "queues differ from the unfinished sequences"),
        (break_slots, "slots and running sequences do not add up"),
        (break_pending, "miscounts its pending tokens"),
        (break_computed, "computed beyond its tokens|too few blocks"),
        (break_table, "reference counts differ|filed under other content"),
        (break_finished, "is finished but kept"),
        (break_content, "filed under other content"),
    ],
)
def test_invariants_notice_damage(damage: object, message: str) -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(list(range(1, 10)))
    feed(scheduler, [5])
    scheduler.check_invariants()
    damage(scheduler, seq)  # type: ignore[operator]
    with pytest.raises(SchedulingError, match=message):
        scheduler.check_invariants()


# Whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_many_requests_give_what_each_gives_alone(policy: str, depth: int) -> None:
    scheduler = Scheduler(
        SchedulerConfig(12, 4, max_num_seqs=4, max_num_batched_tokens=9, policy=policy)
    )
    oracle = KVOracle(12, 4)
    system = list(range(500, 510))
    prompts = [system[: i % 11] + [i] * (1 + i % 7) for i in range(30)]
    params = [SamplingParams(max_tokens=1 + i % 13) for i in range(30)]
    sequences = [scheduler.add(*request) for request in zip(prompts, params, strict=True)]
    run_until_idle(scheduler, oracle, depth=depth)
    for i, seq in enumerate(sequences):
        assert seq.output_token_ids == reference_tokens(prompts[i], 1 + i % 13)
    assert sum(seq.num_preemptions for seq in sequences) > 0
    assert sum(seq.num_cached_tokens for seq in sequences) > 0
    assert scheduler.num_free_blocks == 12


class SignalError(Exception):
    """What the handler of a signal raises, between any two lines."""


def raising_at_line(function: Callable[[Step], StepPlan], line: int) -> Callable[[Step], StepPlan]:
    """A function that is interrupted where its own lines, and those it calls, are so many."""

    def call(step: Step) -> StepPlan:
        left, before = line, sys.gettrace()

        def trace(frame: FrameType, event: str, arg: object) -> Any:  # noqa: ANN401
            nonlocal left
            left -= event == "line"
            if event == "line" and left == 0:
                raise SignalError
            return trace

        sys.settrace(trace)
        try:
            return function(step)
        finally:
            sys.settrace(before)

    return call


@pytest.mark.parametrize("line", range(1, 40, 2))
def test_what_a_signal_raises_while_a_plan_is_made_costs_no_request(
    line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(SchedulerConfig(12, 4, max_num_seqs=4, max_num_batched_tokens=9))
    oracle = KVOracle(12, 4)
    prompts = [[i] * (1 + 3 * i % 7) for i in range(8)]
    sequences = [scheduler.add(prompt, SamplingParams(max_tokens=6)) for prompt in prompts]
    original, num_plans = Step.plan, 0

    def plan(step: Step) -> StepPlan:
        nonlocal num_plans
        num_plans += 1
        make = raising_at_line(original, line) if num_plans in (2, 5, 6) else original
        return make(step)

    monkeypatch.setattr(Step, "plan", plan)
    aborted: set[int] = set()
    while scheduler.has_unfinished:
        try:
            run_until_idle(scheduler, oracle)
        except SignalError:
            scheduler.check_invariants()
            assert scheduler.num_in_flight == 0
            # Whoever is aborted now must not run as a ghost of the step that was lost.
            aborted.add(next(seq.seq_id for seq in sequences if not seq.is_finished))
            scheduler.abort(max(aborted))
    assert aborted
    for seq, prompt in zip(sequences, prompts, strict=True):
        if seq.seq_id not in aborted:
            assert seq.output_token_ids == reference_tokens(prompt, 6)
    assert scheduler.num_free_blocks == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "high"}, "priority must be an integer"),
        ({"priority": True}, "priority must be an integer"),
        ({"user": ["x"]}, "user must be a str"),
        ({"request_id": 5}, "request_id must be a str"),
        ({"arrival_time": "now"}, "arrival_time must be seconds"),
        ({"arrival_time": float("nan")}, "arrival_time must be seconds"),
        ({"deadline": "soon"}, "deadline must be seconds"),
    ],
)
def test_labels_that_no_policy_could_compare_are_refused(
    options: dict[str, Any], message: str
) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    with pytest.raises(RequestError, match=message):
        scheduler.add([1, 2], **options)
    assert not scheduler.has_unfinished


@pytest.mark.parametrize(
    "name", ["priority", "predicted_output_tokens", "arrival_time", "deadline"]
)
def test_an_integer_too_long_to_be_written_out_is_refused_by_name(name: str) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    options: dict[str, Any] = {name: 1 << 16609}
    with pytest.raises(RequestError, match=f"{name} must be an integer.*one of 16610 bits"):
        scheduler.add([1, 2], **options)
    assert not scheduler.has_unfinished
