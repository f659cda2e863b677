"""StepPlan: what one step runs, as plain immutable data.

A plan is complete when it is made: whoever executes it (a model runner on any rank, a
simulator, the oracle of `nv_core.testing`) needs nothing else from the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nv_core.sequence import Sequence, WaitReason


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step.

    A named tuple, since one is made for each sequence and step: making one takes two thirds of
    the time that an object with `__slots__` takes.

    Attributes:
        sequence: The sequence itself, for its sampling parameters; its counters move on while
            the plan is in flight.
        seq_id: Its number.
        num_computed_tokens: Tokens in the KV cache before the step; the position of the first
            token that the step computes.
        num_scheduled_tokens: Tokens that the step computes.
        samples: Whether the step reaches the sequence's last token and so yields the next one.
        num_blocks: Length of the block table.
        num_known_tokens: Tokens whose ids were known when the step was planned.
        growing_table: The sequence's own list of block ids, of which the first `num_blocks` are
            the plan's.
    """

    # The table, like the tokens, only ever grows at the end while a plan can refer to it (a
    # sequence that loses its blocks gets a new table), so a length is enough to freeze it. That
    # it is the very list which the sequence has tells, too, that it did not lose its blocks.
    sequence: Sequence
    seq_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    num_blocks: int
    num_known_tokens: int
    growing_table: list[int]

    @property
    def block_table(self) -> tuple[int, ...]:
        """Ids of the blocks that hold the sequence's keys and values, in order."""
        return tuple(self.growing_table[: self.num_blocks])

    def block_ids_from(self, position: int) -> list[int]:
        """The block table from a position on: what a reader of earlier plans does not have yet."""
        return self.growing_table[position : self.num_blocks]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the step computes, as far as they were known when it was planned.

        One is missing at the end when the sequence runs ahead of the device: that token is the
        one sampled for it by the plan before.
        """
        start = self.num_computed_tokens
        stop = min(start + self.num_scheduled_tokens, self.num_known_tokens)
        return tuple(self.sequence.token_ids[start:stop])

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
        sampled_seq_ids: Ids of the sequences that the step yields a token for, in batch order.
        preempted: Ids of the sequences that lost their blocks while it was planned.
        dropped: Sequences that the policy has ended; `Step.drop` says why it may. Whoever asked for
            them has to be told, as no later plan names them.
        released: Ids of all sequences that lost their blocks since the plan before, ended ones
            included. Whoever keeps state for a sequence drops it before the plan runs.
        refused: Ids of the unfinished sequences that the policy asked for and that got nothing,
            each with the reason. One that is neither here nor in the batch was not asked for.
        token_budget: Tokens that it might have computed.
        num_scheduled_tokens: Tokens that it computes, all sequences together.
        num_hit_tokens: Tokens that its admissions need not compute, since they were found in the
            prefix cache or with a sibling.
        num_waiting: Sequences left without blocks.
        num_running: Sequences that hold blocks.
        num_used_blocks: Blocks that sequences hold.
        num_free_blocks: Blocks left free, those with cached content included.
        num_cached_blocks: Blocks, used or free, whose content a later request can find.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    sampled_seq_ids: tuple[int, ...]
    preempted: tuple[int, ...]
    dropped: tuple[Sequence, ...]
    released: tuple[int, ...]
    refused: tuple[tuple[int, WaitReason], ...]
    token_budget: int
    num_scheduled_tokens: int
    num_hit_tokens: int
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run and nothing to tell."""
        return not (self.sequences or self.preempted or self.dropped)
