"""PlanEncoder: what the other ranks must be told of a plan.

It remembers what they know already: which sequences they have, how far those are computed, how long
their tables are, and the last batch. Tokens that the ranks sample are never sent: every rank learns
them by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from nv_core import ScheduledBatch, ScheduledSequence, StepPlan
from nv_runtime.ranks.values import pack_value
from nv_runtime.ranks.wire import EntryChange, NewSequence, StepMessage


@dataclass(slots=True)
class _Known:
    """What the ranks know of one sequence.

    Attributes:
        num_computed_tokens: Where its next entry will begin.
        num_blocks: Length of its block table.
    """

    num_computed_tokens: int
    num_blocks: int = 0


class PlanEncoder:
    """Turns plans into messages, each relative to the one before."""

    def __init__(self) -> None:
        """Assumes ranks that know no sequence."""
        self._known: dict[int, _Known] = {}
        self._batch: tuple[int, ...] = ()

    def forget(self) -> None:
        """Assumes again that the ranks know no sequence."""
        self._known.clear()
        self._batch = ()

    def encode(self, plan: StepPlan, *, num_collected: int) -> StepMessage:
        """Says what is new in a plan.

        Args:
            plan: The next plan that the ranks will run.
            num_collected: Steps that were collected and committed since the last call.
        """
        for seq_id in plan.released:
            self._known.pop(seq_id, None)
        seq_ids = plan.sequences.seq_ids
        num_kept = self._num_kept(plan, seq_ids)
        self._batch = seq_ids
        new: list[NewSequence] = []
        for place in range(num_kept, len(seq_ids)):
            if seq_ids[place] not in self._known:
                entry = plan.sequences[place]
                new.append(_describe(entry))
                self._known[entry.seq_id] = _Known(entry.num_computed_tokens)
        return StepMessage(
            step_id=plan.step_id,
            num_collected=num_collected,
            continues=num_kept > 0,
            released=plan.released,
            joining=seq_ids[num_kept:],
            new=tuple(new),
            changes=tuple(self._changes(plan.sequences)),
        )

    def _num_kept(self, plan: StepPlan, seq_ids: tuple[int, ...]) -> int:
        """Counts the entries taken over from the last batch: all that are left, or 0."""
        kept = self._batch
        if plan.released:
            gone = set(plan.released)
            kept = tuple([seq_id for seq_id in kept if seq_id not in gone])
        return len(kept) if seq_ids[: len(kept)] == kept else 0

    def _changes(self, batch: ScheduledBatch) -> Iterator[EntryChange]:
        """Finds what the ranks cannot foresee, and notes that they know it from now on."""
        for place, seq_id, first, count, samples, num_blocks in zip(
            range(len(batch)),
            batch.seq_ids,
            batch.num_computed_tokens,
            batch.num_scheduled_tokens,
            batch.samples,
            batch.num_blocks,
            strict=True,
        ):
            known = self._known[seq_id]
            is_foreseen = first == known.num_computed_tokens and count == 1 and samples
            if not is_foreseen or num_blocks != known.num_blocks:
                block_ids = batch.growing_tables[place][known.num_blocks : num_blocks]
                yield EntryChange(place, first, count, samples, block_ids)
                known.num_blocks = num_blocks
            known.num_computed_tokens = first + count


_FOR_THE_CALLER = ("output_kind", "extra_args", "stop")
"""Sampling parameters that no step depends on; not all of them are plain data."""


def _describe(entry: ScheduledSequence) -> NewSequence:
    seq = entry.sequence
    params = seq.sampling_params
    return NewSequence(
        seq_id=entry.seq_id,
        num_computed_tokens=entry.num_computed_tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        token_ids=list(seq.token_ids),
        stop_token_ids=sorted(seq.stop_token_ids),
        sampling_params=pack_value(
            {
                field.name: getattr(params, field.name)
                for field in fields(params)
                if field.name not in _FOR_THE_CALLER
                and getattr(params, field.name) != field.default
            }
        ),
    )
