"""Scheduler: a pure state machine from requests and sampled tokens to step plans.

The same state and events always give the same plan: there is no clock, no randomness and no
device in here. `schedule` makes a plan, somebody runs it, and `commit` takes the tokens it
yielded. Plans may be in flight: `schedule` may be called again before earlier plans are
committed, and then plans decoding sequences one more token ahead, on a token that only the
device knows yet.

What whoever runs the plans must guarantee: plans run in the order in which they were made, and
a plan's writes to the KV cache happen before the next plan's reads and writes (one CUDA stream
does that). Blocks that a sequence loses while a plan in flight may still write to them can then
be handed out at once: the new owner's writes come later. Such a block is never in the prefix
cache, since a block is published only when the plan that filled it is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nv_core.block_hash import (
    BlockHasher,
    BlockKeys,
    default_block_hasher,
    pack_namespace,
)
from nv_core.block_manager import BlockManager
from nv_core.config import SchedulerConfig
from nv_core.errors import RequestError, SchedulingError
from nv_core.plan import ScheduledBatch, StepPlan
from nv_core.policies import make_policy
from nv_core.prefix_cache_stats import PrefixCacheStats
from nv_core.prompt import check_labels, check_prediction, check_prompt, check_time
from nv_core.sampling_params import SamplingParams
from nv_core.sequence import NEVER, Curtain, FinishReason, Sequence, SequenceStatus, WaitReason
from nv_core.step import Step


@dataclass(frozen=True)
class StepEvents:
    """What a committed plan changed.

    Attributes:
        sampled: Sequences that got a token, in batch order; it is the last of their `token_ids`.
        finished: Those of them that ended with it.
    """

    sampled: tuple[Sequence, ...]
    finished: tuple[Sequence, ...]


@dataclass(frozen=True)
class Explanation:
    """Why a sequence stands where it stands.

    Attributes:
        status: See `SequenceStatus`.
        wait_reason: Why the last step left it out; None if that step ran it, or ran it in part.
        num_tokens_ahead: Uncomputed tokens of the sequences that wait before it.
        num_blocks_needed: Free blocks that it needs to compute all of its tokens.
        num_free_blocks: Free blocks now.
    """

    status: SequenceStatus
    wait_reason: WaitReason | None
    num_tokens_ahead: int
    num_blocks_needed: int
    num_free_blocks: int


class Scheduler:
    """Continuous batching over a paged KV pool with an exact prefix cache."""

    def __init__(
        self, config: SchedulerConfig, *, hash_block: BlockHasher = default_block_hasher
    ) -> None:
        """Makes an idle scheduler with an empty pool.

        Args:
            config: Limits and policy.
            hash_block: Chained block hash; replaced only to test that collisions do no harm.

        """
        self.config = config
        self._policy = make_policy(config.policy)
        self._hash_block = hash_block
        self._blocks = BlockManager(
            config.num_blocks, config.block_size, keep_copies=config.keeps_copies
        )
        self._step = Step(
            self._blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._eos_token_ids = frozenset(config.eos_token_ids)
        # The last token of a sequence is never computed, so it needs no place in the pool.
        self._max_total_tokens = config.num_blocks * config.block_size + 1
        if config.max_model_len is not None:
            self._max_total_tokens = min(self._max_total_tokens, config.max_model_len)
        self._curtain = Curtain()
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._next_seq_id = 0
        self._next_step_id = 0

    def add(
        self,
        prompt_token_ids: Iterable[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str | None = None,
        arrival_time: float | None = None,
        deadline: float | None = None,
        predicted_output_tokens: int | None = None,
        cache_salt: str | None = None,
    ) -> Sequence:
        """Puts a request into the waiting queue.

        Args:
            prompt_token_ids: At least one token id.
            sampling_params: What to sample and when to stop; None for the defaults.
            request_id: The caller's name for it; by default the sequence's number.
            priority: Lower is more urgent; for policies that use it.
            user: Whom it belongs to; for policies that share between users.
            arrival_time: In seconds of the caller's clock; kept, never read here.
            deadline: When its answer is due, in the same clock; for policies that use it.
            predicted_output_tokens: How long its answer will be by the caller's estimate; for
                policies that use it, since none of them sees `max_tokens`.
            cache_salt: Only requests of the same salt share cached prefixes, so that nobody can
                tell from the speed of an answer what others have asked; None shares with all
                others that have none.

        Returns:
            The sequence; read-only for the caller.

        Raises:
            RequestError: The prompt is empty, holds something that is no token id, or can never
                fit, or another value is not of its kind; nothing is changed.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        tokens, packed = check_prompt(
            prompt_token_ids, self.config, max_prompt_tokens=self.max_prompt_tokens
        )
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt must be a non-empty str or None, got {cache_salt!r}")
        namespace = pack_namespace({"cache_salt": cache_salt})
        keys = BlockKeys(self.config.block_size, self._hash_block, namespace=namespace)
        if self.config.enable_prefix_caching:
            keys.extend_packed(packed)
        check_labels(request_id=request_id, priority=priority, user=user)
        check_time("arrival_time", arrival_time)
        check_time("deadline", deadline)
        check_prediction(predicted_output_tokens)
        seq = Sequence(
            self._next_seq_id,
            tokens,
            params,
            request_id=str(self._next_seq_id) if request_id is None else request_id,
            keys=keys,
            stop_token_ids=self._stop_token_ids(params),
            max_total_tokens=self._limit(len(tokens), params),
            priority=priority,
            user=user,
            arrival_time=arrival_time,
            arrival_step=self._next_step_id,
            deadline=deadline,
            predicted_output_tokens=predicted_output_tokens,
            cache_salt=cache_salt,
            curtain=self._curtain,
        )
        self._enqueue(seq)
        return seq

    def fork(
        self,
        seq: Sequence,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Sequence:
        """Adds a sequence with the same prompt, which shares the full blocks of it.

        For `n` answers to one prompt: `add` it once and fork it `n - 1` times. The prompt is
        computed once, by whichever of them runs first; the others wait for it (with
        `WaitReason.SIBLING`) and are admitted one step later, with the prompt's full blocks in
        their tables. Nothing is ever copied or written by two: each computes the tokens behind the
        last full block by itself, at most one block of them, and its last prompt token in any case,
        since its own first sample needs the logits. This works with the prefix cache switched off,
        too. Output tokens are not inherited.

        Args:
            seq: An unfinished sequence of this scheduler, in whatever state.
            sampling_params: As for `add`; None for those of `seq`. Sequences that shall differ
                need different seeds.
            request_id: As for `add`.

        Returns:
            The new sequence, behind all others in the queue; everything else as in `seq`.

        Raises:
            RequestError: `seq` has ended, or belongs to another scheduler; nothing is changed.
        """
        if self._sequences.get(seq.seq_id) is not seq:
            raise RequestError(f"only an unfinished sequence can be forked, got {seq!r}")
        params = seq.sampling_params if sampling_params is None else sampling_params
        prompt = seq.prompt_token_ids
        fork = Sequence(
            self._next_seq_id,
            prompt,
            params,
            request_id=str(self._next_seq_id) if request_id is None else request_id,
            keys=seq.keys.of_first(len(prompt)),
            stop_token_ids=self._stop_token_ids(params),
            max_total_tokens=self._limit(len(prompt), params),
            priority=seq.priority,
            user=seq.user,
            arrival_time=seq.arrival_time,
            arrival_step=self._next_step_id,
            deadline=seq.deadline,
            predicted_output_tokens=seq.predicted_output_tokens,
            cache_salt=seq.cache_salt,
            curtain=self._curtain,
        )
        if seq._family is None:
            seq._family = {seq.seq_id: seq}
        fork._family = seq._family
        fork._family[fork.seq_id] = fork
        self._enqueue(fork)
        return fork

    def _enqueue(self, seq: Sequence) -> None:
        self._next_seq_id += 1
        self._sequences[seq.seq_id] = seq
        self._step.waiting.append(seq)

    def schedule(self) -> StepPlan | None:
        """Plans the next step.

        Returns:
            The plan, now in flight until it is committed; None when nothing can run now: no
            unfinished sequence is left, or all wait for tokens of plans in flight.

        Raises:
            SchedulingError: The policy ran nothing although nothing is in flight to wait for. As
                with any error that the policy lets out, or that a signal raises meanwhile, the
                scheduler can go on: what the step had granted is taken back.
        """
        step = self._step
        step.begin(self._next_step_id)
        self._curtain.is_drawn = True
        try:
            self._policy.schedule(step)
            # In here as well: where signals raise, that may happen at any line.
            plan = step.plan()
        except BaseException:
            step.cancel()
            raise
        finally:
            self._curtain.is_drawn = False
            for seq in step.dropped:
                self._sequences.pop(seq.seq_id, None)
        step.close(plan)
        if plan.is_empty:
            if self.has_unfinished and not self._in_flight:
                raise self._stalled()
            return None
        self._next_step_id += 1
        self._in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, token_ids: Mapping[int, int]) -> StepEvents:
        """Takes the tokens that a plan yielded: appends, publishes, finishes and frees.

        Args:
            plan: The oldest plan that is not committed yet.
            token_ids: The sampled token of each entry whose `samples` is true, by `seq_id`.
                Tokens of sequences that ended meanwhile are dropped.

        Returns:
            What changed.

        Raises:
            SchedulingError: The plan is not the oldest in flight, or `token_ids` does not hold
                exactly the tokens that it yields; nothing is changed.
        """
        tokens = self._tokens_of(plan, token_ids)
        self._in_flight.popleft()
        batch = plan.sequences
        ended_before: set[Sequence] = set()
        finished: list[Sequence] = []
        for place, seq, token_id in zip(range(len(batch)), batch.sequences, tokens, strict=True):
            known = seq.token_ids
            if token_id is None:
                self._publish(seq, batch, place)
            elif len(known) < seq._appends_until and token_id not in seq.stop_token_ids:
                # Most tokens neither fill a block nor end anything.
                known.append(token_id)
                seq.num_pending_tokens -= 1
            elif seq.finish_reason is None:
                known.append(token_id)
                seq.num_pending_tokens -= 1
                self._publish(seq, batch, place)
                reason = self._reason_to_finish(seq, token_id)
                if reason is not None:
                    self._finish(seq, reason)
                    finished.append(seq)
            else:
                ended_before.add(seq)
        sampled = batch.sampled_sequences
        if ended_before:
            sampled = tuple([seq for seq in sampled if seq not in ended_before])
        return StepEvents(sampled, tuple(finished))

    def abort(self, seq_id: int) -> Sequence | None:
        """Ends a sequence now and frees its blocks.

        Args:
            seq_id: The sequence; unknown and finished ones are left alone.

        Returns:
            The sequence, or None if there was nothing to abort.
        """
        return self.finish(seq_id, FinishReason.ABORT)

    def finish(self, seq_id: int, reason: FinishReason) -> Sequence | None:
        """Ends a sequence for a reason that the caller found, such as a stop string.

        Tokens that plans in flight still yield for it are dropped when they are committed.

        Args:
            seq_id: The sequence; unknown and finished ones are left alone.
            reason: What its `finish_reason` becomes.

        Returns:
            The sequence, or None if there was nothing to end.
        """
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self._finish(seq, FinishReason(reason))
        return seq

    def reset_prefix_cache(self) -> None:
        """Makes everything that was computed so far unfindable, as after a change of weights.

        Running sequences go on with the blocks they have; as what they still compute builds on
        the old content, they publish nothing until they lose their blocks and start again.
        """
        self._blocks.reset_prefix_cache()
        for seq in self._step.running:
            seq.prefixes = []
            seq._publishes = False
            seq._publish_from(NEVER)
            seq._shares = False

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._step.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._step.running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return self._blocks.num_free_blocks

    @property
    def plans_in_flight(self) -> tuple[StepPlan, ...]:
        """Plans that are not committed yet, oldest first."""
        return tuple(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Plans that are not committed yet."""
        return len(self._in_flight)

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache has saved so far; all zero if it is switched off."""
        return self._step.prefix_cache_stats

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that `add` accepts: one output token must fit behind it."""
        return self._max_total_tokens - 1

    def explain(self, seq_id: int) -> Explanation:
        """Says why a sequence stands where it stands.

        Raises:
            RequestError: No unfinished sequence has that id.
        """
        seq = self._sequences.get(seq_id)
        if seq is None:
            raise RequestError(f"seq_id {seq_id} is not an unfinished sequence of this scheduler")
        ahead = 0
        if seq.status is SequenceStatus.WAITING:
            for other in self._step.waiting:
                if other is seq:
                    break
                ahead += self._step.uncached_tokens(other)
        size = self.config.block_size
        missing = self._step.uncached_tokens(seq)
        if seq.status is SequenceStatus.RUNNING:
            missing = max(0, missing + seq.num_computed_tokens - len(seq.block_table) * size)
        return Explanation(
            status=seq.status,
            wait_reason=self._wait_reason(seq),
            num_tokens_ahead=ahead,
            num_blocks_needed=-(-missing // size),
            num_free_blocks=self._blocks.num_free_blocks,
        )

    def check_invariants(self) -> None:
        """Recounts everything; O(pool and tokens), for tests.

        Raises:
            SchedulingError: Something is counted twice, lost, or contradicts itself.
        """
        waiting, running = list(self._step.waiting), list(self._step.running)
        ids = [seq.seq_id for seq in (*waiting, *running)]
        if sorted(ids) != sorted(self._sequences):
            raise SchedulingError("the queues differ from the unfinished sequences")
        if self._step.slots + len(running) != self.config.max_num_seqs:
            raise SchedulingError("slots and running sequences do not add up")
        pending = dict.fromkeys(self._sequences, 0)
        for plan in self._in_flight:
            for seq_id in plan.sampled_seq_ids:
                if seq_id in pending:
                    pending[seq_id] += 1
        for seq in self._sequences.values():
            self._check_sequence(seq, pending[seq.seq_id])
        self._blocks.check_invariants([seq.block_table for seq in running])

    def _check_sequence(self, seq: Sequence, num_pending: int) -> None:
        size = self.config.block_size
        running = seq.status is SequenceStatus.RUNNING
        problems = {
            "is finished but kept": seq.is_finished,
            "shares blocks that it does not hold": seq._shares and not running,
            "is missing in its family": seq._family is not None
            and seq._family.get(seq.seq_id) is not seq,
            "miscounts its pending tokens": seq.num_pending_tokens != num_pending,
            "waits with blocks": not running and (seq.block_table or seq.num_computed_tokens),
            "is computed beyond its tokens": seq.num_uncomputed_tokens < 0,
            "has too few blocks": seq.num_computed_tokens > len(seq.block_table) * size,
            "published blocks that are not computed": len(seq.prefixes) * size
            > seq.num_computed_tokens,
            "holds a block that is filed under other content": any(
                self._blocks.content_of(block_id) is not prefix
                for block_id, prefix in zip(seq.block_table, seq.prefixes, strict=False)
            ),
        }
        for problem, holds in problems.items():
            if holds:
                raise SchedulingError(f"{seq!r} {problem}")

    def _wait_reason(self, seq: Sequence) -> WaitReason | None:
        """What the last step said of a sequence, which may not be what `seq` remembers."""
        last_step_id = self._step.step_id
        if last_step_id in (seq._step, seq._refused_in_step):
            return seq.wait_reason
        return WaitReason.NOT_CONSIDERED

    def _stalled(self) -> SchedulingError:
        first = next(iter(self._sequences.values()))
        return SchedulingError(
            f"the policy {type(self._policy).__name__} ran nothing although "
            f"{len(self._sequences)} sequences are unfinished and nothing is in flight; "
            f"sequence {first.seq_id} waits: {self._wait_reason(first)}"
        )

    def _limit(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        if params.max_tokens is None:
            return self._max_total_tokens
        return min(self._max_total_tokens, num_prompt_tokens + params.max_tokens)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        if params.ignore_eos:
            return frozenset(params.stop_token_ids)
        if params.stop_token_ids:
            return self._eos_token_ids.union(params.stop_token_ids)
        # Most requests share one set, which then stays in the processor's cache.
        return self._eos_token_ids

    def _tokens_of(self, plan: StepPlan, token_ids: Mapping[int, int]) -> list[int | None]:
        """Returns the token of each entry, None for one that yields none; changes nothing."""
        if not self._in_flight or self._in_flight[0] is not plan:
            raise SchedulingError(
                f"plan {plan.step_id} is not the oldest plan in flight; commit every plan once, "
                "in the order in which they were made"
            )
        expected = plan.sampled_seq_ids
        tokens: list[int | None] = list(map(token_ids.get, expected))
        if len(expected) != len(token_ids) or None in tokens:
            raise SchedulingError(
                f"plan {plan.step_id} yields tokens for the sequences {list(expected)}, "
                f"got tokens for {list(token_ids)}"
            )
        if len(tokens) < len(plan.sequences):
            return list(map(token_ids.get, plan.sequences.seq_ids))
        return tokens

    def _publish(self, seq: Sequence, batch: ScheduledBatch, place: int) -> None:
        """Files the blocks that an entry has filled; their tokens are all known by now."""
        # A plan that was made before the sequence lost its blocks says nothing of those it has.
        table = seq.block_table
        if not seq._publishes or batch.growing_tables[place] is not table:
            return
        blocks, keys, prefixes = self._blocks, seq.keys, seq.prefixes
        num_computed = batch.num_computed_tokens[place] + batch.num_scheduled_tokens[place]
        num_full = num_computed // blocks.block_size
        if num_full > len(keys.hashes):
            keys.extend(seq.token_ids)
        parent = prefixes[-1] if prefixes else None
        for position in range(len(prefixes), num_full):
            parent = blocks.publish(table[position], keys, position, parent)
            prefixes.append(parent)
        seq._publish_from((len(prefixes) + 1) * blocks.block_size)

    def _reason_to_finish(self, seq: Sequence, token_id: int) -> FinishReason | None:
        if (
            token_id in seq.stop_token_ids
            and seq.num_output_tokens > seq.sampling_params.min_tokens
        ):
            if token_id not in self._eos_token_ids or seq.sampling_params.ignore_eos:
                seq.stop_reason = token_id
            return FinishReason.STOP
        if len(seq.token_ids) >= seq._max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._step.retire(seq, reason)
        del self._sequences[seq.seq_id]
