"""Step: what a policy sees of the scheduler, and the two verbs by which it acts.

A policy decides who runs, in which order, how many tokens each, and who loses its blocks. The
step owns correctness: whatever a policy asks for is clamped to the token budget, the slots and
the free blocks, and refused with a reason when nothing is left. A policy can be unfair; it
cannot corrupt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from operator import index

from nv_core.block_manager import BlockManager, CachedPrefix
from nv_core.errors import SchedulingError
from nv_core.plan import ScheduledSequence, StepPlan
from nv_core.prefix_cache_stats import PrefixCacheStats
from nv_core.sequence import NEVER, Sequence, SequenceStatus, WaitReason


class WaitingQueue:
    """Sequences without blocks: the preempted ones first, then by arrival.

    Every operation is O(1). Two insertion-ordered dicts serve as one double-ended queue from
    whose middle a sequence can be taken: preempted sequences go to the front, and are therefore
    kept in reverse.
    """

    def __init__(self) -> None:
        """Makes an empty queue."""
        self._preempted: dict[int, Sequence] = {}
        self._arrived: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrived)

    def __bool__(self) -> bool:
        return bool(self._preempted) or bool(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        yield from reversed(self._preempted.values())
        yield from self._arrived.values()

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and (
            seq.seq_id in self._preempted or seq.seq_id in self._arrived
        )

    def first(self) -> Sequence | None:
        """The sequence at the front, or None."""
        return next(iter(self), None)

    def append(self, seq: Sequence) -> None:
        """Adds an arrival at the back."""
        self._arrived[seq.seq_id] = seq

    def append_front(self, seq: Sequence) -> None:
        """Adds a preempted sequence at the front."""
        self._preempted[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it stands.

        Raises:
            SchedulingError: It is not in the queue.
        """
        if not (self._preempted.pop(seq.seq_id, None) or self._arrived.pop(seq.seq_id, None)):
            raise SchedulingError(f"sequence {seq.seq_id} is not in this scheduler's queue")


class Step:
    """One step in the making.

    Attributes:
        step_id: Number of the step.
        waiting: Sequences without blocks, in queue order; read it, and change it by `take` and
            `preempt` only.
        budget: Tokens that may still be granted.
        slots: Sequences that may still be admitted.
        prefix_cache_stats: What the prefix cache has saved so far.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
    ) -> None:
        """Makes a step builder; the scheduler calls `begin` before each step.

        Args:
            blocks: The pool.
            max_num_seqs: Most sequences that may hold blocks at once.
            max_num_batched_tokens: Token budget of each step.
            enable_prefix_caching: Whether admissions look for cached blocks.
        """
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._running: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        self._grants: dict[int, ScheduledSequence] = {}
        self._admitted: list[Sequence] = []
        self._preempted: list[int] = []
        self._released: list[int] = []
        self.step_id = -1
        self.prefix_cache_stats = PrefixCacheStats()
        self.waiting = WaitingQueue()
        self.budget = 0
        self.slots = max_num_seqs

    def begin(self, step_id: int) -> None:
        """Starts a new step; for the scheduler."""
        self.step_id = step_id
        self._grants = {}
        self._admitted = []
        self.budget = self._max_num_batched_tokens

    def finish(self) -> StepPlan:
        """Ends the step and returns what was granted; for the scheduler."""
        sampled: Iterable[int] = self._grants
        if self._prefilling:
            sampled = [entry.seq_id for entry in self._grants.values() if entry.samples]
        plan = StepPlan(
            step_id=self.step_id,
            sequences=tuple(self._grants.values()),
            sampled_seq_ids=tuple(sampled),
            preempted=tuple(self._preempted),
            released=tuple(self._released),
            num_scheduled_tokens=self._max_num_batched_tokens - self.budget,
            num_waiting=len(self.waiting),
            num_running=len(self._running),
            num_free_blocks=self._blocks.num_free_blocks,
        )
        if not plan.is_empty:
            self._preempted = []
            self._released = []
        return plan

    def cancel(self) -> None:
        """Takes back what was granted; for the scheduler.

        Sequences that the step admitted wait again, at the front; those that it preempted stay
        preempted, and the next plan names them.
        """
        for grant in self._grants.values():
            seq = grant.sequence
            seq.num_computed_tokens = grant.num_computed_tokens
            seq.num_pending_tokens -= grant.samples
            seq._step = -1
            self._note_progress(seq)
        for seq in reversed(self._admitted):
            if seq.seq_id in self._grants:
                self.vacate(seq)
                # No plan has named it, so nobody holds state for it.
                self._released.pop()
                seq.status = SequenceStatus.WAITING
                seq.wait_reason = WaitReason.NOT_CONSIDERED
                self.waiting.append_front(seq)

    @property
    def running(self) -> Collection[Sequence]:
        """Sequences that hold blocks, in admission order.

        Take a copy (`list(step.running)`) before a loop that takes or preempts: a plain loop
        over it must not change it.
        """
        return self._running.values()

    @property
    def prefilling(self) -> list[Sequence]:
        """Running sequences with prompt tokens left to compute, in admission order (a copy)."""
        if not self._prefilling:
            return []
        return [seq for seq in self._running.values() if seq.seq_id in self._prefilling]

    @property
    def decoding(self) -> list[Sequence]:
        """All other running sequences, in admission order (a copy)."""
        if not self._prefilling:
            return list(self._running.values())
        return [seq for seq in self._running.values() if seq.seq_id not in self._prefilling]

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return self._blocks.num_free_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._blocks.block_size

    @property
    def num_blocks(self) -> int:
        """Size of the pool, in blocks."""
        return self._blocks.num_blocks

    @property
    def has_grants(self) -> bool:
        """Whether the step runs anything so far."""
        return bool(self._grants)

    @property
    def preempted(self) -> Collection[int]:
        """Ids of the sequences preempted since the last plan."""
        return self._preempted

    def uncached_tokens(self, seq: Sequence) -> int:
        """Tokens of a sequence that a step would have to compute, prefix hits taken off."""
        if seq.status is SequenceStatus.RUNNING:
            return seq.num_uncomputed_tokens
        return len(seq.token_ids) - len(self._match(seq)) * self._blocks.block_size

    def take(
        self,
        seq: Sequence,
        n: int | None = None,
        *,
        reserve: int = 0,
        exceed_budget: bool = False,
    ) -> int:
        """Grants a sequence tokens in this step.

        A waiting sequence is admitted: its prefix is looked up in the cache, and the rest of
        its tokens counted from there. The grant is clamped to the tokens that there are to
        compute, the token budget, the free slots and the free blocks.

        Args:
            seq: A sequence of this scheduler. One that is finished, has a grant in this step
                or was preempted in it is refused.
            n: Most tokens to grant; None for as many as possible.
            reserve: A length in tokens; an admission gets blocks for at least this length or is
                refused. `len(seq.token_ids)` admits only prompts that fit as a whole.
            exceed_budget: Whether a decoding sequence gets its one token even when the budget is
                used up.

        Returns:
            The number of tokens granted; 0 means refused, and the sequence's `wait_reason`
            says why.

        Raises:
            TypeError: `n` or `reserve` is no integer; nothing is changed.
        """
        if seq._step == self.step_id:
            return 0
        if seq.status is SequenceStatus.RUNNING:
            return self._take_running(seq, n, exceed_budget)
        if seq.status is SequenceStatus.WAITING:
            return self._admit(seq, n, reserve)
        return 0

    def take_all(
        self, sequences: Iterable[Sequence], *, exceed_budget: bool = False
    ) -> list[Sequence]:
        """Grants running sequences all their tokens, up to the first that lacks a block.

        The same as `take` for each of them in turn, and there for speed: a decode that needs
        nothing special costs 0.4 us here and 1.2 us through `take`, and nearly all are of that
        kind.

        Args:
            sequences: Sequences of this scheduler; a copy, not a view of its queues.
            exceed_budget: See `take`.

        Returns:
            The sequences that are not dealt with, in order; empty if none lacked a block. The
            first of them was refused for `WaitReason.BLOCKS`, the others were not looked at.
            Those that were refused for other reasons are passed over.
        """
        make_tuple, step_id, grants = tuple.__new__, self.step_id, self._grants
        block_size, budget = self._blocks.block_size, self.budget
        remaining = iter(sequences)
        for seq in remaining:
            computed = seq.num_computed_tokens
            pending = seq.num_pending_tokens
            num_known = len(seq.token_ids)
            total = num_known + pending
            table = seq.block_table
            if (
                total - computed != 1
                or total >= seq.max_total_tokens
                or seq._step == step_id
                or budget <= 0
                or (computed >= len(table) * block_size and not self._append_block(table))
            ):
                self.budget = budget
                granted = self.take(seq, exceed_budget=exceed_budget)
                if not granted and seq.wait_reason is WaitReason.BLOCKS:
                    return [seq, *remaining]
                budget = self.budget
                continue
            seq_id = seq.seq_id
            grants[seq_id] = make_tuple(
                ScheduledSequence, (seq, seq_id, computed, 1, True, len(table), num_known, table)
            )
            seq.num_computed_tokens = total
            seq.num_pending_tokens = pending + 1
            seq._step = step_id
            seq.wait_reason = None
            budget -= 1
        self.budget = budget
        return []

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks away and puts it at the front of the queue.

        Its tokens stay, and what the prefix cache still holds when it comes back need not be
        computed again. A grant of this step is taken back; a token that a plan in flight will
        yield for it remains its next token.

        Raises:
            SchedulingError: The sequence holds no blocks.
        """
        if seq.status is not SequenceStatus.RUNNING:
            raise SchedulingError(f"sequence {seq.seq_id} cannot be preempted: it is not running")
        grant = self._grants.pop(seq.seq_id, None)
        if grant is not None:
            self.budget += grant.num_scheduled_tokens
            seq.num_pending_tokens -= grant.samples
        self.vacate(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        # It may not come back in the step that evicted it.
        seq._step = self.step_id
        seq.wait_reason = WaitReason.PREEMPTED
        self.waiting.append_front(seq)
        self._preempted.append(seq.seq_id)

    def _take_running(
        self,
        seq: Sequence,
        n: int | None,
        exceed_budget: bool,  # noqa: FBT001 - hot path
    ) -> int:
        computed = seq.num_computed_tokens
        total = len(seq.token_ids) + seq.num_pending_tokens
        if total >= seq.max_total_tokens and seq.num_pending_tokens:
            # The token in flight is its last: there is nothing left to compute.
            return self._refuse(seq, WaitReason.IN_FLIGHT)
        count = total - computed
        if n is not None and index(n) < count:
            count = index(n)
            if count <= 0:
                return self._refuse(seq, WaitReason.POLICY)
        if count > self.budget and not (exceed_budget and not seq.is_prefilling):
            count = self.budget
            if count <= 0:
                return self._refuse(seq, WaitReason.BUDGET)
        table = seq.block_table
        blocks = self._blocks
        capacity = len(table) * blocks.block_size
        if computed + count > capacity:
            room = capacity + blocks.num_free_blocks * blocks.block_size - computed
            if room <= 0:
                return self._refuse(seq, WaitReason.BLOCKS)
            count = min(count, room)
            table.extend(blocks.allocate(-(-(computed + count - capacity) // blocks.block_size)))
        return self._grant(seq, count, computed + count == total)

    def _admit(self, seq: Sequence, n: int | None, reserve: int) -> int:
        reserve = index(reserve)
        if n is not None and index(n) <= 0:
            return self._refuse(seq, WaitReason.POLICY)
        if seq.num_pending_tokens:
            # Its last token is still on the device, and its row there is gone.
            return self._refuse(seq, WaitReason.IN_FLIGHT)
        if self.slots <= 0:
            return self._refuse(seq, WaitReason.SLOTS)
        if self.budget <= 0:
            return self._refuse(seq, WaitReason.BUDGET)
        blocks = self._blocks
        block_size = blocks.block_size
        hits = self._match(seq)
        computed = len(hits) * block_size
        total = len(seq.token_ids)
        count = min(total - computed, self.budget)
        if n is not None:
            count = min(count, index(n))
        # All hits may be free blocks, and counting them takes longer than to assume it.
        room = (blocks.num_free_blocks - len(hits)) * block_size
        if room < max(count, reserve - computed):
            room = (blocks.num_free_blocks - blocks.num_blocks_taken_by(hits)) * block_size
        if room <= 0 or room < reserve - computed:
            return self._refuse(seq, WaitReason.BLOCKS)
        count = min(count, room)
        length = max(computed + count, reserve)
        self.waiting.remove(seq)
        table = blocks.acquire(hits)
        table.extend(blocks.allocate(-(-(length - computed) // block_size)))
        seq.block_table = table
        seq.prefixes = hits
        seq.num_computed_tokens = computed
        seq.num_prefill_tokens = total
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = computed
        if not seq._hits_counted:
            self._count_hits(seq, computed)
        seq._publishes = self._enable_prefix_caching
        seq._publish_at = computed + block_size if seq._publishes else NEVER
        seq.status = SequenceStatus.RUNNING
        self._running[seq.seq_id] = seq
        self._admitted.append(seq)
        self.slots -= 1
        return self._grant(seq, count, computed + count == total)

    def _grant(self, seq: Sequence, count: int, samples: bool) -> int:  # noqa: FBT001 - hot path
        self._grants[seq.seq_id] = ScheduledSequence(
            seq,
            seq.seq_id,
            seq.num_computed_tokens,
            count,
            samples,
            num_blocks=len(seq.block_table),
            num_known_tokens=len(seq.token_ids),
            growing_table=seq.block_table,
        )
        seq.num_computed_tokens += count
        self._note_progress(seq)
        seq.num_pending_tokens += samples
        seq._step = self.step_id
        seq.wait_reason = None
        self.budget -= count
        return count

    def _append_block(self, table: list[int]) -> bool:
        """Appends a block to a running sequence's table, if there is one."""
        if not table or not self._blocks.num_free_blocks:
            return False
        table += self._blocks.allocate(1)
        return True

    def _note_progress(self, seq: Sequence) -> None:
        if seq.is_prefilling:
            self._prefilling[seq.seq_id] = seq
        else:
            self._prefilling.pop(seq.seq_id, None)

    def _refuse(self, seq: Sequence, reason: WaitReason) -> int:
        seq.wait_reason = reason
        seq._refused_in_step = self.step_id
        return 0

    def _max_hits(self, seq: Sequence) -> int:
        # The last token is computed even if a block holds it: its logits are needed.
        return (len(seq.token_ids) - 1) // self._blocks.block_size

    def _match(self, seq: Sequence) -> list[CachedPrefix]:
        if not self._enable_prefix_caching:
            return []
        # Outputs that came after it had lost its blocks have no keys yet.
        seq.keys.extend(seq.token_ids)
        return self._blocks.match(seq.keys, self._max_hits(seq))

    def _count_hits(self, seq: Sequence, num_hit_tokens: int) -> None:
        seq._hits_counted = True
        if self._enable_prefix_caching:
            self.prefix_cache_stats = self.prefix_cache_stats.with_request(
                len(seq.token_ids),
                num_cacheable_tokens=self._max_hits(seq) * self._blocks.block_size,
                num_hit_tokens=num_hit_tokens,
            )

    def vacate(self, seq: Sequence) -> None:
        """Takes a running sequence out of the batch and its blocks back; for the scheduler."""
        del self._running[seq.seq_id]
        self._prefilling.pop(seq.seq_id, None)
        self._released.append(seq.seq_id)
        self._blocks.release(seq.block_table)
        # A new list, since plans in flight still refer to the old one.
        seq.block_table = []
        seq.prefixes = []
        seq.num_computed_tokens = 0
        seq.num_prefill_tokens = 0
        seq._publish_at = NEVER
        self.slots += 1
