"""Engine: the main loop. One `step` schedules, launches, collects and commits.

It joins the scheduler (who runs), the runner (what runs) and the requests (what callers see),
and knows nothing of kernels, layouts or queues itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from nv_core import (
    FinishReason,
    RequestError,
    SamplingParams,
    Scheduler,
    StepPlan,
)
from nv_runtime.model_runner import ModelRunner
from nv_runtime.prompt import TokenizedPrompt
from nv_runtime.request import Request, now
from nv_runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests step by step on one model."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
    ) -> None:
        """Joins the parts; see `nv_runtime.builder` for how they are made.

        Args:
            scheduler: Decides what each step runs.
            runner: Runs it.
            tokenizer: Decodes the answers; None for answers without text.
            vocab_size: Number of token ids that the model has.
        """
        self.scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._requests: dict[int, Request] = {}
        self._ids: dict[str, int] = {}
        self._next_request_number = 0

    def step(self) -> list[Request]:
        """Runs one step.

        Returns:
            The requests that got a token or ended; empty when there was nothing to run.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        with self._dropping_requests_on_failure(plan):
            handle = self._runner.launch(plan)
            self._note_scheduled(plan)
            tokens = self._runner.collect(handle)
        events = self.scheduler.commit(plan, tokens)
        return [self._note_progress(seq.seq_id) for seq in events.sampled]

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still waits for tokens."""
        return self.scheduler.has_unfinished

    def add_request(
        self,
        prompt: TokenizedPrompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
    ) -> Request:
        """Takes a request into the queue.

        Args:
            prompt: The prompt's tokens, and its text if it had one.
            sampling_params: What to sample and when to stop.
            request_id: The caller's name for it, unique among the unfinished ones; by default a
                number.

        Raises:
            RequestError: The request cannot be served; everything else goes on.
        """
        if request_id is None:
            request_id = str(self._next_request_number)
        if request_id in self._ids:
            raise RequestError(
                f"request_id={request_id!r} belongs to an unfinished request; choose another"
            )
        for token_id in sampling_params.stop_token_ids:
            if token_id >= self._vocab_size:
                raise RequestError(
                    f"stop_token_ids holds {token_id}; the model's token ids are in "
                    f"[0, {self._vocab_size})"
                )
        arrival = now()
        seq = self.scheduler.add(
            prompt.token_ids, sampling_params, request_id=request_id, arrival_time=arrival
        )
        self._next_request_number += 1
        request = Request(seq, prompt=prompt.text, tokenizer=self._tokenizer, arrival_time=arrival)
        self._requests[seq.seq_id] = request
        self._ids[request_id] = seq.seq_id
        return request

    def abort_request(self, request_id: str) -> Request | None:
        """Ends a request now; unknown and finished ones are left alone.

        Returns:
            The request, or None if there was nothing to abort.
        """
        seq_id = self._ids.get(request_id)
        if seq_id is None:
            return None
        self.scheduler.abort(seq_id)
        return self._note_progress(seq_id, sampled=False)

    def _note_scheduled(self, plan: StepPlan) -> None:
        launched = now()
        for entry in plan.sequences:
            self._requests[entry.seq_id].note_scheduled(launched)

    def _note_progress(self, seq_id: int, *, sampled: bool = True) -> Request:
        request = self._requests[seq_id]
        request.note_progress(now(), sampled=sampled)
        if request.is_finished:
            del self._requests[seq_id]
            del self._ids[request.request_id]
        return request

    @contextmanager
    def _dropping_requests_on_failure(self, plan: StepPlan) -> Iterator[None]:
        """Ends the plan's requests if it cannot be run, so that the engine stays usable."""
        try:
            yield
        except BaseException:
            for entry in plan.sequences:
                if self.scheduler.finish(entry.seq_id, FinishReason.ERROR) is not None:
                    self._note_progress(entry.seq_id, sampled=False)
            dropped = {entry.seq_id: 0 for entry in plan.sequences if entry.samples}
            self.scheduler.commit(plan, dropped)
            raise
