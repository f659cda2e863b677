"""The simulator makes the plans that the engine makes: same requests, same moments, same plans.

The engine runs a tiny model on the CPU, and requests come at scripted moments: before the step in
which the simulator saw them first. The simulator is told the answers' tokens, since later prompts
may find them in the cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import SamplingParams, SchedulerConfig, Sequence
from nv_core.step_log import StepLog, read_step_log
from nv_runtime import LLM
from nv_runtime.prompt import TokenizedPrompt

sim = pytest.importorskip("nv_core.sim", reason="needs the extra nv-core[sim]")

NUM_BLOCKS, BLOCK_SIZE, BUDGET = 26, 4, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_prompts(seed: int) -> Iterator[tuple[float, list[int], int]]:
    """Arrival, prompt and length of answer of some requests, many of which share a beginning."""
    draw = random.Random(seed)
    beginnings = [[draw.randint(3, 120) for _ in range(9)] for _ in range(2)]
    for _ in range(30):
        own = [draw.randint(3, 120) for _ in range(draw.randint(1, 30))]
        beginning = draw.choice([[], *beginnings])
        yield draw.uniform(0, 40), [*beginning, *own], draw.randint(1, 20)


def simulate(requests: list[Any], policy: str, ahead: int) -> StepLog:
    config = SchedulerConfig(
        NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=6, max_num_batched_tokens=BUDGET, policy=policy
    )
    log: StepLog = sim.simulate(
        sim.Workload("scripted", tuple(requests)),
        config,
        sim.ConstantLatency(1.0),
        num_steps_ahead=ahead,
        record_blocks=True,
    )
    return log


def first_chances(log: StepLog) -> list[int]:
    """For each request, how many steps had been planned when it came."""
    planned = [step.planned_s for step in log.steps]
    return [sum(time < request.arrival_s for time in planned) for request in log.requests.values()]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("policy", ["mixed", "prefill_first", "fair", "longest_prefix"])
def test_same_plans_step_by_step(checkpoint: Path, tmp_path: Path, policy: str, ahead: int) -> None:
    given = sorted(make_prompts(seed=len(policy) + ahead))
    requests = [
        sim.WorkRequest(arrival, len(prompt), length, prompt_token_ids=tuple(prompt))
        for arrival, prompt, length in given
    ]
    # Who comes when does not depend on tokens, as nobody stops early.
    script = first_chances(simulate(requests, policy, ahead))
    path = tmp_path / "log.jsonl"
    with LLM(
        str(checkpoint),
        device="cpu",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=100,
        max_num_seqs=6,
        max_num_batched_tokens=BUDGET,
        scheduling_policy=policy,
        async_scheduling=bool(ahead),
        skip_tokenizer_init=True,
        show_progress=False,
        step_log=path,
    ) as llm:
        answers = run_scripted(llm, given, script)
    engine = read_step_log(path)
    told = [
        sim.WorkRequest(
            arrival,
            len(prompt),
            length,
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(answer),
        )
        for (arrival, prompt, length), answer in zip(given, answers, strict=True)
    ]
    simulated = simulate(told, policy, ahead)
    assert len(engine.steps) == len(simulated.steps)
    for ours, theirs in zip(simulated.steps, engine.steps, strict=True):
        assert without_times(ours) == without_times(theirs)
    for seq_id, request in simulated.requests.items():
        other = engine.requests[seq_id]
        assert request.num_cached_tokens == other.num_cached_tokens
        assert request.num_preemptions == other.num_preemptions
    # What makes schedules hard must have happened.
    assert any(step.preempted for step in engine.steps)
    assert any(step.num_hit_tokens for step in engine.steps)
    assert any(step.refused for step in engine.steps)


def without_times(step: Any) -> dict[str, Any]:  # noqa: ANN401 - a StepRecord
    fields = step._asdict()
    return {name: value for name, value in fields.items() if not name.endswith("_s")}


def run_scripted(
    llm: LLM, given: list[tuple[float, list[int], int]], script: list[int]
) -> list[list[int]]:
    """Adds each request when so many steps have been planned, and runs the engine dry."""
    engine = llm._open_parts().engine
    schedule = engine.scheduler.schedule
    num_planned = 0

    def counting() -> Any:  # noqa: ANN401 - a StepPlan or None
        nonlocal num_planned
        plan = schedule()
        num_planned += plan is not None
        return plan

    engine.scheduler.schedule = counting  # type: ignore[method-assign]
    sequences: list[Sequence] = []
    while len(sequences) < len(given) or engine.has_unfinished:
        while len(sequences) < len(given) and script[len(sequences)] <= num_planned:
            _, prompt, length = given[len(sequences)]
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            request = engine.add_request(TokenizedPrompt(None, prompt), params)
            sequences.append(request.answers[0].sequence)
        engine.step()
    return [seq.output_token_ids for seq in sequences]
