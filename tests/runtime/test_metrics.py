"""`LLM.get_metrics` and the line in the log, against what the requests themselves say."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import nv_runtime.engine
import tiny_checkpoints
from nv_core import ConfigError, RequestError, SamplingParams
from nv_runtime import LLM
from nv_runtime.bench.shapes import materialised
from nv_runtime.metrics import Counter, Gauge, Histogram, HistogramValues

PROMPTS = [[1 + index, *range(2, 30 + index)] for index in range(5)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=[False, True], ids=["in step", "one step ahead"])
def make_llm(request: pytest.FixtureRequest, checkpoint: Path) -> Callable[..., LLM]:
    def make(**options: object) -> LLM:
        settings = {
            "device": "cpu",
            "block_size": 4,
            "num_gpu_blocks_override": 60,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "show_progress": False,
            "async_scheduling": request.param,
        }
        return LLM(str(checkpoint), **{**settings, **options})

    return make


def test_counts_agree_with_the_outputs(make_llm: Callable[..., LLM]) -> None:
    with make_llm() as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        outputs += llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)  # found in the prefix cache
        stream = llm.stream([PROMPTS[1]], PARAMS)
        next(stream)
        running = {m.name: m for m in llm.get_metrics()}["nv:num_requests_running"]
        assert isinstance(running, Gauge)
        assert running.value == 1
        stream.close()
        metrics = llm.get_metrics()
    assert {metric.labels["model_name"] for metric in metrics} == {llm.config.model}
    values = {
        (metric.name, metric.labels.get("finished_reason")): metric.value
        for metric in metrics
        if isinstance(metric, (Counter, Gauge))
    }
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs) + len(PROMPTS[1])
    num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
    assert num_cached > 0
    assert values["nv:prompt_tokens", None] == num_prompt_tokens
    assert values["nv:prefix_cache_queries", None] == num_prompt_tokens
    assert values["nv:prefix_cache_hits", None] >= num_cached
    assert values["nv:request_success", "length"] == len(outputs)
    assert values["nv:request_success", "abort"] == 1
    assert values["nv:num_requests_running", None] == 0
    assert values["nv:num_requests_waiting", None] == 0
    assert values["nv:kv_cache_usage_perc", None] == 0
    num_tokens = values["nv:generation_tokens", None]
    assert num_tokens >= 6 * len(outputs) + 1

    histograms = {metric.name: metric for metric in metrics if isinstance(metric, Histogram)}
    first = histograms["nv:time_to_first_token_seconds"]
    assert first.count == len(outputs) + 1
    between = histograms["nv:inter_token_latency_seconds"]
    assert between.count == num_tokens - first.count
    whole = histograms["nv:e2e_request_latency_seconds"]
    assert whole.count == len(outputs) + 1
    assert whole.sum >= between.sum > 0
    assert histograms["nv:request_generation_tokens"].sum == num_tokens
    assert histograms["nv:iteration_tokens_total"].sum >= num_prompt_tokens - 2 * num_cached


def test_preemptions_are_counted(make_llm: Callable[..., LLM]) -> None:
    with make_llm(num_gpu_blocks_override=20, max_model_len=80) as llm:
        outputs = llm.generate(PROMPTS, PARAMS.clone(max_tokens=20), use_tqdm=False)
        (metric,) = (m for m in llm.get_metrics() if m.name == "nv:num_preemptions")
    assert isinstance(metric, Counter)
    counted = [output.metrics.num_preemptions for output in outputs if output.metrics]
    assert metric.value == sum(counted) > 0


def test_a_line_about_the_load(
    make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nv_runtime.engine_stats"):
        with make_llm(log_stats_interval_s=1e-9) as llm:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        lines = [
            record.getMessage()
            for record in caplog.records
            if record.name == "nv_runtime.engine_stats"
        ]
        assert any("Running: 5 reqs, Waiting: 0 reqs" in line for line in lines)
        assert all("Prefix cache hit rate:" in line for line in lines)
        caplog.clear()
        with make_llm() as llm:  # ten seconds are not over
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not [r for r in caplog.records if r.name == "nv_runtime.engine_stats"]


def test_a_line_after_a_rest_is_about_the_time_after_it(
    make_llm: Callable[..., LLM],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its rates would be of an hour in which nobody asked for anything."""
    clock = [1000.0]

    def ticking() -> float:
        clock[0] += 0.25
        return clock[0]

    monkeypatch.setattr(nv_runtime.engine, "now", ticking)
    caplog.set_level(logging.INFO, "nv_runtime.engine_stats")
    with make_llm(log_stats_interval_s=10.0) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for rest_s, is_long in ((5.0, False), (3600.0, True)):
            caplog.clear()
            clock[0] += rest_s
            llm.generate(PROMPTS, PARAMS.clone(max_tokens=60), use_tqdm=False)
            lines = [r.getMessage() for r in caplog.records if "throughput" in r.getMessage()]
            rates = [
                float(rate)
                for line in lines
                for rate in re.findall(r"generation throughput: ([0-9.]+) tokens/s", line)
            ]
            assert len(rates) > 1
            # Five answers in steps of a second or two.
            assert min(rates) > (1.0 if is_long else 0.1)


def test_without_counts_there_are_no_metrics() -> None:
    with materialised("qwen3-tiny") as (path, options):
        with (
            LLM(path, device="cpu", **options) as llm,
            pytest.raises(RequestError, match="disable_log_stats=False"),
        ):
            llm.get_metrics()
        with pytest.raises(ConfigError, match="log_stats_interval_s must be seconds above 0"):
            LLM(path, log_stats_interval_s=0)


def test_histograms_are_cumulative_and_bounds_are_inclusive() -> None:
    values = HistogramValues([1, 2])
    for value in (0.5, 1, 1.5, 7):
        values.add(value)
    metric = values.as_metric("x", {})
    assert metric.buckets == {"1": 2, "2": 3, "+Inf": 4}
    assert (metric.count, metric.sum) == (4, 10)
