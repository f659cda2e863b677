"""Request: the engine's side of one prompt, from arrival to the last word.

It joins the scheduler's sequence with text and times; it decides nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace

from nv_core import FinishReason, Sequence
from nv_runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nv_runtime.stop_strings import StopMatch, StopStrings
from nv_runtime.tokenizer import Tokenizer


class Request:
    """One prompt and its growing answer.

    Attributes:
        request_id: The caller's or the engine's name for it.
        sequence: Its tokens and progress, owned by the scheduler.
        metrics: Times in seconds of `time.monotonic`.
        has_news: Whether tokens have arrived or it has ended since `take_output` was last called.
    """

    def __init__(
        self,
        sequence: Sequence,
        *,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        arrival_time: float,
    ) -> None:
        """Wraps a sequence that the scheduler has accepted.

        Args:
            sequence: The sequence.
            prompt: The prompt's text; None if it was given as token ids.
            tokenizer: Decodes the answer; None for an answer without text.
            arrival_time: When the request came, in seconds of `time.monotonic`.
        """
        params = sequence.sampling_params
        self._stops = StopStrings(params.stop) if params.stop else None
        self._stop_match: StopMatch | None = None
        self.request_id = sequence.request_id
        self.sequence = sequence
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.has_news = False
        self._prompt = prompt
        self._text = ""
        self._num_decoded = sequence.num_prompt_tokens
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            self._decoder = tokenizer.stream_decoder(skip_special_tokens=params.skip_special_tokens)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.sequence.is_finished

    def note_scheduled(self, now: float) -> None:
        """Notes that a step computes some of it."""
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = now

    def note_progress(self, now: float, *, sampled: bool) -> None:
        """Notes that a token has arrived, or that it has ended, or both."""
        metrics = self.metrics
        if sampled:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.last_token_time = now
        if self.is_finished:
            metrics.finished_time = now
        self.has_news = True

    def meets_stop_text(self) -> bool:
        """Decodes what is new and says whether the text holds a stop text now.

        Requests without stop texts are not decoded here. A stop text counts only from
        `min_tokens` on, and beats every other reason to end with the same token.
        """
        if self._stops is None or self._stop_match is not None:
            return False
        num_searched = len(self._text)
        self._decode()
        if self.sequence.num_output_tokens < self.sequence.sampling_params.min_tokens:
            return False
        self._stop_match = self._stops.find(self._text, num_searched=num_searched)
        return self._stop_match is not None

    def take_output(self) -> RequestOutput:
        """Returns the answer so far; text is decoded only now, so that nobody waits for it."""
        self.has_news = False
        seq = self.sequence
        self.metrics.num_preemptions = seq.num_preemptions
        self._decode()
        finish_reason = seq.finish_reason
        stop_reason: int | str | None = seq.drop_reason or seq.stop_reason
        if self._stop_match is not None:
            finish_reason, stop_reason = FinishReason.STOP, self._stop_match.stop
        completion = CompletionOutput(
            index=0,
            text=self._visible_text(),
            token_ids=seq.output_token_ids,
            finish_reason=None if finish_reason is None else finish_reason.value,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=seq.prompt_token_ids,
            outputs=[completion],
            finished=self.is_finished,
            num_cached_tokens=seq.num_cached_tokens,
            metrics=replace(self.metrics),
        )

    def _decode(self) -> None:
        if self._decoder is None:
            return
        seq = self.sequence
        new_tokens = seq.token_ids[self._num_decoded :]
        self._num_decoded = seq.num_tokens
        params = seq.sampling_params
        if seq.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output:
            # The token that ended it is no part of what it says, as in vLLM.
            new_tokens = new_tokens[:-1]
        self._text += self._decoder.push(new_tokens)
        if self.is_finished:
            self._text += self._decoder.finish()
            self._decoder = None

    def _visible_text(self) -> str:
        if self._stop_match is not None:
            includes = self.sequence.sampling_params.include_stop_str_in_output
            return self._text[: self._stop_match.end if includes else self._stop_match.start]
        if self._stops is None or self.is_finished:
            return self._text
        return self._text[: len(self._text) - self._stops.num_held_back(self._text)]


def now() -> float:
    """The engine's clock, in seconds."""
    return time.monotonic()
