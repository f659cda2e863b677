"""Every error that nv-core and the packages above it raise on purpose.

Each class is also a `ValueError` or a `RuntimeError`, so code that catches the built-in
classes (as code written for other engines does) keeps working. A message says which field
is wrong, which value it had, what is allowed and what to do.
"""


class NvError(Exception):
    """Base of all errors that the nv packages raise on purpose."""


class ConfigError(NvError, ValueError):
    """A configuration value is out of range or contradicts another one."""


class RequestError(NvError, ValueError):
    """One request cannot be served as asked; the engine and every other request go on."""


class CapacityError(NvError, RuntimeError):
    """A resource (KV blocks, device memory) is too small for what was asked of it."""


class SchedulingError(NvError, RuntimeError):
    """A policy or a caller broke the scheduler's protocol, or a step made no progress."""


class EngineDeadError(NvError, RuntimeError):
    """The engine behind a front door has failed and serves no more requests."""
