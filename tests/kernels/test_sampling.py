"""sample_tokens against a plain Python statement of the hash and the noise."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernel_oracles import Target, assert_same_bits, random_tensor, targets
from nv_kernels import KernelInputError, sample_shard, sample_tokens, winning_tokens

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MASK = 2**64 - 1


def mix(value: int) -> int:
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def noise(seed: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix(mix(seed) + position * golden)
    uniform = ((mix(key + (token + 1) * golden) >> 32) + 0.5) / 2**32
    return -math.log(-math.log1p(-uniform))


def scores_of(row: Tensor, temperature: float, seed: int, position: int) -> list[float]:
    values = row.double().tolist()
    if temperature == 0:
        return list(values)
    return [v / temperature + noise(seed, position, t) for t, v in enumerate(values)]


def assert_drawn(
    logits: Tensor, temperatures: list[float], seeds: list[int], positions: list[int], backend: str
) -> Tensor:
    """Each token must be the oracle's best, or so near it that fp32 may decide otherwise."""
    tokens = draw(logits, temperatures, seeds, positions, backend)
    for row, token in enumerate(tokens.tolist()):
        scores = scores_of(logits[row], temperatures[row], seeds[row], positions[row])
        best = max(scores)
        slack = 0.0 if temperatures[row] == 0 else 1e-5 * (1 + abs(best))
        assert scores[token] >= best - slack, row
        if temperatures[row] == 0:
            assert token == scores.index(best)
    return tokens


def draw(
    logits: Tensor, temperatures: list[float], seeds: list[int], positions: list[int], backend: str
) -> Tensor:
    device = logits.device
    tokens = sample_tokens(
        logits,
        torch.tensor(temperatures, dtype=torch.float32, device=device),
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        backend=backend,
    )
    assert tokens.dtype == torch.int64
    return tokens


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("vocab_size", [1, 7, 131, 4096, 4099, 9001])
def test_every_row_gets_the_best_score(target: Target, vocab_size: int) -> None:
    logits = random_tensor(vocab_size, 6, vocab_size, target=target, scale=2.0)
    before = logits.clone()
    assert_drawn(
        logits,
        [0.0, 0.6, 1.0, 2.5, 0.0, 1.0],
        [0, 1, -1, 2**63 - 1, 5, -(2**63)],
        [0, 10, 999, 131071, 3, 4],
        target.backend,
    )
    assert_same_bits(logits, before)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("target", targets())
def test_rows_do_not_depend_on_each_other(target: Target) -> None:
    logits = random_tensor(3, 5, 300, target=target)
    temperatures, seeds, positions = [1.0, 0.0, 0.7, 1.4, 1.0], [4, 5, 6, 7, 4], [1, 2, 3, 4, 5]
    together = draw(logits, temperatures, seeds, positions, target.backend).tolist()
    for row in range(5):
        alone = draw(
            logits[row : row + 1],
            [temperatures[row]],
            [seeds[row]],
            [positions[row]],
            target.backend,
        )
        assert alone.tolist() == [together[row]]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("target", targets())
def test_forbidden_tokens_strides_and_ties(target: Target) -> None:
    wide = random_tensor(4, 4, 600, target=target)
    logits = wide[:, 100:350]
    logits[:, 5:] = -torch.inf
    for seed in range(10):
        tokens = assert_drawn(logits, [3.0] * 4, [seed] * 4, [0, 1, 2, 3], target.backend)
        assert int(tokens.max()) < 5
    ties = torch.zeros(2, 5000, dtype=target.dtype, device=target.device)
    ties[:, [4500, 77, 3]] = 2.0
    assert draw(ties, [0.0, 0.0], [1, 2], [1, 2], target.backend).tolist() == [3, 3]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
def test_draws_follow_the_distribution(target: Target) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    interpreted = target.backend == "triton" and target.device == "cpu"
    count = 300 if interpreted else 5000  # the interpreter takes 10 ms a row
    logits = probabilities.log().expand(count, -1).contiguous().to(target.device)
    tokens = draw(logits, [1.0] * count, list(range(count)), [7] * count, target.backend)
    observed = tokens.bincount(minlength=5).double().cpu()
    expected = probabilities.double() * count
    # 4 degrees of freedom; 23.5 is exceeded once in 10,000. The draws are fixed.
    assert float(((observed - expected) ** 2 / expected).sum()) < 23.5


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(
    "borders", [(0, 131), (0, 66, 131), (0, 33, 66, 99, 131), (0, 1, 130, 131)]
)
def test_the_best_of_all_shards_is_the_draw_from_the_whole_row(
    target: Target, borders: tuple[int, ...]
) -> None:
    logits = random_tensor(5, 8, 131, target=target, scale=2.0)
    logits[0] = -logits[0].abs() - 1  # no score is positive
    logits[1, [5, 70, 129]] = 30.0  # equal best ones, in different shards
    logits[2] = -torch.inf
    logits[2, 80] = -3.0  # nothing to draw in most shards
    logits[3] = torch.where(torch.arange(131, device=logits.device) % 2 == 0, -0.0, 0.0)
    temperatures = [0.0, 0.0, 0.0, 0.0, 0.6, 1.0, 2.5, 1.0]
    seeds, positions = [0, 1, -1, 3, 2**63 - 1, 5, -(2**63), 7], [0, 4, 9, 1, 999, 131071, 3, 4]
    shards = [
        sample_shard(
            logits[:, start:stop],
            torch.tensor(temperatures, device=logits.device),
            torch.tensor(seeds, device=logits.device),
            torch.tensor(positions, device=logits.device),
            first_token=start,
            backend=target.backend,
        )
        for start, stop in pairwise(borders)
    ]
    drawn = winning_tokens(torch.stack(shards).amax(dim=0))
    whole = draw(logits, temperatures, seeds, positions, target.backend)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == whole.tolist()
    assert drawn[:4].tolist() == [int(logits[0].argmax()), 5, 80, 0]


def test_an_empty_batch() -> None:
    assert draw(torch.empty(0, 10), [], [], [], "torch").shape == (0,)


def test_wrong_arguments_are_named() -> None:
    logits, ones = torch.zeros(2, 8), torch.ones(2)
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelInputError, match="seeds has dtype"):
        sample_tokens(logits, ones, ones, ids)
    with pytest.raises(KernelInputError, match="positions has shape"):
        sample_tokens(logits, ones, ids, ids[:1])
    with pytest.raises(KernelInputError, match="logits has stride"):
        sample_tokens(torch.zeros(8, 2).T, ones, ids, ids)
    with pytest.raises(KernelInputError, match="vocab_size 0"):
        sample_tokens(torch.zeros(2, 0), ones, ids, ids)


@pytest.mark.gpu
def test_both_implementations_draw_the_same_tokens() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(64, 151936, device="cuda", generator=generator, dtype=torch.bfloat16) * 3
    arguments = ([0.6] * 64, list(range(64)), list(range(100, 164)))
    ours = draw(logits, *arguments, "triton")
    # Near ties may fall differently by the last bit of a logarithm, but hardly ever do.
    assert int((ours != draw(logits, *arguments, "torch")).sum()) <= 1
