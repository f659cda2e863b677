"""Outputs: plain data with the few questions that callers ask of them."""

from __future__ import annotations

from nv_runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput


def test_an_answer_is_finished_once_it_has_a_reason() -> None:
    answer = CompletionOutput(index=0, text="a", token_ids=[1])
    assert not answer.finished()
    for reason in ("stop", "length", "abort"):
        answer.finish_reason = reason
        assert answer.finished()


def test_times_are_differences_of_stations_and_absent_before_them() -> None:
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.time_in_queue is None
    assert metrics.time_to_first_token is None
    metrics.first_scheduled_time = 10.25
    metrics.first_token_time = 11.5
    assert metrics.time_in_queue == 0.25
    assert metrics.time_to_first_token == 1.5


def test_outputs_do_not_share_their_lists() -> None:
    first = RequestOutput(request_id="0", prompt=None, prompt_token_ids=[1])
    second = RequestOutput(request_id="1", prompt=None, prompt_token_ids=[1])
    first.outputs.append(CompletionOutput(index=0, text="", token_ids=[]))
    assert second.outputs == []
    assert second.metrics is None
    assert second.num_cached_tokens is None
