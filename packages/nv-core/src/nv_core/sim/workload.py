"""Workload: the requests of a simulation, and when each of them comes.

A request's prompt need not be stored. Most traces give lengths only, or a hash for every block; a
prompt is then a list of `segments`, each an id and a length, and its tokens are the id, repeated.
Equal ids are equal content, so requests share exactly the prefixes that their segments share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from math import isfinite

from nv_core.errors import ConfigError

UNIQUE_BASE = 2**31
"""Segment ids from here on stand for content that a request shares with nobody."""


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One request of a workload.

    Args:
        arrival_s: When it comes, in seconds from the start.
        num_prompt_tokens: Length of its prompt.
        num_output_tokens: Length of its answer.
        segments: Content of its prompt, (id, length) in order; ids are in [0, 2**31). What they
            leave over of the prompt, or all of it if there are none, is shared with nobody.
        output_segment: Id of its answer's content, so that a later turn's prompt can hold it; in
            [0, 2**31).
        prompt_token_ids: Its prompt instead, token by token.
        output_token_ids: Its answer instead, token by token.
        request_id: Its name; None for its number.
        user: Whom it belongs to.
        priority: Lower is more urgent.
        slack_s: Its deadline is so long after its arrival; None for no deadline.
        predicted_output_tokens: What a policy may know of the answer's length.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    segments: tuple[tuple[int, int], ...] = ()
    output_segment: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    output_token_ids: tuple[int, ...] | None = None
    request_id: str | None = None
    user: str | None = None
    priority: int = 0
    slack_s: float | None = None
    predicted_output_tokens: int | None = None

    def __post_init__(self) -> None:
        """Checks what would break a simulation later."""
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ConfigError(
                "a request needs at least one prompt token and one output token, got "
                f"{self.num_prompt_tokens} and {self.num_output_tokens}"
            )
        told = self.prompt_token_ids
        if told is not None and len(told) != self.num_prompt_tokens:
            raise ConfigError(
                f"num_prompt_tokens must be the length of prompt_token_ids, {len(told)}, got "
                f"{self.num_prompt_tokens}"
            )
        if not (isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ConfigError(
                f"arrival_s must be a finite number of at least 0, got {self.arrival_s!r}"
            )
        if self.slack_s is not None and not isfinite(self.slack_s):
            raise ConfigError(f"slack_s must be a finite number or None, got {self.slack_s!r}")
        if self.output_segment is not None and not 0 <= self.output_segment < UNIQUE_BASE:
            raise ConfigError(
                f"output_segment must be in [0, 2**31) or None, got {self.output_segment!r}"
            )

    def make_prompt(self, number: int) -> list[int]:
        """Returns the prompt's tokens.

        Args:
            number: Stands for this request in what it shares with nobody.
        """
        if self.prompt_token_ids is not None:
            return list(self.prompt_token_ids)
        if not self.segments:
            return [UNIQUE_BASE + number] * self.num_prompt_tokens
        tokens: list[int] = []
        for segment, length in self.segments:
            tokens += [segment] * min(length, self.num_prompt_tokens - len(tokens))
        tokens += [UNIQUE_BASE + number] * (self.num_prompt_tokens - len(tokens))
        return tokens


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they come.

    Args:
        name: What it is called in reports.
        requests: The requests; sorted by arrival when made, equal times in the order given.
        problems: What was wrong with lines of the file that it was read from, with their numbers;
            those lines are left out.
    """

    name: str
    requests: tuple[WorkRequest, ...]
    problems: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Sorts the requests."""
        ordered = tuple(sorted(self.requests, key=lambda request: request.arrival_s))
        object.__setattr__(self, "requests", ordered)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[WorkRequest]:
        return iter(self.requests)

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last."""
        if not self.requests:
            return 0.0
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate_per_s(self) -> float:
        """Requests per second between the first arrival and the last; 0 for a single moment."""
        return (len(self.requests) - 1) / self.duration_s if self.duration_s else 0.0

    def first(self, count: int) -> Workload:
        """Returns the first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def at_rate(self, rate_per_s: float) -> Workload:
        """Returns the same requests, their arrivals stretched or squeezed to another mean rate.

        Raises:
            ConfigError: The rate is not positive, there is no time between the arrivals, or the
                rate is so low that the last arrivals are beyond any finite time.
        """
        if not rate_per_s > 0 or not self.duration_s:
            raise ConfigError(
                f"rate_per_s must be positive, and arrivals must differ in time, got "
                f"{rate_per_s!r} for {len(self)} requests within {self.duration_s:g} s"
            )
        factor = rate_per_s / self.rate_per_s
        if not factor > 0 or not isfinite(self.requests[-1].arrival_s / factor):
            raise ConfigError(
                f"rate_per_s {rate_per_s!r} is too far from {self.rate_per_s:g}, the rate that the "
                "requests have, for a finite time to each; it must be larger"
            )
        return self.faster(factor)

    def faster(self, factor: float) -> Workload:
        """Returns the same requests, coming `factor` times as fast.

        Raises:
            ConfigError: The factor is not positive, or so small that arrivals are beyond any
                finite time.
        """
        if not factor > 0:
            raise ConfigError(f"factor must be positive, got {factor!r}")
        if self.requests and not isfinite(self.requests[-1].arrival_s / factor):
            raise ConfigError(
                f"{factor!r} times as fast, the last request would come at no finite time; "
                "factor must be larger"
            )
        moved = [replace(r, arrival_s=r.arrival_s / factor) for r in self.requests]
        return replace(self, requests=tuple(moved))

    def with_predictions(self) -> Workload:
        """Returns the same requests, their answers' lengths known to policies (an oracle)."""
        told = [
            replace(request, predicted_output_tokens=request.num_output_tokens)
            for request in self.requests
        ]
        return replace(self, requests=tuple(told))


def workload_of(name: str, requests: Iterable[WorkRequest], problems: Seq[str] = ()) -> Workload:
    """Makes a workload whose first request comes at 0."""
    kept = list(requests)
    start = min((request.arrival_s for request in kept), default=0.0)
    if start:
        kept = [replace(request, arrival_s=request.arrival_s - start) for request in kept]
    return Workload(name, tuple(kept), tuple(problems))
