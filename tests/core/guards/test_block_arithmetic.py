"""Guards against slips of one at block boundaries."""

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, StepPlan
from nv_core.testing import KVOracle, reference_tokens, run_until_idle


def one_sequence(prompt: int, outputs: int, block_size: int, num_blocks: int) -> list[StepPlan]:
    """Plans of a prompt that runs alone."""
    scheduler = Scheduler(SchedulerConfig(num_blocks, block_size))
    seq = scheduler.add(range(1, prompt + 1), SamplingParams(max_tokens=outputs))
    plans = run_until_idle(scheduler, KVOracle(num_blocks, block_size))
    assert seq.output_token_ids == reference_tokens(range(1, prompt + 1), outputs)
    return plans


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_table_covers_each_length_with_no_block_too_many(length: int, block_size: int) -> None:
    """A count of "tokens in the last block" that is 0 at exact multiples writes one slot early."""
    (plan,) = one_sequence(length, 1, block_size, num_blocks=13)
    assert len(plan.sequences[0].block_table) == -(-length // block_size)


@pytest.mark.parametrize("prompt", [3, 4, 5, 8])
def test_decode_writes_the_slot_behind_the_last_computed_token(prompt: int) -> None:
    plans = one_sequence(prompt, 6, block_size=4, num_blocks=8)
    for step, plan in enumerate(plans[1:]):
        (entry,) = plan.sequences
        position = prompt + step
        assert entry.num_computed_tokens == position
        assert entry.num_scheduled_tokens == 1
        assert len(entry.block_table) == position // 4 + 1


def test_block_is_added_when_a_token_is_written_to_it_not_earlier_not_later() -> None:
    """The sampled token is appended before the next step, and stored only in that step.

    A check one token early preempts without need; a check one token late finds no block.
    """
    plans = one_sequence(4, 6, block_size=4, num_blocks=3)
    assert [plan.sequences[0].num_computed_tokens for plan in plans] == [0, 4, 5, 6, 7, 8]
    assert [len(plan.sequences[0].block_table) for plan in plans] == [1, 2, 2, 2, 2, 3]


def test_exactly_full_pool_needs_no_preemption() -> None:
    scheduler = Scheduler(SchedulerConfig(2, 4))
    one, two = (scheduler.add([i] * 2, SamplingParams(max_tokens=3)) for i in (1, 2))
    run_until_idle(scheduler, KVOracle(2, 4))
    assert (one.num_preemptions, two.num_preemptions) == (0, 0)
    assert len(one.output_token_ids) == len(two.output_token_ids) == 3


@pytest.mark.parametrize("max_model_len", [5, 6, 7, 8, 9, 10])
def test_limits_that_are_no_multiple_of_the_block_are_never_rounded_up(max_model_len: int) -> None:
    """A length rounded up for alignment reaches beyond the pool or the model."""
    scheduler = Scheduler(SchedulerConfig(2, 4, max_model_len=max_model_len))
    limit = min(max_model_len, 9)
    assert scheduler.max_prompt_tokens == limit - 1
    seq = scheduler.add([1, 2, 3], SamplingParams(max_tokens=None))
    plans = run_until_idle(scheduler, KVOracle(2, 4))
    assert seq.num_tokens == limit
    assert max(len(plan.sequences[0].block_table) for plan in plans) <= 2
