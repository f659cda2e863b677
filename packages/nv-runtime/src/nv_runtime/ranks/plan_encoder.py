"""PlanEncoder: what the other ranks must be told of a plan.

It remembers what they know already: which sequences they have, how far those are computed, how long
their tables are, and the last batch. Tokens that the ranks sample are never sent: every rank learns
them by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from nv_core import ScheduledSequence, StepPlan
from nv_runtime.ranks.values import pack_value
from nv_runtime.ranks.wire import EntryChange, NewSequence, StepMessage


@dataclass
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
        self._batch: list[int] = []

    def forget(self) -> None:
        """Assumes again that the ranks know no sequence."""
        self._known.clear()
        self._batch = []

    def encode(self, plan: StepPlan, *, num_collected: int) -> StepMessage:
        """Says what is new in a plan.

        Args:
            plan: The next plan that the ranks will run.
            num_collected: Steps that were collected and committed since the last call.
        """
        for seq_id in plan.released:
            self._known.pop(seq_id, None)
        batch = [entry.seq_id for entry in plan.sequences]
        num_kept = self._num_kept(plan, batch)
        self._batch = batch
        new: list[NewSequence] = []
        for entry in plan.sequences[num_kept:]:
            if entry.seq_id not in self._known:
                new.append(_describe(entry))
                self._known[entry.seq_id] = _Known(entry.num_computed_tokens)
        changes = []
        for index, entry in enumerate(plan.sequences):
            change = self._change(index, entry)
            if change is not None:
                changes.append(change)
        return StepMessage(
            step_id=plan.step_id,
            num_collected=num_collected,
            continues=num_kept > 0,
            released=plan.released,
            joining=tuple(batch[num_kept:]),
            new=tuple(new),
            changes=tuple(changes),
        )

    def _num_kept(self, plan: StepPlan, batch: list[int]) -> int:
        """Counts the entries taken over from the last batch: all that are left, or 0."""
        kept = self._batch
        if plan.released:
            gone = set(plan.released)
            kept = [seq_id for seq_id in kept if seq_id not in gone]
        return len(kept) if batch[: len(kept)] == kept else 0

    def _change(self, index: int, entry: ScheduledSequence) -> EntryChange | None:
        known = self._known[entry.seq_id]
        first, count = entry.num_computed_tokens, entry.num_scheduled_tokens
        is_foreseen = first == known.num_computed_tokens and count == 1 and entry.samples
        num_blocks, known.num_blocks = known.num_blocks, entry.num_blocks
        known.num_computed_tokens = first + count
        if is_foreseen and entry.num_blocks == num_blocks:
            return None
        return EntryChange(index, first, count, entry.samples, entry.block_ids_from(num_blocks))


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
