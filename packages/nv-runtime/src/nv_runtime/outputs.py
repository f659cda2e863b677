"""What a caller gets back: plain data, shaped as vLLM's callers know it.

Nothing here computes; `nv_runtime.engine` fills these and `nv_runtime.llm` returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass
class Logprob:
    """One token's log-probability at one position.

    Args:
        logprob: Natural logarithm of the probability under the raw logits.
        rank: Place among all tokens, 1 for the most probable; None if not computed.
        decoded_token: The token's text; None if not computed.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """When the stations of a request were reached, and how often it was set back.

    Times are seconds on one monotonic clock of the engine's process; only their differences mean
    anything. None is a station not reached yet. Of several answers to one prompt, the first to
    reach a station counts, and the last to leave it. When each single token came is told by
    `CompletionOutput.token_times`.

    The fields have the names of vLLM's `RequestMetrics`; those of its `RequestStateStats` are
    properties.

    Args:
        arrival_time: The request was handed to the engine.
        first_scheduled_time: The first step that computes some of it was launched.
        first_token_time: Its first output token was known.
        last_token_time: Its newest output token was known.
        finished_time: It ended.
        num_generation_tokens: Output tokens so far.
        num_preemptions: How often it lost its KV blocks and had to compute them again.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    def copy(self) -> RequestMetrics:
        """Returns the state of now; it is asked for with every output, so it has to be cheap."""
        # A seventh of the time of `dataclasses.replace`.
        return RequestMetrics(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            self.last_token_time,
            self.finished_time,
            self.num_generation_tokens,
            self.num_preemptions,
        )

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return _difference(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return _difference(self.arrival_time, self.first_token_time)

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between output tokens; None before the second one."""
        seconds = _difference(self.first_token_time, self.last_token_time)
        if seconds is None or self.num_generation_tokens < 2:
            return None
        return seconds / (self.num_generation_tokens - 1)

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return _difference(self.arrival_time, self.finished_time)

    @property
    def queued_ts(self) -> float:
        """The same as `arrival_time`."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float | None:
        """The same as `first_scheduled_time`."""
        return self.first_scheduled_time

    @property
    def first_token_ts(self) -> float | None:
        """The same as `first_token_time`."""
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        """The same as `last_token_time`."""
        return self.last_token_time

    @property
    def first_token_latency(self) -> float | None:
        """The same as `time_to_first_token`."""
        return self.time_to_first_token


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass
class CompletionOutput:
    """One answer to a prompt: complete, so far, or (`RequestOutputKind.DELTA`) what is new of it.

    Args:
        index: Its number among the answers to the same prompt.
        text: The decoded text, without the stop string or token that ended it unless asked for.
        token_ids: The output tokens, the one that ended the answer included.
        cumulative_logprob: Sum of the tokens' log-probabilities; None unless asked for.
        logprobs: For each token, the log-probabilities by token id; None unless asked for.
        finish_reason: `"stop"` (end-of-sequence or a stop was met), `"length"` (a limit was
            reached), `"abort"` or `"error"`; None while the answer grows.
        stop_reason: The stop token id or stop string that ended the answer, or what the
            scheduling policy said when it dropped the request; None if an end-of-sequence token
            or something else did.
        token_times: For each of `token_ids`, when it was known, in the clock of
            `RequestMetrics`.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_times: Sequence[float] = ()

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its answers: complete, so far, or what is new of them.

    Args:
        request_id: The request's name.
        prompt: Its text; None if it was given as token ids.
        prompt_token_ids: Its tokens.
        outputs: The answers, one for each that was asked for; with `RequestOutputKind.DELTA`
            only those that have something new.
        finished: Whether all of them are complete.
        num_cached_tokens: Prompt tokens whose KV entries came from the prefix cache; 0 until the
            request is admitted.
        metrics: When the request reached its stations; None if not recorded.
        prompt_logprobs: For each prompt token, the log-probabilities by token id, None for the
            first; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
