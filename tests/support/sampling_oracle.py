"""Which tokens a draw may yield: the rules, the hash, the noise and the draw, stated in fp64.

Nothing here calls nv_kernels: it is a second, independent statement of the maths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MASK = 2**64 - 1
GROUP = 16


@dataclass(frozen=True)
class Row:
    """What a row is asked for."""

    temperature: float = 1.0
    seed: int = 1
    position: int = 5
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    allowed: frozenset[int] | None = None
    bias: dict[int, float] = field(default_factory=dict)
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def mix(value: int) -> int:
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def noise(row: Row, counter: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix(mix(row.seed) + row.position * golden)
    uniform = ((mix(key + (counter + 1) * golden) >> 32) + 0.5) / 2**32
    return -math.log(-math.log1p(-uniform))


def adjusted(logits: Tensor, row: Row) -> list[float]:
    values = logits.double().tolist()
    for token in range(len(values)):
        if row.allowed is not None and token not in row.allowed:
            values[token] = -math.inf
        values[token] += row.bias.get(token, 0.0)
        if token in row.prompt or token in row.output:
            is_positive = values[token] > 0
            values[token] *= 1 / row.repetition if is_positive else row.repetition
        count = row.output.count(token)
        values[token] -= row.frequency * count + row.presence * (count > 0)
    return values


def kept(values: Sequence[float], row: Row) -> set[int]:
    """The tokens that the filters leave; `values` are divided by the temperature."""
    best = max(values)
    weights = [math.exp(value - best) for value in values]
    left = {t for t, weight in enumerate(weights) if weight >= min(row.min_p, 1) and weight > 0}
    if row.top_k:
        ordered = sorted((values[t] for t in left), reverse=True)
        left = {t for t in left if values[t] >= ordered[: row.top_k][-1]}
    if row.top_p < 1:
        total = math.fsum(weights[t] for t in left)
        above, reaching, last = 0.0, set[int](), math.inf
        for t in sorted(left, key=lambda t: -values[t]):
            if reaching and values[t] != last and above >= row.top_p * total:
                break
            last = values[t]
            reaching.add(t)
            above += weights[t]
        left = reaching
    return left


def near_best(scores: Iterable[tuple[int, float]], slack: float) -> set[int]:
    """The best of some, and those so near it that fp32 may decide otherwise."""
    pairs = list(scores)
    best = max(score for _, score in pairs)
    return {item for item, score in pairs if score >= best - slack * (1 + abs(best))}


def acceptable(logits: Tensor, row: Row, *, slack: float = 1e-5) -> set[int]:
    """The tokens that a row may draw, if logits or the draw are off by about `slack`."""
    values = adjusted(logits, row)
    if row.temperature == 0:
        return {values.index(max(values))}
    best = max(values)
    values = [(value - best) / row.temperature for value in values]
    if row.is_filtered:
        return near_best(((t, values[t] + noise(row, t)) for t in kept(values, row)), slack)
    starts = range(0, len(values), GROUP)
    masses = {start: math.fsum(map(math.exp, values[start : start + GROUP])) for start in starts}
    groups = near_best(
        (
            (start, math.log(mass) + noise(row, -1 - start))
            for start, mass in masses.items()
            if mass > 0
        ),
        slack,
    )
    return {
        token
        for start in groups
        for token in near_best(
            ((t, values[t] + noise(row, t)) for t in range(start, min(start + GROUP, len(values)))),
            slack,
        )
    }


def draw_columns(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, seeds and positions as the ops take them."""
    signed = [(row.seed + 2**63) % 2**64 - 2**63 for row in rows]
    return (
        strided([row.temperature for row in rows], torch.float32, device),
        strided(signed, torch.int64, device),
        strided([row.position for row in rows], torch.int64, device),
    )


def strided(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every second value of a longer tensor: strides must be honoured."""
    wide = torch.full((len(values), 2), 77, dtype=dtype, device=device)
    wide[:, 0] = torch.tensor(values, dtype=dtype, device=device)
    return wide[:, 0]
