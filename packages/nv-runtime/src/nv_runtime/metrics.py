"""What `LLM.get_metrics` returns: plain values under vLLM's names, with our prefix.

The classes are those that vLLM's callers know. `nv_runtime.engine_stats` fills them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Counter", "Gauge", "Histogram", "HistogramValues", "Metric", "Vector"]


@dataclass(kw_only=True)
class Metric:
    """One number, or family of numbers, about the engine.

    Args:
        name: Such as `nv:generation_tokens`.
        labels: What tells metrics of one name apart: `model_name`, and `finished_reason` of
            requests that have ended.
    """

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Counter(Metric):
    """A count since the engine was made."""

    value: int


@dataclass(kw_only=True)
class Vector(Metric):
    """Counts by position, since the engine was made."""

    values: list[int]


@dataclass(kw_only=True)
class Gauge(Metric):
    """A value of now."""

    value: float


@dataclass(kw_only=True)
class Histogram(Metric):
    """How often a value was how large, since the engine was made.

    Args:
        count: Number of values.
        sum: Their sum.
        buckets: Upper bound, as text -> number of values up to it; the last bound is "+Inf".
    """

    count: int
    sum: float
    buckets: dict[str, int]


class HistogramValues:
    """Collects values for a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Starts empty.

        Args:
            bounds: Upper bounds of the buckets, ascending; one without bound comes behind them.
        """
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def as_metric(self, name: str, labels: dict[str, str]) -> Histogram:
        """Returns what was collected so far."""
        buckets, count = {}, 0
        for bound, in_bucket in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            count += in_bucket
            buckets[str(bound)] = count
        return Histogram(name=name, labels=labels, count=count, sum=self._sum, buckets=buckets)
