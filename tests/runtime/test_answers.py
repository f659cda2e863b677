"""Answers as they grow: several to one prompt, in every kind of output, text and times included."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_checkpoints
from nv_core import (
    RequestOutputKind,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    Step,
)
from nv_core.policies import Mixed
from nv_runtime import LLM, CompletionOutput, RequestOutput
from nv_runtime.answer import Answer
from nv_runtime.request import params_of_further_answers
from nv_runtime.tokenizer import Tokenizer
from stop_oracle import first_match
from tiny_engines import assert_idle, joined, options, tokens_of
from tiny_tokenizers import KINDS, SAMPLE_TEXTS

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.5, seed=11, max_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "one step ahead"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **options(async_scheduling=request.param)) as llm:
        yield llm
        assert_idle(llm._open_parts().engine)


def generate(llm: LLM, params: SamplingParams, prompt: str = "the quick brown") -> RequestOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0]


# Text: any tokens, any stop texts, taken at any time, against the definition.


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def answer_with(
    kind: str, ids: Sequence[int], params: SamplingParams, *, taken_at: frozenset[int], delta: bool
) -> list[CompletionOutput]:
    """Lets a scheduler yield `ids` one by one, takes the answer at some of them and at the end."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=100, block_size=4))
    sequence = scheduler.add([0], params.clone(max_tokens=len(ids), ignore_eos=True))
    answer = Answer(sequence, index=0, tokenizer=tokenizer(kind))
    taken = []
    for number, token_id in enumerate(ids):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, {sequence.seq_id: token_id})
        answer.note_token(float(number))
        if answer.meets_stop_text():
            scheduler.abort(sequence.seq_id)
        if answer.is_finished:
            break
        if number in taken_at:
            taken.append(answer.take(delta=delta))
    return [*taken, answer.take(delta=delta)]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_deltas_add_up_and_stop_where_the_text_says(kind: str, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(SAMPLE_TEXTS)) + data.draw(st.text(max_size=20))
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    random_ids = st.lists(st.integers(0, tokenizer(kind).vocab_size - 1), max_size=6)
    ids = [*ids, *data.draw(random_ids)][: data.draw(st.integers(1, 60))] or [5]
    whole = tokenizer(kind).decode(ids)
    place, length = data.draw(st.integers(0, len(whole))), data.draw(st.integers(1, 6))
    stops = [
        stop for stop in (whole[place : place + length], data.draw(st.text(max_size=3))) if stop
    ]
    includes = data.draw(st.booleans())
    params = SamplingParams(stop=stops, include_stop_str_in_output=includes)
    taken_at = data.draw(st.frozensets(st.integers(0, 60)))

    match = first_match(whole, stops)
    expected = whole if match is None else whole[: match.end if includes else match.start]
    deltas = answer_with(kind, ids, params, taken_at=taken_at, delta=True)
    assert "".join(part.text for part in deltas) == expected
    tokens = [token for part in deltas for token in part.token_ids]
    assert tokens == ids[: len(tokens)]
    assert (deltas[-1].stop_reason is None) == (match is None)
    if match is None:
        assert tokens == ids
    else:
        # Not one token more than the text needs.
        certain = tokenizer(kind).stream_decoder().push(tokens[:-1])
        assert first_match(certain, stops) is None
    wholes = answer_with(kind, ids, params, taken_at=taken_at, delta=False)
    assert wholes[-1].text == expected
    assert list(wholes[-1].token_ids) == tokens
    texts = list(itertools.accumulate(part.text for part in deltas))
    assert [part.text for part in wholes] == texts
    assert [len(part.token_times) for part in wholes] == [len(part.token_ids) for part in wholes]


def test_a_long_answer_is_decoded_once() -> None:
    """Taking deltas touches each token and each character a bounded number of times."""
    ids = tokenizer("qwen").encode("The quick brown fox. ") * 300
    params = SamplingParams(stop="never to be seen")
    touched = 0

    class CountingDecoder:
        def __init__(self) -> None:
            self._decoder = tokenizer("qwen").stream_decoder()

        def push(self, token_ids: Sequence[int]) -> str:
            nonlocal touched
            touched += len(token_ids)
            return self._decoder.push(token_ids)

        def finish(self) -> str:
            return self._decoder.finish()

    class CountingTokenizer:
        def stream_decoder(self, **_: bool) -> CountingDecoder:
            return CountingDecoder()

    scheduler = Scheduler(SchedulerConfig(num_blocks=2000, block_size=4))
    sequence = scheduler.add([0], params.clone(max_tokens=len(ids)))
    answer = Answer(sequence, index=0, tokenizer=CountingTokenizer())  # type: ignore[arg-type]
    longest_kept = 0
    for token_id in ids:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, {sequence.seq_id: token_id})
        answer.note_token(0.0)
        assert not answer.meets_stop_text()
        assert len(answer.take(delta=True).token_ids) == 1
        longest_kept = max(longest_kept, len("".join(answer._pieces)) + len(answer._held_back))
    assert touched == len(ids)
    assert longest_kept < len("never to be seen")


# Kinds of output.


@pytest.mark.parametrize("stop", [(), "e"])
def test_deltas_of_a_stream_add_up_to_what_generate_returns(llm: LLM, stop: str) -> None:
    params = SEEDED.clone(stop=stop)
    wanted = generate(llm, params).outputs[0]
    deltas = list(llm.stream("the quick brown", params.clone(output_kind=DELTA)))
    assert joined(deltas) == (wanted.text, list(wanted.token_ids))
    times = [time for output in deltas for time in output.outputs[0].token_times]
    assert len(times) == len(wanted.token_ids)
    assert times == sorted(times)
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [output.outputs[0].finish_reason for output in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_a_final_only_stream_yields_once_for_each(llm: LLM) -> None:
    params = GREEDY.clone(output_kind=FINAL_ONLY)
    wanted = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    outputs = list(llm.stream(["a", "b"], params))
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in wanted]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_generate_returns_complete_answers_whatever_the_kind(
    llm: LLM, kind: RequestOutputKind
) -> None:
    wanted, output = generate(llm, GREEDY), generate(llm, GREEDY.clone(output_kind=kind))
    assert output.finished
    assert output.outputs[0].text == wanted.outputs[0].text
    assert tokens_of(output) == tokens_of(wanted)


def test_no_text_is_made_where_none_is_wanted(llm: LLM) -> None:
    output = generate(llm, GREEDY.clone(detokenize=False))
    assert output.outputs[0].text == ""
    assert tokens_of(output) == tokens_of(generate(llm, GREEDY))


# Several answers to one prompt.


def test_each_answer_is_the_one_to_a_request_with_its_seed(llm: LLM) -> None:
    several = generate(llm, SEEDED.clone(n=5))
    assert several.finished
    assert [answer.index for answer in several.outputs] == list(range(5))
    for index, answer in enumerate(several.outputs):
        alone = generate(llm, SEEDED.clone(seed=11 + index)).outputs[0]
        assert list(answer.token_ids) == list(alone.token_ids)
        assert (answer.text, answer.finish_reason) == (alone.text, "length")
    assert len({tuple(answer.token_ids) for answer in several.outputs}) == 5


def test_without_a_seed_they_differ_all_the_same(llm: LLM) -> None:
    output = generate(llm, SEEDED.clone(seed=None, n=4))
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4


def test_seeds_of_further_answers_stay_seeds() -> None:
    for seed in (-3, -1, 0, 2**64 - 2):
        params = SamplingParams(seed=seed, n=5)
        seeds = [p.seed for p in params_of_further_answers(params)]
        if seed == -1:
            assert seeds == [None] * 4
        else:
            assert seeds == [(seed + index) % 2**64 for index in range(1, 5)]


def test_the_prompt_is_computed_once_and_its_blocks_are_shared(checkpoint: Path) -> None:
    prompt = list(range(3, 44))
    # 10 full blocks of the prompt, and at most 4 more of each answer: 26, not 56.
    with LLM(str(checkpoint), **options(num_gpu_blocks_override=27)) as llm:
        engine = llm._open_parts().engine
        several = llm.stream(prompt, SEEDED.clone(n=4))
        tables, preemptions = [], 0
        for output in several:
            (request,) = engine._requests.values() if engine._requests else (None,)
            if request is not None:
                tables.append([list(answer.sequence.block_table) for answer in request.answers])
            assert output.metrics is not None
            preemptions += output.metrics.num_preemptions
        complete = [snapshot for snapshot in tables if min(map(len, snapshot)) > 10]
        assert complete
        for snapshot in complete:
            assert len({tuple(table[:10]) for table in snapshot}) == 1
            assert len({table[10] for table in snapshot}) == 4
        assert preemptions == 0
        assert_idle(engine, num_blocks=27)


def test_several_answers_under_preemption_chunks_and_company(llm: LLM, checkpoint: Path) -> None:
    wanted = generate(llm, SEEDED.clone(n=3), "she sells sea shells")
    small = options(num_gpu_blocks_override=14, max_num_batched_tokens=5)
    with LLM(str(checkpoint), **small) as crowded:
        prompts = ["1 2 3", "she sells sea shells", "x"]
        params = [GREEDY, SEEDED.clone(n=3), SEEDED.clone(n=2)]
        outputs = crowded.generate(prompts, params, use_tqdm=False)
        assert outputs[1].metrics is not None
        assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
        for index in range(3):
            assert tokens_of(outputs[1], index) == tokens_of(wanted, index)
        assert_idle(crowded._open_parts().engine, num_blocks=14)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_a_stream_of_several_answers(llm: LLM, kind: RequestOutputKind) -> None:
    params = SEEDED.clone(n=3, stop="e")
    wanted = generate(llm, params)
    outputs = list(llm.stream("the quick brown", params.clone(output_kind=kind)))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index, answer in enumerate(wanted.outputs):
        seen = joined(outputs, index) if kind is DELTA else joined(outputs[-1:], index)
        assert seen == (answer.text, list(answer.token_ids))
        reasons = [p.finish_reason for o in outputs for p in o.outputs if p.index == index]
        ends = [reason for reason in reasons if reason is not None]
        assert ends[-1] == answer.finish_reason
        # Under DELTA an answer that has ended is told once.
        assert len(ends) == 1 or kind is CUMULATIVE
    if kind is CUMULATIVE:
        assert all(len(output.outputs) == 3 for output in outputs)


def test_leaving_a_stream_ends_all_answers(llm: LLM) -> None:
    stream = llm.stream("the quick", SEEDED.clone(n=4, max_tokens=None))
    next(stream)
    stream.close()
    engine = llm._open_parts().engine
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def test_a_very_large_n(llm: LLM) -> None:
    output = generate(llm, SEEDED.clone(n=300, max_tokens=2), "the")
    assert len(output.outputs) == 300
    assert all(len(answer.token_ids) == 2 for answer in output.outputs)
    assert_idle(llm._open_parts().engine)


class DropsTheSecond(Mixed):
    """Drops the second sequence that it sees."""

    def schedule(self, step: Step) -> None:
        for seq in list(step.waiting):
            if seq.seq_id == 1:
                step.drop(seq, "one is enough")
        super().schedule(step)


def test_a_dropped_answer_is_one_of_several(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **options(scheduling_policy=DropsTheSecond())) as llm:
        output = generate(llm, SEEDED.clone(n=3))
        assert output.finished
        assert [a.finish_reason for a in output.outputs] == ["length", "error", "length"]
        assert output.outputs[1].stop_reason == "one is enough"
        assert_idle(llm._open_parts().engine)


def test_counts_and_times_of_several_answers(llm: LLM) -> None:
    output = generate(llm, SEEDED.clone(n=3))
    metrics = output.metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == 3 * 14
    times = [time for answer in output.outputs for time in answer.token_times]
    assert min(times) == metrics.first_token_time == metrics.first_token_ts
    assert max(times) == metrics.last_token_time == metrics.last_token_ts
    assert metrics.finished_time is not None
    assert metrics.finished_time >= max(times)
    assert metrics.queued_ts <= (metrics.scheduled_ts or 0) <= min(times)
    assert metrics.first_token_latency == metrics.time_to_first_token
    assert metrics.e2e_latency == metrics.finished_time - metrics.arrival_time


def test_a_salted_prompt_shares_only_with_its_own(llm: LLM) -> None:
    ids = list(range(200, 220))
    hits = []
    for salt in ("a", "a", "b", None):
        prompt: Any = {"prompt_token_ids": ids, "cache_salt": salt}
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 16, 0, 0]
