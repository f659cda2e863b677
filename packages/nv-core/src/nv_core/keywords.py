"""Answers an unknown keyword argument with the nearest known one."""

import difflib
from collections.abc import Iterable


def unknown_keyword_error(owner: str, keyword: str, known: Iterable[str]) -> TypeError:
    """Builds the error for a keyword that `owner` does not have.

    Args:
        owner: The callable, as its user writes it, such as `SamplingParams`.
        keyword: The keyword that was passed.
        known: All keywords that `owner` accepts.

    Returns:
        A `TypeError` to raise; its message names the nearest known keyword where one is near,
        and all of them otherwise.
    """
    names = sorted(known)
    near = difflib.get_close_matches(keyword, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keywords: {', '.join(names)}"
    return TypeError(f"{owner}() got an unexpected keyword argument {keyword!r}; {hint}")
