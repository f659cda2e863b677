"""Every rank rebuilds rank 0's plans exactly, however plans follow one another.

A scheduler makes the plans, with random arrivals, aborts, forks, preemption and steps in flight; a
replica sees only the bytes. Tokens are made up on both sides from what each side knows.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, StepPlan
from nv_runtime.ranks.errors import ProtocolError
from nv_runtime.ranks.plan_encoder import PlanEncoder
from nv_runtime.ranks.plan_replica import PlanReplica
from nv_runtime.ranks.wire import CommandKind, StepMessage, pack_command, unpack_command

BLOCK_SIZE = 4


def sampled(plan: StepPlan) -> dict[int, int]:
    """Made-up tokens, as a function of sequence and position."""
    return {
        entry.seq_id: (7 * (entry.num_computed_tokens + entry.num_scheduled_tokens) + entry.seq_id)
        % 50
        for entry in plan.sequences
        if entry.samples
    }


class OtherRank:
    """Follows rank 0 by its commands alone."""

    def __init__(self) -> None:
        self.replica = PlanReplica()
        self.in_flight: deque[StepPlan] = deque()

    def forget(self) -> None:
        self.replica.forget()
        self.in_flight.clear()

    def run(self, command: bytes) -> StepPlan:
        kind, body = unpack_command(command)
        assert kind is CommandKind.STEP
        message = StepMessage.unpack(body)
        for _ in range(message.num_collected):
            self.replica.append_tokens(sampled(self.in_flight.popleft()))
        plan = self.replica.follow(message)
        self.in_flight.append(plan)
        return plan


class RankZero:
    """Encodes plans and counts what it sends."""

    def __init__(self) -> None:
        self.encoder = PlanEncoder()
        self.num_collected = 0
        self.sizes: list[int] = []

    def forget(self) -> None:
        self.encoder.forget()
        self.num_collected = 0

    def command(self, plan: StepPlan) -> bytes:
        message = self.encoder.encode(plan, num_collected=self.num_collected)
        self.num_collected = 0
        command = pack_command(CommandKind.STEP, message.pack())
        self.sizes.append(len(command))
        return command


def assert_same(theirs: StepPlan, ours: StepPlan) -> None:
    for name in ("step_id", "released", "sampled_seq_ids", "num_scheduled_tokens"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert len(theirs.sequences) == len(ours.sequences)
    for their, our in zip(theirs.sequences, ours.sequences, strict=True):
        assert their[1:6] == our[1:6]
        assert their.num_pending_tokens == our.num_pending_tokens
        assert their.block_table == our.block_table
        assert their.token_ids == our.token_ids
        seq, twin = our.sequence, their.sequence
        assert twin.token_ids == seq.token_ids
        for name in ("num_prompt_tokens", "stop_token_ids"):
            assert getattr(twin, name) == getattr(seq, name), name
        # No step depends on stop texts: they stay where the text is.
        assert twin.sampling_params == seq.sampling_params.clone(stop=())


def random_params(rng: random.Random) -> SamplingParams:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": rng.choice([3, 2**64 - 1, -(2**63)])},
        {"temperature": 1.1, "top_k": 5, "top_p": 0.3, "min_p": 0.01},
        {"repetition_penalty": 1.2, "min_tokens": 1, "stop_token_ids": [3, 4]},
        {"stop": ["ab", "ü"], "ignore_eos": True},
    ]
    options: dict[str, object] = {**rng.choice(kinds), "max_tokens": rng.randrange(1, 25)}
    return SamplingParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(25))
def test_random_runs(seed: int, num_steps_ahead: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=rng.choice([12, 16, 40]),
            block_size=BLOCK_SIZE,
            max_num_seqs=5,
            max_num_batched_tokens=rng.choice([3, 8, 64]),
            max_model_len=48,
            eos_token_ids=(13,),
            policy=rng.choice(["mixed", "prefill_first"]),
        )
    )
    rank_zero, other = RankZero(), OtherRank()
    in_flight: deque[StepPlan] = deque()
    sequences = []
    for step in range(400):
        if step < 60 and rng.random() < 0.4:
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
            sequences.append(scheduler.add(prompt, random_params(rng)))
            if rng.random() < 0.2:
                sequences.append(scheduler.fork(sequences[-1], random_params(rng)))
        if sequences and rng.random() < 0.05:
            scheduler.abort(rng.choice(sequences).seq_id)
        if rng.random() < 0.02 and not in_flight:
            # A failed step: what was running has ended, and every rank forgets.
            for seq in sequences:
                scheduler.abort(seq.seq_id)
            rank_zero.forget()
            other.forget()
        plan = scheduler.schedule()
        if plan is not None:
            assert_same(other.run(rank_zero.command(plan)), plan)
            in_flight.append(plan)
        while len(in_flight) > (0 if plan is None else num_steps_ahead):
            oldest = in_flight.popleft()
            scheduler.commit(oldest, sampled(oldest))
            rank_zero.num_collected += 1
    assert not scheduler.has_unfinished
    assert len(rank_zero.sizes) > 3


def test_every_scenario_occurs_in_the_random_runs() -> None:
    """A pool this small preempts: the runs above are worth something."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=12, block_size=BLOCK_SIZE, max_num_seqs=5))
    for _ in range(5):
        scheduler.add([1] * 9, SamplingParams(max_tokens=15, ignore_eos=True))
    preempted = 0
    rank_zero, other = RankZero(), OtherRank()
    while plan := scheduler.schedule():
        preempted += len(plan.preempted)
        assert_same(other.run(rank_zero.command(plan)), plan)
        scheduler.commit(plan, sampled(plan))
        rank_zero.num_collected += 1
    assert preempted > 0


@pytest.mark.parametrize("batch_size", [1, 5, 256])
def test_a_steady_decode_step_takes_40_bytes_whatever_the_batch(batch_size: int) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=1024, block_size=64, max_num_seqs=batch_size))
    for _ in range(batch_size):
        scheduler.add([1] * 10, SamplingParams(max_tokens=70, ignore_eos=True))
    rank_zero, other = RankZero(), OtherRank()
    while plan := scheduler.schedule():
        assert_same(other.run(rank_zero.command(plan)), plan)
        scheduler.commit(plan, sampled(plan))
        rank_zero.num_collected += 1
    # All but the prompts, and the one step in which every sequence gets its second block.
    assert len(rank_zero.sizes) == 70
    assert rank_zero.sizes.count(40) == 68


def test_a_step_that_names_a_sequence_nobody_has_is_refused() -> None:
    message = StepMessage(step_id=0, num_collected=0, continues=False, joining=(5,))
    with pytest.raises(ProtocolError, match="sequence 5, which this rank does not have"):
        PlanReplica().follow(message)
