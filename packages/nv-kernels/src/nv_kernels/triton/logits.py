"""What the sampling kernels share: reading logits as the rules change them, noise, and keys.

A key is an int32 that orders like the fp32 value it is made of, so that a threshold among values
can be built bit by bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from torch import Tensor

    from nv_kernels.logit_rules import LogitAdjustments, TokenFilters


class Column(NamedTuple):
    """One value for each row, any distance apart; a kernel sees pointer and stride."""

    data: Any
    stride: Any

    @classmethod
    def of(cls, tensor: Tensor) -> Column:
        """Views a tensor of shape [num_rows]."""
        return cls(tensor, tensor.stride(0))


class Logits(NamedTuple):
    """Logits and what changes them; a table is None where there is none.

    `penalties` holds three neighbouring values per row; see `nv_kernels.logit_rules`.
    """

    raw: Column
    vocab_size: Any
    table_rows: Column | None
    allowed_mask: Column | None
    bias: Column | None
    counts: Column | None
    penalties: Column | None

    @classmethod
    def of(cls, logits: Tensor, adjustments: LogitAdjustments | None) -> Logits:
        """Views logits, [num_rows, vocab_size], and their adjustments."""
        if adjustments is None:
            return cls(Column.of(logits), logits.shape[1], *[None] * 5)
        tables = (
            adjustments.table_rows,
            adjustments.allowed_mask,
            adjustments.logit_bias,
            adjustments.token_counts,
            adjustments.penalties,
        )
        columns = [None if table is None else Column.of(table) for table in tables]
        return cls(Column.of(logits), logits.shape[1], *columns)


class Draw(NamedTuple):
    """What a row's draw depends on, apart from its logits."""

    temperatures: Column
    seeds: Column
    positions: Column


class Filters(NamedTuple):
    """What is left out of a row's draw."""

    top_k: Column
    top_p: Column
    min_p: Column

    @classmethod
    def of(cls, filters: TokenFilters) -> Filters:
        """Views the tensors."""
        return cls(*(Column.of(tensor) for tensor in (filters.top_k, filters.top_p, filters.min_p)))


class Parts(NamedTuple):
    """What is known of the parts of each row, [num_rows, num_parts] each.

    `maxima` are of the logits, `masses` of exp((logit - maximum) / temperature), both fp32 and None
    where nobody needs them. `groups` are the first columns of the drawn or best groups, int32, and
    `scores` what these won with, fp32.
    """

    num_parts: Any
    scores: Any = None
    groups: Any = None
    maxima: Any = None
    masses: Any = None


@triton.jit  # type: ignore[untyped-decorator]
def load_value(column: Column, row: tl.tensor) -> tl.tensor:
    """Reads one row's value, or those of several."""
    return tl.load(column.data + row * column.stride)


@triton.jit  # type: ignore[untyped-decorator]
def load_logits(
    logits: Logits, row: tl.tensor, token: tl.tensor, is_wanted: tl.tensor
) -> tl.tensor:
    """Reads logits of one row as fp32, after steps 1 to 3; -inf where they are not wanted."""
    place = logits.raw.data + row * logits.raw.stride + token
    value = tl.load(place, mask=is_wanted, other=float("-inf")).to(tl.float32)
    if logits.table_rows is not None:
        table_row = load_value(logits.table_rows, row).to(tl.int64)
        if logits.allowed_mask is not None:
            place = logits.allowed_mask.data + table_row * logits.allowed_mask.stride + token // 32
            word = tl.load(place, mask=is_wanted, other=0)
            value = tl.where(((word >> (token % 32)) & 1) == 1, value, float("-inf"))
        if logits.bias is not None:
            place = logits.bias.data + table_row * logits.bias.stride + token
            value += tl.load(place, mask=is_wanted, other=0.0)
        if logits.counts is not None:
            place = logits.counts.data + table_row * logits.counts.stride + token
            seen = tl.load(place, mask=is_wanted, other=0)
            value = _penalised(logits.penalties, row, value, seen)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _penalised(penalties: Column, row: tl.tensor, value: tl.tensor, seen: tl.tensor) -> tl.tensor:
    place = penalties.data + row * penalties.stride
    repetition = tl.load(place)
    frequency = tl.load(place + 1)
    presence = tl.load(place + 2)
    value = tl.where(seen > 0, tl.where(value > 0, value / repetition, value * repetition), value)
    count = seen >> 1
    value -= frequency * count.to(tl.float32)
    return value - tl.where(count > 0, presence, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(value: tl.tensor) -> tl.tensor:
    """SplitMix64's mixing function on uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit  # type: ignore[untyped-decorator]
def noise_key(draw: Draw, row: tl.tensor) -> tl.tensor:
    """Makes what a row's noise hangs on, of one row, [1], or of several, [num_rows]."""
    increment = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    seed = (load_value(draw.seeds, row) + tl.zeros([1], tl.int64)).to(tl.uint64, bitcast=True)
    position = load_value(draw.positions, row) + tl.zeros([1], tl.int64)
    return _mix(_mix(seed) + position.to(tl.uint64, bitcast=True) * increment)


@triton.jit  # type: ignore[untyped-decorator]
def exponential_noise(key: tl.tensor, counter: tl.tensor) -> tl.tensor:
    """Makes exponential variates for keys and counters, which are broadcast together.

    Gumbel noise is minus their logarithm.
    """
    increment = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    number = (counter.to(tl.int64) + 1).to(tl.uint64, bitcast=True)
    bits = _mix(key + number * increment)
    uniform = ((bits >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    uniform = tl.minimum(uniform, 0.99999994)  # 1 - 2**-24
    # -log(1 - u); the series keeps the relative precision that the logarithm loses near 0.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    return tl.where(uniform < 0.001, series, -tl.log(1.0 - uniform))


@triton.jit  # type: ignore[untyped-decorator]
def gumbel_noise(key: tl.tensor, counter: tl.tensor) -> tl.tensor:
    """Makes standard Gumbel noise for keys and counters, which are broadcast together."""
    return -tl.log(exponential_noise(key, counter))


@triton.jit  # type: ignore[untyped-decorator]
def inverse_temperature(draw: Draw, row: tl.tensor) -> tl.tensor:
    """Reads 1 / temperature; 1 for a greedy row, which nothing is divided by."""
    temperature = load_value(draw.temperatures, row)
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def key_of(value: tl.tensor) -> tl.tensor:
    """Makes the keys of fp32 values. Adding 0 turns -0, which would come before 0, into 0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def lowest_best(score: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The lowest token id among those of the highest score along the first dimension.

    It is the same whatever the order of reduction; NaN never wins, and where nothing does it is the
    largest int32.
    """
    best = tl.max(score, axis=0)
    return tl.min(tl.where(score == best, token, 2147483647), axis=0)
