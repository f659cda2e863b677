"""What sampling has to do for a request, and so for a batch: the key of a step's variant.

Most steps divide by a temperature and draw. Whatever else a request asks for costs work, so a step
does only what one of its rows needs; rows that do not need it are not changed by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nv_core import SamplingParams, Sequence

_TOP_BUCKETS = (0, 5, 20)
"""Numbers of most probable tokens that steps return; more are powers of two."""


@dataclass(frozen=True)
class SamplingNeeds:
    """What a step's sampling must be able to do; few values, since each has graphs of its own.

    Attributes:
        filters: top-k, top-p or min-p.
        penalties: Of repetition, presence or frequency.
        logit_bias: Biases of single tokens.
        allowed_mask: Tokens that alone are allowed.
        banned_words: Runs of tokens that must not be completed.
        num_top: How many most probable tokens to return with log-probabilities; None for none.
    """

    filters: bool = False
    penalties: bool = False
    logit_bias: bool = False
    allowed_mask: bool = False
    banned_words: bool = False
    num_top: int | None = None

    def __or__(self, other: SamplingNeeds) -> SamplingNeeds:
        """What rows of both kinds need together."""
        tops = [needs.num_top for needs in (self, other) if needs.num_top is not None]
        return SamplingNeeds(
            filters=self.filters or other.filters,
            penalties=self.penalties or other.penalties,
            logit_bias=self.logit_bias or other.logit_bias,
            allowed_mask=self.allowed_mask or other.allowed_mask,
            banned_words=self.banned_words or other.banned_words,
            num_top=max(tops) if tops else None,
        )


PLAIN = SamplingNeeds()
"""A temperature and nothing else."""


@dataclass(frozen=True)
class BannedWord:
    """A run of tokens that the output must not hold.

    Attributes:
        token_ids: The run.
        until: Position in the sequence from which on it is allowed.
    """

    token_ids: tuple[int, ...]
    until: int


FOREVER = 2**31 - 1
"""A position that no sequence reaches."""


@dataclass(frozen=True)
class RowNeeds:
    """What one request's sampling needs, position by position.

    Attributes:
        early: Needs of tokens before `switch_at`.
        late: Needs of the others.
        switch_at: A position in the sequence.
    """

    early: SamplingNeeds
    late: SamplingNeeds
    switch_at: int

    def at(self, position: int) -> SamplingNeeds:
        """Needs of the token at a position."""
        return self.early if position < self.switch_at else self.late


def needs_of(seq: Sequence, vocab_size: int) -> RowNeeds:
    """Reads what a request asks for."""
    params = seq.sampling_params
    late = lasting_needs_of(params, vocab_size)
    early = late | SamplingNeeds(banned_words=bool(params.min_tokens and seq.stop_token_ids))
    return RowNeeds(early, late, seq.num_prompt_tokens + params.min_tokens)


def lasting_needs_of(params: SamplingParams, vocab_size: int) -> SamplingNeeds:
    """Reads what parameters ask for at every token, be they few or many."""
    return SamplingNeeds(
        filters=not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        penalties=params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0,
        logit_bias=params.logit_bias is not None,
        allowed_mask=params.allowed_token_ids is not None,
        banned_words=bool(params.bad_words),
        num_top=None if params.logprobs is None else num_top_bucket(params.logprobs, vocab_size),
    )


def banned_words_of(seq: Sequence) -> list[BannedWord]:
    """Lists what must not be sampled: bad words, and stop tokens before `min_tokens`."""
    params = seq.sampling_params
    words = [BannedWord(_as_ids(word), FOREVER) for word in params.bad_words]
    if params.min_tokens:
        until = min(seq.num_prompt_tokens + params.min_tokens, FOREVER)
        words += [BannedWord((token_id,), until) for token_id in sorted(seq.stop_token_ids)]
    return words


def effective_temperature(params: SamplingParams) -> float:
    """Returns the temperature to draw with: finite in float32, and 0 for a greedy request."""
    return 0.0 if params.is_greedy else min(params.temperature, _MAX_TEMPERATURE)


_MAX_TEMPERATURE = 1e30
"""Higher temperatures are cut to this, which makes every token equally likely all the same."""


def _as_ids(word: str | object) -> tuple[int, ...]:
    if not isinstance(word, tuple):
        raise TypeError(f"bad_words must be token ids when they reach the device, got {word!r}")
    return word


def num_top_bucket(num_top: int, vocab_size: int) -> int:
    """Rounds a number of most probable tokens up to one of few; -1 is all tokens."""
    if num_top < 0:
        return vocab_size
    for bucket in _TOP_BUCKETS:
        if num_top <= bucket:
            return min(bucket, vocab_size)
    return min(1 << (num_top - 1).bit_length(), vocab_size)
