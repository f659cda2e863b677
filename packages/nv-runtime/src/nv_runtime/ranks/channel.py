"""Channel: the line between rank 0 and one other rank, beside the ring.

Rank 0 sends one message, with which the other starts; after that single bytes, which wake it. The
other sends reports: that it is ready, or what it failed of. When the line breaks, the process at
its other end is gone. Messages are JSON with their length before them.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Iterable
from typing import Any

from nv_runtime.ranks.errors import ProtocolError

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 64 * 2**20

Message = dict[str, Any]


def readable(fds: Iterable[int], timeout_s: float) -> list[int]:
    """Waits until a file descriptor can be read, is broken, or the time has passed.

    Not by `select.select`, which takes no descriptor above 1023: a server has more files open.

    Args:
        fds: The descriptors.
        timeout_s: How long to wait.

    Returns:
        Those that can be read or are broken; none if the time has passed.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(1000 * timeout_s)]


class Channel:
    """One end of the line."""

    def __init__(self, end: socket.socket) -> None:
        """Takes the connected socket."""
        self._socket = end
        self._received = b""

    def fileno(self) -> int:
        """The file descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            OSError: The other end is gone.
        """
        encoded = json.dumps(message).encode()
        self._socket.sendall(_LENGTH.pack(len(encoded)) + encoded)

    def receive(self) -> Message | None:
        """Waits for a message; None when the other end is gone."""
        while True:
            message = self._next_message()
            if message is not None:
                return message
            if not self._fill():
                return None

    def receive_available(self) -> tuple[list[Message], bool]:
        """Reads what has arrived, without waiting.

        Returns:
            The complete messages, and whether the other end is still there.
        """
        is_open = True
        while is_open and readable([self._socket.fileno()], 0):
            is_open = self._fill()
        messages = []
        while (message := self._next_message()) is not None:
            messages.append(message)
        return messages, is_open

    def wake(self) -> None:
        """Wakes the other end out of `sleep`."""
        try:
            self._socket.send(b"!", socket.MSG_DONTWAIT)
        except OSError:
            # A full buffer wakes it as well; if it is gone, whoever watches it finds out.
            return

    def sleep(self, seconds: float) -> None:
        """Sleeps until the other end wakes this one, or is gone, or so many seconds have passed."""
        if readable([self._socket.fileno()], seconds):
            self._socket.recv(4096)

    def close(self) -> None:
        """Closes this end; calling it again does nothing."""
        self._socket.close()

    def _next_message(self) -> Message | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length} bytes between ranks is out of the question")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        message: Message = json.loads(self._received[_LENGTH.size : end])
        self._received = self._received[end:]
        return message

    def _fill(self) -> bool:
        try:
            data = self._socket.recv(65536)
        except ConnectionError:
            data = b""
        self._received += data
        return bool(data)
