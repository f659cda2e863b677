"""Step: what a policy sees of the scheduler, and the verbs by which it acts.

The verbs are `take` (and `take_all`, for speed), `preempt` and `drop`.

A policy decides who runs, in which order, how many tokens each, and who loses its blocks. The
step owns correctness: whatever a policy asks for is clamped to the token budget, the slots and
the free blocks, and refused with a reason when nothing is left. A policy can be unfair; it
cannot corrupt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import compress, islice
from operator import index

from nv_core.block_manager import BlockManager, CachedPrefix
from nv_core.errors import SchedulingError
from nv_core.plan import ScheduledBatch, StepPlan
from nv_core.prefix_cache_stats import PrefixCacheStats
from nv_core.sequence import NEVER, FinishReason, Sequence, SequenceStatus, WaitReason


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
        if not isinstance(seq, Sequence):
            return False
        # Another scheduler has sequences of the same numbers.
        return seq in (self._preempted.get(seq.seq_id), self._arrived.get(seq.seq_id))

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
        for queue in (self._preempted, self._arrived):
            if queue.get(seq.seq_id) is seq:
                del queue[seq.seq_id]
                return
        raise SchedulingError(f"sequence {seq.seq_id} is not in this scheduler's queue")


_DECODE = (1, True)
"""What most grants are: one token, which yields the next."""


class Step:
    """One step in the making.

    Attributes:
        step_id: Number of the step.
        waiting: Sequences without blocks, in queue order; read it, and change it by the step's
            verbs only.
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
        # The grants, in order: whose, and its computed and pending tokens before. How many tokens,
        # and whether they yield the next, is said of those that are no `_DECODE`, by `seq_id`.
        self._granted: list[Sequence] = []
        self._computed: list[int] = []
        self._pending: list[int] = []
        self._chunks: dict[int, tuple[int, bool]] = {}
        self._taken_back: set[int] = set()
        # The batch before, as long as all sequences have the tables that they had then.
        self._last_batch: ScheduledBatch | None = None
        self._admitted: list[Sequence] = []
        self._dropped: list[Sequence] = []
        self._preempted: list[int] = []
        self._released: list[int] = []
        self._refused: dict[int, Sequence] = {}
        self.step_id = -1
        self.prefix_cache_stats = PrefixCacheStats()
        self.waiting = WaitingQueue()
        self.budget = max_num_batched_tokens
        self.slots = max_num_seqs

    def begin(self, step_id: int) -> None:
        """Starts a new step; for the scheduler."""
        self.step_id = step_id
        self._refused = {}

    def _forget_grants(self) -> None:
        """Leaves nothing granted, as it is between steps.

        What ends should not live on in a step that is over: its tokens take time to free.
        """
        self._granted = []
        self._computed = []
        self._pending = []
        self._chunks = {}
        self._taken_back = set()
        self._admitted = []
        self.budget = self._max_num_batched_tokens

    def plan(self) -> StepPlan:
        """Says what was granted, and changes nothing; for the scheduler."""
        batch = self._batch()
        return StepPlan(
            step_id=self.step_id,
            sequences=batch,
            sampled_seq_ids=batch.sampled_seq_ids,
            preempted=tuple(self._preempted),
            dropped=tuple(self._dropped),
            released=tuple(self._released),
            refused=self._reasons() if self._refused else (),
            token_budget=self._max_num_batched_tokens,
            num_scheduled_tokens=self._max_num_batched_tokens - self.budget,
            num_hit_tokens=sum(map(self._computed_before, filter(self._has_grant, self._admitted))),
            num_waiting=len(self.waiting),
            num_running=len(self._running),
            num_used_blocks=self._blocks.num_blocks - self._blocks.num_free_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
            num_cached_blocks=self._blocks.num_cached_blocks,
        )

    def close(self, plan: StepPlan) -> None:
        """Ends the step, whose plan counts from now on; for the scheduler."""
        self._last_batch = plan.sequences
        self._forget_grants()
        if not plan.is_empty:
            self._preempted = []
            self._dropped = []
            self._released = []

    def _reasons(self) -> tuple[tuple[int, WaitReason], ...]:
        """Why sequences got nothing; those that got something after all are left out."""
        return tuple(
            (seq_id, seq.wait_reason)
            for seq_id, seq in self._refused.items()
            if seq.wait_reason is not None
        )

    def _batch(self) -> ScheduledBatch:
        """What is granted so far."""
        granted, computed, pending = self._granted, self._computed, self._pending
        if self._taken_back:
            kept = [seq.seq_id not in self._taken_back for seq in granted]
            granted = list(compress(granted, kept))
            computed, pending = list(compress(computed, kept)), list(compress(pending, kept))
        last = self._last_batch
        if last is not None and granted == last.sequences:
            seq_ids, tables = last.seq_ids, last.growing_tables
        else:
            seq_ids = tuple([seq.seq_id for seq in granted])
            tables = [seq.block_table for seq in granted]
        counts, samples = [1] * len(granted), [True] * len(granted)
        if self._chunks:
            shares = [self._chunks.get(seq_id, _DECODE) for seq_id in seq_ids]
            counts, samples = [n for n, _ in shares], [is_last for _, is_last in shares]
        num_blocks = list(map(len, tables))
        return ScheduledBatch(
            granted, seq_ids, computed, counts, samples, num_blocks, pending, tables
        )

    def _has_grant(self, seq: Sequence) -> bool:
        # Whoever loses a grant is not running any more, and cannot come back in the same step.
        return seq._step == self.step_id and seq.status is SequenceStatus.RUNNING

    def _share_of(self, seq: Sequence) -> tuple[int, bool]:
        """How many tokens the step has granted a sequence, and whether they yield the next."""
        if not self._has_grant(seq):
            return 0, False
        return self._chunks.get(seq.seq_id, _DECODE)

    def _computed_before(self, seq: Sequence) -> int:
        """Tokens of a sequence that earlier plans compute, or that it shares."""
        return seq.num_computed_tokens - self._share_of(seq)[0]

    def cancel(self) -> None:
        """Takes back what was granted; for the scheduler.

        Sequences that the step admitted wait again, at the front; those that it preempted or
        dropped stay so, and the next plan names them.
        """
        admitted = list(filter(self._has_grant, self._admitted))
        for seq in filter(self._has_grant, self._granted):
            count, samples = self._share_of(seq)
            seq.num_computed_tokens -= count
            seq.num_pending_tokens -= samples
            seq._step = -1
            self._note_progress(seq)
        for seq in reversed(admitted):
            self.vacate(seq)
            # No plan has named it, so nobody holds state for it.
            self._released.pop()
            seq.status = SequenceStatus.WAITING
            seq.wait_reason = WaitReason.NOT_CONSIDERED
            self.waiting.append_front(seq)
        self._forget_grants()

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
    def num_prefilling(self) -> int:
        """How many those are."""
        return len(self._prefilling)

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
        return len(self._granted) > len(self._taken_back)

    @property
    def grants(self) -> ScheduledBatch:
        """What the step runs so far, in order (a copy)."""
        batch = self._batch()
        return replace(
            batch,
            sequences=list(batch.sequences),
            num_computed_tokens=list(batch.num_computed_tokens),
            num_pending_tokens=list(batch.num_pending_tokens),
            growing_tables=list(batch.growing_tables),
        )

    @property
    def dropped(self) -> Collection[Sequence]:
        """Sequences dropped since the last plan."""
        return self._dropped

    @property
    def preempted(self) -> Collection[int]:
        """Ids of the sequences preempted since the last plan."""
        return self._preempted

    def uncached_tokens(self, seq: Sequence) -> int:
        """Tokens of a sequence that a step would have to compute, prefix hits taken off."""
        if seq.status is SequenceStatus.RUNNING:
            return seq.num_uncomputed_tokens
        hits = self._match(seq)
        num_found = max(len(hits), len(self._shared(seq, len(hits)) or ()))
        return len(seq.token_ids) - num_found * self._blocks.block_size

    def tokens_lost(self, seq: Sequence) -> int:
        """Tokens that a running sequence would have to compute again if it were preempted now.

        Those in leading blocks that another sequence holds as well would be found again. More may
        be, if its other blocks are still cached when it comes back; that cannot be known here.
        """
        num_kept = 0
        for block_id in seq.block_table[: len(seq.prefixes)]:
            if self._blocks.ref_count(block_id) < 2:
                break
            num_kept += 1
        return max(0, seq.num_computed_tokens - num_kept * self._blocks.block_size)

    def fits(self, seq: Sequence, *, after: Iterable[Sequence] = (), keep_free: int = 0) -> bool:
        """Whether there is room for all of a sequence's tokens: blocks, and a slot if it waits.

        False, too, for one that could not be taken whatever is free: it has ended, its last token
        is in flight, or it waits for its own token or for a sibling's blocks. Nothing is changed,
        and the token budget is not looked at. Costs O(blocks of `seq` and `after`).

        Args:
            seq: A waiting or running sequence.
            after: Answers as if these running sequences had been preempted.
            keep_free: See `take`.
        """
        victims = {
            other.seq_id: other
            for other in after
            if other.status is SequenceStatus.RUNNING and other is not seq
        }
        blocks = self._blocks
        lost: dict[int, int] = {}
        for victim in victims.values():
            for block_id in victim.block_table:
                lost[block_id] = lost.get(block_id, 0) + 1
        freed = {
            block_id for block_id, count in lost.items() if blocks.ref_count(block_id) == count
        }
        num_free = blocks.num_free_blocks + len(freed)
        total = len(seq.token_ids) + seq.num_pending_tokens
        num_needed = -(-total // blocks.block_size)
        if seq.status is SequenceStatus.RUNNING:
            if seq.num_pending_tokens and total >= seq._max_total_tokens:
                return False
            return num_needed - len(seq.block_table) <= num_free
        if seq.status is SequenceStatus.FINISHED or seq.num_pending_tokens:
            return False
        if self.slots + len(victims) <= 0:
            return False
        found = blocks.held(self._match(seq))
        # Blocks of a sibling that is a victim count like any others that its end frees.
        shared = self._shared(seq, len(found))
        if shared is None:
            return False
        found = shared or found
        num_taken = sum(1 for b in found if b in freed or blocks.ref_count(b) == 0)
        return num_needed - len(found) + num_taken <= num_free - keep_free

    def take(
        self,
        seq: Sequence,
        n: int | None = None,
        *,
        reserve: int = 0,
        keep_free: int = 0,
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
            keep_free: An admission that would leave fewer free blocks than these is refused.
            exceed_budget: Whether a decoding sequence gets its one token even when the budget is
                used up.

        Returns:
            The number of tokens granted; 0 means refused, and the sequence's `wait_reason`
            says why.

        Raises:
            SchedulingError: Another scheduler runs the sequence.
            TypeError: `n`, `reserve` or `keep_free` is no integer; nothing is changed.
        """
        if seq._step == self.step_id:
            return 0
        if seq.status is SequenceStatus.RUNNING:
            if self._running.get(seq.seq_id) is not seq:
                raise SchedulingError(f"take needs a sequence of this scheduler, got {seq!r}")
            return self._take_running(seq, n, exceed_budget)
        if seq.status is SequenceStatus.WAITING:
            return self._admit(seq, n, reserve, keep_free)
        return 0

    def take_all(
        self, sequences: Iterable[Sequence], *, exceed_budget: bool = False
    ) -> list[Sequence]:
        """Grants running sequences all their tokens, up to the first that lacks a block.

        The same as `take` for each of them in turn, and there for speed: a decode that needs
        nothing special costs 0.15 us here and 0.85 us through `take`, and nearly all are of that
        kind.

        Args:
            sequences: Sequences of this scheduler; a copy, not a view of its queues.
            exceed_budget: See `take`.

        Returns:
            The sequences that are not dealt with, in order; empty if none lacked a block. The
            first of them was refused for `WaitReason.BLOCKS`, the others were not looked at.
            Those that were refused for other reasons are passed over.
        """
        remaining = iter(sequences)
        while True:
            seq = self._take_decodes(remaining)
            if seq is None:
                return []
            granted = self.take(seq, exceed_budget=exceed_budget)
            if not granted and seq.wait_reason is WaitReason.BLOCKS:
                return [seq, *remaining]

    def _take_decodes(self, sequences: Iterator[Sequence]) -> Sequence | None:
        """Grants decoding sequences their token, in as few operations as we found.

        Returns:
            The first sequence for which this is not all that there is to do, such as one with a
            prompt left; None at the end. Those behind it stay in the iterator.
        """
        step_id, granted = self.step_id, self._granted
        note_grant = granted.append
        note_computed, note_pending = self._computed.append, self._pending.append
        num_granted_before = len(granted)
        try:
            for seq in islice(sequences, max(0, self.budget)):
                computed = seq.num_computed_tokens
                if (computed >= seq._decodes_until or seq._step == step_id) and not self._grow(seq):
                    return seq
                pending = seq.num_pending_tokens
                note_grant(seq)
                note_computed(computed)
                note_pending(pending)
                seq.num_computed_tokens = computed + 1
                seq.num_pending_tokens = pending + 1
                seq._step = step_id
        finally:
            # Also where the policy's iterator raises: it may go on after that.
            self.budget -= len(granted) - num_granted_before
        # The sequences are at an end, or the budget is.
        return next(sequences, None)

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
        self._take_back(seq)
        self.vacate(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        # It may not come back in the step that evicted it.
        seq._step = self.step_id
        seq.wait_reason = WaitReason.PREEMPTED
        self.waiting.append_front(seq)
        self._preempted.append(seq.seq_id)

    def drop(self, seq: Sequence, reason: str) -> None:
        """Ends a waiting or running sequence: the policy will not serve it.

        For admission control: a queue that is too long, a deadline that cannot be met. The
        sequence ends at once, with `FinishReason.ERROR` and the given `drop_reason`; a grant of
        this step is taken back, and tokens of plans in flight are dropped when they are committed.
        The next plan names it in `dropped`.

        Args:
            seq: A sequence of this scheduler.
            reason: What to tell whoever asked for it.

        Raises:
            SchedulingError: It is no unfinished sequence of this scheduler, or the reason is empty.
        """
        known = seq in self.waiting or self._running.get(seq.seq_id) is seq
        if not known or not isinstance(reason, str) or not reason:
            raise SchedulingError(
                f"drop needs an unfinished sequence of this scheduler and a text that says why, "
                f"got {seq!r} and {reason!r}"
            )
        self._take_back(seq)
        self.retire(seq, FinishReason.ERROR)
        seq.drop_reason = reason
        self._dropped.append(seq)

    def retire(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence and takes it out of its queue; for the scheduler."""
        if seq.status is SequenceStatus.RUNNING:
            self.vacate(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.wait_reason = None
        seq._appends_until = 0
        if seq._family is not None:
            del seq._family[seq.seq_id]
            seq._family = None

    def _take_back(self, seq: Sequence) -> None:
        """Takes back what the step has granted a sequence that loses its blocks now."""
        if self._has_grant(seq):
            count, samples = self._share_of(seq)
            self._taken_back.add(seq.seq_id)
            self.budget += count
            seq.num_pending_tokens -= samples

    def _take_running(
        self,
        seq: Sequence,
        n: int | None,
        exceed_budget: bool,  # noqa: FBT001 - hot path
    ) -> int:
        computed = seq.num_computed_tokens
        total = len(seq.token_ids) + seq.num_pending_tokens
        if total >= seq._max_total_tokens and seq.num_pending_tokens:
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

    def _admit(self, seq: Sequence, n: int | None, reserve: int, keep_free: int) -> int:
        reserve, keep_free = index(reserve), index(keep_free)
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
        shared = self._shared(seq, len(hits))
        if shared is None:
            return self._refuse(seq, WaitReason.SIBLING)
        table = shared or blocks.held(hits)
        computed = len(table) * block_size
        total = len(seq.token_ids)
        count = min(total - computed, self.budget)
        if n is not None:
            count = min(count, index(n))
        # All that was found may be free blocks; counting them takes longer than to assume it.
        num_free = blocks.num_free_blocks - max(0, keep_free)
        room = (num_free - len(table)) * block_size
        if room < max(count, reserve - computed):
            room = (num_free - blocks.num_free_among(table)) * block_size
        if room <= 0 or room < reserve - computed:
            return self._refuse(seq, WaitReason.BLOCKS)
        count = min(count, room)
        length = max(computed + count, reserve)
        self.waiting.remove(seq)
        if shared:
            hits = self._prefixes_of(shared)
        blocks.share(table)
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
        seq._publish_from((len(hits) + 1) * block_size if seq._publishes else NEVER)
        seq._shares = True
        seq.status = SequenceStatus.RUNNING
        self._running[seq.seq_id] = seq
        self._admitted.append(seq)
        self.slots -= 1
        return self._grant(seq, count, computed + count == total)

    def _grant(self, seq: Sequence, count: int, samples: bool) -> int:  # noqa: FBT001 - hot path
        self._granted.append(seq)
        self._computed.append(seq.num_computed_tokens)
        self._pending.append(seq.num_pending_tokens)
        if (count, samples) != _DECODE:
            self._chunks[seq.seq_id] = (count, samples)
        seq.num_computed_tokens += count
        self._note_progress(seq)
        seq.num_pending_tokens += samples
        seq._step = self.step_id
        seq.wait_reason = None
        self.budget -= count
        return count

    def _grow(self, seq: Sequence) -> bool:
        """Gives a decoding sequence a block, if that is all it lacks and one is free."""
        blocks, last = self._blocks, seq._max_total_tokens - 1
        is_full = 0 < seq._decodes_until <= seq.num_computed_tokens < last
        if not is_full or seq._step == self.step_id or not blocks.num_free_blocks:
            return False
        table = seq.block_table
        table += blocks.allocate(1)
        seq._decodes_until = min(len(table) * blocks.block_size, last)
        return True

    def _note_progress(self, seq: Sequence) -> None:
        if seq.is_prefilling:
            self._prefilling[seq.seq_id] = seq
            seq._decodes_until = 0
        else:
            self._prefilling.pop(seq.seq_id, None)
            capacity = len(seq.block_table) * self._blocks.block_size
            seq._decodes_until = min(capacity, seq._max_total_tokens - 1)

    def _refuse(self, seq: Sequence, reason: WaitReason) -> int:
        seq.wait_reason = reason
        # The next grant has to clear the reason, and so must not be made by `_take_decodes`.
        seq._decodes_until = 0
        seq._refused_in_step = self.step_id
        self._refused[seq.seq_id] = seq
        return 0

    def _max_hits(self, seq: Sequence) -> int:
        # The last token is computed even if a block holds it: its logits are needed.
        return (len(seq.token_ids) - 1) // self._blocks.block_size

    def _match(self, seq: Sequence) -> list[CachedPrefix]:
        # Log-probabilities of a prompt come from computing it.
        if not self._enable_prefix_caching or seq._sampling_params.prompt_logprobs is not None:
            return []
        # Outputs that came after it had lost its blocks have no keys yet.
        seq.keys.extend(seq.token_ids)
        return self._blocks.match(seq.keys, self._max_hits(seq))

    def _shared(self, seq: Sequence, num_hits: int) -> list[int] | None:
        """Blocks that a waiting sequence may share with a sibling, beyond what the cache holds.

        Only what earlier plans compute counts: a grant of this step can still be taken back.

        Args:
            seq: The sequence.
            num_hits: How many of its blocks the prefix cache holds.

        Returns:
            A copy of the leading blocks of the sibling's table; empty if there is nothing to gain;
            None if a sibling is computing what this one would then compute again.
        """
        size = self._blocks.block_size
        num_wanted = min(seq.num_prompt_tokens // size, self._max_hits(seq))
        if seq._family is None or num_wanted <= num_hits:
            return []
        is_computed_now = False
        for sibling in seq._family.values():
            if not sibling._shares:
                continue
            if self._computed_before(sibling) >= num_wanted * size:
                return sibling.block_table[:num_wanted]
            is_computed_now = True
        return None if is_computed_now else []

    def _prefixes_of(self, block_ids: list[int]) -> list[CachedPrefix]:
        """Contents of a sibling's blocks, as far as they are published."""
        prefixes = []
        for block_id in block_ids:
            prefix = self._blocks.content_of(block_id)
            if prefix is None:
                break
            prefixes.append(prefix)
        return prefixes

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
        self._last_batch = None
        self._prefilling.pop(seq.seq_id, None)
        self._released.append(seq.seq_id)
        self._blocks.release(seq.block_table)
        # A new list, since plans in flight still refer to the old one.
        seq.block_table = []
        seq.prefixes = []
        seq.num_computed_tokens = 0
        seq.num_prefill_tokens = 0
        seq._decodes_until = 0
        seq._publish_from(NEVER)
        seq._shares = False
        self.slots += 1
