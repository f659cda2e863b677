"""Engine: the main loop. One `step` schedules, launches, collects and commits.

With `num_steps_ahead=1` the plan that it launches and the plan that it collects are not the same:
the next step is launched first, and runs while the tokens of the one before are handed out.

It joins the scheduler (who runs), the runner (what runs) and the requests (what callers see),
and knows nothing of kernels, layouts or queues itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from nv_core import (
    FinishReason,
    RequestError,
    SamplingParams,
    Scheduler,
    Sequence,
    StepPlan,
)
from nv_runtime.answer import Answer
from nv_runtime.bad_words import with_tokenized_bad_words
from nv_runtime.engine_stats import EngineStats
from nv_runtime.executor import Executor
from nv_runtime.frozen_heap import FrozenHeap
from nv_runtime.interrupts import interrupts_deferred
from nv_runtime.logprobs import LogprobReader
from nv_runtime.model_runner import StepHandle
from nv_runtime.prompt import TokenizedPrompt
from nv_runtime.request import Request, now, params_of_further_answers
from nv_runtime.request_checks import check_sampling_params
from nv_runtime.start_times import StartTimes
from nv_runtime.step_log import EngineStepLog

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer


class Engine:
    """Serves requests step by step on one model."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Executor,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_logprobs: int = 20,
        num_steps_ahead: int = 0,
        step_log: EngineStepLog | None = None,
        stats: EngineStats | None = None,
        start_times: StartTimes | None = None,
    ) -> None:
        """Joins the parts; see `nv_runtime.builder` for how they are made.

        Args:
            scheduler: Decides what each step runs.
            runner: Runs it, on one rank or several.
            tokenizer: Decodes the answers; None for answers without text.
            vocab_size: Number of token ids that the model has.
            max_logprobs: Most log-probabilities of one position; -1 for no limit.
            num_steps_ahead: How many steps are launched before the oldest is collected.
            step_log: Writes down what each step does; None for no log.
            stats: Counts what the engine does; None to count nothing.
            start_times: Is told of the first token, which ends the start.
        """
        self.scheduler = scheduler
        self.runner = runner
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self._logprob_reader = LogprobReader(tokenizer)
        self._num_steps_ahead = num_steps_ahead
        self._step_log = step_log
        self.stats = stats
        self._start_times = start_times
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._requests: dict[str, Request] = {}
        self._owners: dict[int, tuple[Request, Answer]] = {}
        self._heap = FrozenHeap()
        self._next_request_number = 0

    @interrupts_deferred()
    def step(self) -> list[Request]:
        """Runs one step; an interrupt from the keyboard takes effect at its end.

        Returns:
            The requests that got a token or ended, also those that the policy dropped; empty when
            there was nothing to run, or when the step's tokens are still on their way.
        """
        planned = now()
        # If the policy raises, what is in flight goes on with the next call.
        plan = self.scheduler.schedule()
        updated: list[Request] = []
        with self._dropping_requests_on_failure():
            if plan is not None:
                updated += self._note_dropped(plan)
                self._launch(plan, planned)
            updated += self._collect(keep=0 if plan is None else self._num_steps_ahead)
            if not self.scheduler.has_unfinished:
                # What is still in flight yields only tokens that nobody wants.
                updated += self._collect(keep=0)
        return updated

    def _launch(self, plan: StepPlan, planned: float) -> None:
        self._in_flight.append((plan, self.runner.launch(plan)))
        if self._step_log is not None:
            self._step_log.note_launched(plan, planned=planned)
        launched = now()
        if self.stats is not None:
            self.stats.note_launch(plan, launched)
        for seq_id in plan.sequences.seq_ids:
            # One that a commit in between has ended has no owner any more.
            owner = self._owners.get(seq_id)
            if owner is not None:
                owner[0].note_scheduled(launched)

    def _collect(self, *, keep: int) -> list[Request]:
        """Collects and commits the oldest plans until `keep` are left in flight."""
        updated: list[Request] = []
        while len(self._in_flight) > keep:
            plan, handle = self._in_flight[0]
            tokens = self.runner.collect(handle)
            if self._step_log is not None:
                self._step_log.note_collected(plan, done=now())
            self._in_flight.popleft()
            events = self.scheduler.commit(plan, tokens)
            if self._start_times is not None and events.sampled:
                self._start_times.note_first_token()
                self._start_times = None
            self._note_logprobs(handle, events.sampled)
            updated += [self._note_progress(seq.seq_id) for seq in events.sampled]
        return updated

    def _note_logprobs(self, handle: StepHandle, sampled: Iterable[Sequence]) -> None:
        """Hands log-probabilities to those who asked for them; the step must be collected."""
        for piece in handle.prompt_logprobs:
            # A caller may have turned its back on the request in the meantime.
            if piece.seq_id in self._owners:
                request, _ = self._owners[piece.seq_id]
                request.note_prompt_logprobs(piece, self._logprob_reader)
        if handle.logprobs is None:
            return
        rows = {seq_id: row for row, seq_id in enumerate(handle.seq_ids)}
        for seq in sampled:
            _, answer = self._owners[seq.seq_id]
            answer.note_logprobs(handle.logprobs, rows[seq.seq_id], self._logprob_reader)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still waits for tokens."""
        return self.scheduler.has_unfinished

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do, be it only to collect what nobody wants any more."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    @interrupts_deferred()
    def add_request(
        self,
        prompt: TokenizedPrompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Takes a request into the queue.

        Args:
            prompt: The prompt's tokens, and its text if it had one.
            sampling_params: What to sample, how often, and when to stop.
            request_id: The caller's name for it, unique among the unfinished ones; by default a
                number.
            priority: Lower is more urgent; for policies that use it.

        Raises:
            RequestError: The request cannot be served; everything else goes on.
        """
        request_id = self._free_id(request_id)
        sampling_params = with_tokenized_bad_words(sampling_params, self._tokenizer)
        self._check(sampling_params)
        if self._start_times is not None and not self._requests:
            # The start went on hold when the engine was ready.
            self._start_times.skip()
        further = params_of_further_answers(sampling_params)
        arrival = now()
        sequences = [
            self.scheduler.add(
                prompt.token_ids,
                sampling_params,
                request_id=request_id,
                priority=priority,
                arrival_time=arrival,
                cache_salt=prompt.cache_salt,
            )
        ]
        try:
            for params in further:
                sequences.append(self.scheduler.fork(sequences[0], params, request_id=request_id))
            request = Request(
                request_id,
                sequences,
                prompt=prompt.text,
                tokenizer=self._tokenizer,
                output_kind=sampling_params.output_kind,
                arrival_time=arrival,
            )
            if self._step_log is not None:
                for seq in sequences:
                    self._step_log.note_added(seq)
        except BaseException:
            # Without an owner they would run, and nobody would know whose tokens they get.
            for seq in sequences:
                self.scheduler.abort(seq.seq_id)
                if self._step_log is not None:
                    self._step_log.note_withdrawn(seq)
            raise
        self._next_request_number += 1
        self._heap.freeze()
        self._requests[request_id] = request
        for answer in request.answers:
            self._owners[answer.sequence.seq_id] = (request, answer)
        return request

    @interrupts_deferred()
    def abort_request(self, request_id: str) -> Request | None:
        """Ends all answers of a request now; unknown and finished requests are left alone.

        Returns:
            The request, or None if there was nothing to abort.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._abort(request)
        return request

    @interrupts_deferred()
    def abort_unfinished(self, requests: Iterable[Request]) -> None:
        """Ends those of some requests that have not ended.

        An interrupt from the keyboard takes effect when all have, so that none is left behind that
        nobody would know of any more.
        """
        for request in requests:
            # The id of one that has ended may be another's by now.
            if not request.is_finished:
                self._abort(request)

    def check(self) -> None:
        """Raises the reason why no more steps can be run; see `Executor`."""
        self.runner.check()

    @property
    def num_graphs_ahead(self) -> int:
        """See `Executor`."""
        return self.runner.num_graphs_ahead

    @interrupts_deferred()
    def capture_next_graph(self) -> bool:
        """See `Executor`; an interrupt from the keyboard takes effect at its end."""
        return self.runner.capture_next_graph()

    def abort_all(self) -> None:
        """Ends every request; an interrupt from the keyboard takes effect when all have ended."""
        self.abort_unfinished(list(self._requests.values()))

    def close(self) -> None:
        """Ends every request, the step log, and the ranks if there are several."""
        try:
            with interrupts_deferred():
                self.abort_all()
                if self._step_log is not None:
                    self._step_log.close()
                if self._start_times is not None:
                    self._start_times.close()
        finally:
            self.runner.shutdown()

    def _abort(self, request: Request) -> None:
        for answer in request.answers:
            if self.scheduler.abort(answer.sequence.seq_id) is not None:
                self._note_progress(answer.sequence.seq_id, sampled=False)

    def _free_id(self, request_id: str | None) -> str:
        if request_id is None:
            while str(self._next_request_number) in self._requests:
                self._next_request_number += 1
            return str(self._next_request_number)
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a str or None, got {request_id!r}")
        if request_id in self._requests:
            raise RequestError(
                f"request_id={request_id!r} belongs to an unfinished request; choose another"
            )
        return request_id

    def _check(self, sampling_params: SamplingParams) -> None:
        """Refuses what this model or this engine cannot do."""
        if sampling_params.stop and self._tokenizer is None:
            raise RequestError(
                f"stop={sampling_params.stop!r} needs the output text, but the engine has no "
                "tokenizer (skip_tokenizer_init=True); use stop_token_ids"
            )
        check_sampling_params(
            sampling_params,
            vocab_size=self._vocab_size,
            max_logprobs=self._max_logprobs,
            eos_token_ids=self.scheduler.config.eos_token_ids,
        )

    def _note_dropped(self, plan: StepPlan) -> list[Request]:
        # A caller may have turned its back on a request before the plan that names it.
        known = [seq.seq_id for seq in plan.dropped if seq.seq_id in self._owners]
        return [self._note_progress(seq_id, sampled=False) for seq_id in known]

    def _note_progress(self, seq_id: int, *, sampled: bool = True) -> Request:
        request, answer = self._owners[seq_id]
        if sampled and answer.meets_stop_text():
            self.scheduler.finish(seq_id, FinishReason.STOP)
        request.note_progress(answer, now(), sampled=sampled)
        if sampled and self.stats is not None:
            self.stats.note_token(request, answer)
        if answer.is_finished:
            self._forget(request, answer)
        return request

    def _forget(self, request: Request, answer: Answer) -> None:
        if self._step_log is not None:
            self._step_log.note_finished(answer.sequence)
        if self.stats is not None:
            self.stats.note_finished(request, answer, now())
        self._owners.pop(answer.sequence.seq_id, None)
        if request.is_finished:
            self._requests.pop(request.request_id, None)
            if not self._requests:
                self._heap.unfreeze()

    @contextmanager
    def _dropping_requests_on_failure(self) -> Iterator[None]:
        """Ends every request that has a step in flight if one fails: the engine stays usable."""
        try:
            yield
        except BaseException:
            self._in_flight.clear()
            plans = self.scheduler.plans_in_flight
            if self._step_log is not None:
                self._step_log.note_failed(plans)
            for seq_id in chain.from_iterable(plan.sequences.seq_ids for plan in plans):
                self.scheduler.finish(seq_id, FinishReason.ERROR)
            for plan in plans:
                self.scheduler.commit(plan, dict.fromkeys(plan.sampled_seq_ids, 0))
            self.runner.reset()
            for request, answer in list(self._owners.values()):
                if answer.is_finished:
                    request.note_progress(answer, now(), sampled=False)
                    self._forget(request, answer)
            raise
