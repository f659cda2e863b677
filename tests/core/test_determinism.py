"""Same events, same plans: in another process, under another hash seed, on another Python."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, StepPlan
from nv_core.policies import SHIPPED_POLICIES
from nv_core.testing import KVOracle

RECORDED_DIGESTS = {
    "mixed": "0f9b80e1801c166d",
    "prefill_first": "e7ebf7ed5ce9d9a7",
    "skip_ahead": "5c9205290c84b54b",
    "least_recompute": "47feaa891edd4a50",
    "priority": "b818d1a8856fa771",
    "shortest_first": "02a5910cd553cfa0",
    "deadline": "663c427909162ea5",
    "longest_prefix": "9cabb701f87fde5c",
    "fair": "8f8acf4e2db811b3",
}


def numbers(seed: int) -> Iterator[int]:
    """Pseudo-random numbers that no library can change."""
    while True:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield seed >> 33


def schedule_log(policy: str) -> Iterator[str]:
    """All plans and events of a busy life: small pool, common prefixes, aborts, plans ahead."""
    draw = numbers(7)
    scheduler = Scheduler(
        SchedulerConfig(
            10, 4, max_num_seqs=5, max_num_batched_tokens=24, eos_token_ids=(3, 5), policy=policy
        )
    )
    oracle = KVOracle(10, 4, vocab_size=50)
    in_flight: list[StepPlan] = []
    for event in range(1000):
        if event < 800 and next(draw) % 8 == 0:
            kind = next(draw) % 4
            prompt = [kind] * (next(draw) % 20) + [next(draw) % 50]
            seq = scheduler.add(
                prompt,
                SamplingParams(max_tokens=1 + next(draw) % 12, stop_token_ids=(7, 11)),
                request_id=f"request {event}",
                user=f"user {kind}",
                cache_salt=[None, "salt"][next(draw) % 2],
                priority=kind,
                deadline=float(event + next(draw) % 50),
                predicted_output_tokens=next(draw) % 12,
            )
            for _ in range(max(0, next(draw) % 6 - 3)):
                scheduler.fork(seq)
        if next(draw) % 20 == 0:
            scheduler.abort(next(draw) % (event + 1))
        plan = scheduler.schedule() if len(in_flight) < 2 else None
        if plan is not None:
            in_flight.append(plan)
            entries = [(entry, entry.token_ids) for entry in plan.sequences]
            counts = (plan.num_hit_tokens, plan.num_free_blocks, plan.num_cached_blocks)
            yield f"{plan.step_id} {entries} {counts} preempted {plan.preempted}"
        elif in_flight:
            oldest = in_flight.pop(0)
            events = scheduler.commit(oldest, oracle.execute(oldest))
            yield f"{[(seq.request_id, str(seq.finish_reason)) for seq in events.finished]}"
    yield f"{scheduler.prefix_cache_stats} {scheduler.has_unfinished}"


def digest(policy: str) -> str:
    return hashlib.sha256("\n".join(schedule_log(policy)).encode()).hexdigest()[:16]


def test_log_is_of_a_busy_life() -> None:
    log = list(schedule_log("mixed"))
    num_plans = sum("preempted" in line for line in log)
    num_quiet_plans = sum(line.endswith("preempted ()") for line in log)
    assert num_plans > 300
    assert num_plans - num_quiet_plans > 10
    assert any("'stop'" in line for line in log)
    assert any("'length'" in line for line in log)
    assert "num_hit_tokens=0" not in log[-1]
    assert log[-1].endswith(" False")


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295"])
def test_hash_seed_changes_nothing(hash_seed: str) -> None:
    result = subprocess.run(
        [sys.executable, str(Path(__file__)), *RECORDED_DIGESTS],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == list(RECORDED_DIGESTS.values())


def test_every_shipped_policy_is_recorded() -> None:
    assert set(RECORDED_DIGESTS) == set(SHIPPED_POLICIES)


@pytest.mark.parametrize("policy", sorted(RECORDED_DIGESTS))
def test_plans_are_the_recorded_ones(policy: str) -> None:
    """Recorded once, so that Pythons can be compared: record anew if plans change on purpose."""
    assert digest(policy) == RECORDED_DIGESTS[policy]


if __name__ == "__main__":
    sys.stdout.write("".join(digest(policy) + "\n" for policy in sys.argv[1:]))
