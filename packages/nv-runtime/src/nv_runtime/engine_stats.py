"""EngineStats: counts what the engine does, for `LLM.get_metrics` and the periodic line in the log.

An engine with `disable_log_stats` has none and counts nothing. Nothing here looks at the device.
"""

from __future__ import annotations

import logging
from collections import Counter as Tally
from typing import TYPE_CHECKING

from nv_core import RequestError
from nv_runtime.metrics import Counter, Gauge, HistogramValues, Metric

if TYPE_CHECKING:
    from nv_core import Scheduler, StepPlan
    from nv_runtime.answer import Answer
    from nv_runtime.request import Request

logger = logging.getLogger(__name__)

PREFIX = "nv:"

_FIRST_TOKEN_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _token_bounds(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to the largest."""
    bounds = [digit * 10**power for power in range(len(str(largest))) for digit in (1, 2, 5)]
    return [bound for bound in bounds if bound <= largest]


class EngineStats:
    """Counters and histograms of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        model_name: str,
        num_blocks: int,
        max_model_len: int,
        log_interval_s: float,
    ) -> None:
        """Starts at zero.

        Args:
            scheduler: Asked for what it counts itself.
            model_name: Label of every metric.
            num_blocks: Size of the KV pool.
            max_model_len: Longest sequence, in tokens.
            log_interval_s: Seconds between two lines in the log.
        """
        self._scheduler = scheduler
        self._labels = {"model_name": model_name, "engine": "0"}
        self._num_blocks = num_blocks
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions = 0
        self._num_finished: Tally[str] = Tally()
        token_bounds = _token_bounds(max_model_len)
        self._histograms = {
            "iteration_tokens_total": HistogramValues(_STEP_TOKENS),
            "time_to_first_token_seconds": HistogramValues(_FIRST_TOKEN_S),
            "inter_token_latency_seconds": HistogramValues(_TOKEN_S),
            "request_time_per_output_token_seconds": HistogramValues(_TOKEN_S),
            "e2e_request_latency_seconds": HistogramValues(_REQUEST_S),
            "request_queue_time_seconds": HistogramValues(_REQUEST_S),
            "request_prefill_time_seconds": HistogramValues(_REQUEST_S),
            "request_decode_time_seconds": HistogramValues(_REQUEST_S),
            "request_inference_time_seconds": HistogramValues(_REQUEST_S),
            "request_prompt_tokens": HistogramValues(token_bounds),
            "request_generation_tokens": HistogramValues(token_bounds),
        }
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._first_token = self._histograms["time_to_first_token_seconds"]
        self._inter_token = self._histograms["inter_token_latency_seconds"]
        self._log_interval_s = log_interval_s
        self._logged_at: float | None = None
        self._logged_tokens = (0, 0)
        self._idle_since: float | None = None

    def note_launch(self, plan: StepPlan, now: float) -> None:
        """Counts a step, and writes the line in the log when it is time.

        Args:
            plan: What was launched.
            now: When, in seconds of the engine's clock.
        """
        self._num_preemptions += len(plan.preempted)
        self._step_tokens.add(plan.num_scheduled_tokens)
        if self._logged_at is None or self._has_rested(now):
            self._logged_at, self._logged_tokens = now, self._num_tokens
        elif now - self._logged_at >= self._log_interval_s:
            self._log(plan, now)

    def note_token(self, request: Request, answer: Answer) -> None:
        """Counts the newest token of an answer."""
        times = answer.token_times
        self._num_generation_tokens += 1
        if len(times) > 1:
            self._inter_token.add(times[-1] - times[-2])
            return
        if answer.index == 0:
            self._num_prompt_tokens += request.num_prompt_tokens
        self._first_token.add(times[0] - request.metrics.arrival_time)

    def note_finished(self, request: Request, answer: Answer, now: float) -> None:
        """Counts an answer that has ended, as vLLM does: each of a request's answers by itself.

        Args:
            request: What it answers.
            answer: The answer.
            now: When it ended, in seconds of the engine's clock.
        """
        if not self._scheduler.has_unfinished:
            self._idle_since = now
        histograms, times = self._histograms, answer.token_times
        arrived, scheduled = request.metrics.arrival_time, request.metrics.first_scheduled_time
        self._num_finished[str(answer.sequence.finish_reason)] += 1
        histograms["request_prompt_tokens"].add(request.num_prompt_tokens)
        histograms["request_generation_tokens"].add(len(times))
        histograms["e2e_request_latency_seconds"].add(now - arrived)
        if scheduled is not None:
            histograms["request_queue_time_seconds"].add(scheduled - arrived)
        if scheduled is None or not times:
            return
        histograms["request_prefill_time_seconds"].add(times[0] - scheduled)
        histograms["request_decode_time_seconds"].add(times[-1] - times[0])
        histograms["request_inference_time_seconds"].add(times[-1] - scheduled)
        if len(times) > 1:
            per_token = (times[-1] - times[0]) / (len(times) - 1)
            histograms["request_time_per_output_token_seconds"].add(per_token)

    def metrics(self) -> list[Metric]:
        """Returns every metric, as it stands now."""
        scheduler, labels = self._scheduler, self._labels
        cache = scheduler.prefix_cache_stats
        gauges = {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting,
            "kv_cache_usage_perc": 1 - scheduler.num_free_blocks / self._num_blocks,
        }
        counters = {
            "prefix_cache_queries": cache.num_query_tokens,
            "prefix_cache_hits": cache.num_hit_tokens,
            "prompt_tokens": self._num_prompt_tokens,
            "prompt_tokens_cached": cache.num_hit_tokens,
            "generation_tokens": self._num_generation_tokens,
            "num_preemptions": self._num_preemptions,
        }
        return [
            *(Gauge(name=PREFIX + k, labels=dict(labels), value=v) for k, v in gauges.items()),
            *(Counter(name=PREFIX + k, labels=dict(labels), value=v) for k, v in counters.items()),
            *(
                Counter(
                    name=PREFIX + "request_success",
                    labels={**labels, "finished_reason": reason},
                    value=count,
                )
                for reason, count in self._num_finished.items()
            ),
            *(
                values.as_metric(PREFIX + name, dict(labels))
                for name, values in self._histograms.items()
            ),
        ]

    @property
    def _num_tokens(self) -> tuple[int, int]:
        return self._num_prompt_tokens, self._num_generation_tokens

    def _has_rested(self, now: float) -> bool:
        """Whether the engine was idle for so long that a rate over that time would say nothing."""
        since, self._idle_since = self._idle_since, None
        return since is not None and now - since >= self._log_interval_s

    def _log(self, plan: StepPlan, now: float) -> None:
        seconds = now - (self._logged_at or now)
        tokens = self._num_tokens
        prompt_rate, generation_rate = (
            (new - old) / seconds for new, old in zip(tokens, self._logged_tokens, strict=True)
        )
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%",
            prompt_rate,
            generation_rate,
            plan.num_running,
            plan.num_waiting,
            100 * plan.num_used_blocks / self._num_blocks,
            100 * self._scheduler.prefix_cache_stats.hit_rate,
        )
        self._logged_at, self._logged_tokens = now, tokens


def require_stats(stats: EngineStats | None) -> EngineStats:
    """Returns an engine's counts.

    Raises:
        RequestError: It was made with `disable_log_stats=True`, the default.
    """
    if stats is None:
        raise RequestError("the engine counts nothing; make it with disable_log_stats=False")
    return stats
