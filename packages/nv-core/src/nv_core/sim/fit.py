"""Fits a latency model to a step log: non-negative least squares, and the error on steps held out.

What a step costs is the time from the end of the step before to its own, as long as the engine had
work all through: that is right with steps in flight and without, and whichever of host and device
is the slower. After an idle time it is the time from the beginning of its planning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nv_core.errors import ConfigError
from nv_core.sim.hardware import Hardware
from nv_core.sim.latency import AffineLatency, LatencyModel, RooflineLatency, StepWork, work_of
from nv_core.sim.model_shape import ModelShape
from nv_core.step_log import StepLog

Floats = npt.NDArray[np.float64]

HELD_OUT = 5
"""Every fifth step is held out."""

MIN_STEPS = 4 * HELD_OUT
"""Fewer tell too little."""

MAX_RATIO = 3.0
"""Steps that take so many times as long as predicted, or as short, are not fitted: compiling."""

NORMS = (1.0, 1.15, 1.3, 1.5, 2.0, 3.0, 6.0)
RATIOS = (0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 1.0, 1.2, 1.5)


@dataclass(frozen=True)
class Fit:
    """A fitted model.

    Attributes:
        latency: The model.
        held_out_error: Mean absolute error on steps held out, as a share of their time.
        num_steps: Steps that it was fitted to.
        num_outliers: Steps left out, see `MAX_RATIO`.
    """

    latency: LatencyModel
    held_out_error: float
    num_steps: int
    num_outliers: int


@dataclass(frozen=True)
class RooflineFit:
    """A fitted GPU.

    Attributes:
        hardware: The GPU.
        held_out_error: See `Fit`, like the others.
        num_steps: See there.
        num_outliers: See there.
    """

    hardware: Hardware
    held_out_error: float
    num_steps: int
    num_outliers: int


def split_at_idle(log: StepLog) -> list[StepLog]:
    """Cuts a log where the engine had nothing to do, as between two calls of `LLM.generate`."""
    starts = [i for i, idle in enumerate(_idle_before(log)) if idle or i == 0]
    parts = []
    for start, stop in zip(starts, [*starts[1:], len(log.steps)], strict=True):
        steps = log.steps[start:stop]
        ids = {seq_id for step in steps for seq_id in step.seq_ids}
        requests = {seq_id: r for seq_id, r in log.requests.items() if seq_id in ids}
        parts.append(StepLog(log.header, requests, [], steps))
    return parts


def step_seconds(log: StepLog) -> Floats:
    """What each step of a log cost, [num_steps]; see the module."""
    done = np.array([step.done_s for step in log.steps], dtype=float)
    planned = np.array([step.planned_s for step in log.steps], dtype=float)
    if not done.size:
        return done
    begun = np.concatenate([planned[:1], done[:-1]])
    return done - np.where(_idle_before(log), planned, begun)


def _idle_before(log: StepLog) -> npt.NDArray[np.bool_]:
    """Whether everything that had come before a step's predecessor ended was ended, too."""
    if not log.steps:
        return np.zeros(0, dtype=bool)
    requests = log.requests.values()
    arrived = np.sort(np.array([r.arrival_s for r in requests], dtype=float))
    ended = np.sort([np.inf if r.finished_s is None else r.finished_s for r in requests])
    done = np.array([step.done_s for step in log.steps], dtype=float)[:-1]
    planned = np.array([step.planned_s for step in log.steps], dtype=float)[1:]
    num_came = np.searchsorted(arrived, done, side="right")
    num_gone = np.searchsorted(ended, planned, side="right")
    return np.concatenate([[True], (num_gone >= num_came) & (planned >= done)])


def fit(logs: StepLog | Iterable[StepLog]) -> Fit:
    """Fits an `AffineLatency`, which needs to know neither the model nor the GPU.

    Args:
        logs: One log, or several of the same engine.

    Raises:
        ConfigError: There are too few steps.
    """
    rows = _rows(logs)

    def solve(chosen: Sequence[_Row]) -> LatencyModel:
        features = [
            (1.0, w.num_tokens, w.num_seqs, w.decode_context, w.chunk_pairs)
            for w in (row.work for row in chosen)
        ]
        times = _times(chosen)
        weights, _ = _solve(np.array(features, dtype=float), times, times)
        step, token, seq, context, pair = (float(w) for w in weights)
        return AffineLatency(
            step_s=step, token_s=token, seq_s=seq, context_token_s=context, pair_s=pair
        )

    latency, error, num_steps, num_outliers = _fit(
        rows, solve, lambda latency, row: latency.seconds(row.work)
    )
    return Fit(latency, error, num_steps, num_outliers)


def fit_roofline(
    logs: StepLog | Iterable[StepLog], hardware: Hardware, *, bytes_share: float | None = None
) -> RooflineFit:
    """Fits the shares and overheads of a GPU, so that it can predict other models, too.

    Args:
        logs: Logs of engines on this GPU; their headers say which model each ran.
        hardware: The GPU's data sheet; the fitted numbers are replaced.
        bytes_share: A known `Hardware.bytes_share`, which is then kept; None to fit it as well. In
            the log of one small model, reading the weights and a fixed cost look alike, and what
            is fitted for the one is wrong for another model; logs of two models tell them apart.

    Raises:
        ConfigError: There are too few steps, or a log does not say which model it ran.
    """
    rows = _rows(logs)
    if any(row.model is None for row in rows):
        raise ConfigError("the log's header does not hold the shape of the model")

    def solve(chosen: Sequence[_Row]) -> Hardware:
        features = _Features.of(chosen, hardware)
        solutions = (
            _solve_roofline(features, hardware, norm, ratio, bytes_share)
            for norm, ratio in itertools.product(NORMS, RATIOS)
        )
        return min(solutions, key=lambda solution: solution[0])[1]

    rooflines: dict[tuple[ModelShape, Hardware], RooflineLatency] = {}

    def predict(fitted: Hardware, row: _Row) -> float:
        key = (row.shape, fitted)
        if key not in rooflines:
            rooflines[key] = RooflineLatency(*key)
        return rooflines[key].seconds(row.work)

    fitted, error, num_steps, num_outliers = _fit(rows, solve, predict)
    return RooflineFit(fitted, error, num_steps, num_outliers)


@dataclass(frozen=True)
class _Row:
    """A step, the model that ran it, and the seconds that it took."""

    work: StepWork
    model: ModelShape | None
    seconds: float

    @property
    def shape(self) -> ModelShape:
        if self.model is None:
            raise ConfigError("the log's header does not hold the shape of the model")
        return self.model


@dataclass(frozen=True)
class _Features:
    """What the steps that are fitted have in them.

    Attributes:
        flops: Arithmetic of the matrix products, [num_steps].
        read_bytes: Weights that they read, [num_steps].
        others: Seconds of KV reads and of attention at peak speed; numbers of sequences, layers
            and steps, [num_steps, 5].
        times: What the steps took in seconds, [num_steps].
    """

    flops: Floats
    read_bytes: Floats
    others: Floats
    times: Floats

    @classmethod
    def of(cls, rows: Sequence[_Row], hardware: Hardware) -> _Features:
        has_one_model = len({row.shape for row in rows}) == 1
        flops, read_bytes, others = [], [], []
        for row in rows:
            model, work = row.shape, row.work
            flops.append(
                2.0 * model.num_matmul_parameters * work.num_tokens
                + 2.0 * model.num_head_parameters * work.num_sampled
            )
            num_read = model.num_matmul_parameters + model.num_head_parameters
            read_bytes.append(float(num_read * model.dtype_bytes))
            context = model.kv_bytes_per_token * (work.decode_context + work.chunk_context)
            pairs = 4 * model.num_layers * model.num_heads * model.head_dim * work.chunk_pairs
            others.append(
                (
                    context / hardware.bytes_per_s,
                    pairs / hardware.flops_per_s,
                    work.num_seqs,
                    model.num_layers,
                    # With one model, what a layer costs and what a step costs look the same.
                    0.0 if has_one_model else 1.0,
                )
            )
        return cls(
            np.array(flops), np.array(read_bytes), np.array(others, dtype=float), _times(rows)
        )


def _solve_roofline(
    features: _Features,
    hardware: Hardware,
    norm: float,
    ratio: float,
    bytes_share: float | None,
) -> tuple[float, Hardware]:
    """Solves for one shape of the roofline.

    Args:
        features: The steps.
        hardware: The data sheet.
        norm: See `Hardware`.
        ratio: flops_share / bytes_share.
        bytes_share: See `fit_roofline`.

    Returns:
        The loss, see `_solve`, and the fitted GPU.
    """
    compute_s = features.flops / (hardware.flops_per_s * ratio)
    read_s = features.read_bytes / hardware.bytes_per_s
    linear_s = (compute_s**norm + read_s**norm) ** (1 / norm)
    times = features.times
    if bytes_share is None:
        weights, loss = _solve(np.column_stack([linear_s, features.others]), times, times)
        linear, rest = float(weights[0]), weights[1:]
    else:
        linear = 1 / bytes_share
        rest, loss = _solve(features.others, times - linear * linear_s, times)
    kv, attention, seq, layer, step = (float(w) for w in rest)
    # What costs nothing is infinitely fast; a large share says so.
    shares = [1 / w if w > 1e-3 else 1e3 for w in (linear, kv, attention)]
    fitted = replace(
        hardware,
        flops_share=ratio * shares[0],
        bytes_share=shares[0],
        kv_share=shares[1],
        attention_share=shares[2],
        norm=norm,
        seq_overhead_s=seq,
        layer_overhead_s=layer,
        step_overhead_s=step,
    )
    return loss, fitted


def _rows(logs: StepLog | Iterable[StepLog]) -> list[_Row]:
    rows: list[_Row] = []
    for log in [logs] if isinstance(logs, StepLog) else logs:
        model = ModelShape.from_header(log.header.model)
        rows += [
            _Row(work_of(step), model, float(seconds))
            for step, seconds in zip(log.steps, step_seconds(log), strict=True)
            if step.seq_ids and seconds > 0
        ]
    if len(rows) < MIN_STEPS:
        raise ConfigError(f"a fit needs at least {MIN_STEPS} steps, the log has {len(rows)}")
    return rows


def _times(rows: Sequence[_Row]) -> Floats:
    return np.array([row.seconds for row in rows])


_Model = TypeVar("_Model")


def _fit(
    rows: list[_Row],
    solve: Callable[[Sequence[_Row]], _Model],
    predict: Callable[[_Model, _Row], float],
) -> tuple[_Model, float, int, int]:
    """Fits to most steps, leaves out what is nothing like the rest, and fits again."""
    is_held_out = np.arange(len(rows)) % HELD_OUT == HELD_OUT - 1
    kept = np.ones(len(rows), dtype=bool)
    seconds = _times(rows)
    for _ in range(2):
        chosen = np.flatnonzero(kept & ~is_held_out)
        model = solve([rows[i] for i in chosen])
        predicted = np.array([predict(model, row) for row in rows])
        kept = (seconds < MAX_RATIO * predicted) & (predicted < MAX_RATIO * seconds)
        if kept.sum() < MIN_STEPS:
            raise ConfigError(
                f"a fit needs at least {MIN_STEPS} steps that are alike, but only {kept.sum()} of "
                f"{len(rows)} took from 1/{MAX_RATIO:g} to {MAX_RATIO:g} times as long as "
                "predicted; look for times in the log that cannot be"
            )
    tested = (predicted / seconds)[kept & is_held_out]
    error = float(np.abs(tested - 1).mean()) if tested.size else float("nan")
    return model, error, len(chosen), int((~kept).sum())


def _solve(features: Floats, targets: Floats, times: Floats) -> tuple[Floats, float]:
    """Least squares with weights that are not negative.

    Squared errors are divided by the step's time: between absolute errors, which would let the few
    longest steps decide, and relative ones, which would count a millisecond of a short step for
    more than one of a long step, although a request waits for both.

    With six unknowns, the best solution over every choice of those that are 0 is exact and fast.

    Args:
        features: [num_steps, num_weights].
        targets: What they shall add up to, [num_steps].
        times: What the steps took, [num_steps], positive.

    Returns:
        The weights, and the sum that they make least.
    """
    root = np.sqrt(times)
    scaled, goal = features / root[:, None], targets / root
    size = np.sqrt((scaled**2).mean(axis=0))
    size[size == 0] = 1.0
    scaled = scaled / size
    gram, product = scaled.T @ scaled, scaled.T @ goal
    num = features.shape[1]
    none = float(goal @ goal)
    best, best_loss = np.zeros(num), none
    for count in range(1, num + 1):
        for chosen in itertools.combinations(range(num), count):
            part = list(chosen)
            try:
                weights = np.linalg.solve(gram[np.ix_(part, part)], product[part])
            except np.linalg.LinAlgError:
                continue
            if (weights < 0).any():
                continue
            loss = none - float(weights @ product[part])
            if loss < best_loss * (1 - 1e-12):
                best, best_loss = np.zeros(num), loss
                best[part] = weights
    return best / size, best_loss
