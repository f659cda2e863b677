"""Readers of public formats with their traps, and look-alikes with the statistics of the traces."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import pytest

from nv_core import ConfigError, SchedulerConfig
from nv_core.sim import (
    LOOK_ALIKES,
    ConstantLatency,
    Lengths,
    Workload,
    WorkRequest,
    gamma_arrivals,
    make_documents,
    make_sessions,
    make_workload,
    measure,
    on_off_arrivals,
    poisson_arrivals,
    read_workload,
    simulate,
    synthetic,
)
from nv_core.sim.readers import parse_timestamp
from nv_core.sim.synthetic import varying_arrivals, with_arrivals


def write(tmp_path: Path, text: str, name: str = "trace.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def rows_of(workload: Workload) -> list[tuple[float, int, int]]:
    return [(round(r.arrival_s, 6), r.num_prompt_tokens, r.num_output_tokens) for r in workload]


def test_azure_2023_has_seven_digits_and_no_last_newline(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8"
    )
    workload = read_workload(write(tmp_path, text))
    assert rows_of(workload) == [(0, 4808, 10), (0.052, 3180, 8)]
    assert workload.problems == ()


def test_azure_2024_mixes_its_times(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\r\n"
        "2024-05-10 00:00:01+00:00,2399,6\r\n"
        "2024-05-10 00:00:02.5,100,7\r\n"
    )
    workload = read_workload(write(tmp_path, text))
    assert rows_of(workload) == [(0, 2162, 5), (0.99007, 2399, 6), (2.49007, 100, 7)]


@pytest.mark.parametrize("text", ["", "yesterday", "2024-05-10", "2024-13-10 00:00:00"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no time|month must be"):
        parse_timestamp(text)


def test_bad_lines_are_reported_with_their_numbers(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "soon,1,1\n"
        "2023-11-16 18:17:04.0,many,1\n"
        "2023-11-16 18:17:04.0,0,1\n"
        "2023-11-16 18:17:04.0,5\n"
        "2023-11-16 18:17:04.0,5,6,7\n"
        "2023-11-16 18:17:05.0,7,2.5\n"
    )
    workload = read_workload(write(tmp_path, text))
    assert len(workload) == 1
    assert [problem.split(":")[0] for problem in workload.problems] == [
        f"line {n}" for n in (3, 4, 5, 6, 7, 8)
    ]
    assert "'soon' is no time" in workload.problems[0]
    assert "'0' is no number of tokens of at least 1" in workload.problems[2]
    assert "3 columns expected" in workload.problems[3]


def test_burstgpt_by_column_name_with_failures(tmp_path: Path) -> None:
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n"
        "5,a,2.5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,,0.1,GPT-4,1087,0,1087,API log\n"
        "118.25,b,9,GPT-4,417,276,693,API log\n"
    )
    workload = read_workload(write(tmp_path, text))
    assert rows_of(workload) == [(0, 472, 18), (113.25, 417, 276)]
    assert workload.requests[0].user == "a"
    assert workload.problems == ("line 3: a failed request: no response tokens",)


def test_burstgpt_of_the_first_version(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,x,1,2,3,y\n"
    assert rows_of(read_workload(write(tmp_path, text))) == [(0, 1, 2)]


MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 3]},
    {"timestamp": 6000, "input_length": 400, "output_length": 5, "hash_ids": [0]},
]


def json_lines(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_mooncake_counts_milliseconds_and_shares_prefixes(tmp_path: Path) -> None:
    bad = {"timestamp": 1, "input_length": 2000, "output_length": 5, "hash_ids": [0, 1, 3]}
    path = write(tmp_path, json_lines([*MOONCAKE, bad]) + "{oops\n\n")
    workload = read_workload(path)
    assert rows_of(workload) == [(0, 1100, 5), (3, 1100, 5), (6, 400, 5)]
    assert workload.problems[0] == "line 4: 3 hashes for 2000 tokens in blocks of 512"
    assert workload.problems[1].startswith("line 5: no JSON")
    prompts = [request.make_prompt(i) for i, request in enumerate(workload)]
    assert [len(prompt) for prompt in prompts] == [1100, 1100, 400]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][1024] != prompts[1][1024]
    # Ticks can be spread; nobody overtakes beyond the tick.
    spread = read_workload(path, spread_s=3.0)
    assert all(0 <= b.arrival_s - a.arrival_s < 6 for a, b in pairwise(spread))


def test_bailian_counts_seconds_and_knows_conversations(tmp_path: Path) -> None:
    rows = [
        {"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "turn": 1, "type": "text"},
        {"chat_id": 8, "parent_chat_id": 7, "timestamp": 9.0, "turn": 2, "type": "text"},
        {"chat_id": 9, "parent_chat_id": 8, "timestamp": 20.0, "turn": 3, "type": "text"},
    ]
    ids = [[1, 2], [1, 2, 3], [1, 2, 3, 4]]
    lines = [
        {**row, "input_length": 16 * len(own), "output_length": 3, "hash_ids": own}
        for row, own in zip(rows, ids, strict=True)
    ]
    workload = read_workload(write(tmp_path, json_lines(lines)))
    assert rows_of(workload) == [(0, 32, 3), (7.5, 48, 3), (18.5, 64, 3)]
    assert {request.user for request in workload} == {"7"}


def conversation(*texts: str) -> dict[str, object]:
    speakers = ("human", "gpt")
    turns = [{"from": speakers[i % 2], "value": text} for i, text in enumerate(texts)]
    return {"id": "x", "conversations": turns}


def test_sharegpt_filters_as_vllm_does_and_says_so(tmp_path: Path) -> None:
    def words(count: int) -> str:
        return "word " * count

    items = [
        conversation(words(20), words(30), words(99)),
        conversation(words(20)),
        conversation(words(3), words(30)),
        conversation(words(1025), words(30)),
        conversation(words(1000), words(1049)),
    ]
    path = write(tmp_path, json.dumps(items), "sharegpt.json")
    workload = read_workload(path, count_tokens=lambda text: len(text.split()))
    assert rows_of(workload) == [(0, 20, 30)]
    assert [problem.split(": ")[1] for problem in workload.problems] == [
        "fewer than two messages",
        "too short",
        "too long",
        "too long",
    ]


def test_vllm_lines_with_arrivals(tmp_path: Path) -> None:
    lines = [{"prompt": "x" * 40}, {"prompt": "x" * 80, "output_tokens": 9}, {"prompt": 3}]
    path = write(tmp_path, json_lines(lines))
    assert rows_of(read_workload(path, num_output_tokens=4)) == [(0, 10, 4), (0, 20, 9)]
    timed = read_workload(path, rate_per_s=2.0)
    assert timed.requests[1].arrival_s > 0
    assert timed.problems == ("line 3: prompt must be a text, got 3",)


@pytest.mark.parametrize(
    "header",
    [
        "arrival_s,num_prompt_tokens,num_output_tokens",
        "arrived_at,num_prefill_tokens,num_decode_tokens",
    ],
)
def test_plain_tables(tmp_path: Path, header: str) -> None:
    workload = read_workload(write(tmp_path, f"{header}\n2.5,10,4\n1.5,20,8\n"))
    assert rows_of(workload) == [(0, 20, 8), (1, 10, 4)]


def test_a_plain_table_with_everything(tmp_path: Path) -> None:
    text = (
        "arrival_s,num_prompt_tokens,num_output_tokens,user,priority,slack_s,predicted_output_tokens\n"
        "0,10,4,ann,2,1.5,5\n"
        "0,10,4,,,,\n"
    )
    first, second = read_workload(write(tmp_path, text))
    assert (first.user, first.priority, first.slack_s) == ("ann", 2, 1.5)
    assert first.predicted_output_tokens == 5
    assert (second.user, second.priority, second.slack_s) == (None, 0, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c\n1,2,3\n", "cannot be told"),
        ('{"colour": 1}\n', "cannot be told"),
        ("arrival_s,num_prompt_tokens,num_output_tokens\n", "no request that can be read"),
        ("arrival_s,num_prompt_tokens,num_output_tokens\nx,y,z\n", "line 2"),
    ],
)
def test_files_that_say_nothing_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_workload(write(tmp_path, text))


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file_format must be one of auto, azure"):
        read_workload(write(tmp_path, "x"), "excel")
    with pytest.raises(ConfigError, match="no column TIMESTAMP"):
        read_workload(write(tmp_path, "x\n1\n"), "azure")


# The statistics that follow are those of the traces themselves.


def gaps_of(workload: Workload) -> list[float]:
    return [b.arrival_s - a.arrival_s for a, b in pairwise(workload)]


def variation_of(gaps: Sequence[float]) -> float:
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def distance(lengths: Sequence[int], table: Lengths) -> float:
    """Kolmogorov and Smirnov's, at the table's own points that differ from their neighbours."""
    ordered = sorted(lengths)
    worst = 0.0
    for level, value in zip(table.levels, table.quantiles, strict=True):
        if table.quantiles.count(value) == 1:
            share = sum(length <= value for length in ordered) / len(ordered)
            worst = max(worst, abs(share - level))
    return worst


@pytest.mark.parametrize(
    ("name", "rate", "variation", "prompt", "output"),
    [
        # Rate and variation of arrivals; mean and standard deviation of lengths (Azure 2023).
        ("azure-conversation", 5.53, 1.09, (1155, 1109), (211, 163)),
        ("azure-code", 2.57, 13.2, (2048, 1974), (27.9, 59.9)),
    ],
)
def test_azure_look_alikes(
    name: str,
    rate: float,
    variation: float,
    prompt: tuple[float, float],
    output: tuple[float, float],
) -> None:
    workload = LOOK_ALIKES[name]()
    prompts = [request.num_prompt_tokens for request in workload]
    outputs = [request.num_output_tokens for request in workload]
    assert workload.rate_per_s == pytest.approx(rate, rel=0.1)
    assert variation_of(gaps_of(workload)) == pytest.approx(variation, rel=0.1)
    assert statistics.fmean(prompts) == pytest.approx(prompt[0], rel=0.03)
    assert statistics.pstdev(prompts) == pytest.approx(prompt[1], rel=0.03)
    assert statistics.fmean(outputs) == pytest.approx(output[0], rel=0.05)
    assert statistics.pstdev(outputs) == pytest.approx(output[1], rel=0.15)
    tables = {
        "azure-conversation": (
            synthetic.AZURE_CONVERSATION_INPUT,
            synthetic.AZURE_CONVERSATION_OUTPUT,
        ),
        "azure-code": (synthetic.AZURE_CODE_INPUT, synthetic.AZURE_CODE_OUTPUT),
    }
    for lengths, table in zip((prompts, outputs), tables[name], strict=True):
        # Short lengths are whole numbers, which no table can follow closely.
        assert distance(lengths, table) < 0.06
    assert abs(correlation(prompts, outputs)) < 0.03


def correlation(a: Sequence[int], b: Sequence[int]) -> float:
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    product = statistics.fmean((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return product / statistics.pstdev(a) / statistics.pstdev(b)


def lru_hits(prompts: Sequence[tuple[int, ...]], capacity: float) -> list[int]:
    """Blocks that each prompt finds in the plainest of caches: LRU, the tail of a chain first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for blocks in prompts:
        found = 0
        while found < len(blocks) and blocks[found] in cache:
            found += 1
        hits.append(found)
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize(
    ("name", "rate", "num_blocks", "mean_length", "expected"),
    [
        (
            "mooncake-conversation",
            3.40,
            288_500,
            12_035,
            {
                1_000: 4.45,
                3_000: 6.53,
                10_000: 21.16,
                30_000: 32.57,
                50_000: 35.46,
                100_000: 36.37,
                math.inf: 36.64,
            },
        ),
        (
            "mooncake-synthetic",
            3.91,
            121_877,
            15_325,
            {
                1_000: 8.41,
                3_000: 19.06,
                10_000: 42.39,
                30_000: 62.42,
                50_000: 63.96,
                100_000: 63.96,
                math.inf: 63.96,
            },
        ),
    ],
)
def test_mooncake_look_alikes_have_the_hit_rates_of_the_traces(
    name: str, rate: float, num_blocks: int, mean_length: float, expected: dict[float, float]
) -> None:
    workload = LOOK_ALIKES[name]()
    prompts = [tuple(block for block, _ in request.segments) for request in workload]
    total = sum(map(len, prompts))
    assert workload.rate_per_s == pytest.approx(rate, rel=0.03)
    assert total == pytest.approx(num_blocks, rel=0.07)
    lengths = [request.num_prompt_tokens for request in workload]
    assert statistics.fmean(lengths) == pytest.approx(mean_length, rel=0.07)
    for capacity, percent in expected.items():
        found = 100 * sum(lru_hits(prompts, capacity)) / total
        assert found == pytest.approx(percent, abs=1.5), f"{capacity} blocks"


@pytest.mark.parametrize(
    ("name", "at_most_first", "above_half", "above_most"),
    [
        # Shares of requests that reuse one block at most, more than half, more than 90 %.
        ("mooncake-conversation", 0.61, 0.29, 0.128),
        ("mooncake-synthetic", 0.55, None, 0.38),
    ],
)
def test_mooncake_look_alikes_reuse_as_much_of_each_prompt(
    name: str, at_most_first: float, above_half: float | None, above_most: float
) -> None:
    prompts = [tuple(block for block, _ in r.segments) for r in LOOK_ALIKES[name]()]
    hits = lru_hits(prompts, math.inf)
    shares = [found / len(blocks) for found, blocks in zip(hits, prompts, strict=True)]
    assert statistics.fmean(found <= 1 for found in hits) == pytest.approx(at_most_first, abs=0.08)
    if above_half is not None:
        assert statistics.fmean(s > 0.5 for s in shares) == pytest.approx(above_half, abs=0.05)
    assert statistics.fmean(share > 0.9 for share in shares) == pytest.approx(above_most, abs=0.05)


@pytest.mark.parametrize("num_blocks", [300, 1_000, 20_000])
def test_the_scheduler_finds_what_an_lru_cache_finds(num_blocks: int) -> None:
    """One request at a time, so that nothing but the cache decides; blocks as in the trace."""
    requests = [
        WorkRequest(10.0 * i, r.num_prompt_tokens // 512 * 512 + 1, 1, segments=r.segments)
        for i, r in enumerate(LOOK_ALIKES["mooncake-conversation"](400))
    ]
    config = SchedulerConfig(num_blocks, 512, max_num_batched_tokens=2**17)
    log = simulate(Workload("serial", tuple(requests)), config, ConstantLatency(1.0))
    found = [r.num_cached_tokens // 512 for r in log.requests.values()]
    # The token behind the last full block takes a block, too, which nobody can find.
    prompts = [
        (*(block for block, _ in request.segments[: request.num_prompt_tokens // 512]), -1 - i)
        for i, request in enumerate(requests)
    ]
    assert found == lru_hits(prompts, num_blocks)
    assert sum(found) > 0


def test_block_hashes_of_a_smaller_block_size_give_the_same_hits(tmp_path: Path) -> None:
    """Where the scheduler's blocks divide those of the trace, its hits are those of the trace."""
    rows = [
        {"timestamp": 1000 * i, "input_length": 512 * len(ids) + 1, "output_length": 1,
         "hash_ids": [*ids, 90 + i]}
        for i, ids in enumerate([[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3]])
    ]  # fmt: skip
    workload = read_workload(write(tmp_path, json_lines(rows)))
    for block_size in (16, 64, 512):
        config = SchedulerConfig(40_000 // block_size, block_size)
        log = simulate(workload, config, ConstantLatency(0.1))
        found = [r.num_cached_tokens for r in log.requests.values()]
        assert found == [0, 1024, 512, 1536]


def test_gamma_arrivals_have_the_variation_that_their_shape_says() -> None:
    for shape in (0.25, 1.0, 4.0):
        times = list(islice(gamma_arrivals(10.0, burstiness=shape, seed=3), 20_000))
        gaps = [b - a for a, b in pairwise(times)]
        assert 1 / statistics.fmean(gaps) == pytest.approx(10.0, rel=0.05)
        assert variation_of(gaps) == pytest.approx(shape**-0.5, rel=0.05)


def test_arrivals_are_the_same_every_time_and_differ_by_seed() -> None:
    def first(seed: int) -> list[float]:
        return list(islice(poisson_arrivals(2.0, seed=seed), 5))

    assert first(1) == first(1) != first(2)


def test_on_off_arrivals_are_off_at_times() -> None:
    times = list(islice(on_off_arrivals(20.0, mean_on_s=5, mean_off_s=15, seed=1), 5_000))
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.2)
    assert max(b - a for a, b in pairwise(times)) > 15


def test_varying_arrivals_follow_their_rates() -> None:
    times = list(islice(varying_arrivals([1.0, 0.0, 9.0], period_s=100, seed=1), 3_000))
    share = [sum(int(time // 100) % 3 == period for time in times) for period in range(3)]
    assert share[1] == 0
    assert share[2] / share[0] == pytest.approx(9, rel=0.15)


def test_sessions_find_all_that_was_said_before() -> None:
    workload = make_sessions(
        60, arrivals=poisson_arrivals(0.5), mean_turns=4, system_prompt_tokens=64, seed=5
    )
    assert len(workload) / 60 == pytest.approx(4, rel=0.3)
    log = simulate(workload, SchedulerConfig(60_000, 16), ConstantLatency(0.005))
    last: dict[str, tuple[int, int]] = {}
    for number, request in enumerate(workload):
        found = log.requests[number].num_cached_tokens
        assert request.user is not None
        before = last.get(request.user)
        if before is not None:
            # All but the answer's last token, in full blocks.
            assert found >= (sum(before) - 1) // 16 * 16
        last[request.user] = (request.num_prompt_tokens, request.num_output_tokens)
    assert measure(log).hit_rate > 0.6


def test_documents_are_asked_about_by_zipf() -> None:
    workload = make_documents(
        4_000, arrivals=poisson_arrivals(5.0), num_documents=20, num_system_prompts=2, seed=2
    )
    counts = [0] * 20
    for request in workload:
        counts[request.segments[1][0] - 10**6] += 1
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.25)
    assert {request.segments[0][0] for request in workload} == {0, 1}


def test_users_of_a_synthetic_workload() -> None:
    workload = make_workload(
        3_000,
        arrivals=poisson_arrivals(1.0),
        prompt_lengths=Lengths.fixed(10),
        output_lengths=Lengths.between(5, 50),
        num_users=4,
    )
    counts = {user: sum(r.user == user for r in workload) for user in ("user 0", "user 3")}
    assert counts["user 0"] / counts["user 3"] == pytest.approx(4, rel=0.2)
    assert {r.num_prompt_tokens for r in workload} == {10}
    assert {r.num_output_tokens for r in workload} == set(range(5, 51))


def test_arrivals_can_be_replaced() -> None:
    workload = LOOK_ALIKES["sessions"](10)
    moved = with_arrivals(workload, iter(range(10)))
    assert [r.arrival_s for r in moved] == list(range(10))


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_have_the_size_and_the_seed_that_were_asked_for(name: str) -> None:
    make = LOOK_ALIKES[name]
    assert len(make(50)) == 50
    assert make(50, seed=1) == make(50, seed=1)
    assert make(50, seed=1) != make(50, seed=2)


def test_generators_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="rate_per_s must be positive"):
        poisson_arrivals(0.0)
    with pytest.raises(ConfigError, match="do not fall"):
        Lengths((5, 3), (0, 1))
    with pytest.raises(ConfigError, match="mean_turns"):
        make_sessions(1, arrivals=poisson_arrivals(1.0), mean_turns=0.5)
    with pytest.raises(ConfigError, match="rates_per_s"):
        varying_arrivals([0.0])


def test_lengths_are_drawn_between_their_quantiles() -> None:
    lengths = Lengths((10, 20, 1000), (0, 0.5, 1))
    assert [lengths.at(level) for level in (0, 0.25, 0.5, 1)] == [10, 14, 20, 1000]
    draw = random.Random(0)
    drawn = [lengths.draw(draw) for _ in range(2_000)]
    assert statistics.fmean(length <= 20 for length in drawn) == pytest.approx(0.5, abs=0.04)


MOONCAKE_LINE = '{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (MOONCAKE_LINE.replace("[1]", "[1e400]"), "infinity"),
        (MOONCAKE_LINE.replace("[1]", "[NaN]"), "NaN"),
        (MOONCAKE_LINE.replace("[1]", "[-1]"), "hash_ids"),
        (MOONCAKE_LINE.replace('"input_length": 9', '"input_length": 1e400'), "number of tokens"),
        (MOONCAKE_LINE.replace('"output_length": 9', '"output_length": NaN'), "number of tokens"),
        (
            MOONCAKE_LINE.replace('"output_length": 9', f'"output_length": 1{"0" * 400}'),
            "too large",
        ),
        (
            MOONCAKE_LINE.replace('"timestamp": 0', '"timestamp": 1e400'),
            "arrival_s must be a finite",
        ),
        (MOONCAKE_LINE.replace('"timestamp": 0', '"timestamp": NaN'), "arrival_s must be a finite"),
        ("[" * 100_000, "no JSON"),
        ("[1, 2]", ""),
        ("\udcff", "no UTF-8"),
    ],
)
def test_a_malformed_line_loses_no_other(tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    text = f"{MOONCAKE_LINE}\n{bad}\n{MOONCAKE_LINE}\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    workload = read_workload(path)
    assert len(workload) == 2
    (problem,) = workload.problems
    assert problem.startswith("line 2: ")
    assert message in problem


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("inf,9,9,,", "arrival_s must be a finite"),
        ("nan,9,9,,", "arrival_s must be a finite"),
        ("1e400,9,9,,", "arrival_s must be a finite"),
        ("-1,9,9,,", "arrival_s must be a finite"),
        ("0,inf,9,,", "number of tokens"),
        ("0,9,9,1e9,", "invalid literal"),
        ("0,9,9,,nan", "slack_s must be a finite"),
        ("0,9,9", "columns expected"),
        ("0," + "9" * 200_000 + ",9,,", "no row of a table"),
        ("\udcff,9,9,,", "no UTF-8"),
    ],
)
def test_a_malformed_row_loses_no_other(tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "table.csv"
    head = "arrival_s,num_prompt_tokens,num_output_tokens,priority,slack_s"
    text = f"{head}\n0,9,9,,\n{bad}\n0,9,9,,\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    workload = read_workload(path)
    assert len(workload) == 2
    (problem,) = workload.problems
    assert problem.startswith("line 3: ")
    assert message in problem


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * 50)
    with pytest.raises(ConfigError, match="cannot be told from its first line"):
        read_workload(path)
    for file_format in ("azure", "csv", "sharegpt", "mooncake", "vllm"):
        with pytest.raises(ConfigError, match=r"weights\.bin"):
            read_workload(path, file_format)


@pytest.mark.parametrize("factor", [1e-320, 5e-324, float("nan"), 0.0, -1.0])
def test_no_stretch_puts_a_request_off_for_ever(factor: float) -> None:
    workload = Workload("two", (WorkRequest(0.0, 9, 9), WorkRequest(1.0, 9, 9)))
    for stretch in (workload.faster, workload.at_rate):
        with pytest.raises(ConfigError, match=r"factor|rate_per_s"):
            stretch(factor)
    dense = Workload("dense", (WorkRequest(0.0, 9, 9), WorkRequest(1e-300, 9, 9)))
    with pytest.raises(ConfigError, match="rate_per_s"):
        dense.at_rate(1e-300)


@pytest.mark.parametrize("segment", [-1, 2**31])
def test_an_answer_s_segment_has_the_range_of_segments(segment: int) -> None:
    with pytest.raises(ConfigError, match="output_segment"):
        WorkRequest(0.0, 9, 9, output_segment=segment)


def test_a_prompt_that_is_given_has_the_length_that_is_given() -> None:
    with pytest.raises(ConfigError, match="num_prompt_tokens must be the length"):
        WorkRequest(0.0, 10**9, 9, prompt_token_ids=(1, 2, 3))


def test_a_prompt_is_no_longer_than_it_says() -> None:
    request = WorkRequest(0.0, 5, 9, segments=((1, 3), (2, 10**12), (3, 10**12)))
    assert request.make_prompt(0) == [1, 1, 1, 2, 2]
