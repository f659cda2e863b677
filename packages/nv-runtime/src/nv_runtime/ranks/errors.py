"""Errors of several ranks working together."""

from nv_core import EngineDeadError, NvError


class RankError(EngineDeadError):
    """A rank died, failed or fell silent; the message holds its number and its traceback.

    The engine whose rank it was serves no more requests.
    """


class ProtocolError(NvError, RuntimeError):
    """A command between ranks is not what it should be: cut, foreign, or of another version."""
