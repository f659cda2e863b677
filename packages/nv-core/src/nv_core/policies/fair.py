"""Fair: users share the machine, not requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from nv_core.policies.mixed import Mixed
from nv_core.sequence import Sequence, SequenceStatus
from nv_core.step import Step

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nv_core.policies.mixed import MixedOptions


class Fair(Mixed):
    """Serves the user first who was served least so far; each one's requests in order.

    A counter for each user adds up the tokens that were computed for them. Whoever comes, or comes
    back, is lifted to the least counter of the others: absence saves nothing up. So two users who
    always have requests waiting differ by no more than what fits into the machine at once, however
    many requests each of them sends, and nobody starves.

    Source: "Fairness in Serving Large Language Models" (VTC), arXiv:2401.00588.
    """

    def __init__(self, *, output_weight: int = 2, **options: Unpack[MixedOptions]) -> None:
        """Starts with nobody served.

        Args:
            output_weight: What an output token counts; a prompt token counts 1.
            options: See `Mixed`.
        """
        super().__init__(**options)
        self.output_weight = output_weight
        self.served: dict[str | None, int] = {}
        # Users that had requests in the last step, and the least counter among those who stayed.
        self._present: dict[str | None, None] = {}
        self._least = 0

    def schedule(self, step: Step) -> None:
        """Plans one step and charges it to the users."""
        self._meet_users(step)
        super().schedule(step)
        grants = step.grants
        for seq, first, count in zip(
            grants.sequences, grants.num_computed_tokens, grants.num_scheduled_tokens, strict=True
        ):
            is_output = first >= seq.num_prompt_tokens
            weight = self.output_weight if is_output else 1
            self.served[seq.user] += weight * count

    def _meet_users(self, step: Step) -> None:
        """Lifts the counters of newcomers, and forgets those that say nothing any more."""
        before = self._present
        self._present = dict.fromkeys(seq.user for seq in (*step.running, *step.waiting))
        others = [user for user in self._present if user in before] or list(before)
        self._least = max(self._least, min((self.served[user] for user in others), default=0))
        for user in self._present:
            if user not in before:
                self.served[user] = max(self.served.get(user, 0), self._least)
        self.served = {
            user: count
            for user, count in self.served.items()
            if count > self._least or user in self._present
        }

    def candidates(self, step: Step) -> Iterator[Sequence]:
        """Waiting sequences, each of the user who has got least, in this step too."""
        queues: dict[str | None, deque[Sequence]] = {}
        for seq in step.waiting:
            queues.setdefault(seq.user, deque()).append(seq)
        heap = [(self.served[user], place, user) for place, user in enumerate(queues)]
        heapify(heap)
        while heap:
            served, place, user = heappop(heap)
            seq = queues[user].popleft()
            yield seq
            if seq.status is SequenceStatus.RUNNING:
                served += seq.num_tokens
            if queues[user]:
                heappush(heap, (served, place, user))

    def rank_victims(self, step: Step, running: list[Sequence]) -> list[Sequence]:
        """The youngest of the users who have got most last."""
        del step
        return sorted(running, key=lambda seq: self.served[seq.user])
