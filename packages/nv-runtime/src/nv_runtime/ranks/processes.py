"""RankProcess: starts one other rank, and ends it.

A rank is a fresh interpreter that runs `rank_main.py`, not a copy of this process and not a second
run of the caller's script: it works from a notebook, from standard input, and without a guard
around the main module. What it needs it inherits: the ring, its line to rank 0, and a pipe that
breaks when this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from nv_runtime.ranks.channel import Channel

_BOOTSTRAP = """\
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module, function = sys.argv[2].split(":")
getattr(importlib.import_module(module), function)(*map(int, sys.argv[3:]))
"""

RANK_MAIN = "nv_runtime.ranks.rank_main:main"
"""What a started process runs, as "module:function"."""


class RankProcess:
    """One started rank.

    Attributes:
        rank: Its number.
        channel: Rank 0's end of the line to it.
    """

    def __init__(self, rank: int, start: dict[str, Any], *, segment_fd: int) -> None:
        """Starts the process; it imports what it needs and waits for the others.

        Args:
            rank: Its number.
            start: What `rank_main.StartMessage` holds, as JSON.
            segment_fd: The ring's memory.
        """
        self.rank = rank
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        fds = (theirs.fileno(), lifeline, segment_fd)
        try:
            self._process = start_process(fds)
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.channel = Channel(ours)
        # If it is dead already, the watch says so, and why.
        with contextlib.suppress(OSError):
            self.channel.send(start)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def exit_text(self, timeout_s: float) -> str | None:
        """Says how the process ended; None if it has not within the time."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if code < 0:
            return f"was killed by {_signal_name(-code)}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """Ends the process now, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self, timeout_s: float) -> None:
        """Waits for the process to end, kills it when it takes too long, and closes the line."""
        if self.exit_text(timeout_s) is None:
            self.kill()
            self._process.wait()
        self.channel.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def _signal_name(number: int) -> str:
    # Most real-time signals have none.
    names = {member.value: member.name for member in signal.Signals}
    return names.get(number, f"signal {number}")


def start_process(fds: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    """Starts an interpreter that runs `RANK_MAIN` with these file descriptors.

    It leaves the terminal's group of processes, so that an interrupt from the keyboard reaches the
    caller's process alone, which decides what becomes of the ranks.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), RANK_MAIN, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
