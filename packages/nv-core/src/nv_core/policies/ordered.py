"""Policies that serve in another order than that of arrival.

Each is `Mixed` with a rank: the least rank is admitted first and preempted last. A rank that
counts the step of arrival in ages by itself, without a clock: what arrives a step later starts one
step behind, so that only what arrives soon enough can pass. Everything that arrives later than that
stands behind, and whoever is first closes the door, as in `Mixed`: so nobody starves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from heapq import heapify, heappop
from itertools import islice
from typing import TYPE_CHECKING

from nv_core.policies.mixed import WINDOW, Mixed
from nv_core.sequence import Sequence
from nv_core.step import Step

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nv_core.policies.mixed import MixedOptions

Rank = tuple[float, ...]


class Ordered(Mixed, ABC):
    """`Mixed` in the order of a rank, equal ones in the order of the queue."""

    @abstractmethod
    def rank(self, step: Step, seq: Sequence) -> Rank:
        """Says where a sequence stands; the least comes first."""

    def candidates(self, step: Step) -> Iterator[Sequence]:
        """Waiting sequences in the order of their ranks."""
        heap = [(self.rank(step, seq), place, seq) for place, seq in enumerate(step.waiting)]
        heapify(heap)
        while heap:
            yield heappop(heap)[2]

    def rank_victims(self, step: Step, running: list[Sequence]) -> list[Sequence]:
        """Orders the running sequences by their ranks, the greatest last."""
        return sorted(running, key=lambda seq: self.rank(step, seq))


class Priority(Ordered):
    """The most urgent first (`priority`, lower is more urgent)."""

    def __init__(
        self, *, ageing: int = 100, preemptive: bool = False, **options: Unpack[MixedOptions]
    ) -> None:
        """Sets the options.

        Args:
            ageing: How many steps of waiting are worth one level of priority.
            preemptive: Whether a waiting sequence may take the place of running ones that are less
                urgent by a whole level, their waiting counted in.
            options: See `Mixed`.
        """
        super().__init__(**options)
        self.ageing = ageing
        self.preemptive = preemptive

    def rank(self, step: Step, seq: Sequence) -> Rank:
        """By urgency, each step of waiting counted in."""
        del step
        return (seq.arrival_step + self.ageing * seq.priority,)

    def admit(self, step: Step) -> None:
        """Makes room for the most urgent if need be, then admits as `Mixed` does."""
        if self.preemptive and step.waiting and step.budget > 0:
            self._make_room(step, next(self.candidates(step)))
        super().admit(step)

    def _make_room(self, step: Step, seq: Sequence) -> None:
        limit = self.rank(step, seq)[0] + self.ageing
        ranked = self.rank_victims(step, list(step.running))
        victims = [other for other in ranked if self.rank(step, other)[0] >= limit]
        keep_free = self.keep_free(step)
        if step.fits(seq, after=victims, keep_free=keep_free):
            while victims and not step.fits(seq, keep_free=keep_free):
                step.preempt(victims.pop())


class ShortestFirst(Ordered):
    """The least work first: the prompt, and the answer as long as the caller predicted it."""

    def __init__(
        self, *, ageing: int = 16, default_prediction: int = 256, **options: Unpack[MixedOptions]
    ) -> None:
        """Sets the options.

        Args:
            ageing: How many tokens less of work one step of waiting is worth.
            default_prediction: Length of an answer for which there is no prediction, in tokens.
            options: See `Mixed`.
        """
        super().__init__(**options)
        self.ageing = ageing
        self.default_prediction = default_prediction

    def rank(self, step: Step, seq: Sequence) -> Rank:
        """By work, each step of waiting counted in."""
        del step
        answer = seq.predicted_output_tokens
        work = seq.num_prompt_tokens + (self.default_prediction if answer is None else answer)
        return (self.ageing * seq.arrival_step + work,)


class Deadline(Ordered):
    """The earliest `deadline` first; those without one after all others."""

    def __init__(self, *, patience: int = 1000, **options: Unpack[MixedOptions]) -> None:
        """Sets the options.

        Args:
            patience: Whoever has waited for more steps than these goes before all deadlines.
            options: See `Mixed`.
        """
        super().__init__(**options)
        self.patience = patience

    def rank(self, step: Step, seq: Sequence) -> Rank:
        """By deadline, or by arrival after too long a wait."""
        if step.step_id - seq.arrival_step > self.patience:
            return (0, seq.arrival_step)
        return (1, math.inf if seq.deadline is None else seq.deadline)


class LongestPrefix(Ordered):
    """The most cached tokens first, while they are cached; among the first 64 in the queue."""

    def __init__(self, *, ageing: int = 64, **options: Unpack[MixedOptions]) -> None:
        """Sets the options.

        Args:
            ageing: How many cached tokens one step of waiting is worth.
            options: See `Mixed`.
        """
        super().__init__(**options)
        self.ageing = ageing

    def rank(self, step: Step, seq: Sequence) -> Rank:
        """By what is cached, each step of waiting counted in."""
        num_cached = seq.num_tokens - step.uncached_tokens(seq)
        return (self.ageing * seq.arrival_step - num_cached,)

    def candidates(self, step: Step) -> Iterator[Sequence]:
        """The first waiting sequences in the order of their ranks: each costs a look-up."""
        window = list(islice(step.waiting, WINDOW))
        yield from sorted(window, key=lambda seq: self.rank(step, seq))

    def rank_victims(self, step: Step, running: list[Sequence]) -> list[Sequence]:
        """The youngest last, as in `Mixed`."""
        return Mixed.rank_victims(self, step, running)
