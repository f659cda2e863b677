"""token_logprobs against logarithms in fp64 and a plain sort."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_oracles import Target, assert_same_bits, random_tensor, targets
from nv_kernels import KernelInputError, token_logprobs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(
    ("vocab_size", "num_top"), [(1, 0), (1, 1), (7, 7), (131, 5), (4099, 0), (9001, 20), (300, 40)]
)
def test_logprobs_ranks_and_top_tokens(target: Target, vocab_size: int, num_top: int) -> None:
    wide = random_tensor(vocab_size, 4, vocab_size + 9, target=target, scale=3.0)
    logits = wide[:, 9:]
    if vocab_size > 4:
        logits[1, 1:-1] = -torch.inf
        logits[2] = logits[2].round()  # many equal ones
    tokens = [0, vocab_size - 1, vocab_size // 2, vocab_size // 3]
    token_ids = torch.tensor([tokens, tokens], device=target.device).T[:, 0]
    before = logits.clone()
    result = token_logprobs(logits, token_ids, num_top=num_top, backend=target.backend)
    assert result.top_token_ids.shape == result.top_logprobs.shape == (4, num_top)
    for row, token in enumerate(tokens):
        values = logits[row].double().tolist()
        best = max(values)
        log_sum = best + math.log(math.fsum(math.exp(value - best) for value in values))
        order = sorted(range(vocab_size), key=lambda t: (-values[t], t))
        assert int(result.ranks[row]) == 1 + order.index(token)
        assert result.top_token_ids[row].tolist() == order[:num_top]
        logprobs = [values[t] - log_sum for t in [token, *order[:num_top]]]
        ours = [float(result.logprobs[row]), *result.top_logprobs[row].tolist()]
        assert ours == pytest.approx(logprobs, rel=1e-5, abs=1e-5)
    assert_same_bits(logits, before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, in the interpreter, on NaN
@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
def test_padding_rows_may_hold_anything(target: Target) -> None:
    logits = random_tensor(1, 3, 5000, target=target)
    logits[0] = torch.nan
    token_ids = torch.tensor([0, 7, 8], device=target.device)
    together = token_logprobs(logits, token_ids, num_top=3, backend=target.backend)
    alone = token_logprobs(logits[1:], token_ids[1:], num_top=3, backend=target.backend)
    assert_same_bits(together.logprobs[1:], alone.logprobs)
    assert torch.equal(together.ranks[1:], alone.ranks)
    assert torch.equal(together.top_token_ids[1:], alone.top_token_ids)


def test_an_empty_batch() -> None:
    result = token_logprobs(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), num_top=2)
    assert result.top_token_ids.shape == (0, 2)


def test_wrong_arguments_are_named() -> None:
    logits, ids = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelInputError, match="token_ids has dtype"):
        token_logprobs(logits, ids.int(), num_top=1)
    with pytest.raises(KernelInputError, match="token_ids has shape"):
        token_logprobs(logits, ids[:1], num_top=1)
    for num_top in (-1, 9):
        with pytest.raises(KernelInputError, match=r"num_top is .* must be in \[0, 8\]"):
            token_logprobs(logits, ids, num_top=num_top)


@pytest.mark.gpu
def test_both_implementations_agree_at_full_size() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(64, 151936, device="cuda", generator=generator, dtype=torch.bfloat16) * 3
    token_ids = torch.randint(0, 151936, (64,), device="cuda", generator=generator)
    ours = token_logprobs(logits, token_ids, num_top=20, backend="triton")
    theirs = token_logprobs(logits, token_ids, num_top=20, backend="torch")
    assert torch.equal(ours.ranks, theirs.ranks)
    assert torch.equal(ours.top_token_ids, theirs.top_token_ids)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.top_logprobs, theirs.top_logprobs, rtol=1e-4, atol=1e-4)
