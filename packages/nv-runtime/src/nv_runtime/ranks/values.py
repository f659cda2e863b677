"""Plain values as bytes: numbers, texts, and lists and mappings of them, each with its type.

For the few things between ranks that have no fixed shape, such as sampling parameters. Only plain
data can be read back, whatever the bytes say.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from nv_runtime.ranks.errors import ProtocolError

Value = object
"""None, bool, int, float, str, bytes, or a tuple, list, frozenset or dict of values."""

_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct("<d")
_NONE, _FALSE, _TRUE, _INT, _FLOAT_TAG, _STR, _BYTES, _TUPLE, _LIST, _SET, _DICT = range(11)
_COLLECTIONS: dict[type, int] = {tuple: _TUPLE, list: _LIST, frozenset: _SET}
_MAKERS: dict[int, type] = {tag: kind for kind, tag in _COLLECTIONS.items()}


def pack_value(value: Value) -> bytes:
    """Turns a value into bytes.

    Raises:
        ProtocolError: It holds something else than plain data.
    """
    parts: list[bytes] = []
    _pack(value, parts)
    return b"".join(parts)


def unpack_value(packed: bytes) -> Value:
    """Turns bytes of `pack_value` back into the value.

    Raises:
        ProtocolError: The bytes are cut, too long, or not of this kind.
    """
    reader = _Reader(packed)
    value = reader.value()
    if reader.position != len(packed):
        raise ProtocolError(f"{len(packed) - reader.position} bytes follow a complete value")
    return value


def _pack(value: Value, parts: list[bytes]) -> None:
    if value is None:
        parts.append(bytes([_NONE]))
    elif isinstance(value, bool):
        parts.append(bytes([_TRUE if value else _FALSE]))
    elif isinstance(value, int):
        _pack_sized(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), parts)
    elif isinstance(value, float):
        parts += (bytes([_FLOAT_TAG]), _FLOAT.pack(value))
    elif isinstance(value, str):
        _pack_sized(_STR, value.encode("utf-8", "surrogatepass"), parts)
    elif isinstance(value, bytes):
        _pack_sized(_BYTES, value, parts)
    elif type(value) in _COLLECTIONS:
        items = list(value)  # type: ignore[call-overload]
        parts += (bytes([_COLLECTIONS[type(value)]]), _LENGTH.pack(len(items)))
        for item in items:
            _pack(item, parts)
    elif isinstance(value, Mapping):
        parts += (bytes([_DICT]), _LENGTH.pack(len(value)))
        for key, item in value.items():
            _pack(key, parts)
            _pack(item, parts)
    else:
        raise ProtocolError(
            f"a {type(value).__name__} cannot be sent to other ranks, only plain data: {value!r}"
        )


def _pack_sized(tag: int, content: bytes, parts: list[bytes]) -> None:
    parts += (bytes([tag]), _LENGTH.pack(len(content)), content)


class _Reader:
    """Reads values one after the other, never past the end."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self.position = 0

    def value(self) -> Value:
        tag = self._take(1)[0]
        if tag in (_NONE, _FALSE, _TRUE):
            return None if tag == _NONE else tag == _TRUE
        if tag == _FLOAT_TAG:
            number: float = _FLOAT.unpack(self._take(_FLOAT.size))[0]
            return number
        if tag in _MAKERS:
            return _MAKERS[tag](self.value() for _ in range(self._length()))
        if tag == _DICT:
            return {self.value(): self.value() for _ in range(self._length())}
        if tag not in (_INT, _STR, _BYTES):
            raise ProtocolError(f"byte {self.position - 1}: {tag} is no type of value")
        content = self._take(self._length())
        if tag == _INT:
            return int.from_bytes(content, "little", signed=True)
        return content if tag == _BYTES else content.decode("utf-8", "surrogatepass")

    def _length(self) -> int:
        length: int = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        return length

    def _take(self, count: int) -> bytes:
        taken = self._packed[self.position : self.position + count]
        if len(taken) != count:
            raise ProtocolError(f"a value is cut at byte {len(self._packed)}")
        self.position += count
        return taken
