"""The errors of nv-models, beside `nv_core.errors.ConfigError` for values out of range."""

from nv_core.errors import NvError


class UnsupportedModelError(NvError, ValueError):
    """A checkpoint uses an architecture or a feature that this package does not compute."""


class WeightError(NvError, RuntimeError):
    """Weights are missing, left over, damaged, or not of the shape that the model needs."""
