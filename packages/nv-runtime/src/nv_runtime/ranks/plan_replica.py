"""PlanReplica: the plans of rank 0, rebuilt on another rank from what is new in them.

It keeps a copy of every resident sequence, as far as a runner reads it: tokens, block table and
parameters. Outputs are added by this rank's own runner, which samples what every rank samples.
"""

from __future__ import annotations

from typing import Any, cast

from nv_core import SamplingParams, ScheduledBatch, StepPlan
from nv_core.block_hash import BlockKeys, default_block_hasher
from nv_core.sequence import NEVER, Sequence
from nv_runtime.ranks.errors import ProtocolError
from nv_runtime.ranks.values import unpack_value
from nv_runtime.ranks.wire import NewSequence, StepMessage


class PlanReplica:
    """The sequences that rank 0 has resident, on another rank."""

    def __init__(self) -> None:
        """Knows no sequence."""
        self._sequences: dict[int, Sequence] = {}
        self._batch: list[int] = []

    def forget(self) -> None:
        """Forgets every sequence."""
        self._sequences.clear()
        self._batch = []

    def append_tokens(self, token_ids: dict[int, int]) -> None:
        """Adds what a collected step has sampled.

        Args:
            token_ids: Token by `seq_id`; sequences that are gone are passed over.
        """
        for seq_id, token_id in token_ids.items():
            seq = self._sequences.get(seq_id)
            if seq is not None:
                seq.token_ids.append(token_id)

    def follow(self, message: StepMessage) -> StepPlan:
        """Rebuilds a plan.

        Args:
            message: What is new in it. The tokens of the steps that it says are collected must have
                been added.

        Returns:
            The plan as a runner sees it: what only the scheduler's statistics need is 0.

        Raises:
            ProtocolError: The message does not fit what came before it.
        """
        gone = set(message.released)
        for seq_id in gone:
            self._sequences.pop(seq_id, None)
        kept = [seq_id for seq_id in self._batch if seq_id not in gone] if message.continues else []
        self._batch = [*kept, *message.joining]
        for new in message.new:
            self._sequences[new.seq_id] = _make_sequence(new)
        batch = self._apply(message)
        return StepPlan(
            step_id=message.step_id,
            sequences=batch,
            sampled_seq_ids=batch.sampled_seq_ids,
            preempted=(),
            dropped=(),
            refused=(),
            released=message.released,
            token_budget=0,
            num_scheduled_tokens=sum(batch.num_scheduled_tokens),
            num_hit_tokens=0,
            num_waiting=0,
            num_running=len(self._sequences),
            num_used_blocks=0,
            num_free_blocks=0,
            num_cached_blocks=0,
        )

    def _apply(self, message: StepMessage) -> ScheduledBatch:
        """Advances the sequences of the batch by one decode each, or as the message says."""
        beyond = [change.place for change in message.changes if change.place >= len(self._batch)]
        if beyond:
            raise ProtocolError(
                f"step {message.step_id} changes entries {beyond} of a batch of {len(self._batch)}"
            )
        sequences = [self._sequence(seq_id) for seq_id in self._batch]
        starts = [seq.num_computed_tokens for seq in sequences]
        counts, samples = [1] * len(sequences), [True] * len(sequences)
        for change in message.changes:
            place = change.place
            starts[place] = change.num_computed_tokens
            counts[place] = change.num_scheduled_tokens
            samples[place] = change.samples
            sequences[place].block_table += change.block_ids
        pending = []
        for seq, start, count in zip(sequences, starts, counts, strict=True):
            seq.num_computed_tokens = start + count
            pending.append(max(0, start + count - len(seq.token_ids)))
        tables = [seq.block_table for seq in sequences]
        return ScheduledBatch(
            sequences,
            tuple(self._batch),
            starts,
            counts,
            samples,
            num_blocks=list(map(len, tables)),
            num_pending_tokens=pending,
            growing_tables=tables,
        )

    def _sequence(self, seq_id: int) -> Sequence:
        seq = self._sequences.get(seq_id)
        if seq is None:
            raise ProtocolError(f"a step names sequence {seq_id}, which this rank does not have")
        return seq


def _make_sequence(new: NewSequence) -> Sequence:
    params = unpack_value(new.sampling_params)
    if not isinstance(params, dict):
        raise ProtocolError(f"sampling parameters are a dict, got {type(params).__name__}")
    seq = Sequence(
        new.seq_id,
        new.token_ids,
        SamplingParams(**cast("dict[str, Any]", params)),
        request_id=str(new.seq_id),
        # Only the scheduler reads keys and limits; no rank but the first has one.
        keys=BlockKeys(1, default_block_hasher),
        stop_token_ids=frozenset(new.stop_token_ids),
        max_total_tokens=NEVER,
    )
    seq.num_prompt_tokens = new.num_prompt_tokens
    seq.num_computed_tokens = new.num_computed_tokens
    return seq
