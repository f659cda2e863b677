"""Policies: who runs in the next step.

A policy is any object with a method `schedule(step)`. It reads the queues and acts through
`step.take` and `step.preempt`, which keep it from doing harm (see `nv_core.step`). To write
one, copy the shortest here; to use it, pass the object as `SchedulerConfig.policy`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Protocol, runtime_checkable

from nv_core.errors import ConfigError
from nv_core.sequence import Sequence, WaitReason
from nv_core.step import Step


@runtime_checkable
class Policy(Protocol):
    """Decides who runs in each step."""

    def schedule(self, step: Step) -> None:
        """Plans one step by calling `step.take` and `step.preempt`."""


class PrefillFirst:
    """Runs prompts before anything else, and decodes only when no prompt can run.

    The policy of nano-vLLM, step for step: a prompt is admitted when all of it fits the free
    blocks, only the first prompt of a step may be cut to the budget, the first that does not fit
    closes the door, and the youngest decoding sequences make room for the oldest. The token
    budget cuts prompts only: a decode step runs every decoding sequence.
    """

    def schedule(self, step: Step) -> None:
        """Plans one step."""
        self._schedule_prompts(step)
        if not step.has_grants:
            self._schedule_decodes(step)

    def _schedule_prompts(self, step: Step) -> None:
        for seq in chain(step.prefilling, list(step.waiting)):
            if step.has_grants and step.uncached_tokens(seq) > step.budget:
                break
            if not step.take(seq, reserve=len(seq.token_ids)):
                break

    def _schedule_decodes(self, step: Step) -> None:
        take_all_or_preempt(step, list(step.running), exceed_budget=True)


class Mixed:
    """Decodes every running sequence, then fills the rest of the token budget with prompts.

    No prompt, however long, keeps a decoding sequence waiting: it is cut to the tokens that the
    decodes leave over. A prompt is admitted only when all of it fits the free blocks, so that
    it need not be thrown out half-way. Nobody is admitted in a step that had to preempt, since
    the sequence preempted last stands first in the queue and may not come back in that step.
    """

    def schedule(self, step: Step) -> None:
        """Plans one step."""
        take_all_or_preempt(step, step.decoding + step.prefilling)
        while seq := step.waiting.first():
            if not step.take(seq, reserve=len(seq.token_ids)):
                break


def take_all_or_preempt(
    step: Step, sequences: list[Sequence], *, exceed_budget: bool = False
) -> None:
    """Takes running sequences in order; the last make room for the first.

    Args:
        step: The step.
        sequences: Running sequences, the last to be preempted first.
        exceed_budget: See `Step.take`.
    """
    rest = deque(step.take_all(sequences, exceed_budget=exceed_budget))
    while rest:
        take_or_preempt(step, rest.popleft(), victims=rest, exceed_budget=exceed_budget)


def take_or_preempt(
    step: Step, seq: Sequence, *, victims: deque[Sequence], exceed_budget: bool = False
) -> int:
    """Takes a running sequence, preempting from the end of `victims` until it has its block.

    Args:
        step: The step.
        seq: The running sequence to take.
        victims: Running sequences that may be preempted, the best victim last; those preempted
            are removed. With none left, `seq` itself is preempted.
        exceed_budget: See `Step.take`.

    Returns:
        The tokens granted.
    """
    while not (granted := step.take(seq, exceed_budget=exceed_budget)):
        if seq.wait_reason is not WaitReason.BLOCKS:
            break
        victim = victims.pop() if victims else seq
        step.preempt(victim)
        if victim is seq:
            break
    return granted


SHIPPED_POLICIES: dict[str, Callable[[], Policy]] = {
    "mixed": Mixed,
    "prefill_first": PrefillFirst,
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
