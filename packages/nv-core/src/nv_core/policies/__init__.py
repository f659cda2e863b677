"""Policies: who runs in the next step.

A policy is any object with a method `schedule(step)`. It reads the queues and acts through
`step.take`, `step.preempt` and `step.drop`, which keep it from doing harm (see `nv_core.step`). To
write one, copy the shortest here; to use it, pass the object as `SchedulerConfig.policy`. The
shipped ones have names, which stand for their defaults.
"""

from __future__ import annotations

from collections.abc import Callable

from nv_core.errors import ConfigError
from nv_core.policies.fair import Fair
from nv_core.policies.mixed import LeastRecompute, Mixed, SkipAhead
from nv_core.policies.ordered import Deadline, LongestPrefix, Ordered, Priority, ShortestFirst
from nv_core.policies.policy import Policy, take_or_preempt
from nv_core.policies.prefill_first import PrefillFirst

__all__ = [
    "SHIPPED_POLICIES",
    "Deadline",
    "Fair",
    "LeastRecompute",
    "LongestPrefix",
    "Mixed",
    "Ordered",
    "Policy",
    "PrefillFirst",
    "Priority",
    "ShortestFirst",
    "SkipAhead",
    "check_policy",
    "make_policy",
    "take_or_preempt",
]

SHIPPED_POLICIES: dict[str, Callable[[], Policy]] = {
    "mixed": Mixed,
    "prefill_first": PrefillFirst,
    "skip_ahead": SkipAhead,
    "least_recompute": LeastRecompute,
    "priority": Priority,
    "shortest_first": ShortestFirst,
    "deadline": Deadline,
    "longest_prefix": LongestPrefix,
    "fair": Fair,
}


def check_policy(policy: str | Policy) -> None:
    """Refuses what is no policy.

    Raises:
        ConfigError: The name is unknown, or the object has no `schedule` method.
    """
    if isinstance(policy, str):
        if policy not in SHIPPED_POLICIES:
            names = ", ".join(sorted(SHIPPED_POLICIES))
            raise ConfigError(f"policy must be one of {names}, or a Policy object, got {policy!r}")
    elif isinstance(policy, type) or not callable(getattr(policy, "schedule", None)):
        raise ConfigError(
            "policy must be a name or an object with a method schedule(step), such as "
            f"MyPolicy(), got {policy!r}"
        )


def make_policy(policy: str | Policy) -> Policy:
    """Returns a new policy of that name, or the object itself.

    Raises:
        ConfigError: See `check_policy`.
    """
    check_policy(policy)
    return SHIPPED_POLICIES[policy]() if isinstance(policy, str) else policy
