"""Sequence: its counters say everything; there are no phases."""

import pytest

from nv_core import (
    FinishReason,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SequenceStatus,
    WaitReason,
)


def make_scheduler() -> Scheduler:
    return Scheduler(
        SchedulerConfig(num_blocks=8, block_size=4, max_num_batched_tokens=6, eos_token_ids=(0,))
    )


def test_new_sequence() -> None:
    seq = make_scheduler().add(
        [5, 6, 7], request_id="mine", priority=-2, user="u", arrival_time=1.5
    )
    assert (seq.seq_id, seq.request_id, seq.priority, seq.user) == (0, "mine", -2, "u")
    assert seq.arrival_time == 1.5
    assert seq.sampling_params == SamplingParams()
    assert seq.prompt_token_ids == [5, 6, 7]
    assert seq.output_token_ids == []
    assert seq.block_table == []
    assert seq.status is SequenceStatus.WAITING
    assert seq.finish_reason is None
    assert not seq.is_finished
    assert seq.wait_reason is WaitReason.NOT_CONSIDERED
    assert (seq.num_tokens, seq.num_computed_tokens, seq.num_uncomputed_tokens) == (3, 0, 3)
    assert (seq.num_cached_tokens, seq.num_preemptions, seq.num_pending_tokens) == (0, 0, 0)


def test_request_id_is_the_number_by_default() -> None:
    scheduler = make_scheduler()
    assert [scheduler.add([1]).request_id for _ in range(2)] == ["0", "1"]


def test_counters_through_a_life() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(list(range(1, 10)), SamplingParams(max_tokens=2))

    first = scheduler.schedule()
    assert first is not None
    assert (seq.num_computed_tokens, seq.num_uncomputed_tokens) == (6, 3)
    assert seq.is_prefilling
    assert seq.num_pending_tokens == 0
    scheduler.commit(first, {})

    second = scheduler.schedule()
    assert second is not None
    assert (seq.num_computed_tokens, seq.num_pending_tokens) == (9, 1)
    assert not seq.is_prefilling
    assert seq.num_uncomputed_tokens == 1
    scheduler.commit(second, {0: 42})
    assert (seq.num_tokens, seq.num_output_tokens, seq.num_pending_tokens) == (10, 1, 0)
    assert len(seq.block_table) == 3

    third = scheduler.schedule()
    assert third is not None
    assert seq.num_computed_tokens == 10
    scheduler.commit(third, {0: 43})
    assert seq.output_token_ids == [42, 43]
    assert seq.status is SequenceStatus.FINISHED
    assert seq.finish_reason is FinishReason.LENGTH
    assert seq.block_table == []
    assert seq.wait_reason is None


def test_token_lists_are_copies() -> None:
    prompt = [1, 2, 3]
    seq = make_scheduler().add(prompt)
    prompt.append(9)
    seq.prompt_token_ids.append(9)
    seq.output_token_ids.append(9)
    assert seq.token_ids == [1, 2, 3]


def test_repr_says_where_it_stands() -> None:
    seq = make_scheduler().add([1, 2])
    assert repr(seq) == "Sequence(0, waiting, tokens=2, computed=0, pending=0)"


@pytest.mark.parametrize(
    ("member", "text"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.ABORT, "abort"),
        (FinishReason.ERROR, "error"),
        (WaitReason.BLOCKS, "blocks"),
        (WaitReason.IN_FLIGHT, "in flight"),
    ],
)
def test_reasons_read_as_text(member: FinishReason | WaitReason, text: str) -> None:
    assert member == text
    assert str(member) == f"{member}" == text
