"""From logits to token ids, one row at a time in meaning, all rows at once in execution.

Every draw comes from a counter-based generator keyed by (seed, position, token id), so a row's
token depends on its own logits, parameters and seed alone: not on the batch it runs in, on
chunking, on prefix hits or on preemption.

A draw from softmax(x) is argmax(x + g) with g independent standard Gumbel noise (the Gumbel-max
trick: Gumbel, "Statistical theory of extreme values", 1954).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from nv_core import SamplingParams

_MASK_64 = 2**64 - 1
# Constants of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
# OOPSLA 2014): an odd increment and the two multipliers of its mixing function.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know of one row.

    Args:
        params: What the caller asked for.
        seed: Key of the row's draws.
        token_ids: The sequence's prompt and output so far; the new token's position is its
            length. Read only, never kept.
        num_prompt_tokens: How many of `token_ids` are the prompt.
        stop_token_ids: Tokens that end the sequence, kept out before `params.min_tokens`.
    """

    params: SamplingParams
    seed: int
    token_ids: Seq[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]


def sample(logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """Samples one token per row.

    The order of steps is vLLM's: repetition penalty, minimum length, temperature, min-p, top-k,
    top-p. Greedy rows take the best token after the first two.

    Args:
        logits: [num_rows, vocab_size], any float dtype; not changed.
        rows: One entry per row.

    Returns:
        Token ids, [num_rows] int64, on the device of the logits.
    """
    scores = logits.float()
    if any(_changes_logits(row) for row in rows):
        scores = scores.clone() if scores is logits else scores
        for index, row in enumerate(rows):
            _penalise_repetition(scores[index], row)
            _forbid_early_stop(scores[index], row)
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if not drawn:
        return scores.argmax(dim=-1)
    if len(drawn) == len(rows):
        return _draw(scores, rows)
    token_ids = scores.argmax(dim=-1)
    selected = torch.tensor(drawn, device=logits.device)
    token_ids[selected] = _draw(scores[selected], [rows[index] for index in drawn])
    return token_ids


def derive_seed(engine_seed: int, request_number: int) -> int:
    """Makes the seed of a request that brought none, in [0, 2**64)."""
    return _mix(engine_seed * _MULTIPLIER_1 + request_number * _INCREMENT)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Makes standard Gumbel noise for every row and token id.

    Args:
        keys: One key per row, [num_rows] int64.
        vocab_size: Number of token ids.

    Returns:
        [num_rows, vocab_size] float32.
    """
    counter = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_INCREMENT)
    bits = keys[:, None] + counter
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MULTIPLIER_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MULTIPLIER_2)
    bits = bits ^ _shift_right(bits, 31)
    # 32 random bits as a float in (0, 1). The exponential variate -log(1 - u) keeps its relative
    # precision near 0, where the winners are; only its far tail is cut.
    uniform = (_shift_right(bits, 32).float() + 0.5) * 2.0**-32
    exponential = -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))
    return -exponential.log()


def _draw(scores: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]

    params = [row.params for row in rows]
    scores = scores / column([p.temperature for p in params])
    if any(p.min_p > 0 for p in params):
        scores = _keep_min_p(scores, column([p.min_p for p in params]))
    filtered = [i for i, p in enumerate(params) if p.top_p < 1 or p.top_k > 0]
    if filtered:
        chosen = torch.tensor(filtered, device=scores.device)
        vocab_size = scores.shape[-1]
        top_k = torch.tensor(
            [params[i].top_k or vocab_size for i in filtered], device=scores.device
        )[:, None]
        top_p = column([params[i].top_p for i in filtered])
        scores[chosen] = _keep_top(scores[chosen], top_k, top_p)
    keys = torch.tensor([_key(row) for row in rows], device=scores.device)
    return (scores + gumbel_noise(keys, scores.shape[-1])).argmax(dim=-1)


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    # p < min_p * p_max, in logarithms, so that no softmax is needed.
    threshold = scores.amax(dim=-1, keepdim=True) + min_p.log()
    return scores.masked_fill(scores < threshold, -torch.inf)


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the top-k tokens, and of those the fewest whose probability reaches top-p."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    # A token stays while the probability of those before it has not reached top-p, so the best
    # one always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    # Where top-p is off, rounding of the sum must not drop the tail.
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)


def _changes_logits(row: SamplingRow) -> bool:
    params = row.params
    return params.repetition_penalty != 1 or _too_short(row)


def _too_short(row: SamplingRow) -> bool:
    return len(row.token_ids) - row.num_prompt_tokens < row.params.min_tokens


def _penalise_repetition(scores: Tensor, row: SamplingRow) -> None:
    """Changes one row in place (Keskar et al., "CTRL", arXiv:1909.05858, section 4.1)."""
    penalty = row.params.repetition_penalty
    if penalty == 1:
        return
    seen = torch.tensor(sorted(set(row.token_ids)), device=scores.device)
    values = scores[seen]
    scores[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _forbid_early_stop(scores: Tensor, row: SamplingRow) -> None:
    """Changes one row in place."""
    if _too_short(row) and row.stop_token_ids:
        scores[torch.tensor(sorted(row.stop_token_ids), device=scores.device)] = -torch.inf


def _key(row: SamplingRow) -> int:
    """Mixes seed and position into the row's 64-bit key, as a signed integer."""
    return _signed(_mix(_mix(row.seed) + len(row.token_ids) * _INCREMENT))


def _mix(value: int) -> int:
    """SplitMix64's mixing function on Python integers."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK_64
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """Reads 64 bits as a signed integer, as torch's int64 does."""
    return value - 2**64 if value >= 2**63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shifts int64 right and fills with zeros; torch's own shift copies the sign."""
    return (value >> bits).bitwise_and(2 ** (64 - bits) - 1)
