"""Metrics of a log: latencies, rates, goodput, cache, fairness. The engine's log or a simulator's.

Definitions, all in seconds from the raw time of each token:

    TTFT   first token - arrival                 queue  first scheduled - arrival
    E2E    end - arrival                         ITL    gaps between tokens, pooled over all tokens
    TPOT   (last token - first token) / (output tokens - 1), per request

Goodput counts requests that meet every objective; those that were dropped, rejected or not finished
do not, and stay in the denominator of the attainment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from nv_core.errors import ConfigError
from nv_core.step_log import RequestRecord, StepLog

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SERVED = ("stop", "length")
"""Reasons to finish that mean the answer is complete."""

OUTPUT_WEIGHT = 2
"""What an output token counts as service to a user; a prompt token counts 1."""


@dataclass(frozen=True, kw_only=True)
class SLO:
    """Objectives that a request must meet; None for no objective.

    Args:
        ttft_s: Most time to the first token.
        tpot_s: Most time per output token after the first.
        e2e_s: Most time to the end.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        """Checks the objectives."""
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive or None, got {value!r}")

    def __str__(self) -> str:
        parts = [
            f"{name} <= {1000 * value:g} ms"
            for name, value in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s))
            if value is not None
        ]
        return ", ".join(parts) or "none"


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of a quantity; all 0 if there is nothing.

    Attributes:
        count: Values.
        mean: Their mean.
        p50: Median.
        p90: 90th percentile.
        p99: 99th percentile.
        maximum: The greatest.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Floats) -> Distribution:
        """Sums up values; NaN stands for a missing one."""
        known = values[~np.isnan(values)]
        if not known.size:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (float(p) for p in np.percentile(known, (50, 90, 99)))
        return cls(known.size, float(known.mean()), p50, p90, p99, float(known.max()))


@dataclass(frozen=True)
class RequestTimes:
    """Latencies of each request, [num_requests] each; NaN where there is none.

    Attributes:
        requests: The requests.
        ttft_s: See the module.
        tpot_s: See there.
        e2e_s: See there.
        queue_s: See there.
        num_output_tokens: Tokens that reached the request.
        itl_s: Gaps between tokens of one request, pooled, [num_gaps].
        itl_request: Index of the request that each gap belongs to, [num_gaps].
    """

    requests: list[RequestRecord]
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    queue_s: Floats
    num_output_tokens: Ints
    itl_s: Floats
    itl_request: Ints

    def meets(self, slo: SLO) -> npt.NDArray[np.bool_]:
        """Which requests were served within the objectives, [num_requests]."""
        ok = np.array([r.finish_reason in SERVED for r in self.requests], dtype=bool)
        for limit, values in (
            (slo.ttft_s, self.ttft_s),
            (slo.e2e_s, self.e2e_s),
            # A single token has no time between tokens.
            (slo.tpot_s, np.where(self.num_output_tokens == 1, 0.0, self.tpot_s)),
        ):
            if limit is not None:
                ok &= np.nan_to_num(values, nan=np.inf) <= limit
        return ok


def request_times(log: StepLog) -> RequestTimes:
    """Works out the latencies of each request, the rejected ones last."""
    requests = log.all_requests
    num = len(requests)
    index = {r.seq_id: i for i, r in enumerate(requests) if r.seq_id is not None}
    arrival = np.array([r.arrival_s for r in requests], dtype=float)
    end = np.array([np.nan if r.finished_s is None else r.finished_s for r in requests])
    served = np.array([r.finish_reason in SERVED for r in requests], dtype=bool)

    owner, time = _tokens(log, index)
    # What arrives after its request has ended reaches nobody.
    alive = ~(time > end[owner])
    owner, time = owner[alive], time[alive]
    order = np.argsort(owner, kind="stable")
    owner, time = owner[order], time[order]
    count = np.bincount(owner, minlength=num)
    first, last = np.full(num, np.nan), np.full(num, np.nan)
    # Of equal indices the last assignment stays.
    first[owner[::-1]] = time[::-1]
    last[owner] = time
    same = owner[1:] == owner[:-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(count > 1, (last - first) / (count - 1), np.nan)
    return RequestTimes(
        requests,
        ttft_s=first - arrival,
        tpot_s=tpot,
        e2e_s=np.where(served, end - arrival, np.nan),
        queue_s=_first_scheduled(log, index, num) - arrival,
        num_output_tokens=count.astype(np.int64),
        itl_s=np.diff(time)[same],
        itl_request=owner[1:][same],
    )


def _tokens(log: StepLog, index: Mapping[int, int]) -> tuple[Ints, Floats]:
    """Owner and time of every token that was sampled, in order of time."""
    counts = [len(step.sampled) for step in log.steps]
    done = np.array([step.done_s for step in log.steps], dtype=float)
    return _owners(index, (step.sampled for step in log.steps)), np.repeat(done, counts)


def _owners(index: Mapping[int, int], ids: Iterable[Iterable[int]]) -> Ints:
    """Turns lists of `seq_id` into one array of indices of requests."""
    return np.fromiter(map(index.__getitem__, chain.from_iterable(ids)), dtype=np.int64)


def _first_scheduled(log: StepLog, index: Mapping[int, int], num: int) -> Floats:
    owner = _owners(index, (step.seq_ids for step in log.steps))
    launched = np.repeat(
        np.array([step.launched_s for step in log.steps], dtype=float),
        [len(step.seq_ids) for step in log.steps],
    )
    first = np.full(num, np.nan)
    first[owner[::-1]] = launched[::-1]
    return first


@dataclass(frozen=True)
class Fairness:
    """How evenly users were served.

    Attributes:
        num_users: Users; requests without one are one user together.
        jain_index: Of the service that users with open requests got within a window, in (0, 1]; the
            mean over windows. 1 is even, 1 / users is one user alone.
        service_gap: The greatest difference between two of them within any window, in weighted
            tokens.
        window_s: Length of the windows. Only users who have requests open all through a window
            count in it.
    """

    num_users: int
    jain_index: float
    service_gap: float
    window_s: float


@dataclass(frozen=True)
class Metrics:
    """What a log says, in numbers.

    Attributes:
        num_requests: Requests that came.
        num_served: Those whose answers are complete.
        num_dropped: Those that the policy dropped, and those that were rejected at the door.
        num_unfinished: Those that were neither served nor dropped.
        duration_s: From the first arrival to the last event.
        ttft_s: See the module.
        tpot_s: See there.
        itl_s: See there.
        e2e_s: See there.
        queue_s: See there.
        requests_per_s: Served requests per second.
        output_tokens_per_s: Output tokens per second.
        total_tokens_per_s: Prompt tokens of served requests and all output tokens, per second.
        slo: The objectives.
        goodput_per_s: Requests per second that met them.
        attainment: Share of all requests that met them.
        hit_rate: Share of prompt tokens that first admissions found in the prefix cache.
        recompute_share: Share of computed tokens that had been computed before.
        num_preemptions: Times that a sequence lost its blocks.
        mean_kv_use: Mean share of the blocks in use, over time.
        peak_kv_use: The greatest.
        mean_batch_size: Mean number of sequences in a step.
        num_steps: Steps.
        busy_share: Share of the time in which a step ran.
        fairness: See `Fairness`.
    """

    num_requests: int
    num_served: int
    num_dropped: int
    num_unfinished: int
    duration_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    queue_s: Distribution
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    slo: SLO
    goodput_per_s: float
    attainment: float
    hit_rate: float
    recompute_share: float
    num_preemptions: int
    mean_kv_use: float
    peak_kv_use: float
    mean_batch_size: float
    num_steps: int
    busy_share: float
    fairness: Fairness


def measure(
    log: StepLog,
    *,
    slo: SLO | None = None,
    between_s: tuple[float, float] | None = None,
    window_s: float = 60.0,
) -> Metrics:
    """Measures a log.

    Args:
        log: The log.
        slo: Objectives for the goodput; None for none, which every served request meets.
        between_s: Latencies, goodput and counts of requests only of those that came within these
            two times, to leave out warm-up and drain; None for all. The rest is of the whole log.
        window_s: See `Fairness`.
    """
    slo = SLO() if slo is None else slo
    times = request_times(log)
    arrival = np.array([r.arrival_s for r in times.requests], dtype=float)
    chosen = np.ones(len(arrival), dtype=bool)
    start, end = (float(arrival.min()) if arrival.size else 0.0), log.end_s
    if between_s is not None:
        chosen = (arrival >= between_s[0]) & (arrival < between_s[1])
    duration = max(end - start, 1e-12)
    span = duration if between_s is None else max(min(between_s[1], end) - between_s[0], 1e-12)
    reasons = [
        r.finish_reason for r, is_chosen in zip(times.requests, chosen, strict=True) if is_chosen
    ]
    num_served = sum(reason in SERVED for reason in reasons)
    num_dropped = reasons.count("error")
    num_good = int((times.meets(slo) & chosen).sum())
    num_prompt_tokens = sum(
        r.num_prompt_tokens for r in times.requests if r.finish_reason in SERVED
    )
    num_output_tokens = int(times.num_output_tokens.sum())
    busy = [s.done_s - begin for s, begin in zip(log.steps, log.begins_s(), strict=True)]
    return Metrics(
        num_requests=len(reasons),
        num_served=num_served,
        num_dropped=num_dropped,
        num_unfinished=len(reasons) - num_served - num_dropped,
        duration_s=duration,
        ttft_s=Distribution.of(times.ttft_s[chosen]),
        tpot_s=Distribution.of(times.tpot_s[chosen]),
        itl_s=Distribution.of(times.itl_s[chosen[times.itl_request]]),
        e2e_s=Distribution.of(times.e2e_s[chosen]),
        queue_s=Distribution.of(times.queue_s[chosen]),
        requests_per_s=num_served / span,
        output_tokens_per_s=num_output_tokens / duration,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration,
        slo=slo,
        goodput_per_s=num_good / span,
        attainment=num_good / len(reasons) if reasons else 0.0,
        hit_rate=_hit_rate(times),
        recompute_share=_recompute_share(log),
        num_preemptions=sum(len(step.preempted) for step in log.steps),
        mean_kv_use=_mean_kv_use(log),
        peak_kv_use=max((s.num_used_blocks for s in log.steps), default=0) / log.header.num_blocks,
        mean_batch_size=float(np.mean([len(s.seq_ids) for s in log.steps])) if log.steps else 0.0,
        num_steps=len(log.steps),
        busy_share=min(1.0, sum(busy) / duration),
        fairness=measure_fairness(log, window_s=window_s),
    )


def _hit_rate(times: RequestTimes) -> float:
    """Over requests that ended and had been admitted: what others would have found is not known."""
    admitted = zip(times.requests, ~np.isnan(times.queue_s), strict=True)
    requests = [r for r, is_admitted in admitted if is_admitted and r.finish_reason is not None]
    num_tokens = sum(r.num_prompt_tokens for r in requests)
    return sum(r.num_cached_tokens for r in requests) / num_tokens if num_tokens else 0.0


def _recompute_share(log: StepLog) -> float:
    """Only sequences that were preempted can have computed a token twice."""
    total = sum(step.num_scheduled_tokens for step in log.steps)
    preempted = {seq_id for step in log.steps for seq_id in step.preempted}
    if not preempted or not total:
        return 0.0
    reached: dict[int, int] = {}
    again = 0
    for step in log.steps:
        if preempted.isdisjoint(step.seq_ids):
            continue
        for seq_id, computed, scheduled in zip(
            step.seq_ids, step.computed, step.scheduled, strict=True
        ):
            if seq_id in preempted:
                end = computed + scheduled
                before = reached.get(seq_id, 0)
                again += max(0, min(before, end) - computed)
                reached[seq_id] = max(before, end)
    return again / total


def _mean_kv_use(log: StepLog) -> float:
    """Over time: what a step uses counts until the next step ends; idle times are left out."""
    if not log.steps:
        return 0.0
    used = np.array([step.num_used_blocks for step in log.steps], dtype=float)
    weight = np.array([step.done_s for step in log.steps]) - np.array(log.begins_s())
    if not weight.sum():
        weight[:] = 1.0
    return float((used * weight).sum() / weight.sum() / log.header.num_blocks)


def measure_fairness(log: StepLog, *, window_s: float = 60.0, num_ticks: int = 200) -> Fairness:
    """Compares what users got while they competed.

    Service is a weighted number of tokens: a prompt token counts 1 when it is first covered by a
    step (found ones included), an output token `OUTPUT_WEIGHT`.

    Args:
        log: The log.
        window_s: Length of the windows; at most a tenth of the log.
        num_ticks: At how many moments windows may begin and end.
    """
    users = sorted({r.user or "" for r in log.requests.values()})
    place = {user: i for i, user in enumerate(users)}
    window_s = min(window_s, log.end_s / 10)
    if len(users) < 2 or not log.end_s:
        return Fairness(len(users), 1.0, 0.0, window_s)
    times = np.linspace(0, log.end_s, num_ticks + 1)
    service, is_open = _service(log, place, times), _is_open(log, place, times)
    width = max(1, round(window_s / times[1]))
    indices, gap = [], 0.0
    for start in range(len(times) - width):
        present = (is_open[start : start + width + 1] > 0).all(axis=0)
        if present.sum() >= 2:
            got = (service[start + width] - service[start])[present]
            gap = max(gap, float(got.max() - got.min()))
            squares = float((got**2).sum())
            if squares:
                indices.append(float(got.sum()) ** 2 / (got.size * squares))
    return Fairness(len(users), float(np.mean(indices)) if indices else 1.0, gap, window_s)


def _service(log: StepLog, place: Mapping[str, int], times: Floats) -> Floats:
    """Service of each user up to each moment, [num_times, num_users]."""
    user_of = {seq_id: place[r.user or ""] for seq_id, r in log.requests.items()}
    prompt_of = {seq_id: r.num_prompt_tokens for seq_id, r in log.requests.items()}
    covered: dict[int, int] = {}
    gained = np.zeros((len(times), len(place)))
    bins = np.searchsorted(times, [step.done_s for step in log.steps]).clip(0, len(times) - 1)
    for step, tick in zip(log.steps, bins, strict=True):
        row = gained[tick]
        for seq_id, computed, scheduled in zip(
            step.seq_ids, step.computed, step.scheduled, strict=True
        ):
            prompt = prompt_of[seq_id]
            if computed < prompt:
                end = min(prompt, computed + scheduled)
                row[user_of[seq_id]] += max(0, end - covered.get(seq_id, 0))
                covered[seq_id] = max(end, covered.get(seq_id, 0))
        for seq_id in step.sampled:
            row[user_of[seq_id]] += OUTPUT_WEIGHT
    return np.cumsum(gained, axis=0)


def _is_open(log: StepLog, place: Mapping[str, int], times: Floats) -> Ints:
    """Open requests of each user at each moment, [num_times, num_users]."""
    change = np.zeros((len(times) + 1, len(place)), dtype=np.int64)
    for r in log.requests.values():
        end = log.end_s if r.finished_s is None else r.finished_s
        # Open at the moments in [arrival, end).
        change[np.searchsorted(times, r.arrival_s), place[r.user or ""]] += 1
        change[np.searchsorted(times, end), place[r.user or ""]] -= 1
    return np.cumsum(change, axis=0)[:-1]


def rows_of(metrics: Metrics) -> list[tuple[str, str]]:
    """The metrics as names and texts, in the order in which reports print them."""
    rows = [
        ("requests", f"{metrics.num_requests}"),
        (
            "served / dropped / unfinished",
            f"{metrics.num_served} / {metrics.num_dropped} / {metrics.num_unfinished}",
        ),
        ("time", f"{metrics.duration_s:.2f} s"),
    ]
    for name, values in latency_rows(metrics):
        rows.append((f"{name} mean / p50 / p90 / p99", " / ".join(format_ms(v) for v in values)))
    rows += [
        ("requests per second", f"{metrics.requests_per_s:.3f}"),
        ("output tokens per second", f"{metrics.output_tokens_per_s:,.0f}"),
        (f"goodput ({metrics.slo})", f"{metrics.goodput_per_s:.3f} requests/s"),
        ("attainment", f"{metrics.attainment:.1%}"),
        ("prefix hit rate", f"{metrics.hit_rate:.1%}"),
        ("recomputed tokens", f"{metrics.recompute_share:.2%}"),
        ("preemptions", f"{metrics.num_preemptions}"),
        ("KV blocks in use, mean / peak", f"{metrics.mean_kv_use:.1%} / {metrics.peak_kv_use:.1%}"),
        ("steps, mean batch", f"{metrics.num_steps}, {metrics.mean_batch_size:.1f}"),
    ]
    if metrics.fairness.num_users > 1:
        fairness = metrics.fairness
        rows.append(("users", f"{fairness.num_users}"))
        rows.append(("Jain index", f"{fairness.jain_index:.4f}"))
        gap = f"{fairness.service_gap:,.0f} tokens in {fairness.window_s:.3g} s"
        rows.append(("service gap", gap))
    return rows


def latency_rows(metrics: Metrics) -> Iterable[tuple[str, tuple[float, float, float, float]]]:
    """Name and mean, p50, p90 and p99 in seconds of each latency."""
    for name, d in (
        ("TTFT", metrics.ttft_s),
        ("TPOT", metrics.tpot_s),
        ("ITL", metrics.itl_s),
        ("E2E", metrics.e2e_s),
        ("queue time", metrics.queue_s),
    ):
        yield name, (d.mean, d.p50, d.p90, d.p99)


def format_ms(seconds: float) -> str:
    """A time in milliseconds, or in seconds from ten seconds on."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1000 * seconds:.1f} ms"
