"""The tensors of a step against the plain definition of each."""

from __future__ import annotations

import torch

from nv_core import SamplingParams, Scheduler, SchedulerConfig, StepPlan
from nv_runtime.input_builder import StepLayout, layout_of, pack_step

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
    exact = layout_of(plan)
    padded = StepLayout(exact.num_tokens + 3, exact.num_seqs + 2, exact.num_blocks + 4)
    for layout in (exact, padded):
        check_layout(plan, layout)


def check_layout(plan: StepPlan, layout: StepLayout) -> None:
    packed = pack_step(plan, layout, block_size=BLOCK_SIZE)
    made = layout.unpack(
        packed.values,
        num_samples=packed.num_samples,
        max_query_len=packed.max_query_len,
        max_context_len=packed.max_context_len,
    )
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    ends = [0]
    for entry in plan.sequences:
        tokens += entry.token_ids
        first = entry.num_computed_tokens
        for position in range(first, first + entry.num_scheduled_tokens):
            positions.append(position)
            block = entry.block_table[position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        ends.append(len(positions))
        if entry.samples:
            rows.append(len(positions) - 1)
    num_padding = layout.num_tokens - len(tokens)
    metadata = made.metadata
    start = packed.values.data_ptr()
    parts = (metadata.cu_seqlens_q, metadata.context_lens, metadata.block_table)
    for part in (*parts, metadata.slot_mapping):
        assert (part.data_ptr() - start) % 16 == 0
    assert made.token_ids.tolist() == tokens + [0] * num_padding
    assert made.positions.tolist() == positions + [0] * num_padding
    assert made.sample_rows.tolist() == rows
    assert metadata.slot_mapping.tolist() == slots + [-1] * num_padding
    num_padding = layout.num_seqs - len(plan.sequences)
    assert metadata.cu_seqlens_q.tolist() == ends + [ends[-1]] * num_padding
    lengths = [e.num_computed_tokens + e.num_scheduled_tokens for e in plan.sequences]
    assert metadata.context_lens.tolist() == lengths + [0] * num_padding
    assert metadata.max_context_len == max(lengths)
    assert metadata.max_query_len == max(e.num_scheduled_tokens for e in plan.sequences)
    tables = [list(entry.block_table) for entry in plan.sequences] + [[]] * num_padding
    for row, table in zip(metadata.block_table.tolist(), tables, strict=True):
        assert row == table + [-1] * (layout.num_blocks - len(table))
    assert packed.unknown_tokens == {}


def test_every_step_of_a_run_with_chunks_hits_and_decodes() -> None:
    plans = plans_of_a_mixed_run()
    kinds = {(e.num_scheduled_tokens > 1, e.samples) for p in plans for e in p.sequences}
    assert kinds >= {(True, True), (True, False), (False, True)}
    assert any(len({e.num_scheduled_tokens for e in p.sequences}) > 1 for p in plans)


def test_a_token_that_only_the_device_knows_is_named() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=40, block_size=BLOCK_SIZE, max_num_batched_tokens=10)
    )
    first = scheduler.add([1, 2, 3], SamplingParams(max_tokens=5))
    assert scheduler.schedule() is not None
    scheduler.add([4, 5], SamplingParams(max_tokens=5))
    plan = scheduler.schedule()
    assert plan is not None
    layout = layout_of(plan)
    packed = pack_step(plan, layout, block_size=BLOCK_SIZE)
    assert packed.unknown_tokens == {first.seq_id: 0}
    assert torch.split(packed.values, list(layout.sizes))[0].tolist()[:3] == [0, 4, 5]
