"""StepPlan: what one step runs, as plain immutable data.

A plan is complete when it is made: whoever executes it (a model runner on any rank, a
simulator, the oracle of `nv_core.testing`) needs nothing else from the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nv_core.sequence import Sequence


class ScheduledSequence:
    """One sequence's share of a step.

    Attributes:
        seq_id: The sequence.
        sequence: The sequence itself, for its sampling parameters; its counters move on while
            the plan is in flight.
        num_computed_tokens: Tokens in the KV cache before the step; the position of the first
            token that the step computes.
        num_scheduled_tokens: Tokens that the step computes.
        samples: Whether the step reaches the sequence's last token and so yields the next one.
    """

    __slots__ = (
        "_num_blocks",
        "_num_known_tokens",
        "_residence",
        "_table",
        "_token_ids",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "samples",
        "seq_id",
        "sequence",
    )

    def __init__(self, sequence: Sequence, num_scheduled_tokens: int, *, samples: bool) -> None:
        """Records a grant; the sequence's counters must still be those before the step."""
        self.sequence = sequence
        self.seq_id = sequence.seq_id
        self.num_computed_tokens = sequence.num_computed_tokens
        self.num_scheduled_tokens = num_scheduled_tokens
        self.samples = samples
        # Both lists only ever grow at the end while a plan can refer to them (a sequence that
        # loses its blocks gets a new table), so a length is enough to freeze their content.
        self._table = sequence.block_table
        self._num_blocks = len(sequence.block_table)
        self._token_ids = sequence.token_ids
        self._num_known_tokens = len(sequence.token_ids)
        self._residence = sequence._residence

    @property
    def block_table(self) -> tuple[int, ...]:
        """Ids of the blocks that hold the sequence's keys and values, in order."""
        return tuple(self._table[: self._num_blocks])

    @property
    def num_blocks(self) -> int:
        """Length of the block table."""
        return self._num_blocks

    def block_ids_from(self, position: int) -> list[int]:
        """The block table from a position on: what a reader of earlier plans does not have yet."""
        return self._table[position : self._num_blocks]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the step computes, as far as they were known when it was planned.

        One is missing at the end when the sequence runs ahead of the device: that token is the
        one sampled for it by the plan before.
        """
        start = self.num_computed_tokens
        stop = min(start + self.num_scheduled_tokens, self._num_known_tokens)
        return tuple(self._token_ids[start:stop])

    def __repr__(self) -> str:
        return (
            f"ScheduledSequence(seq_id={self.seq_id}, "
            f"num_computed_tokens={self.num_computed_tokens}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, samples={self.samples}, "
            f"block_table={self.block_table})"
        )


@dataclass(frozen=True)
class StepPlan:
    """What one step runs.

    Attributes:
        step_id: Number of the step, from 0.
        sequences: The batch, in the order in which the policy granted it. Empty when planning
            only took blocks away: there is nothing to run, but the plan is committed all the same.
        preempted: Ids of the sequences that lost their blocks while it was planned.
        released: Ids of all sequences that lost their blocks since the plan before, ended ones
            included. Whoever keeps state for a sequence drops it before the plan runs.
        num_scheduled_tokens: Tokens that the step computes, all sequences together.
        num_waiting: Sequences left without blocks.
        num_running: Sequences that hold blocks.
        num_free_blocks: Blocks left free.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[int, ...]
    released: tuple[int, ...]
    num_scheduled_tokens: int
    num_waiting: int
    num_running: int
    num_free_blocks: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run and nothing to tell."""
        return not self.sequences and not self.preempted
