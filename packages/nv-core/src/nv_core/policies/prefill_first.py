"""PrefillFirst: prompts before anything else, as nano-vLLM schedules."""

from __future__ import annotations

from collections import deque
from itertools import chain

from nv_core.policies.policy import take_or_preempt
from nv_core.step import Step


class PrefillFirst:
    """Runs prompts before anything else, and decodes only when no prompt can run.

    The policy of nano-vLLM, step for step: a prompt is admitted when all of it fits the free
    blocks, only the first prompt of a step may be cut to the budget, the first that does not fit
    closes the door, and the youngest decoding sequences make room for the oldest. The token
    budget cuts prompts only: a decode step runs every decoding sequence.

    Nobody starves: prompts keep decodes waiting only until the slots or the blocks are used up.
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
        rest = deque(step.take_all(list(step.running), exceed_budget=True))
        while rest:
            take_or_preempt(step, rest.popleft(), victims=rest, exceed_budget=True)
