"""The tensors of a step against the plain definition of each."""

from __future__ import annotations

import torch

from nv_core import SamplingParams, Scheduler, SchedulerConfig, StepPlan
from nv_runtime.input_builder import build_model_input

BLOCK_SIZE = 4


def plans_of_a_mixed_run() -> list[StepPlan]:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=40, block_size=BLOCK_SIZE, max_num_batched_tokens=10)
    )
    params = SamplingParams(max_tokens=6)
    scheduler.add(range(100, 105), params)
    scheduler.add(range(200, 223), params)
    scheduler.add(range(100, 109), params)
    plans = []
    while plan := scheduler.schedule():
        plans.append(plan)
        check(plan)
        scheduler.commit(plan, {e.seq_id: 7 for e in plan.sequences if e.samples})
    return plans


def check(plan: StepPlan) -> None:
    made = build_model_input(plan, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    ends = [0]
    for entry in plan.sequences:
        tokens += entry.token_ids
        for position in range(
            entry.num_computed_tokens, entry.num_computed_tokens + entry.num_scheduled_tokens
        ):
            positions.append(position)
            block = entry.block_table[position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        ends.append(len(positions))
        if entry.samples:
            rows.append(len(positions) - 1)
    metadata = made.metadata
    assert made.token_ids.tolist() == tokens
    assert made.positions.tolist() == positions
    assert made.sample_rows.tolist() == rows
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.cu_seqlens_q.tolist() == ends
    lengths = [e.num_computed_tokens + e.num_scheduled_tokens for e in plan.sequences]
    assert metadata.context_lens.tolist() == lengths
    assert metadata.max_context_len == max(lengths)
    assert metadata.max_query_len == max(e.num_scheduled_tokens for e in plan.sequences)
    for row, entry in zip(metadata.block_table.tolist(), plan.sequences, strict=True):
        table = list(entry.block_table)
        assert row == table + [-1] * (len(row) - len(table))


def test_every_step_of_a_run_with_chunks_hits_and_decodes() -> None:
    plans = plans_of_a_mixed_run()
    kinds = {(e.num_scheduled_tokens > 1, e.samples) for p in plans for e in p.sequences}
    assert kinds >= {(True, True), (True, False), (False, True)}
    assert any(len({e.num_scheduled_tokens for e in p.sequences}) > 1 for p in plans)
