"""From logits to token ids, one row at a time in meaning, all rows at once in execution.

This file changes and filters logits as the parameters say; `nv_kernels.sample_tokens` draws. Its
noise is keyed by (seed, position, token id), so a row's token depends on its own logits, parameters
and seed alone: not on the batch it runs in, on chunking, on prefix hits or on preemption.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from nv_core import SamplingParams
from nv_kernels import sample_tokens
from nv_runtime.transfer import to_device

_MAX_TEMPERATURE = 1e30
"""Higher temperatures are cut to this, which makes every token equally likely all the same."""


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know of one row.

    Args:
        params: What the caller asked for.
        seed: Key of the row's draws.
        position: Position in the sequence that the new token will have.
        token_ids: The sequence's prompt and output so far, for the repetition penalty. Read only,
            never kept.
        num_prompt_tokens: How many of `token_ids` are the prompt.
        stop_token_ids: Tokens that end the sequence, kept out before `params.min_tokens`.
    """

    params: SamplingParams
    seed: int
    position: int
    token_ids: Seq[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that stand before the new one."""
        return self.position - self.num_prompt_tokens


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
    scores = logits
    if any(_changes_logits(row.params, row.num_output_tokens) for row in rows):
        scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
        for index, row in enumerate(rows):
            _penalise_repetition(scores[index], row)
            _forbid_early_stop(scores[index], row)
    params = [row.params for row in rows]
    if any(_filters(p) for p in params):
        scores = _filter(scores.float(), params)

    return sample_tokens(scores, *pack_draw(rows, logits.device))


def pack_draw(rows: Seq[SamplingRow], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns temperatures, seeds and positions of rows, as `sample_tokens` takes them."""
    return (
        to_device([effective_temperature(row.params) for row in rows], torch.float32, device),
        to_device([_signed(row.seed) for row in rows], torch.int64, device),
        to_device([row.position for row in rows], torch.int64, device),
    )


def effective_temperature(params: SamplingParams) -> float:
    """Returns the temperature to draw with: finite in float32, and 0 for a greedy request."""
    return 0.0 if params.is_greedy else min(params.temperature, _MAX_TEMPERATURE)


def draws_by_temperature_alone(
    params: SamplingParams, *, position: int, num_prompt_tokens: int
) -> bool:
    """Whether a row's logits need no change but the division by its temperature.

    Args:
        params: What the caller asked for.
        position: Position in the sequence that the new token will have.
        num_prompt_tokens: Tokens of the prompt.
    """
    return not _filters(params) and not _changes_logits(params, position - num_prompt_tokens)


def derive_seed(engine_seed: int, request_number: int) -> int:
    """Makes the seed of a request that brought none, in [0, 2**64)."""
    return xxhash.xxh64_intdigest(request_number.to_bytes(8, "little"), engine_seed)


def _filter(scores: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Applies min-p, top-k and top-p, each where it is asked for.

    Scores come and go as logits: temperature is taken into account where it matters, and is left
    for the draw to apply.
    """
    rows = [i for i, p in enumerate(params) if _filters(p)]

    def column(values: list[float]) -> Tensor:
        return to_device(values, torch.float32, scores.device)[:, None]

    chosen = to_device(rows, torch.int64, scores.device)
    kept = scores[chosen] / column([effective_temperature(params[i]) for i in rows])
    if any(params[i].min_p > 0 for i in rows):
        kept = _keep_min_p(kept, column([params[i].min_p for i in rows]))
    if any(params[i].top_p < 1 or params[i].top_k > 0 for i in rows):
        vocab_size = scores.shape[-1]
        top_k = to_device(
            [min(params[i].top_k or vocab_size, vocab_size) for i in rows],
            torch.int64,
            scores.device,
        )
        kept = _keep_top(kept, top_k[:, None], column([params[i].top_p for i in rows]))
    filtered = scores.clone()
    filtered[chosen] = scores[chosen].masked_fill(kept == -torch.inf, -torch.inf)
    return filtered


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
    # A token stays while the probability of those before it has not reached top-p; the best one
    # always does, also where top-p is rounded to 0.
    before = probabilities.cumsum(dim=-1) - probabilities
    # Where top-p is off, rounding of the sum must not drop the tail.
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1) & (rank > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)


def _filters(params: SamplingParams) -> bool:
    has_filter = params.min_p > 0 or params.top_p < 1 or params.top_k > 0
    return has_filter and not params.is_greedy


def _changes_logits(params: SamplingParams, num_output_tokens: int) -> bool:
    return params.repetition_penalty != 1 or num_output_tokens < params.min_tokens


def _penalise_repetition(scores: Tensor, row: SamplingRow) -> None:
    """Changes one row in place (Keskar et al., "CTRL", arXiv:1909.05858, section 4.1)."""
    penalty = row.params.repetition_penalty
    if penalty == 1:
        return
    seen = to_device(sorted(set(row.token_ids)), torch.int64, scores.device)
    values = scores[seen]
    scores[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _forbid_early_stop(scores: Tensor, row: SamplingRow) -> None:
    """Changes one row in place."""
    if row.num_output_tokens < row.params.min_tokens and row.stop_token_ids:
        stops = to_device(sorted(row.stop_token_ids), torch.int64, scores.device)
        scores[stops] = -torch.inf


def _signed(value: int) -> int:
    """Reads 64 bits as a signed integer, as torch's int64 does."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
