"""Rate sweeps: how many requests a second a policy carries before it misses its objectives.

Seeds run in parallel processes. A run needs nothing but its arguments, so the numbers do not depend
on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass

from nv_core.config import SchedulerConfig
from nv_core.errors import ConfigError
from nv_core.sim.latency import LatencyModel
from nv_core.sim.metrics import SLO, measure
from nv_core.sim.simulator import simulate
from nv_core.sim.workload import Workload


@dataclass(frozen=True)
class RatePoint:
    """What a rate came to.

    Attributes:
        rate_per_s: Requests per second.
        attainments: Share of requests that met the objectives, for each seed.
        goodputs_per_s: Requests per second that did, for each seed.
    """

    rate_per_s: float
    attainments: tuple[float, ...]
    goodputs_per_s: tuple[float, ...]

    @property
    def attainment(self) -> float:
        """Mean over the seeds."""
        return sum(self.attainments) / len(self.attainments)


@dataclass(frozen=True)
class Sweep:
    """A search for the highest rate.

    Attributes:
        rate_per_s: The highest rate found to meet the target; 0 if none did.
        points: Every rate that was tried, rising.
        target: The attainment that was asked for.
        slo: The objectives.
    """

    rate_per_s: float
    points: tuple[RatePoint, ...]
    target: float
    slo: SLO


def find_highest_rate(
    workloads: Sequence[Workload],
    config: SchedulerConfig,
    latency: LatencyModel,
    *,
    slo: SLO,
    target: float = 0.9,
    low_per_s: float = 0.1,
    high_per_s: float = 100.0,
    tolerance: float = 0.05,
    num_steps_ahead: int = 0,
    num_processes: int = 1,
    on_point: Callable[[RatePoint], None] | None = None,
) -> Sweep:
    """Searches the highest rate at which enough requests meet their objectives, by halving.

    Args:
        workloads: The same kind of workload from different seeds; stretched to each rate.
        config: Limits and policy; a policy object is copied for every run.
        latency: Says how long each step takes.
        slo: The objectives.
        target: Mean share of requests that must meet them.
        low_per_s: Lowest rate to try.
        high_per_s: Highest rate to try.
        tolerance: Ends when the highest good and the lowest bad rate differ by this share.
        num_steps_ahead: See `simulate`.
        num_processes: Seeds to run at the same time.
        on_point: Called with every rate that was tried.

    Raises:
        ConfigError: The rates or the target make no sense.
    """
    if not workloads or not 0 < low_per_s < high_per_s or not 0 < target <= 1 or tolerance <= 0:
        raise ConfigError(
            "a sweep needs workloads, 0 < low_per_s < high_per_s, 0 < target <= 1 and a positive "
            f"tolerance, got {len(workloads)} workloads, {low_per_s!r}, {high_per_s!r}, {target!r} "
            f"and {tolerance!r}"
        )
    points: list[RatePoint] = []

    def is_met(rate: float) -> bool:
        point = measure_rate(
            workloads,
            rate,
            config,
            latency,
            slo=slo,
            num_steps_ahead=num_steps_ahead,
            num_processes=num_processes,
        )
        points.append(point)
        if on_point is not None:
            on_point(point)
        return point.attainment >= target

    best = 0.0
    if is_met(low_per_s):
        best = low_per_s
        if is_met(high_per_s):
            best = high_per_s
    low, high = low_per_s, high_per_s
    while 0 < best < high_per_s and high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        if is_met(middle):
            low = best = middle
        else:
            high = middle
    ordered = tuple(sorted(points, key=lambda point: point.rate_per_s))
    return Sweep(best, ordered, target, slo)


def measure_rate(
    workloads: Sequence[Workload],
    rate_per_s: float,
    config: SchedulerConfig,
    latency: LatencyModel,
    *,
    slo: SLO,
    num_steps_ahead: int = 0,
    num_processes: int = 1,
) -> RatePoint:
    """Runs every workload at a rate; see `find_highest_rate`."""
    jobs = [
        (workload.at_rate(rate_per_s), config, latency, slo, num_steps_ahead)
        for workload in workloads
    ]
    if num_processes > 1 and len(jobs) > 1:
        with ProcessPoolExecutor(min(num_processes, len(jobs))) as pool:
            results = list(pool.map(_run, jobs))
    else:
        results = [_run(job) for job in jobs]
    return RatePoint(rate_per_s, tuple(a for a, _ in results), tuple(g for _, g in results))


def _run(
    job: tuple[Workload, SchedulerConfig, LatencyModel, SLO, int],
) -> tuple[float, float]:
    """One seed at one rate; returns attainment and goodput."""
    workload, config, latency, slo, num_steps_ahead = job
    # Policies may keep state, which must not go from one run to the next.
    log = simulate(workload, deepcopy(config), latency, num_steps_ahead=num_steps_ahead)
    metrics = measure(log, slo=slo)
    return metrics.attainment, metrics.goodput_per_s
