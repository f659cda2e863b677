"""Typed reading of JSON or GGUF metadata, with errors naming field, value and file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nv_core.errors import ConfigError

# A vocabulary or a chat template in the wrong place should not fill the screen.
_MAX_SHOWN_CHARACTERS = 200

MAX_INTEGER = 2**31 - 1
"""Most that any integer may be: kernels index along one dimension with 32 bits."""

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConfigValues:
    """Reads fields of one JSON object.

    A field that is absent or null takes the default; without a default it is an error. Booleans
    do not pass for numbers.

    Args:
        values: The object.
        source: What messages call it, for example "config.json".
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def integer(self, name: str, default: int | None = None, *, at_most: int = MAX_INTEGER) -> int:
        """Returns an integer field."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(name, value, "an integer")
        if value > at_most:
            raise self._error(name, value, f"at most {at_most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a numeric field as a float."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(name, value, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self._error(name, value, "in the range of a float") from None

    def boolean(self, name: str, *, default: bool) -> bool:
        """Returns a true/false field."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Returns a string field."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._error(name, value, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns an object field; an absent or null one is empty."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._error(name, value, "an object")
        return value

    def array(self, name: str) -> list[Any]:
        """Returns a list field, whatever it lists; an absent or null one is empty."""
        value = self._get(name, [])
        if not isinstance(value, list):
            raise self._error(name, value, "a list")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns a field that holds one token id, a list of them, or null."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self._error(name, value, "a token id, a list of token ids or null")
        return tuple(dict.fromkeys(ids))

    def optional_text(self, name: str) -> str | None:
        """Returns a string field, or None for an absent or null one."""
        return None if self._values.get(name) is None else self.text(name)

    def optional_boolean(self, name: str) -> bool | None:
        """Returns a true/false field, or None for an absent or null one."""
        return None if self._values.get(name) is None else self.boolean(name, default=False)

    def optional_token_id(self, name: str, *, num_tokens: int) -> int | None:
        """Returns a token id below `num_tokens`, or None for an absent or null field."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise self._error(name, value, f"a token id from 0 to {num_tokens - 1}")
        return value

    def optional_texts(self, name: str) -> tuple[str, ...] | None:
        """Returns a list of strings, or None for an absent or null field."""
        return self._optional_list(name, {str}, "a list of strings")

    def optional_integers(self, name: str) -> tuple[int, ...] | None:
        """Returns a list of integers, or None for an absent or null field."""
        return self._optional_list(name, {int}, "a list of integers")

    def optional_numbers(self, name: str) -> tuple[float, ...] | None:
        """Returns a list of numbers as floats, or None for an absent or null field."""
        numbers = self._optional_list(name, {int, float}, "a list of numbers")
        return None if numbers is None else tuple(map(float, numbers))

    def _optional_list(self, name: str, types: set[type], wanted: str) -> tuple[Any, ...] | None:
        value = self._values.get(name)
        if value is None:
            return None
        # By exact type: a boolean is an integer to isinstance.
        if not isinstance(value, list) or not set(map(type, value)) <= types:
            raise self._error(name, value, wanted)
        return tuple(value)

    def _get(self, name: str, default: Any) -> Any:  # noqa: ANN401 - JSON values, checked above
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{name} is missing in {self._source}")
        return default

    def _error(self, name: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{name} in {self._source} must be {wanted}, got {shown(value)}")


def shown(value: object) -> str:
    """Returns the repr of a value for a message, cut where it is long."""
    text = repr(value)
    short = text[:_MAX_SHOWN_CHARACTERS]
    return text if short == text else f"{short}... ({len(text)} characters)"
