"""Policy: what every policy is, and how a running sequence gets a block when none is free."""

from __future__ import annotations

from collections import deque
from typing import Protocol, runtime_checkable

from nv_core.sequence import Sequence, WaitReason
from nv_core.step import Step


@runtime_checkable
class Policy(Protocol):
    """Decides who runs in each step."""

    def schedule(self, step: Step) -> None:
        """Plans one step by calling `step.take`, `step.preempt` and `step.drop`."""


def take_or_preempt(
    step: Step,
    seq: Sequence,
    n: int | None = None,
    *,
    victims: deque[Sequence] | list[Sequence],
    exceed_budget: bool = False,
) -> int:
    """Takes a running sequence, preempting from the end of `victims` until it has its block.

    Args:
        step: The step.
        seq: The running sequence to take.
        n: See `Step.take`.
        victims: Running sequences that may be preempted, the best victim last; those preempted
            are removed. `seq` itself may be among them, and is preempted when none is left.
        exceed_budget: See `Step.take`.

    Returns:
        The tokens granted.
    """
    while not (granted := step.take(seq, n, exceed_budget=exceed_budget)):
        if seq.wait_reason is not WaitReason.BLOCKS:
            break
        victim = victims.pop() if victims else seq
        step.preempt(victim)
        if victim is seq:
            break
    return granted
