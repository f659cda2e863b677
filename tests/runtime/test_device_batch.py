"""Rows on the device always say what the sequences say, however plans follow one another.

A decode step advances rows by itself, so the test advances them the same way and then compares
every row of the batch with the plan, step by step, one step ahead and not.
"""

from __future__ import annotations

import random
import struct
from collections import deque

import pytest
import torch

from nv_core import CapacityError, SamplingParams, Scheduler, SchedulerConfig, StepPlan
from nv_runtime.device_batch import (
    FIRST_BLOCK,
    IS_ACTIVE,
    LENGTH,
    SEED,
    TEMPERATURE,
    TOKEN,
    DeviceBatch,
)

BLOCK_SIZE = 4
MAX_NUM_SEQS = 5
MAX_BLOCKS = 12


def make_batch(max_num_seqs: int = MAX_NUM_SEQS) -> DeviceBatch:
    return DeviceBatch(
        max_num_seqs=max_num_seqs,
        max_batch=max_num_seqs,
        max_blocks=MAX_BLOCKS,
        vocab_size=50,
        device=torch.device("cpu"),
        seed_of=lambda entry: (entry.seq_id + 1) * 0x123456789ABCDEF1,
    )


class Device:
    """Runs plans as the runner does, with a made-up token instead of a model."""

    def __init__(self) -> None:
        self.batch = make_batch()
        self.num_decodes = 0
        self.num_uploads = 0
        self.tokens: dict[tuple[int, int], int] = {}

    def run(self, plan: StepPlan) -> dict[int, int]:
        changes = self.batch.follow(plan)
        entries = plan.sequences
        if entries and plan.is_decode:
            self.num_decodes += 1
            order = range(len(entries))
            changes += self.batch.prepare_decode(entries, order, padded_size=MAX_NUM_SEQS)
            self.num_uploads += bool(changes)
            self.batch.send(changes)
            self.check_decode(plan)
        else:
            self.batch.send(changes)
        self.check_blocks(plan)
        return {e.seq_id: self.sample(plan, index) for index, e in enumerate(entries) if e.samples}

    def sample(self, plan: StepPlan, index: int) -> int:
        entry = plan.sequences[index]
        position = entry.num_computed_tokens + entry.num_scheduled_tokens
        token = (7 * position + 3 * entry.seq_id) % 50
        self.tokens[entry.seq_id, position] = token
        row = self.batch.rows[self.batch.row_of(entry.seq_id)]
        row[TOKEN] = token
        if all(e.num_scheduled_tokens == 1 and e.samples for e in plan.sequences):
            row[LENGTH] += 1
        else:
            self.batch.note_sampled(entry)
        return token

    def check_decode(self, plan: StepPlan) -> None:
        batch = self.batch.batch.tolist()
        rows = [self.batch.row_of(entry.seq_id) for entry in plan.sequences]
        assert batch == rows + [self.batch.padding_row] * (MAX_NUM_SEQS - len(rows))
        assert len(set(rows)) == len(rows)
        for row_number, entry in zip(rows, plan.sequences, strict=True):
            row = self.batch.rows[row_number].tolist()
            position = entry.num_computed_tokens
            seq = entry.sequence
            known = seq.token_ids[position] if position < seq.num_tokens else None
            assert row[TOKEN] == self.tokens.get((entry.seq_id, position), known)
            assert row[LENGTH] == position
            assert row[IS_ACTIVE] == 1
            temperature = struct.unpack("<f", struct.pack("<i", row[TEMPERATURE]))[0]
            assert temperature == pytest.approx(seq.sampling_params.temperature)
            seed = (row[SEED] % 2**32) + (row[SEED + 1] % 2**32) * 2**32
            assert seed == (entry.seq_id + 1) * 0x123456789ABCDEF1 % 2**64
        padding = self.batch.rows[self.batch.padding_row]
        assert padding[IS_ACTIVE] == padding[LENGTH] == 0

    def check_blocks(self, plan: StepPlan) -> None:
        for entry in plan.sequences:
            row = self.batch.rows[self.batch.row_of(entry.seq_id)].tolist()
            table = list(entry.block_table)
            assert row[FIRST_BLOCK : FIRST_BLOCK + len(table)] == table


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(30))
def test_random_runs(seed: int, num_steps_ahead: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=rng.choice([12, 16, 40]),
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=rng.choice([3, 8, 64]),
            max_model_len=MAX_BLOCKS * BLOCK_SIZE,
            eos_token_ids=(13,),
            policy=rng.choice(["mixed", "prefill_first"]),
        )
    )
    device = Device()
    in_flight: deque[tuple[StepPlan, dict[int, int]]] = deque()
    sequences = []
    for step in range(400):
        if step < 40 and rng.random() < 0.4:
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
            params = SamplingParams(temperature=rng.random() + 0.1, max_tokens=rng.randrange(1, 25))
            sequences.append(scheduler.add(prompt, params))
        if sequences and rng.random() < 0.05:
            scheduler.abort(rng.choice(sequences).seq_id)
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append((plan, device.run(plan)))
        while len(in_flight) > (0 if plan is None else num_steps_ahead):
            scheduler.commit(*in_flight.popleft())
    assert not scheduler.has_unfinished
    assert device.num_decodes > 0


def test_a_steady_decode_step_uploads_nothing() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=40, block_size=16, max_num_seqs=MAX_NUM_SEQS))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for length in (3, 5, 7):
        scheduler.add([1] * length, params)
    device = Device()
    while plan := scheduler.schedule():
        scheduler.commit(plan, device.run(plan))
    # 39 decode steps; the first names the batch, and each sequence needs two more blocks.
    assert device.num_decodes == 39
    assert device.num_uploads == 1 + 3 * 2


def test_more_state_than_can_be_addressed_is_refused_before_it_is_allocated() -> None:
    width = FIRST_BLOCK + MAX_BLOCKS
    most = (2**31 - 1 - width) // (width + 1)
    with pytest.raises(CapacityError, match=rf"max_num_seqs={most + 1} .* addressed; lower max_nu"):
        make_batch(most + 1)


def test_state_that_the_device_refuses_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(CapacityError, match=r"max_num_seqs=5 rows .* bytes; lower max_num_seqs or"):
        make_batch()
