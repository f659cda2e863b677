"""Errors of several ranks working together."""

from nv_core import NvError


class RankError(NvError, RuntimeError):
    """A rank died, failed or fell silent; the message holds its number and its traceback."""


class ProtocolError(NvError, RuntimeError):
    """A command between ranks is not what it should be: cut, foreign, or of another version."""
