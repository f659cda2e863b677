"""Executor: what the engine needs of whatever runs its steps.

One process runs them with a `ModelRunner` alone. Several ranks run them together: behind
`nv_runtime.ranks`, the same runner works on each of them.
"""

from __future__ import annotations

from typing import Protocol

from nv_core import StepPlan
from nv_runtime.model_runner import StepHandle


class Executor(Protocol):
    """Runs plans, in the order in which they are launched.

    No interrupt from the keyboard falls into a call: the engine holds it back until its step ends.
    """

    def check(self) -> None:
        """Raises the reason why no more steps can be run, if it is known and there is one."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step; after an error, `reset` must come before the next launch."""

    def collect(self, handle: StepHandle) -> dict[int, int]:
        """Waits for a step and returns the token of each sequence that got one."""

    @property
    def num_graphs_ahead(self) -> int:
        """CUDA graphs of decode steps that are worth capturing before a step needs them."""

    def capture_next_graph(self) -> bool:
        """Captures one of them, between two steps.

        Returns:
            Whether it did; without one, or without memory for one, it does nothing.
        """

    def reset(self) -> None:
        """Forgets every sequence, after a step that failed."""

    def shutdown(self) -> None:
        """Ends what was started for it; calling it again does nothing."""
