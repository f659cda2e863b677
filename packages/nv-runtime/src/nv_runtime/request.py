"""Request: the engine's side of one prompt and its answers.

It joins the answers with times and tells the caller what is new; it decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from nv_core import RequestOutputKind, SamplingParams, Sequence
from nv_runtime.answer import Answer
from nv_runtime.logprobs import LogprobReader
from nv_runtime.outputs import Logprob, RequestMetrics, RequestOutput
from nv_runtime.prompt_logprobs import PromptLogprobs

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer


class Request:
    """One prompt and its growing answers.

    Attributes:
        request_id: The caller's or the engine's name for it.
        answers: One for each that was asked for, in order of their indices.
        metrics: Times in seconds of `time.monotonic`.
        is_finished: Whether all answers are complete.
        has_news: Whether there is something for `take_output` that was not taken before.
    """

    def __init__(
        self,
        request_id: str,
        sequences: Seq[Sequence],
        *,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        output_kind: RequestOutputKind,
        arrival_time: float,
    ) -> None:
        """Wraps sequences that the scheduler has accepted.

        Args:
            request_id: See the attribute.
            sequences: One for each answer; all have the same prompt.
            prompt: The prompt's text; None if it was given as token ids.
            tokenizer: Decodes the answers; None for answers without text.
            output_kind: What `take_output` returns.
            arrival_time: When the request came, in seconds of `time.monotonic`.
        """
        self.request_id = request_id
        self.answers = tuple(
            Answer(sequence, index=index, tokenizer=tokenizer)
            for index, sequence in enumerate(sequences)
        )
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.is_finished = False
        self.has_news = False
        self._num_open = len(self.answers)
        self._prompt = prompt
        self._prompt_token_ids = sequences[0].prompt_token_ids
        self._output_kind = output_kind
        self._params = sequences[0].sampling_params
        # By position; the first token has none.
        self._prompt_logprobs: dict[int, dict[int, Logprob]] = {}

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers so far."""
        return self.metrics.num_generation_tokens

    def note_scheduled(self, now: float) -> None:
        """Notes that a step computes some of it."""
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = now

    def note_prompt_logprobs(self, piece: PromptLogprobs, reader: LogprobReader) -> None:
        """Notes log-probabilities of some tokens of the prompt; what is known already stays."""
        num_top = self._params.prompt_logprobs
        if num_top is None:
            return
        for row in range(len(piece.values.logprobs)):
            position = piece.first_position + row
            if position not in self._prompt_logprobs:
                self._prompt_logprobs[position] = reader.read(
                    piece.values,
                    row,
                    self._prompt_token_ids[position],
                    num_top=num_top,
                    decodes=self._params.detokenize,
                )

    def _all_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One entry for each token of the prompt; None if not asked for, or not complete yet."""
        if self._params.prompt_logprobs is None:
            return None
        if len(self._prompt_logprobs) < self.num_prompt_tokens - 1:
            return None
        positions = range(1, self.num_prompt_tokens)
        return [None, *(self._prompt_logprobs[position] for position in positions)]

    def note_progress(self, answer: Answer, now: float, *, sampled: bool) -> None:
        """Notes that an answer has got a token, or that it has ended, or both."""
        metrics = self.metrics
        if sampled:
            answer.note_token(now)
            metrics.num_generation_tokens += 1
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.last_token_time = now
        if answer.is_finished and not answer.has_ended:
            answer.note_end()
            self._num_open -= 1
            if not self._num_open:
                self.is_finished = True
                metrics.finished_time = now
        if self.is_finished or self._output_kind is not RequestOutputKind.FINAL_ONLY:
            self.has_news = True

    def decode_ahead(self) -> None:
        """Decodes what has come, so that `take_output` finds little left to do."""
        for answer in self.answers:
            answer.decode_ahead()

    def take_output(self) -> RequestOutput:
        """Returns the answers so far, or what is new of them, as `output_kind` says."""
        self.has_news = False
        delta = self._output_kind is RequestOutputKind.DELTA
        outputs, num_preemptions = [], 0
        for answer in self.answers:
            num_preemptions += answer.sequence.num_preemptions
            if answer.has_news or not delta:
                outputs.append(answer.take(delta=delta))
        self.metrics.num_preemptions = num_preemptions
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished,
            # The others find the prompt with the first one.
            num_cached_tokens=self.answers[0].sequence.num_cached_tokens,
            metrics=self.metrics.copy(),
            prompt_logprobs=self._all_prompt_logprobs(),
        )


def params_of_further_answers(params: SamplingParams) -> list[SamplingParams]:
    """Makes the parameters of the answers 1, 2, ... to a prompt; the first has those given.

    As in vLLM, a seed is counted up from answer to answer, so that the answer `i` to a request
    with `seed=s` is the one to a request with `seed=s + i`. Without a seed, each sequence gets one
    of its own from the engine.
    """
    if params.seed is None:
        return [params] * (params.n - 1)
    # Seeds are 64 bits wide.
    seeds = [(params.seed + index) % 2**64 for index in range(1, params.n)]
    return [params.clone(seed=seed) for seed in seeds]


def now() -> float:
    """The engine's clock, in seconds."""
    return time.monotonic()
