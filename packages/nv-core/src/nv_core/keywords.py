"""Answers an unknown keyword argument with the nearest known one."""

import difflib
from collections.abc import Iterable


def refuse_unknown_keywords(owner: str, keywords: Iterable[str], known: Iterable[str]) -> None:
    """Checks that `owner` has every keyword it was called with.

    Args:
        owner: The callable, as its user writes it, such as `SamplingParams`.
        keywords: The keywords that were passed.
        known: All keywords that `owner` accepts.

    Raises:
        TypeError: For the first keyword that `owner` does not have. The message names the nearest
            known one where one is near, and all of them otherwise.
    """
    accepted = set(known)
    for keyword in keywords:
        if keyword not in accepted:
            names = sorted(accepted)
            near = difflib.get_close_matches(keyword, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keywords: {', '.join(names)}"
            raise TypeError(f"{owner}() got an unexpected keyword argument {keyword!r}; {hint}")
