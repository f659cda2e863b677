"""Under every shipped policy whoever it favours least still ends within a bounded time.

One request of the worst kind for the policy arrives into a machine that favoured ones keep busy:
they arrive faster than they are served, in every step, for ever. Without ageing it would never run;
the tests say so, too, wherever a policy lets its ageing be switched off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from nv_core import (
    Deadline,
    Fair,
    LongestPrefix,
    Mixed,
    Policy,
    Priority,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    Sequence,
    ShortestFirst,
    SkipAhead,
    StepPlan,
)
from nv_core.policies import SHIPPED_POLICIES
from nv_core.testing import KVOracle

NUM_STEPS = 1500


@dataclass
class Rivals:
    """A request that a policy favours least, and those that it favours.

    Attributes:
        victim: Arguments of `add` for the one.
        favoured: Arguments for all others.
        shared_tokens: Leading tokens that all favoured prompts have in common.
        prompt_tokens: Lengths of their prompts, the victim's and the others'.
    """

    victim: dict[str, Any] = field(default_factory=dict)
    favoured: dict[str, Any] = field(default_factory=dict)
    shared_tokens: int = 0
    prompt_tokens: tuple[int, int] = (12, 6)


RIVALS = {
    "mixed": Rivals(prompt_tokens=(40, 6)),
    "prefill_first": Rivals(prompt_tokens=(40, 6)),
    "least_recompute": Rivals(prompt_tokens=(6, 12)),
    "skip_ahead": Rivals(prompt_tokens=(44, 6)),
    "priority": Rivals(victim={"priority": 3}, favoured={"priority": 0}),
    "shortest_first": Rivals(
        victim={"predicted_output_tokens": 900}, favoured={"predicted_output_tokens": 2}
    ),
    "deadline": Rivals(victim={"deadline": None}, favoured={"deadline": 1.0}),
    "longest_prefix": Rivals(shared_tokens=8, prompt_tokens=(12, 12)),
    "fair": Rivals(victim={"user": "many"}, favoured={"user": "many"}),
}


def num_steps_until_served(
    policy: str | Policy, rivals: Rivals, *, depth: int = 1, num_rivals_per_step: int = 1
) -> int | None:
    """Steps from the victim's arrival to its end; None if it has not ended by then."""
    scheduler = Scheduler(
        SchedulerConfig(12, 4, max_num_seqs=4, max_num_batched_tokens=16, policy=policy)
    )
    oracle = KVOracle(12, 4)
    in_flight: list[StepPlan] = []
    victim: Sequence | None = None
    num_victim_tokens, num_tokens = rivals.prompt_tokens
    params = SamplingParams(max_tokens=4)
    for step in range(NUM_STEPS):
        for place in range(num_rivals_per_step):
            own = 10 + num_rivals_per_step * step + place
            shared = [1] * rivals.shared_tokens
            scheduler.add([*shared, *[own] * (num_tokens - len(shared))], params, **rivals.favoured)
        if step == 20:
            victim = scheduler.add([5] * num_victim_tokens, params, **rivals.victim)
        while len(in_flight) < depth and (plan := scheduler.schedule()):
            in_flight.append(plan)
        oldest = in_flight.pop(0)
        scheduler.commit(oldest, oracle.execute(oldest))
        if victim is not None and victim.is_finished:
            return step - 20
        # The queue is long enough; a longer one only takes time.
        while scheduler.num_waiting > 60:
            youngest = list(scheduler._step.waiting)[-1]
            if youngest is victim:
                break
            scheduler.abort(youngest.seq_id)
    return None


def test_every_policy_has_its_rivals() -> None:
    assert set(RIVALS) == set(SHIPPED_POLICIES)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", sorted(RIVALS))
def test_whoever_is_favoured_least_ends_too(policy: str, depth: int) -> None:
    num_steps = num_steps_until_served(policy, RIVALS[policy], depth=depth)
    bounds = {"deadline": 1100, "priority": 400, "skip_ahead": 130, "shortest_first": 150}
    assert num_steps is not None
    assert num_steps <= bounds.get(policy, 60)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("skip_ahead", SkipAhead(patience=10**9)),
        ("priority", Priority(ageing=10**9)),
        ("shortest_first", ShortestFirst(ageing=0)),
        ("deadline", Deadline(patience=10**9)),
        ("longest_prefix", LongestPrefix(ageing=0)),
    ],
)
def test_it_is_ageing_that_ends_the_wait(name: str, policy: Policy) -> None:
    assert num_steps_until_served(policy, RIVALS[name]) is None


@pytest.mark.parametrize("ageing", [5, 20, 80])
def test_wait_grows_with_what_ageing_is_worth(ageing: int) -> None:
    num_steps = num_steps_until_served(Priority(ageing=ageing), RIVALS["priority"])
    assert num_steps is not None
    assert 3 * ageing - 20 <= num_steps <= 3 * ageing + 60


def test_one_request_is_not_starved_by_another_users_many() -> None:
    """Under `mixed` it waits for everything before it, under `fair` for its turn."""
    rivals = Rivals(victim={"user": "one"}, favoured={"user": "many"})
    fair = num_steps_until_served(Fair(), rivals, num_rivals_per_step=4)
    mixed = num_steps_until_served(Mixed(), rivals, num_rivals_per_step=4)
    assert fair is not None
    assert mixed is not None
    assert fair <= 12
    assert mixed > 2 * fair
