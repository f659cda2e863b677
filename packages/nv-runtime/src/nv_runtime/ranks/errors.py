"""Errors of several ranks working together."""

import os

from nv_core import EngineDeadError, NvError


class RankError(EngineDeadError):
    """A rank died, failed or fell silent; the message holds its number and its traceback.

    The engine whose rank it was serves no more requests.
    """


def refuse_forked_child(owner_pid: int) -> None:
    """Raises in a process that was forked from the one that started or joined the ranks.

    It has a copy of everything except what counts: the lines to the ranks, the ring and the
    collectives are still those of the first process, and would mix up what the two do.

    Args:
        owner_pid: The process that the ranks belong to.

    Raises:
        RankError: This is another process.
    """
    if os.getpid() != owner_pid:
        raise RankError(
            f"this engine's ranks belong to process {owner_pid}, and this is process "
            f"{os.getpid()}, forked from it; call the engine there, or make a new one here (in a "
            "process that was spawned, not forked)"
        )


class ProtocolError(NvError, RuntimeError):
    """A command between ranks is not what it should be: cut, foreign, or of another version."""
