"""Sequence: one request's tokens and how far they are computed.

There are no phases. A sequence has tokens, and a number of them whose keys and values are in
the KV cache; a step computes some more. Prefill, decode, chunk, prefix hit and recompute after
preemption are values of these counters. Only the scheduler writes to a sequence.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from nv_core.errors import SchedulingError

if TYPE_CHECKING:
    from nv_core.block_hash import BlockKeys
    from nv_core.block_manager import CachedPrefix
    from nv_core.sampling_params import SamplingParams


NEVER = 2**62
"""More tokens than any sequence will have."""


class FinishReason(str, enum.Enum):
    """Why a sequence ended; compares equal to its own text."""

    STOP = "stop"
    """An end-of-sequence or stop token was sampled, or the caller found a stop."""
    LENGTH = "length"
    """`max_tokens`, `max_model_len` or the size of the KV pool was reached."""
    ABORT = "abort"
    """The caller aborted it."""
    ERROR = "error"
    """It could not be served: a step failed, or the policy dropped it (see `drop_reason`)."""

    def __str__(self) -> str:
        return self.value


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Holds no blocks: new, or preempted."""
    RUNNING = "running"
    """Holds blocks, whatever part of it is computed."""
    FINISHED = "finished"
    """Holds no blocks and never will again."""


class WaitReason(str, enum.Enum):
    """Why a sequence did not run."""

    NOT_CONSIDERED = "not considered"
    """The policy did not ask for it."""
    BUDGET = "budget"
    """The step's token budget was used up."""
    SLOTS = "slots"
    """`max_num_seqs` sequences hold blocks already."""
    BLOCKS = "blocks"
    """Too few free KV blocks."""
    IN_FLIGHT = "in flight"
    """Its next token is still being computed."""
    SIBLING = "sibling"
    """One that it was forked from or with is computing their prompt; see `Scheduler.fork`."""
    PREEMPTED = "preempted"
    """It has just lost its blocks."""
    POLICY = "policy"
    """The policy asked for none of its tokens."""

    def __str__(self) -> str:
        return self.value


class Curtain:
    """Hides from policies what only the caller may know; one for all sequences of a scheduler.

    Attributes:
        is_drawn: Whether a policy is at work.
    """

    __slots__ = ("is_drawn",)

    def __init__(self) -> None:
        """Makes an open curtain."""
        self.is_drawn = False


class _Progress:
    """What every step touches of a sequence.

    The fields of a class of its own lie side by side in memory. A step over thousands of sequences
    waits for memory more than for anything else.
    """

    __slots__ = (
        "_appends_until",
        "_decodes_until",
        "_step",
        "block_table",
        "num_computed_tokens",
        "num_pending_tokens",
        "seq_id",
        "stop_token_ids",
        "token_ids",
    )


class Sequence(_Progress):
    """One request's tokens and progress.

    A policy sees all of this but `sampling_params` and `max_total_tokens`, which say how long the
    answer may become, and in a simulation how long it will: reading them while a policy is at
    work raises `SchedulingError`. What a policy may know of the length is
    `predicted_output_tokens`.

    Attributes:
        seq_id: Number that the scheduler gave it; unique in that scheduler.
        request_id: The caller's own name for it.
        sampling_params: What the caller asked for (not for policies).
        priority: Lower values are more urgent; for policies that use it.
        user: Whom the request belongs to; for policies that share between users.
        arrival_time: When it arrived, in the caller's clock, in seconds; None if not given.
        arrival_step: Number of the first step that could run it: a policy's measure of its wait.
        deadline: When its answer is due, in the caller's clock, in seconds; None for never.
        predicted_output_tokens: How long the caller thinks the answer will be; None if unknown.
        token_ids: Prompt and committed output tokens; grows at the end only.
        num_prompt_tokens: How many of `token_ids` are the prompt.
        num_computed_tokens: Tokens whose keys and values are in the cache, or will be when the
            plans in flight have run.
        num_prefill_tokens: Its length when it was last admitted; until that many tokens are
            computed it is a prompt to the policies, also when it recomputes after preemption.
        num_pending_tokens: Tokens that plans in flight will yield; their ids are not known yet.
        max_total_tokens: Length at which it ends with `FinishReason.LENGTH` (not for policies).
        block_table: Ids of the blocks that hold its keys and values, in order.
        num_cached_tokens: Tokens that its first admission found in the prefix cache.
        num_preemptions: How often it lost its blocks.
        status: See `SequenceStatus`.
        finish_reason: See `FinishReason`; None while it lives.
        stop_reason: The stop token that ended it, or None (also for end-of-sequence tokens).
        drop_reason: What the policy that dropped it said; None for all others.
        wait_reason: Why it was refused when the policy last asked for it; None if it was not.
            `Scheduler.explain` says how that stands now.
        cache_salt: Only sequences of the same salt share blocks; None is a salt of its own.
        stop_token_ids: All tokens that end it.
        keys: Keys of its full blocks, for the prefix cache.
        prefixes: Content of its leading blocks that the prefix cache knows.
    """

    __slots__ = (
        "_curtain",
        "_family",
        "_hits_counted",
        "_max_total_tokens",
        "_publishes",
        "_refused_in_step",
        "_sampling_params",
        "_shares",
        "arrival_step",
        "arrival_time",
        "cache_salt",
        "deadline",
        "drop_reason",
        "finish_reason",
        "keys",
        "num_cached_tokens",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "predicted_output_tokens",
        "prefixes",
        "priority",
        "request_id",
        "status",
        "stop_reason",
        "user",
        "wait_reason",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        request_id: str,
        keys: BlockKeys,
        stop_token_ids: frozenset[int],
        max_total_tokens: int,
        priority: int = 0,
        user: str | None = None,
        arrival_time: float | None = None,
        arrival_step: int = 0,
        deadline: float | None = None,
        predicted_output_tokens: int | None = None,
        cache_salt: str | None = None,
        curtain: Curtain | None = None,
    ) -> None:
        """Makes a waiting sequence.

        Args:
            seq_id: See the attribute.
            prompt_token_ids: The prompt; the sequence keeps this list and appends to it.
            sampling_params: See the attribute.
            request_id: See the attribute.
            keys: Keys of its full blocks.
            stop_token_ids: All tokens that end this sequence.
            max_total_tokens: See the attribute.
            priority: See the attribute.
            user: See the attribute.
            arrival_time: See the attribute.
            arrival_step: See the attribute.
            deadline: See the attribute.
            predicted_output_tokens: See the attribute.
            cache_salt: See the attribute.
            curtain: The scheduler's; None for one that is never drawn.
        """
        self.seq_id = seq_id
        self.request_id = request_id
        self._sampling_params = sampling_params
        self.priority = priority
        self.user = user
        self.arrival_time = arrival_time
        self.arrival_step = arrival_step
        self.deadline = deadline
        self.predicted_output_tokens = predicted_output_tokens
        self.cache_salt = cache_salt
        self.token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.keys = keys
        self.stop_token_ids = stop_token_ids
        self._max_total_tokens = max_total_tokens
        self.num_computed_tokens = 0
        self.num_prefill_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.prefixes: list[CachedPrefix] = []
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.drop_reason: str | None = None
        self.wait_reason: WaitReason | None = WaitReason.NOT_CONSIDERED
        self._curtain = Curtain() if curtain is None else curtain
        # It and all that were forked from it or with it, by `seq_id`; None without forks.
        self._family: dict[int, Sequence] | None = None
        # Whether its blocks hold what a sibling may go on with.
        self._shares = False
        # Whether the statistics have seen it.
        self._hits_counted = False
        # Whether blocks that it fills in this residence may enter the prefix cache.
        self._publishes = False
        # Two bounds that spare most steps all other questions. As long as fewer tokens are
        # computed, a decode needs no block, is not the last, and no refusal is to be forgotten; 0
        # while it does not decode.
        self._decodes_until = 0
        # As long as fewer tokens are known, one more fills no block that is to be published and is
        # not the last; 0 once it has ended.
        self._appends_until = 0
        # The last step that granted it tokens or preempted it, and the last that refused it.
        self._step = -1
        self._refused_in_step = -1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, pending={self.num_pending_tokens})"
        )

    def _publish_from(self, num_tokens: int) -> None:
        """Notes how many known tokens there must be before there is another block to publish."""
        self._appends_until = min(num_tokens, self._max_total_tokens - 1)

    @property
    def sampling_params(self) -> SamplingParams:
        """See the class."""
        if self._curtain.is_drawn:
            raise _hidden("sampling_params")
        return self._sampling_params

    @property
    def max_total_tokens(self) -> int:
        """See the class."""
        if self._curtain.is_drawn:
            raise _hidden("max_total_tokens")
        return self._max_total_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and committed output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, known or pending, that a step could compute; 1 while decoding."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens that it had when it was admitted are still to be computed."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the committed output tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


def _hidden(name: str) -> SchedulingError:
    return SchedulingError(
        f"a policy must not read {name}, since it tells how long the answer will be; "
        "predicted_output_tokens is what it may know"
    )
