"""StartTimes: where the time of a start goes, from `LLM(...)` to the first token.

A start has phases one after the other. Within them, kernels are compiled or loaded and CUDA graphs
are captured; that time is taken out of the phase and has rows of its own. So every moment counts
once, and the rows add up. What passes between the end of the start and the first request does not
count, nor do imports, which a process does once: they stand in the table's first line.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

logger = logging.getLogger(__name__)

KERNELS = "kernels"
GRAPHS = "CUDA graphs"
FIRST_TOKEN = "first token"


class Kernels(Protocol):
    """Kernels so far; see `nv_kernels.KernelWatch`."""

    num_compiled: int
    num_from_cache: int
    seconds: float

    def close(self) -> None:
        """Ends the counting."""


class Captures(Protocol):
    """CUDA graphs so far; see `nv_runtime.captured_graphs.CapturedGraphs`."""

    num_graphs: int
    seconds: float


@dataclass(frozen=True)
class StartPhase:
    """One row of the table.

    Attributes:
        name: What the time went into.
        seconds: How much of it.
        detail: Sizes, rates and counts, in words; empty if there are none.
    """

    name: str
    seconds: float
    detail: str = ""


class StartTimes:
    """Times one start. `end` ends a phase; the next one begins there."""

    def __init__(self, import_seconds: Mapping[str, float]) -> None:
        """Starts the clock.

        Args:
            import_seconds: What the process imported before -> seconds.
        """
        self._import_seconds = import_seconds
        self._phases: list[StartPhase] = []
        self._kernels: Kernels | None = None
        self._captures: Captures | None = None
        # Seconds that kernels and graphs have taken within phases that count.
        self._inner = {KERNELS: 0.0, GRAPHS: 0.0}
        self._seen = {KERNELS: 0.0, GRAPHS: 0.0}
        self._is_over = False
        self._last = monotonic()

    def watch_kernels(self, kernels: Kernels) -> None:
        """From now on, takes the time of kernels out of the phases.

        Closed by the first token, by `close`, or with this object.
        """
        self._kernels = kernels
        weakref.finalize(self, kernels.close)

    def watch_captures(self, captures: Captures) -> None:
        """From now on, takes the time of captures out of the phases."""
        self._captures = captures

    def end(self, name: str, detail: str = "", *, num_bytes: int | None = None) -> None:
        """Ends a phase.

        Args:
            name: Its name.
            detail: Sizes and counts, in words.
            num_bytes: What it moved; the detail then is that, and the rate.
        """
        elapsed = monotonic() - self._last
        for inner, seconds in self._new_inner_seconds().items():
            self._inner[inner] += seconds
            elapsed -= seconds
        if num_bytes is not None:
            detail = f"{num_bytes / 1e9:.2f} GB, {num_bytes / 1e9 / max(elapsed, 1e-9):.2f} GB/s"
        self._phases.append(StartPhase(name, elapsed, detail))
        self._last = monotonic()

    def skip(self) -> None:
        """Begins the next phase now: what has passed since the last one ended does not count."""
        self._new_inner_seconds()
        self._last = monotonic()

    @property
    def phases(self) -> tuple[StartPhase, ...]:
        """All rows until now, or until the first token, those of kernels and graphs among them.

        The seconds add up to what has passed since the start began, less what was skipped.
        """
        if self._is_over:
            return tuple(self._phases)
        kernels = StartPhase(KERNELS, self._inner[KERNELS], self._describe_kernels())
        graphs = StartPhase(GRAPHS, self._inner[GRAPHS], self._describe_captures())
        return (*self._phases, kernels, graphs)

    def log_ready(self) -> None:
        """Logs the table of all phases so far."""
        imports = ", ".join(f"{name} {s:.2f} s" for name, s in self._import_seconds.items())
        logger.info(
            "ready in %.2f s; imported before that: %s\n%s",
            self._total(),
            imports,
            format_phases(self.phases),
        )

    def note_first_token(self) -> None:
        """Ends the last phase, logs it, and ends the watching."""
        before = dict(self._inner)
        self.end(FIRST_TOKEN, "its request, without kernels and graphs")
        kernels, graphs = (self._inner[name] - before[name] for name in (KERNELS, GRAPHS))
        rest = self._phases[-1].seconds
        logger.info(
            "first token %.2f s after its request, %.2f s of start and request together: kernels "
            "%.2f s (%s until now), CUDA graphs %.2f s (%s until now), everything else %.2f s",
            kernels + graphs + rest,
            self._total(),
            kernels,
            self._describe_kernels(),
            graphs,
            self._describe_captures(),
            rest,
        )
        self.close()
        *phases, first_token, kernel_row, graph_row = self.phases
        self._phases = [*phases, kernel_row, graph_row, first_token]
        self._is_over = True

    def close(self) -> None:
        """Ends the watching; calling it again does nothing."""
        if self._kernels is not None:
            self._kernels.close()

    def _total(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def _new_inner_seconds(self) -> dict[str, float]:
        """What kernels and graphs have taken since the last call."""
        now = {
            KERNELS: 0.0 if self._kernels is None else self._kernels.seconds,
            GRAPHS: 0.0 if self._captures is None else self._captures.seconds,
        }
        new = {name: now[name] - self._seen[name] for name in now}
        self._seen = now
        return new

    def _describe_kernels(self) -> str:
        kernels = self._kernels
        compiled, cached = (
            (0, 0) if kernels is None else (kernels.num_compiled, kernels.num_from_cache)
        )
        return f"{compiled} compiled, {cached} loaded from the cache"

    def _describe_captures(self) -> str:
        return f"{0 if self._captures is None else self._captures.num_graphs} captured"


def format_phases(phases: Iterable[StartPhase]) -> str:
    """Makes a table of phases, one a line."""
    lines = (f"  {phase.name:<17} {phase.seconds:6.2f} s  {phase.detail}" for phase in phases)
    return "\n".join(line.rstrip() for line in lines)
