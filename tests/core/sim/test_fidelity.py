"""What the simulator predicts against what an H200 did: recorded runs of the benchmark workload.

`benchmarks/bench_fidelity.py` recorded them and repeats this with any new log.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from nv_core import SchedulerConfig
from nv_core.sim import (
    RooflineLatency,
    StepLog,
    Workload,
    WorkRequest,
    find_hardware,
    find_model,
    measure,
    simulate,
)

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "h200_qwen3_0.6b.json").read_text()
)


def plans_of(log: StepLog) -> list[list[list[int]]]:
    return [
        [list(share) for share in zip(step.seq_ids, step.computed, step.scheduled, strict=True)]
        for step in log.steps
    ]


@pytest.mark.parametrize("run", RECORDED["runs"], ids=["first", "second"])
def test_the_preset_predicts_the_h200(run: dict[str, Any]) -> None:
    requests = tuple(WorkRequest(0, prompt, output) for prompt, output in run["requests"])
    log = simulate(
        Workload("benchmark", requests),
        SchedulerConfig(**RECORDED["header"]),
        RooflineLatency(find_model("qwen3-0.6b"), find_hardware("h200")),
        num_steps_ahead=1,
    )
    # Every plan is the one that the engine made on the GPU.
    assert len(log.steps) == run["num_steps"]
    plans = json.dumps(plans_of(log), separators=(",", ":"))
    assert hashlib.sha256(plans.encode()).hexdigest() == run["plans_sha256"]
    metrics = measure(log)
    assert metrics.output_tokens_per_s == pytest.approx(run["output_tokens_per_s"], rel=0.05)
    assert metrics.itl_s.mean == pytest.approx(run["mean_itl_s"], rel=0.07)
    assert metrics.ttft_s.mean == pytest.approx(run["mean_ttft_s"], rel=0.05)
