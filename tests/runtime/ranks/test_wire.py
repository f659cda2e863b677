"""What is packed is read back equal, and nothing else is read at all."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nv_runtime.ranks.errors import ProtocolError
from nv_runtime.ranks.values import pack_value, unpack_value
from nv_runtime.ranks.wire import (
    CommandKind,
    EntryChange,
    NewSequence,
    StepMessage,
    pack_command,
    unpack_command,
)

COUNTS = st.integers(0, 2**32 - 1)
IDS = st.integers(0, 2**64 - 1)

HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
)
VALUES = st.recursive(
    HASHABLE,
    lambda values: st.one_of(
        st.lists(values, max_size=5),
        st.lists(values, max_size=5).map(tuple),
        st.frozensets(HASHABLE, max_size=5),
        st.dictionaries(HASHABLE, values, max_size=5),
    ),
    max_leaves=12,
)
CHANGES = st.builds(
    EntryChange, COUNTS, COUNTS, COUNTS, st.booleans(), st.lists(COUNTS, max_size=9)
)
NEW = st.builds(
    NewSequence,
    IDS,
    COUNTS,
    COUNTS,
    st.lists(COUNTS, max_size=20),
    st.lists(COUNTS, max_size=5),
    st.binary(max_size=30),
)
MESSAGES = st.builds(
    StepMessage,
    step_id=IDS,
    num_collected=st.integers(0, 2**32 - 1),
    continues=st.booleans(),
    released=st.lists(IDS, max_size=5).map(tuple),
    joining=st.lists(IDS, max_size=5).map(tuple),
    new=st.lists(NEW, max_size=5).map(tuple),
    changes=st.lists(CHANGES, max_size=5).map(tuple),
)

steadily = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""On a machine that others keep busy, time says nothing."""


def types_of(value: Any) -> Any:  # noqa: ANN401 - any value
    """The types all the way down: 1, 1.0 and True are equal, and not the same."""
    if isinstance(value, dict):
        return {(key, type(key)): types_of(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return {(item, type(item)) for item in value}
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(item) for item in value]
    return type(value)


@given(VALUES)
@steadily
def test_values_come_back_with_their_types(value: Any) -> None:  # noqa: ANN401
    back = unpack_value(pack_value(value))
    assert back == value
    assert types_of(back) == types_of(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 2**64 - 1, -(2**63), 2**200])
def test_extreme_numbers(value: float) -> None:
    back = unpack_value(pack_value({"x": (value,)}))
    assert repr(back) == repr({"x": (value,)})
    assert math.isnan(unpack_value(pack_value(math.nan)))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [object(), {1, 2}, print, {"processors": [lambda x: x]}, 1j])
def test_what_is_no_plain_data_cannot_be_sent(value: object) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent to other ranks"):
        pack_value(value)


@given(VALUES, st.data())
@steadily
def test_cut_values_are_refused(value: object, data: st.DataObject) -> None:
    packed = pack_value(value)
    length = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ProtocolError):
        unpack_value(packed[:length])
    with pytest.raises(ProtocolError, match="1 bytes follow"):
        unpack_value(packed + b"x")


@pytest.mark.parametrize("packed", [b"\xff", b"\x07\xff\xff\xff\xff", b"\x05\xff\xff\xff\xffab"])
def test_nonsense_is_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_value(packed)


@given(MESSAGES)
@steadily
def test_steps_come_back_equal(message: StepMessage) -> None:
    kind, body = unpack_command(pack_command(CommandKind.STEP, message.pack()))
    assert kind is CommandKind.STEP
    assert StepMessage.unpack(body) == message


@given(MESSAGES, st.data())
@steadily
def test_cut_steps_are_refused(message: StepMessage, data: st.DataObject) -> None:
    body = message.pack()
    length = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolError, match="cut"):
        StepMessage.unpack(body[:length])
    with pytest.raises(ProtocolError, match="2 bytes follow"):
        StepMessage.unpack(body + b"xx")
    command = pack_command(CommandKind.STEP, body)
    with pytest.raises(ProtocolError, match="announces"):
        unpack_command(command[:-1])


def test_a_steady_step_takes_40_bytes() -> None:
    message = StepMessage(step_id=2**40, num_collected=1, continues=True)
    assert len(pack_command(CommandKind.STEP, message.pack())) == 40


@pytest.mark.parametrize("kind", list(CommandKind))
def test_commands_without_a_body(kind: CommandKind) -> None:
    assert unpack_command(pack_command(kind)) == (kind, b"")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"\1\1", "at least 8 bytes, got 2"),
        (struct.pack("<BBHI", 2, 1, 0, 0), "version 2, and this rank speaks version 1"),
        (struct.pack("<BBHI", 1, 77, 0, 0), "no command of kind 77"),
        (struct.pack("<BBHI", 1, 1, 0, 5), "announces 5 bytes and has 0"),
    ],
)
def test_foreign_commands_are_refused(message: bytes, expected: str) -> None:
    with pytest.raises(ProtocolError, match=expected):
        unpack_command(message)
