"""StepPlan: what one step runs, as plain immutable data.

A plan is complete when it is made: whoever executes it (a model runner on any rank, a
simulator, the oracle of `nv_core.testing`) needs nothing else from the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

if TYPE_CHECKING:
    from nv_core.sequence import Sequence, WaitReason


T = TypeVar("T")


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step.

    Attributes:
        sequence: The sequence itself, for its sampling parameters; its counters move on while
            the plan is in flight.
        seq_id: Its number.
        num_computed_tokens: Tokens in the KV cache before the step; the position of the first
            token that the step computes.
        num_scheduled_tokens: Tokens that the step computes.
        samples: Whether the step reaches the sequence's last token and so yields the next one.
        num_blocks: Length of the block table.
        num_pending_tokens: Tokens of it that plans in flight were to yield when the step was
            planned: if not 0, the last token that the step computes is one of them.
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
    num_pending_tokens: int
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
        stop = start + self.num_scheduled_tokens - self.num_pending_tokens
        return tuple(self.sequence.token_ids[start:stop])

    def __repr__(self) -> str:
        return (
            f"ScheduledSequence(seq_id={self.seq_id}, "
            f"num_computed_tokens={self.num_computed_tokens}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, samples={self.samples}, "
            f"block_table={self.block_table})"
        )


# Half the time of `ScheduledSequence._make`, and a fifth of that of the constructor.
_make_entry = partial(tuple.__new__, ScheduledSequence)


@dataclass(slots=True, eq=False, repr=False)
class ScheduledBatch(Seq[ScheduledSequence]):
    """The entries of a plan, kept in columns.

    Reads as a tuple of `ScheduledSequence`, and equals one: entries are made when they are asked
    for. Whoever needs a field of all entries reads its column, in which place i belongs to entry
    i. Nothing of it changes once the plan is made, and nobody may change it: plans share columns.

    A step of thousands of sequences is thus a handful of lists. An object for each sequence and
    step would cost more than the scheduling itself: Python's garbage collector would look at all of
    them, again and again, and find them in use.

    Attributes:
        sequences: The sequences; see `ScheduledSequence`, as for all columns.
        seq_ids: Their numbers.
        num_computed_tokens: Tokens in the KV cache before the step.
        num_scheduled_tokens: Tokens that the step computes.
        samples: Whether the step yields a token.
        num_blocks: Lengths of the block tables.
        num_pending_tokens: Tokens that plans in flight were to yield.
        growing_tables: The sequences' own lists of block ids.
    """

    sequences: Seq[Sequence] = ()
    seq_ids: tuple[int, ...] = ()
    num_computed_tokens: Seq[int] = ()
    num_scheduled_tokens: Seq[int] = ()
    samples: Seq[bool] = ()
    num_blocks: Seq[int] = ()
    num_pending_tokens: Seq[int] = ()
    growing_tables: Seq[list[int]] = ()

    @classmethod
    def of(cls, entries: Iterable[ScheduledSequence]) -> ScheduledBatch:
        """Makes the columns of given entries."""
        return cls(*zip(*entries, strict=True))

    @property
    def sampled_seq_ids(self) -> tuple[int, ...]:
        """Ids of the sequences that the step yields a token for."""
        return self._where_sampled(self.seq_ids)

    @property
    def sampled_sequences(self) -> tuple[Sequence, ...]:
        """Those sequences themselves."""
        return self._where_sampled(self.sequences)

    def _where_sampled(self, column: Seq[T]) -> tuple[T, ...]:
        if self.samples.count(True) == len(column):
            return tuple(column)
        return tuple(compress(column, self.samples))

    @property
    def _columns(self) -> tuple[Seq[object], ...]:
        """In the order of an entry's fields."""
        return (
            self.sequences,
            self.seq_ids,
            self.num_computed_tokens,
            self.num_scheduled_tokens,
            self.samples,
            self.num_blocks,
            self.num_pending_tokens,
            self.growing_tables,
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return map(_make_entry, zip(*self._columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> ScheduledSequence: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ScheduledSequence, ...]: ...
    def __getitem__(self, index: int | slice) -> ScheduledSequence | tuple[ScheduledSequence, ...]:
        found = [column[index] for column in self._columns]
        if isinstance(index, slice):
            return tuple(map(_make_entry, zip(*found, strict=True)))
        return _make_entry(found)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (ScheduledBatch, tuple)):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __repr__(self) -> str:
        return repr(tuple(self))


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
    sequences: ScheduledBatch
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
    def is_decode(self) -> bool:
        """Whether there are sequences, and each computes one token and yields the next."""
        # No sequence computes less than one.
        num_seqs = len(self.sequences)
        return 0 < num_seqs == self.num_scheduled_tokens == len(self.sampled_seq_ids)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run and nothing to tell."""
        return not (self.sequences or self.preempted or self.dropped)
