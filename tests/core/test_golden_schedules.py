"""`prefill_first` makes the schedules that nano-vLLM's own scheduler made, step for step.

The recorded workloads use a stand-in model whose next token depends on the last eight tokens
and the length, so a wrong token anywhere changes everything after it. Set the environment
variable NV_GOLDEN_SCHEDULES to check another file of the same format.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, Sequence

DEFAULT_FILE = Path(__file__).parent.parent / "data" / "nano_vllm_schedules.json.gz"


def load_cases() -> list[dict[str, Any]]:
    path = Path(os.environ.get("NV_GOLDEN_SCHEDULES", DEFAULT_FILE))
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        cases: list[dict[str, Any]] = json.load(file)
    return cases


CASES = load_cases()


def stand_in_model(token_ids: list[int], vocab: int) -> int:
    last = token_ids[-8:]
    return (sum(i * t for i, t in enumerate(last, start=1)) + 7 * len(token_ids)) % vocab


@pytest.mark.parametrize("index", range(len(CASES)))
def test_schedule_equals_the_recorded_one(index: int) -> None:
    case = CASES[index]
    steps, outputs = run(case["workload"], {step["step"] for step in case["steps"]})
    assert steps == case["steps"]
    assert outputs == case["outputs"]


def run(
    workload: dict[str, Any], recorded_steps: set[int]
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=workload["num_blocks"],
            block_size=workload["block_size"],
            max_num_seqs=workload["max_num_seqs"],
            max_num_batched_tokens=workload["max_num_batched_tokens"],
            eos_token_ids=(workload["eos"],),
            policy="prefill_first",
        )
    )
    sequences: dict[int, Sequence] = {}
    request_of: dict[int, int] = {}
    steps: list[dict[str, Any]] = []
    step = 0
    last_step = max(recorded_steps)
    while step <= last_step:
        for index, request in enumerate(workload["requests"]):
            if request["arrival_step"] == step:
                params = SamplingParams(
                    max_tokens=request["max_tokens"], ignore_eos=request["ignore_eos"]
                )
                sequences[index] = scheduler.add(request["prompt"], params)
                request_of[sequences[index].seq_id] = index
        plan = scheduler.schedule()
        if plan is not None:
            batch = [
                {
                    "request": request_of[entry.seq_id],
                    "cached": entry.num_computed_tokens,
                    "scheduled": entry.num_scheduled_tokens,
                    "block_table": list(entry.block_table),
                }
                for entry in plan.sequences
            ]
            phases = {
                entry.num_computed_tokens < entry.sequence.num_prefill_tokens
                for entry in plan.sequences
            }
            assert len(phases) == 1
            tokens = {
                e.seq_id: stand_in_model(e.sequence.token_ids, workload["vocab"])
                for e in plan.sequences
                if e.samples
            }
            events = scheduler.commit(plan, tokens)
            scheduler.check_invariants()
            steps.append(
                {
                    "step": step,
                    "phase": "prefill" if phases.pop() else "decode",
                    "batch": batch,
                    "preempted": sorted(request_of[seq_id] for seq_id in plan.preempted),
                    "finished": sorted(request_of[seq.seq_id] for seq in events.finished),
                }
            )
        step += 1
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == workload["num_blocks"]
    return steps, [sequences[i].output_token_ids for i in range(len(workload["requests"]))]
