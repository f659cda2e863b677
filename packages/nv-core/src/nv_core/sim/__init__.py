"""The scheduler laboratory: the real `Scheduler` under a virtual clock, on traces, in pictures.

`simulate` runs a workload with a latency model and returns a step log; `measure` turns a log into
numbers, `write_report` into a page. The engine's own log (`LLM(step_log=path)`) is read by
`read_step_log` and goes into the same functions. Read `simulator.py` first.

Needs the extra: `pip install "nv-core[sim]"`.
"""

from __future__ import annotations

# First: it says what to install where the extra is missing.
from nv_core.sim import extra  # noqa: F401
from nv_core.sim.block_map import replay_blocks
from nv_core.sim.capacity import Capacity, plan_capacity
from nv_core.sim.fit import Fit, RooflineFit, fit, fit_roofline, split_at_idle
from nv_core.sim.hardware import HARDWARE, Hardware, find_hardware
from nv_core.sim.latency import (
    AffineLatency,
    ConstantLatency,
    LatencyModel,
    RooflineLatency,
    StepWork,
)
from nv_core.sim.metrics import SLO, Distribution, Metrics, measure, request_times
from nv_core.sim.model_shape import MODELS, ModelShape, find_model
from nv_core.sim.perfetto import write_perfetto
from nv_core.sim.play import write_play
from nv_core.sim.plots import plot_cdfs, plot_sweep, plot_timeline
from nv_core.sim.readers import READERS, read_workload
from nv_core.sim.report import write_report
from nv_core.sim.simulator import simulate
from nv_core.sim.summary import compare_table, summarise
from nv_core.sim.sweep import RatePoint, Sweep, find_highest_rate, measure_rate
from nv_core.sim.synthetic import (
    LOOK_ALIKES,
    Lengths,
    gamma_arrivals,
    make_documents,
    make_sessions,
    make_workload,
    on_off_arrivals,
    poisson_arrivals,
)
from nv_core.sim.workload import Workload, WorkRequest
from nv_core.step_log import StepLog, read_step_log

__all__ = [
    "HARDWARE",
    "LOOK_ALIKES",
    "MODELS",
    "READERS",
    "SLO",
    "AffineLatency",
    "Capacity",
    "ConstantLatency",
    "Distribution",
    "Fit",
    "Hardware",
    "LatencyModel",
    "Lengths",
    "Metrics",
    "ModelShape",
    "RatePoint",
    "RooflineFit",
    "RooflineLatency",
    "StepLog",
    "StepWork",
    "Sweep",
    "WorkRequest",
    "Workload",
    "compare_table",
    "find_hardware",
    "find_highest_rate",
    "find_model",
    "fit",
    "fit_roofline",
    "gamma_arrivals",
    "make_documents",
    "make_sessions",
    "make_workload",
    "measure",
    "measure_rate",
    "on_off_arrivals",
    "plan_capacity",
    "plot_cdfs",
    "plot_sweep",
    "plot_timeline",
    "poisson_arrivals",
    "read_step_log",
    "read_workload",
    "replay_blocks",
    "request_times",
    "simulate",
    "split_at_idle",
    "summarise",
    "write_perfetto",
    "write_play",
    "write_report",
]
