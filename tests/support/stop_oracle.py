"""What it means that a text holds a stop text, said as plainly as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_runtime.stop_strings import StopMatch

if TYPE_CHECKING:
    from collections.abc import Sequence


def first_match(text: str, stops: Sequence[str]) -> StopMatch | None:
    """Walks along the text until some stop text ends; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return StopMatch(end - len(longest), longest)
    return None
