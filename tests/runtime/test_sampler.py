"""The sampler on rows of a device batch: equal to transformers, and blind to batch-mates."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nv_core import SamplingParams, Scheduler, SchedulerConfig
from nv_kernels.reference.sampling import keep_probable, scaled_logits
from nv_models.parallel import TensorParallel
from nv_runtime.device_batch import FIRST_BLOCK, TOKEN, DeviceBatch
from nv_runtime.sampler import SampledTokens, Sampler, derive_seed

VOCAB = 50
EOS = 49


@dataclass(frozen=True)
class Asked:
    """A request as it stands: what is asked for, and the tokens so far."""

    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 3)
    output: tuple[int, ...] = ()


class OneRank:
    """What the sampler asks of a model whose vocabulary is in one piece."""

    tensor_parallel = TensorParallel()
    num_shard_tokens = VOCAB

    def gather_logits(self, shard: Tensor) -> Tensor:
        return shard


class Residents:
    """Sequences in a device batch, with their tokens, as after preemption."""

    def __init__(self, asked: Seq[Asked]) -> None:
        scheduler = Scheduler(
            SchedulerConfig(num_blocks=99, block_size=16, max_num_seqs=9, eos_token_ids=(EOS,))
        )
        self.batch = DeviceBatch(
            max_num_seqs=9,
            max_batch=9,
            max_blocks=9,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
            seed_of=lambda entry: entry.sequence.sampling_params.seed or 0,
        )
        model: Any = OneRank()
        self.sampler = Sampler(model, self.batch.rows, self.batch.tables)
        self.sequences = [scheduler.add(list(item.prompt), item.params) for item in asked]
        plan = scheduler.schedule()
        assert plan is not None
        self.entries = plan.sequences
        for seq, item in zip(self.sequences, asked, strict=True):
            seq.token_ids += item.output
        self.batch.send(self.batch.follow(plan))
        self.rows = [self.batch.row_of(seq.seq_id) for seq in self.sequences]

    def sample(self, logits: Tensor) -> SampledTokens:
        """Samples one token for each, which the sequences then have."""
        needs = self.batch.needs_of(())
        for row, seq in zip(self.rows, self.sequences, strict=True):
            needs |= self.batch._known[row].needs.at(seq.num_tokens)
        batch = torch.tensor(self.rows, dtype=torch.int32)
        positions = torch.tensor([seq.num_tokens for seq in self.sequences])
        state = self.batch.rows[:, :FIRST_BLOCK].index_select(0, batch)
        sampled = self.sampler(logits.clone(), batch, state, positions, needs)
        assert self.batch.rows[batch, TOKEN].tolist() == sampled.token_ids.tolist()
        for seq, token in zip(self.sequences, sampled.token_ids.tolist(), strict=True):
            seq.token_ids.append(token)
        return sampled


def sample(logits: Tensor, asked: Seq[Asked]) -> list[int]:
    tokens: list[int] = Residents(asked).sample(logits).token_ids.tolist()
    return tokens


def make_logits(num_rows: int, *, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.4},
    {"temperature": 2.0, "min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"min_tokens": 3, "stop_token_ids": [4, 5]},
    {"logit_bias": {7: 3.0, 8: -3.0}},
    {"allowed_token_ids": [1, 4, 9, 33, 48]},
    {"bad_words": [[4, 9], [6], [1, 4, 4, 8]]},
    {"logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 1.0, "bad_words": [[4]], "logprobs": 0},
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_row_does_not_depend_on_its_batch_mates(kind: int) -> None:
    rng = random.Random(kind)
    for seed in range(4):
        row = Asked(SamplingParams(seed=seed, **KINDS[kind]), output=(4, 9, 4, 4))
        mates = [
            Asked(SamplingParams(seed=99 + i, **other), output=(rng.randrange(VOCAB),) * i)
            for i, other in enumerate(rng.sample(KINDS, 8))
        ]
        alone, crowd = Residents([row]), Residents([*mates[:3], row, *mates[3:]])
        for step in range(3):
            logits = make_logits(9, seed=10 * seed + step)
            assert crowd.sample(logits).token_ids[3] == alone.sample(logits[3:4]).token_ids[0]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_the_device_notes_is_what_the_host_would_send(kind: int) -> None:
    """A row that sampled for itself goes on as one that was filled with the same tokens."""
    params = SamplingParams(seed=3, max_tokens=30, **KINDS[kind])
    resident = Residents([Asked(params)])
    for step in range(12):
        seq = resident.sequences[0]
        fresh = Residents([Asked(params, output=tuple(seq.output_token_ids))])
        logits = make_logits(1, seed=step)
        assert resident.sample(logits).token_ids == fresh.sample(logits).token_ids
        for name in ("token_counts", "recent"):
            ours, theirs = (getattr(r.batch.tables, name) for r in (resident, fresh))
            if ours is not None:
                assert torch.equal(ours[resident.rows[0]], theirs[fresh.rows[0]])


def test_a_row_that_changes_hands_is_neutral() -> None:
    residents = Residents([Asked(SamplingParams(seed=1, **kind)) for kind in KINDS[5:]])
    batch, seq = residents.batch, Residents([Asked(SamplingParams())]).sequences[0]
    for row in residents.rows:
        batch.tables.fill(row, seq, batch.needs_of(()))
    assert batch.tables.logit_bias is not None
    assert batch.tables.allowed_mask is not None
    assert batch.tables.banned is not None
    assert not batch.tables.logit_bias.any()
    assert (batch.tables.allowed_mask == -1).all()
    assert (batch.tables.banned == -1).all()


def test_tables_grow_when_a_longer_word_comes() -> None:
    asked = [
        Asked(SamplingParams(temperature=0, bad_words=[[4, 9]]), output=(4,)),
        Asked(SamplingParams(temperature=0, bad_words=[[7, 6, 5, 4, 9]]), output=(7, 6, 5, 4)),
        Asked(SamplingParams(temperature=0, bad_words=[[i, 9] for i in range(5, 40)])),
        Asked(SamplingParams(temperature=0, bad_words=[[8, 9]]), output=(8,)),
    ]
    logits = torch.zeros(4, VOCAB)
    logits[:, 9] = 2.0
    logits[:, 11] = 1.0
    assert sample(logits, asked) == [11, 11, 9, 11]


# --- against transformers


def ids(asked: Asked) -> Tensor:
    return torch.tensor([[*asked.prompt, *asked.output]])


def test_filters_keep_what_transformers_keeps() -> None:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    rng = random.Random(0)
    for seed in range(300):
        logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(seed)) * 3
        temperature = rng.choice([0.3, 0.7, 1.0, 1.9])
        min_p, top_k = rng.choice([0.0, rng.random() ** 3]), rng.choice([0, rng.randrange(1, 420)])
        top_p = rng.choice([1.0, 0.05 + 0.94 * rng.random()])
        warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
        warpers += [MinPLogitsWarper(min_p)] if min_p else []
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        scores = logits
        for warper in warpers:
            scores = warper(None, scores)
        kept = keep_probable(
            scaled_logits(logits, torch.tensor([temperature])),
            top_k=torch.tensor([top_k]),
            top_p=torch.tensor([top_p]),
            min_p=torch.tensor([min_p]),
        )
        assert torch.equal(kept, scores > -torch.inf), (temperature, min_p, top_k, top_p)


def best_by_transformers(logits: Tensor, asked: Asked, processor: Any) -> int:  # noqa: ANN401
    return int(processor(ids(asked), logits.clone()).argmax())


def test_adjustments_are_those_of_transformers() -> None:
    from transformers import (
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    rng = random.Random(1)
    changed = 0
    for seed in range(150):
        logits = make_logits(1, seed=seed)
        top = logits[0].argsort(descending=True).tolist()
        output = tuple(rng.choices(top[:6], k=rng.randrange(7)))
        # transformers looks for words in the prompt as well: there are none of these tokens.
        prompt = tuple(top[-3:])
        penalty = rng.choice([0.4, 1.7, 3.0])
        bias = {token: rng.uniform(-4, 4) for token in rng.sample(top[:10], 4)}
        words = [[*output[-n:], top[0]] for n in range(1, 4) if len(output) >= n]
        words += [[top[1], top[2]], [top[3]]]
        cases: list[tuple[dict[str, Any], Any]] = [
            ({"repetition_penalty": penalty}, RepetitionPenaltyLogitsProcessor(penalty)),
            (
                {"logit_bias": bias},
                SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()]),
            ),
            ({"bad_words": words}, NoBadWordsLogitsProcessor(words)),
            (
                {"min_tokens": 4, "stop_token_ids": top[:2]},
                MinNewTokensLengthLogitsProcessor(len(prompt), 4, [EOS, *top[:2]]),
            ),
        ]
        for fields, processor in cases:
            asked = Asked(SamplingParams(temperature=0, **fields), prompt, output)
            expected = best_by_transformers(logits, asked, processor)
            assert sample(logits, [asked]) == [expected], fields
            changed += expected != top[0]
    assert changed > 150


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    flat = torch.zeros(1, VOCAB)
    flat[0, [5, 6, 7]] = torch.tensor([2.0, 1.6, 1.0])
    for fields, output, expected in (
        ({}, (5, 5), 5),
        ({"presence_penalty": 0.3}, (5, 5), 5),
        ({"presence_penalty": 0.5}, (5, 5), 6),
        ({"frequency_penalty": 0.3}, (5,), 5),
        ({"frequency_penalty": 0.3}, (5, 5), 6),
        ({"frequency_penalty": 0.3}, (5, 5, 6, 6), 5),
        ({"frequency_penalty": 0.6}, (5, 5, 6, 6), 7),
        ({"frequency_penalty": -0.6}, (7, 7), 7),
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, (), 5),
    ):
        params = SamplingParams(temperature=0, **fields)  # type: ignore[arg-type]
        assert sample(flat, [Asked(params, (5, 5, 5), output)]) == [expected], fields


def test_only_allowed_tokens_are_sampled() -> None:
    params = SamplingParams(allowed_token_ids=[3, 31, 32, 49], temperature=5.0, max_tokens=99)
    resident = Residents([Asked(params)])
    drawn = {int(resident.sample(make_logits(1)).token_ids) for _ in range(60)}
    assert drawn == {3, 31, 32, 49}


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = make_logits(1)
    best = int(logits.argmax())
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[best])
    for num_output, allowed in ((0, False), (1, False), (2, True)):
        (token,) = sample(logits, [Asked(params, output=(9,) * num_output)])
        assert (token == best) == allowed


def test_logprobs_are_of_the_raw_logits() -> None:
    """Whatever is done to the logits before sampling, bans included."""
    params = SamplingParams(
        temperature=0.2,
        top_k=2,
        repetition_penalty=2.0,
        logit_bias={5: 9.0},
        bad_words=[[7], [3, 8]],
        logprobs=4,
    )
    logits = make_logits(2, seed=3)
    logits[:, 7] = 11.0
    residents = Residents([Asked(params), Asked(SamplingParams(temperature=0))])
    sampled = residents.sample(logits)
    assert sampled.logprobs is not None
    expected = logits.double().log_softmax(dim=-1)
    for row in range(2):
        token = int(sampled.token_ids[row])
        assert float(sampled.logprobs.logprobs[row]) == pytest.approx(
            float(expected[row, token]), abs=1e-5
        )
        order = expected[row].argsort(descending=True).tolist()
        assert int(sampled.logprobs.ranks[row]) == 1 + order.index(token)
        assert sampled.logprobs.top_token_ids[row, :4].tolist() == order[:4]
    assert int(sampled.token_ids[0]) != 7


def test_derived_seeds_differ() -> None:
    seeds = {derive_seed(engine, request) for engine in range(50) for request in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**64 for seed in seeds)
