"""Typed reading of a JSON object, with errors that name the field, the value and the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nv_core.errors import ConfigError

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

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns an integer field."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a numeric field as a float."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(name, value, "a number")
        return float(value)

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

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns a field that holds one token id, a list of them, or null."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self._error(name, value, "a token id, a list of token ids or null")
        return tuple(dict.fromkeys(ids))

    def _get(self, name: str, default: Any) -> Any:  # noqa: ANN401 - JSON values, checked above
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{name} is missing in {self._source}")
        return default

    def _error(self, name: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{name} in {self._source} must be {wanted}, got {value!r}")
