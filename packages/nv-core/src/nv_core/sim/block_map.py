"""Replays the block tables of a log: which block is free, used, shared or cached, step by step.

The log tells which blocks each table has gained and which tables were given back. From that and the
rules of the core (a block is published when the step that filled it is committed, keeps its content
when it is freed, and loses it when it is handed out again) the state of the pool follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from nv_core.errors import ConfigError
from nv_core.step_log import StepLog, StepRecord


@dataclass
class Pool:
    """State of the pool after a step was planned.

    Attributes:
        tables: Block tables by `seq_id`.
        ref_counts: How many tables hold each block, [num_blocks].
        cached: Blocks, used or free, whose content can be found.
        hits: Blocks that the step's admissions found, by `seq_id`.
    """

    tables: dict[int, list[int]]
    ref_counts: list[int]
    cached: set[int]
    hits: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_used(self) -> int:
        """Blocks that tables hold."""
        return sum(count > 0 for count in self.ref_counts)

    @property
    def num_cached_free(self) -> int:
        """Free blocks whose content can be found."""
        return sum(self.ref_counts[block_id] == 0 for block_id in self.cached)


def replay_blocks(log: StepLog) -> Iterator[tuple[StepRecord, Pool]]:
    """Yields each step with the pool as it was when the step had been planned.

    Args:
        log: A log with blocks: the engine's, or one simulated with `record_blocks=True`.

    Yields:
        The step, and the pool; the same object each time, changed in place.

    Raises:
        ConfigError: The log has no blocks, or not all of them.
    """
    if log.steps and not any(step.new_blocks for step in log.steps):
        raise ConfigError("the log has no blocks; simulate with record_blocks=True")
    size = log.header.block_size
    pool = Pool({}, [0] * log.header.num_blocks, set())
    pending: deque[tuple[StepRecord, dict[int, list[int]]]] = deque()
    for step in log.steps:
        while pending and pending[0][0].done_s <= step.planned_s:
            _publish(log, pool, *pending.popleft())
        for seq_id in step.released:
            for block_id in pool.tables.pop(seq_id, ()):
                pool.ref_counts[block_id] -= 1
        pool.hits = {}
        computed = dict(zip(step.seq_ids, step.computed, strict=True))
        for seq_id, block_ids in step.new_blocks.items():
            table = pool.tables.get(seq_id)
            if table is None:
                table = pool.tables[seq_id] = []
                num_hits = computed[seq_id] // size
                if num_hits:
                    pool.hits[seq_id] = list(block_ids[:num_hits])
            else:
                num_hits = 0
            pool.cached.difference_update(block_ids[num_hits:])
            table.extend(block_ids)
            for block_id in block_ids:
                pool.ref_counts[block_id] += 1
        pending.append((step, _tables_of(step, pool, size)))
        yield step, pool


def _tables_of(step: StepRecord, pool: Pool, block_size: int) -> dict[int, list[int]]:
    """Finds the tables of a step's sequences, which must reach as far as it computes."""
    tables = {}
    for seq_id, computed, scheduled in zip(
        step.seq_ids, step.computed, step.scheduled, strict=True
    ):
        tables[seq_id] = table = pool.tables.get(seq_id, [])
        if len(table) * block_size < computed + scheduled:
            raise ConfigError(
                f"the log is damaged: in step {step.step_id}, sequence {seq_id} has "
                f"{len(table)} blocks of {block_size} for {computed + scheduled} tokens"
            )
    return tables


def _publish(log: StepLog, pool: Pool, step: StepRecord, tables: dict[int, list[int]]) -> None:
    """Publishes the blocks that a step has filled, when it is committed."""
    if not log.header.enable_prefix_caching:
        return
    size = log.header.block_size
    for seq_id, computed, scheduled in zip(
        step.seq_ids, step.computed, step.scheduled, strict=True
    ):
        # A sequence that has lost its blocks since, or that had ended before, publishes nothing.
        ended = log.requests[seq_id].finished_s
        if pool.tables.get(seq_id) is not tables[seq_id] or (
            ended is not None and ended < step.done_s
        ):
            continue
        for position in range(computed // size, (computed + scheduled) // size):
            pool.cached.add(tables[seq_id][position])
