"""One check for all the integers that a caller gives with a request."""

from __future__ import annotations

from typing import Any

from nv_core.errors import RequestError

MAX_INTEGER = 2**128 - 1
"""No integer of a request is longer than 128 bits: longer ones mean nothing, and Python refuses to
write the longest out, in a log or in a message."""


def check_integer(
    name: str,
    value: Any,  # noqa: ANN401 - a caller may pass anything; that is what is checked here
    *,
    minimum: int,
    maximum: int = MAX_INTEGER,
    hint: str = "",
) -> None:
    """Refuses what is no integer, or out of range.

    Args:
        name: Of the field.
        value: Its value.
        minimum: Least that is allowed.
        maximum: Most that is allowed.
        hint: What a special value means.

    Raises:
        RequestError: It is not allowed; the message names field, value and range.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and minimum <= value <= maximum:
        return
    allowed = f"in [{minimum}, {maximum}]"
    if maximum == MAX_INTEGER:
        allowed = f"at least {minimum}" + " and below 2**128" * (is_integer and value > maximum)
    note = f" ({hint})" if hint else ""
    raise RequestError(f"{name} must be an integer {allowed}{note}, got {shown(value)}")


def shown(value: object) -> str:
    """A value for a message, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"one of {value.bit_length()} bits"
    return repr(value)
