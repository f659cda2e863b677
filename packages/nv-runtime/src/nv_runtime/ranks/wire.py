"""Commands from rank 0 to the others, as bytes: typed, with a version and exact lengths.

    | version 1 | kind 1 | 0 2 | length of the body 4 | body |

The body of a step says what is new since the step before it; everything else the ranks know. In a
steady decode step nothing is new, and the whole command takes 40 bytes.

Numbers are little-endian: counts, block ids and token ids of four bytes, `seq_id`s of eight.
"""

from __future__ import annotations

import enum
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from nv_runtime.ranks.errors import ProtocolError

PROTOCOL_VERSION = 1

_HEADER = struct.Struct("<BBHI")  # version, kind, 0, length of the body
_STEP = struct.Struct("<QIHHIIII")
# step_id, collected, continues, 0, and how many: released, joining, changes, new sequences
_NEW = struct.Struct("<QIIIIi")
# seq_id, computed, prompt tokens, tokens, stop tokens, length of the sampling parameters


class CommandKind(enum.IntEnum):
    """What a rank is told to do."""

    STEP = 1
    """Run a step."""
    RESET = 2
    """Forget every sequence and every step that is not collected."""
    STOP = 3
    """End."""
    CAPTURE = 4
    """Capture the next CUDA graph ahead: the same on every rank, since all run the same steps."""


class EntryChange(NamedTuple):
    """What the ranks cannot foresee of one sequence of the batch.

    Attributes:
        place: Its place in the batch.
        num_computed_tokens: As in `ScheduledSequence`.
        num_scheduled_tokens: As in `ScheduledSequence`.
        samples: As in `ScheduledSequence`.
        block_ids: Blocks that its table has gained.
    """

    place: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    block_ids: list[int]


class NewSequence(NamedTuple):
    """A sequence that the ranks do not have yet.

    Attributes:
        seq_id: Its number.
        num_computed_tokens: Tokens that need no computing.
        num_prompt_tokens: How many of the tokens are the prompt.
        token_ids: All tokens so far, outputs included.
        stop_token_ids: All tokens that end it.
        sampling_params: Its parameters, packed by `pack_value`.
    """

    seq_id: int
    num_computed_tokens: int
    num_prompt_tokens: int
    token_ids: list[int]
    stop_token_ids: list[int]
    sampling_params: bytes


@dataclass(frozen=True)
class StepMessage:
    """What is new in a step.

    Attributes:
        step_id: As in `StepPlan`.
        num_collected: How many steps rank 0 has collected and committed since the step before.
        continues: Whether the batch begins with that of the step before, without the sequences
            that are released.
        released: As in `StepPlan`.
        joining: The rest of the batch, or all of it, by `seq_id`.
        new: Those of `joining` that the ranks do not have.
        changes: Entries that do not just compute one token and sample the next, or have new blocks.
    """

    step_id: int
    num_collected: int
    continues: bool
    released: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()
    new: tuple[NewSequence, ...] = ()
    changes: tuple[EntryChange, ...] = ()

    def pack(self) -> bytes:
        """Returns the body of a step command."""
        head = _STEP.pack(
            self.step_id,
            self.num_collected,
            self.continues,
            0,
            len(self.released),
            len(self.joining),
            len(self.changes),
            len(self.new),
        )
        if not (self.released or self.joining or self.changes or self.new):
            return head
        numbers: list[int] = []
        for change in self.changes:
            numbers += change[:4]
            numbers.append(len(change.block_ids))
            numbers += change.block_ids
        parts = [head, _pack("Q", self.released + self.joining), _pack("I", numbers)]
        for seq in self.new:
            parts.append(
                _NEW.pack(
                    seq.seq_id,
                    seq.num_computed_tokens,
                    seq.num_prompt_tokens,
                    len(seq.token_ids),
                    len(seq.stop_token_ids),
                    len(seq.sampling_params),
                )
            )
            parts += (_pack("I", seq.token_ids), _pack("I", seq.stop_token_ids))
            parts.append(seq.sampling_params)
        return b"".join(parts)

    @classmethod
    def unpack(cls, body: bytes) -> StepMessage:
        """Reads the body of a step command.

        Raises:
            ProtocolError: The body is cut or too long.
        """
        reader = _Reader(body)
        step_id, collected, continues, _, num_released, num_joining, num_changes, num_new = (
            reader.fields(_STEP)
        )
        released = reader.numbers("Q", num_released)
        joining = reader.numbers("Q", num_joining)
        changes = tuple(_read_change(reader) for _ in range(num_changes))
        new = tuple(_read_new(reader) for _ in range(num_new))
        reader.check_end()
        return cls(
            step_id=step_id,
            num_collected=collected,
            continues=bool(continues),
            released=tuple(released),
            joining=tuple(joining),
            new=new,
            changes=changes,
        )


def pack_command(kind: CommandKind, body: bytes = b"") -> bytes:
    """Puts the header before a body."""
    return _HEADER.pack(PROTOCOL_VERSION, kind, 0, len(body)) + body


def unpack_command(message: bytes) -> tuple[CommandKind, bytes]:
    """Reads the header of a command.

    Returns:
        Its kind and its body.

    Raises:
        ProtocolError: It is cut, too long, unknown, or of another version.
    """
    if len(message) < _HEADER.size:
        raise ProtocolError(f"a command has at least {_HEADER.size} bytes, got {len(message)}")
    version, kind, _, length = _HEADER.unpack_from(message)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"this is a command of version {version}, and this rank speaks version "
            f"{PROTOCOL_VERSION}: all ranks must run the same code"
        )
    body = message[_HEADER.size :]
    if len(body) != length:
        raise ProtocolError(f"a command announces {length} bytes and has {len(body)}")
    try:
        return CommandKind(kind), body
    except ValueError:
        raise ProtocolError(f"there is no command of kind {kind}") from None


class _Reader:
    """Reads a body from the front, never past its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._position = 0

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def numbers(self, kind: str, count: int) -> list[int]:
        numbers = array(kind)
        numbers.frombytes(self.take(count * numbers.itemsize))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()

    def take(self, count: int) -> bytes:
        taken = self._body[self._position : self._position + count]
        if count < 0 or len(taken) != count:
            raise ProtocolError(f"a step command is cut at byte {len(self._body)}")
        self._position += count
        return taken

    def check_end(self) -> None:
        rest = len(self._body) - self._position
        if rest:
            raise ProtocolError(f"{rest} bytes follow a complete step command")


def _read_change(reader: _Reader) -> EntryChange:
    place, computed, scheduled, samples, num_blocks = reader.numbers("I", 5)
    return EntryChange(place, computed, scheduled, bool(samples), reader.numbers("I", num_blocks))


def _read_new(reader: _Reader) -> NewSequence:
    seq_id, computed, num_prompt, num_tokens, num_stops, num_bytes = reader.fields(_NEW)
    return NewSequence(
        seq_id,
        computed,
        num_prompt,
        reader.numbers("I", num_tokens),
        reader.numbers("I", num_stops),
        reader.take(num_bytes),
    )


def _pack(kind: str, values: tuple[int, ...] | list[int]) -> bytes:
    numbers = array(kind, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
