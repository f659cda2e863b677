"""StopStrings: finds stop texts in a text that grows, and holds back what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop text that was met.

    Attributes:
        start: Where it begins in the text.
        stop: The stop text.
    """

    start: int
    stop: str

    @property
    def end(self) -> int:
        """Where it ends in the text."""
        return self.start + len(self.stop)


class StopStrings:
    """The stop texts of one request.

    Attributes:
        texts: The stop texts; perhaps none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Takes the texts, each of at least one character."""
        self.texts = tuple(stops)
        self._longest = max(map(len, self.texts), default=0)

    def find(self, text: str, *, num_searched: int) -> StopMatch | None:
        """Finds the stop text that is complete first.

        Args:
            text: The text so far.
            num_searched: Characters that an earlier call has searched already.

        Returns:
            The match that ends first, the longest of those; None if there is none. The answer does
            not depend on the pieces in which the text arrived.
        """
        matches = [
            StopMatch(start, stop)
            for stop in self.texts
            if (start := text.find(stop, max(0, num_searched - len(stop) + 1))) >= 0
        ]
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def num_held_back(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop text."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-count:]
            if any(stop.startswith(tail) for stop in self.texts):
                return count
        return 0
