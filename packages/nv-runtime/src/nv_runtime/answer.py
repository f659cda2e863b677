"""Answer: one of the answers to a prompt, from its first token to its last word.

It joins the scheduler's sequence with text: it decodes, looks for stop texts, and remembers what
the caller has been told. Work per token is constant, however long the answer is, as long as only
what is new is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_core import FinishReason, Sequence
from nv_kernels import TokenLogprobs
from nv_runtime.logprobs import LogprobReader
from nv_runtime.outputs import CompletionOutput, Logprob
from nv_runtime.stop_strings import StopMatch, StopStrings

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer


class Answer:
    """One sequence and its text.

    Attributes:
        index: Its number among the answers to the same prompt.
        sequence: Its tokens and progress, owned by the scheduler.
        token_times: When each output token was known, in seconds of the engine's clock.
        has_news: Whether tokens have arrived or it has ended since `take` was last called.
        has_ended: Whether `note_end` was called.
    """

    def __init__(self, sequence: Sequence, *, index: int, tokenizer: Tokenizer | None) -> None:
        """Wraps a sequence that the scheduler has accepted.

        Args:
            sequence: The sequence.
            index: See the attribute.
            tokenizer: Decodes the answer; None for an answer without text.
        """
        params = sequence.sampling_params
        self.index = index
        self.sequence = sequence
        self.token_times: list[float] = []
        self.has_news = False
        self.has_ended = False
        self._stops = StopStrings(params.stop)
        self._stop_match: StopMatch | None = None
        self._num_decoded = sequence.num_prompt_tokens
        self._num_taken = 0
        # The text, but for the end of it that may become a stop text, and this end.
        self._pieces: list[str] = []
        self._held_back = ""
        self._logprobs: list[dict[int, Logprob]] | None = None
        if params.logprobs is not None:
            self._logprobs = []
        self._cumulative_logprob = 0.0
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            self._decoder = tokenizer.stream_decoder(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    @property
    def is_finished(self) -> bool:
        """Whether it is complete."""
        return self.sequence.is_finished

    def note_token(self, now: float) -> None:
        """Notes that a token has arrived."""
        self.token_times.append(now)
        self.has_news = True

    def note_logprobs(self, values: TokenLogprobs, row: int, reader: LogprobReader) -> None:
        """Notes log-probabilities of the newest token, if it was asked for any.

        Args:
            values: Of all sequences of a step.
            row: Which of them this is.
            reader: Reads them.
        """
        params = self.sequence.sampling_params
        if self._logprobs is None or params.logprobs is None:
            return
        token_id = self.sequence.token_ids[-1]
        entry = reader.read(
            values, row, token_id, num_top=params.logprobs, decodes=params.detokenize
        )
        self._logprobs.append(entry)
        self._cumulative_logprob += entry[token_id].logprob

    def note_end(self) -> None:
        """Notes that it has ended, with a token or without."""
        self.has_news = True
        self.has_ended = True

    def meets_stop_text(self) -> bool:
        """Decodes what is new and says whether the text holds a stop text now.

        Answers without stop texts are not decoded here. A stop text counts only from `min_tokens`
        on, and beats every other reason to end with the same token.
        """
        if not self._stops.texts or self._stop_match is not None:
            return False
        self._decode()
        return self._stop_match is not None

    def decode_ahead(self) -> None:
        """Decodes what has come, so that `take` finds little left to do.

        Answers with stop texts are decoded token by token anyway.
        """
        if not self._stops.texts:
            self._decode()

    def take(self, *, delta: bool) -> CompletionOutput:
        """Returns the answer so far; what of its text is not decoded yet is decoded now.

        Args:
            delta: Whether to return only what has come since the last call. Either all calls for
                an answer say so, or none.
        """
        self.has_news = False
        self._decode()
        seq = self.sequence
        start = self._num_taken if delta else 0
        self._num_taken = seq.num_output_tokens
        text = "".join(self._pieces)
        self._pieces = [] if delta else [text]
        finish_reason = seq.finish_reason
        stop_reason: int | str | None = seq.drop_reason or seq.stop_reason
        if self._stop_match is not None:
            finish_reason, stop_reason = FinishReason.STOP, self._stop_match.stop
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=seq.token_ids[seq.num_prompt_tokens + start :],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
            finish_reason=None if finish_reason is None else finish_reason.value,
            stop_reason=stop_reason,
            token_times=self.token_times[start:],
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
        new_text = self._decoder.push(new_tokens)
        if self.is_finished:
            new_text += self._decoder.finish()
            self._decoder = None
        self._settle(new_text)

    def _settle(self, new_text: str) -> None:
        """Adds text to what is certain, except for what may be, or is, a stop text."""
        text = self._held_back + new_text
        params = self.sequence.sampling_params
        # What one that was broken off leaves in the decoder is half a character, no stop text.
        may_stop = self.sequence.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR)
        if self._stops.texts and may_stop and self.sequence.num_output_tokens >= params.min_tokens:
            match = self._stops.find(text, num_searched=len(self._held_back))
            if match is not None:
                self._stop_match = match
                self._decoder = None
                self._held_back = ""
                end = match.end if params.include_stop_str_in_output else match.start
                self._pieces.append(text[:end])
                return
        num_held_back = 0 if self.is_finished else self._stops.num_held_back(text)
        certain = len(text) - num_held_back
        self._pieces.append(text[:certain])
        self._held_back = text[certain:]
