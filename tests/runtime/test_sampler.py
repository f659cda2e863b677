"""The sampler: exact for greedy rows, right in distribution, and blind to a row's batch-mates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nv_core import SamplingParams
from nv_runtime.sampler import SamplingRow, derive_seed, sample

VOCAB = 50


def make_logits(num_rows: int, *, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def make_row(
    params: SamplingParams,
    *,
    seed: int = 1,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    stop: frozenset[int] = frozenset(),
) -> SamplingRow:
    tokens = [*prompt, *output]
    return SamplingRow(params, seed, len(tokens), tokens, len(prompt), stop)


def draw_many(logits: Tensor, params: SamplingParams, count: int) -> Tensor:
    """Draws `count` tokens from one row of logits, each at another seed."""
    rows = [make_row(params, seed=i) for i in range(count)]
    return sample(logits.expand(count, -1), rows)


def test_greedy_rows_take_the_best_token() -> None:
    logits = make_logits(5)
    rows = [make_row(SamplingParams(temperature=0.0)) for _ in range(5)]
    assert torch.equal(sample(logits, rows), logits.argmax(dim=-1))


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = make_logits(3)
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
    tokens = sample(logits, [make_row(greedy), make_row(sampled), make_row(greedy)])
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()


MATES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.4),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(min_tokens=3),
]


@pytest.mark.parametrize("params", MATES)
def test_a_row_does_not_depend_on_its_batch_mates(params: SamplingParams) -> None:
    logits = make_logits(4, seed=3)
    stop = frozenset({int(logits[0].argmax())})
    for seed in range(20):
        row = make_row(params, seed=seed, output=(4,), stop=stop)
        alone = sample(logits[:1], [row])
        for mate in MATES:
            mates = [make_row(mate, seed=99 + i, stop=stop) for i in range(3)]
            assert sample(logits, [row, *mates])[0] == alone[0]
            assert sample(logits.roll(2, dims=0), [*mates[:2], row, mates[2]])[2] == alone[0]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = make_logits(1).expand(64, -1)
    params = SamplingParams(temperature=1.5)
    by_seed = sample(logits, [make_row(params, seed=i) for i in range(64)])
    again = sample(logits, [make_row(params, seed=i) for i in range(64)])
    by_position = sample(logits, [make_row(params, output=(7,) * i) for i in range(64)])
    assert torch.equal(by_seed, again)
    assert len(set(by_seed.tolist())) > 5
    assert len(set(by_position.tolist())) > 5


def test_inputs_are_not_changed() -> None:
    logits = make_logits(2)
    before = logits.clone()
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, min_tokens=2
    )
    sample(logits, [make_row(params, stop=frozenset({0}))] * 2)
    assert torch.equal(logits, before)


def transformers_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution as transformers' logits processors make it, in the sampler's order."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    scores = logits
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(dim=-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=7),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.2, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.85, min_p=0.02),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-6),
    ],
)
def test_the_distribution_is_that_of_transformers(params: SamplingParams) -> None:
    logits = make_logits(1, seed=5)
    expected = transformers_probabilities(logits, params)[0].double()
    count = 20_000
    observed = draw_many(logits, params, count).bincount(minlength=VOCAB).double()
    assert observed[expected == 0].sum() == 0, "a token outside the support was drawn"
    # Pearson's chi-square over the tokens expected at least five times; the rest are pooled.
    frequent = expected * count >= 5
    cells = [*observed[frequent].tolist(), observed[~frequent].sum().item()]
    means = [*(expected[frequent] * count).tolist(), expected[~frequent].sum().item() * count]
    statistic = sum((o - e) ** 2 / e for o, e in zip(cells, means, strict=True) if e > 0)
    degrees = max(sum(e > 0 for e in means) - 1, 1)
    # Wilson and Hilferty's normal approximation; 4.5 standard deviations, draws are fixed.
    z = ((statistic / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))
    assert z < 4.5


def test_top_k_off_keeps_every_token() -> None:
    flat = torch.zeros(1, VOCAB)
    assert len(set(draw_many(flat, SamplingParams(top_k=0), 2000).tolist())) == VOCAB


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = make_logits(1, seed=9)
    prompt, output = (3, 4, 4, 5), (6, 3)
    seen = torch.tensor([[*prompt, *output]])
    expected = RepetitionPenaltyLogitsProcessor(penalty=3.0)(seen, logits.clone()).argmax()
    best = int(logits.argmax())
    params = SamplingParams(temperature=0.0, repetition_penalty=3.0)
    assert sample(logits, [make_row(params, prompt=prompt, output=output)])[0] == expected
    # A penalty on the best token, once in the prompt and once in the output, dethrones it.
    for row in (make_row(params, prompt=(best,)), make_row(params, output=(best,))):
        assert sample(logits, [row])[0] != best


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = make_logits(1)
    best = int(logits.argmax())
    params = SamplingParams(temperature=0.0, min_tokens=2)
    for num_output, allowed in ((0, False), (1, False), (2, True)):
        row = make_row(params, output=(9,) * num_output, stop=frozenset({best}))
        assert (sample(logits, [row])[0] == best) == allowed


def test_derived_seeds_differ() -> None:
    seeds = {derive_seed(engine, request) for engine in range(50) for request in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**64 for seed in seeds)
