"""sample_tokens against a plain fp64 statement of the rules and the draw (`sampling_oracle`)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernel_oracles import Target, assert_same_bits, random_tensor, targets
from nv_kernels import (
    KernelInputError,
    LogitAdjustments,
    TokenFilters,
    sample_shard,
    sample_tokens,
    winning_tokens,
)
from sampling_oracle import Row, acceptable, draw_columns, kept, strided

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # NumPy, which the interpreter computes with, warns of what kernels do on purpose.
    pytest.mark.filterwarnings(
        "ignore:(overflow|divide by zero|invalid value|All-NaN slice) encountered:RuntimeWarning"
    ),
]


def draw(logits: Tensor, rows: Sequence[Row], backend: str) -> Tensor:
    device, vocab_size = logits.device, logits.shape[1]

    filters = None
    if any(row.is_filtered for row in rows):
        filters = TokenFilters(
            top_k=strided([row.top_k for row in rows], torch.int32, device),
            top_p=strided([row.top_p for row in rows], torch.float32, device),
            min_p=strided([row.min_p for row in rows], torch.float32, device),
        )
    tokens = sample_tokens(
        logits,
        *draw_columns(rows, device),
        adjustments=adjustments_of(rows, vocab_size, device),
        filters=filters,
        backend=backend,
    )
    assert tokens.dtype == torch.int64
    return tokens


def draw_many(logits: Tensor, row: Row, varied: str, count: int, backend: str) -> Tensor:
    """Draws one row again and again, each time at another seed or position."""
    device = logits.device

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    numbers = {
        name: column(getattr(row, name), torch.int64)
        if name != varied
        else torch.arange(count, device=device)
        for name in ("seed", "position")
    }
    filters = TokenFilters(
        column(row.top_k, torch.int32),
        column(row.top_p, torch.float32),
        column(row.min_p, torch.float32),
    )
    return sample_tokens(
        logits.expand(count, -1),
        column(row.temperature, torch.float32),
        numbers["seed"],
        numbers["position"],
        filters=filters if row.is_filtered else None,
        backend=backend,
    )


def adjustments_of(
    rows: Sequence[Row], vocab_size: int, device: torch.device
) -> LogitAdjustments | None:
    """Makes tables whose rows stand in another order than the logits', with rubbish between."""
    plain = Row()
    changes = [replace(row, temperature=1, seed=1, position=5, top_k=0, top_p=1, min_p=0)
               for row in rows]  # fmt: skip
    if all(change == plain for change in changes):
        return None
    num_tables = 2 * len(rows)
    table_rows = [num_tables - 1 - 2 * index for index in range(len(rows))]
    # A mask may be wider than the vocabulary, as for one that is padded.
    mask = torch.full((num_tables, -(-vocab_size // 32) + 2), 0x55555555, dtype=torch.int32)
    bias = torch.full((num_tables, vocab_size), torch.nan)
    counts = torch.full((num_tables, vocab_size), 99, dtype=torch.int32)
    for table, row in zip(table_rows, rows, strict=True):
        bits = torch.ones(mask.shape[1] * 32, dtype=torch.int64)
        bits[:vocab_size] = 0
        bits[list(range(vocab_size) if row.allowed is None else row.allowed)] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(dim=1)
        mask[table] = torch.where(words >= 2**31, words - 2**32, words).int()
        bias[table] = 0
        for token, value in row.bias.items():
            bias[table, token] = value
        counts[table] = 0
        counts[table, list(row.prompt)] = 1
        for token in row.output:
            counts[table, token] += 2
    penalties = [[row.repetition, row.frequency, row.presence] for row in rows]
    return LogitAdjustments(
        table_rows=torch.tensor(table_rows, dtype=torch.int32, device=device),
        allowed_mask=mask.to(device) if any(row.allowed is not None for row in rows) else None,
        logit_bias=bias.to(device) if any(row.bias for row in rows) else None,
        token_counts=counts.to(device),
        penalties=torch.tensor(penalties, device=device),
    )


def assert_drawn(logits: Tensor, rows: Sequence[Row], backend: str) -> Tensor:
    tokens = draw(logits, rows, backend)
    for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        assert token in acceptable(logits[index], row), (index, row)
    return tokens


def is_interpreted(target: Target) -> bool:
    return target.backend == "triton" and target.device == "cpu"


# --- tests

TEMPERATURES = [0.0, 0.6, 1.0, 2.5, 0.0, 1.0]
SEEDS = [0, 1, -1, 2**63 - 1, 5, -(2**63)]
POSITIONS = [0, 10, 999, 131071, 3, 4]
PLAIN = [
    Row(temperature=t, seed=s, position=p)
    for t, s, p in zip(TEMPERATURES, SEEDS, POSITIONS, strict=True)
]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("vocab_size", [1, 7, 131, 4096, 4099, 9001])
def test_temperature_and_greedy_rows(target: Target, vocab_size: int) -> None:
    logits = random_tensor(vocab_size, 6, vocab_size, target=target, scale=2.0)
    before = logits.clone()
    assert_drawn(logits, PLAIN, target.backend)
    assert_same_bits(logits, before)


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_k": 10**6},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"min_p": 1e-4},
    {"min_p": 1.0},
    {"min_p": 1.5},
    {"top_k": 3, "top_p": 0.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    {"top_p": 0.7, "min_p": 0.01},
    {"top_k": 7, "min_p": 0.3, "top_p": 0.99},
    {},
]


# 131: all are candidates at once; 17000: groups are chosen; 4500 flat: only the whole row helps.
@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(("vocab_size", "scale"), [(131, 2.0), (17000, 3.0), (4500, 0.05)])
def test_filters(target: Target, vocab_size: int, scale: float) -> None:
    rng = random.Random(vocab_size)
    logits = random_tensor(1, len(FILTERS), vocab_size, target=target, scale=scale)
    rows = [
        Row(temperature=rng.choice([0.5, 1.0, 1.7]), seed=rng.randrange(2**64), position=i, **asked)  # type: ignore[arg-type]
        for i, asked in enumerate(FILTERS)
    ]
    if is_interpreted(target):
        # Each row takes a tenth of a second or more; both dtypes together have them all.
        half = slice(int(target.dtype == torch.float32), None, 2)
        logits, rows = logits[half], rows[half]
    before = logits.clone()
    assert_drawn(logits, rows, target.backend)
    assert_same_bits(logits, before)


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
def test_thresholds_below_all_that_is_gathered(target: Target) -> None:
    """With more tiles than are opened at first, the best tokens are gathered, and do not do."""
    logits = random_tensor(7, 3, 18000, target=target, scale=0.05)
    filters = ({"top_p": 0.97}, {"min_p": 0.8}, {"top_p": 0.5, "min_p": 0.7})
    for seed in range(1 if is_interpreted(target) else 20):
        rows = [Row(seed=seed, position=3, **asked) for asked in filters]  # type: ignore[arg-type]
        assert_drawn(logits, rows, target.backend)


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
def test_many_random_filters(target: Target) -> None:
    rng = random.Random(2)
    rows = [
        Row(
            temperature=rng.choice([0.0, 0.3, 1.0, 3.0]),
            seed=rng.randrange(2**64),
            position=rng.randrange(5000),
            top_k=rng.choice([0, 0, 1, 3, rng.randrange(1, 700)]),
            top_p=rng.choice([1.0, rng.random() + 1e-3]),
            min_p=rng.choice([0.0, 0.0, rng.random() ** 4]),
        )
        for _ in range(12 if is_interpreted(target) else 300)
    ]
    logits = random_tensor(3, len(rows), 700, target=target, scale=2.5)
    assert_drawn(logits, rows, target.backend)


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32, torch.bfloat16)))
@pytest.mark.parametrize("filters", [{}, {"top_k": 9, "top_p": 0.9}])
def test_adjustments(target: Target, filters: dict[str, float]) -> None:
    vocab_size = 4500
    rng = random.Random(4)
    some = [rng.randrange(vocab_size) for _ in range(3000)]
    many = frozenset(some)
    logits = random_tensor(5, 9, vocab_size, target=target, scale=2.0)
    top = logits.double().argsort(dim=-1, descending=True)[:, :400].tolist()
    rows = [
        Row(allowed=many),
        Row(allowed=frozenset({3, 4499})),
        Row(allowed=frozenset({4490}), bias={3: 90.0}),
        Row(bias=dict.fromkeys(top[3][:300], -50.0)),
        Row(bias={17: 30.0, 4400: 29.0}),
        Row(prompt=tuple(top[5][:200]), output=tuple(top[5][100:300]), repetition=1.8),
        Row(output=tuple(top[6][:200]) * 2 + tuple(top[6][:50]), frequency=0.4),
        Row(prompt=tuple(top[7][:90]), output=tuple(top[7][90:200]) * 3, presence=-1.9),
        Row(
            allowed=many,
            bias={some[0]: 8.0, some[1]: 7.5},
            prompt=(some[0], some[1]),
            output=(some[0], some[0], some[2]),
            repetition=0.7,
            frequency=1.1,
            presence=0.9,
        ),
    ]
    for temperature in (1.3,) if filters else (0.0, 1.3):
        asked = [
            replace(row, temperature=temperature, seed=index, **filters)  # type: ignore[arg-type]
            for index, row in enumerate(rows)
        ]
        assert_drawn(logits, asked, target.backend)


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32, torch.bfloat16)))
def test_rows_do_not_depend_on_each_other(target: Target) -> None:
    logits = random_tensor(3, 6, 5000, target=target)
    rows = [
        Row(temperature=1.0, seed=4),
        Row(temperature=0.0, seed=5),
        Row(temperature=0.7, seed=6, top_p=0.7),
        Row(temperature=1.4, seed=7, bias={3: 4.0}),
        Row(temperature=1.0, seed=4, top_k=9),
        Row(temperature=1.0, seed=9, output=(1, 2), presence=2.0),
    ]
    together = draw(logits, rows, target.backend).tolist()
    for index, row in enumerate(rows):
        alone = draw(logits[index : index + 1], [row], target.backend)
        assert alone.tolist() == [together[index]], row


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32, torch.bfloat16)))
def test_forbidden_tokens_and_strides(target: Target) -> None:
    wide = random_tensor(4, 4, 9600, target=target)
    logits = wide[:, 100:9350]
    logits[:2, 5:] = -torch.inf
    logits[2:, :9000] = -torch.inf
    for seed in range(2):
        rows = [
            Row(temperature=3.0, seed=seed),
            Row(temperature=3.0, seed=seed, top_p=0.9),
            Row(temperature=3.0, seed=seed),
            Row(temperature=3.0, seed=seed, top_k=500),
        ]
        tokens = assert_drawn(logits, rows, target.backend)
        assert int(tokens[:2].max()) < 5
        assert int(tokens[2:].min()) >= 9000


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32, torch.bfloat16)))
def test_equal_logits_stay_or_go_together(target: Target) -> None:
    ties = torch.zeros(2, 1000, dtype=target.dtype, device=target.device)
    ties[:, [700, 77, 3]] = 2.0
    assert draw(ties, [Row(temperature=0)] * 2, target.backend).tolist() == [3, 3]
    zeros = torch.full_like(ties, -5.0)
    zeros[:, [700, 77, 3]] = torch.tensor([0.0, -0.0, 0.0], dtype=ties.dtype, device=ties.device)
    # Few rows in the interpreter; these seeds show all three.
    few = [*range(6)] if is_interpreted(target) else [*range(40)]
    for filters, logits in (({"top_k": 1}, ties), ({"top_p": 1e-6}, ties), ({"top_k": 1}, zeros)):
        rows = [Row(seed=seed, **filters) for seed in few]
        tokens = draw(logits[:1].expand(len(few), -1), rows, target.backend)
        assert set(tokens.tolist()) == {3, 77, 700}


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e30])
def test_extreme_temperatures(target: Target, temperature: float) -> None:
    logits = random_tensor(6, 20, 5000, target=target, scale=100.0)
    rows = [Row(temperature=temperature, seed=seed) for seed in range(20)]
    tokens = draw(logits, rows, target.backend)
    if temperature < 1:
        assert torch.equal(tokens, logits.argmax(dim=-1))
    else:
        assert len(set(tokens.tolist())) == 20


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
def test_rows_of_nan_get_some_token(target: Target) -> None:
    logits = torch.full((4, 5000), torch.nan, device=target.device)
    logits[1] = -torch.inf
    logits[3] = 0
    rows = [Row(), Row(), Row(temperature=0), Row(temperature=0)]
    tokens = draw(logits, rows, target.backend).tolist()
    assert all(0 <= token < 5000 for token in tokens)
    assert tokens[3] == 0


def chi_square_z(observed: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic in standard deviations (Wilson and Hilferty's approximation).

    Tokens expected less than five times are pooled.
    """
    count = int(observed.sum())
    expected = probabilities.double() * count
    assert observed[expected == 0].sum() == 0, "a token outside the support was drawn"
    frequent = expected >= 5
    cells = [*observed[frequent].tolist(), observed[~frequent].sum().item()]
    means = [*expected[frequent].tolist(), expected[~frequent].sum().item()]
    statistic = sum((o - e) ** 2 / e for o, e in zip(cells, means, strict=True) if e > 0)
    degrees = max(sum(e > 0 for e in means) - 1, 1)
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - 1 + spread) / math.sqrt(spread))


# The interpreter would take minutes, and draws the same tokens by the tests above.
@pytest.mark.parametrize(
    "target",
    [t for t in targets(dtypes=(torch.float32,)) if not str(t.id).startswith("triton-cpu")],
)
@pytest.mark.parametrize(
    ("row", "varied"),
    [
        (Row(), "seed"),
        (Row(temperature=0.6), "position"),
        (Row(temperature=1.7, top_k=7), "position"),
        (Row(top_p=0.7), "seed"),
        (Row(temperature=1.2, min_p=0.1), "seed"),
        (Row(temperature=1.5, top_k=40, top_p=0.85, min_p=0.02), "position"),
    ],
)
def test_draws_follow_the_distribution(target: Target, row: Row, varied: str) -> None:
    logits = random_tensor(8, 1, 100, target=target, scale=1.5)
    tokens = draw_many(logits, row, varied, 100_000, target.backend)
    values = [value / row.temperature for value in logits[0].double().tolist()]
    best = max(values)
    probabilities = torch.zeros(len(values), dtype=torch.float64)
    for token in kept(values, row):
        probabilities[token] = math.exp(values[token] - best)
    probabilities /= probabilities.sum()
    # 4.5 standard deviations; the draws are fixed.
    assert chi_square_z(tokens.bincount(minlength=len(values)).cpu(), probabilities) < 4.5


def draw_from_shards(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    borders: Sequence[int],
    backend: str,
) -> Tensor:
    shards = [
        sample_shard(
            logits[:, start:stop],
            temperatures,
            seeds,
            positions,
            first_token=start,
            backend=backend,
        )
        for start, stop in pairwise(borders)
    ]
    return winning_tokens(torch.stack(shards).amax(dim=0))


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(
    "borders", [(0, 131), (0, 80, 131), (0, 32, 64, 96, 131), (0, 16, 128, 131)]
)
def test_the_best_of_all_shards_is_the_draw_from_the_whole_row(
    target: Target, borders: tuple[int, ...]
) -> None:
    logits = random_tensor(5, 8, 131, target=target, scale=2.0)
    logits[0] = -logits[0].abs() - 1  # no score is positive
    logits[1, [5, 70, 129]] = 30.0  # equal best ones, in different shards
    logits[2] = -torch.inf
    logits[2, 80] = -3.0  # nothing to draw in most shards
    logits[3, :32], logits[3, 32:] = -0.0, 0.0  # which are equal
    temperatures = [0.0, 0.0, 0.0, 0.0, 0.6, 1.0, 2.5, 1.0]
    seeds, positions = [0, 1, -1, 3, 2**63 - 1, 5, -(2**63), 7], [0, 4, 9, 1, 999, 131071, 3, 4]
    rows = [
        Row(temperature=t, seed=s, position=p)
        for t, s, p in zip(temperatures, seeds, positions, strict=True)
    ]
    drawn = draw_from_shards(
        logits,
        torch.tensor(temperatures, device=logits.device),
        torch.tensor(seeds, device=logits.device),
        torch.tensor(positions, device=logits.device),
        borders,
        target.backend,
    )
    whole = draw(logits, rows, target.backend)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == whole.tolist()
    assert drawn[:4].tolist() == [int(logits[0].argmax()), 5, 80, 0]


@pytest.mark.parametrize("target", targets(gpu_backends=("triton",)))
def test_the_length_of_a_part_changes_no_score(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.backend == "torch":
        pytest.skip("PyTorch has the whole row at once")
    kernels = pytest.importorskip("nv_kernels.triton.sampling")
    logits = random_tensor(9, len(PLAIN), 1500, target=target, scale=2.0)
    columns = draw_columns(PLAIN, logits.device)
    draws = []
    for part_size in (2048, 256, 128):
        monkeypatch.setattr(kernels, "_PART_SIZE", part_size)
        draws.append(sample_shard(logits, *columns, first_token=32, backend="triton").tolist())
    assert draws[0] == draws[1] == draws[2]


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
def test_shards_that_cut_groups_draw_from_the_same_distribution(target: Target) -> None:
    logits = random_tensor(5, 1, 131, target=target, scale=1.5)
    borders = (0, 33, 66, 99, 131)

    def draws(count: int, backend: str) -> Tensor:
        numbers = torch.arange(count, device=logits.device)
        ones = torch.ones(count, device=logits.device)
        return draw_from_shards(logits.expand(count, -1), ones, numbers, numbers, borders, backend)

    if is_interpreted(target):
        assert torch.equal(draws(20, "triton"), draws(20, "torch"))
        return
    tokens = draws(100_000, target.backend)
    probabilities = logits[0].double().softmax(dim=0).cpu()
    assert chi_square_z(tokens.bincount(minlength=131).cpu(), probabilities) < 4.5


def test_an_empty_batch() -> None:
    assert draw(torch.empty(0, 10), [], "torch").shape == (0,)


def test_wrong_arguments_are_named() -> None:
    logits, ones = torch.zeros(2, 8), torch.ones(2)
    ids = torch.zeros(2, dtype=torch.int64)
    rows = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(KernelInputError, match="seeds has dtype"):
        sample_tokens(logits, ones, ones, ids)
    with pytest.raises(KernelInputError, match="positions has shape"):
        sample_tokens(logits, ones, ids, ids[:1])
    with pytest.raises(KernelInputError, match="logits has stride"):
        sample_tokens(torch.zeros(8, 2).T, ones, ids, ids)
    with pytest.raises(KernelInputError, match="vocab_size 0"):
        sample_tokens(torch.zeros(2, 0), ones, ids, ids)
    with pytest.raises(KernelInputError, match="top_k has dtype"):
        sample_tokens(logits, ones, ids, ids, filters=TokenFilters(ids, ones, ones))
    for name, wrong in (
        ("table_rows", LogitAdjustments(ids)),
        ("allowed_mask", LogitAdjustments(rows, allowed_mask=torch.zeros(2, 8))),
        ("allowed_mask", LogitAdjustments(rows, allowed_mask=rows[:, None][:, :0])),
        ("logit_bias", LogitAdjustments(rows, logit_bias=torch.zeros(2, 9))),
        ("token_counts", LogitAdjustments(rows, penalties=torch.zeros(2, 3))),
        ("penalties", LogitAdjustments(rows, token_counts=rows.expand(8, 2).T.contiguous())),
    ):
        with pytest.raises(KernelInputError, match=f"{name} has"):
            sample_tokens(logits, ones, ids, ids, adjustments=wrong)
    for first_token in (-16, 2**31 - 8):
        with pytest.raises(KernelInputError, match=f"first_token is {first_token}, but must be"):
            sample_shard(logits, ones, ids, ids, first_token=first_token)


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
def test_the_last_token_ids_that_there_are(target: Target) -> None:
    logits = random_tensor(2, len(PLAIN), 40, target=target)
    columns = draw_columns(PLAIN, logits.device)
    first_token = 2**31 - 1 - 40
    drawn = sample_shard(logits, *columns, first_token=first_token, backend=target.backend)
    tokens = winning_tokens(drawn) - first_token
    assert bool(((tokens >= 0) & (tokens < 40)).all())
    greedy = columns[0] == 0
    assert torch.equal(tokens[greedy], logits.argmax(dim=-1)[greedy])


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}])
@pytest.mark.parametrize("scale", [0.5, 5.0])
def test_both_implementations_draw_the_same_tokens(filters: dict[str, float], scale: float) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(64, 151936, device="cuda", generator=generator) * scale
    rows = [
        Row(temperature=0.6, seed=index, position=100 + index, **filters)  # type: ignore[arg-type]
        for index in range(64)
    ]
    ours = draw(logits, rows, "triton")
    # Near ties may fall differently by the last bit of a logarithm, but hardly ever do.
    assert int((ours != draw(logits, rows, "torch")).sum()) <= 1
