"""The one error of this package.

Knows nothing of the other packages: nv-kernels stands alone, so its error does not derive from
theirs. Read `checks.py` next for the wording of the messages.
"""

from __future__ import annotations


class KernelInputError(ValueError):
    """An argument of an op has the wrong shape, dtype, device or value.

    The message names the argument, what it was, what is allowed and how to get there.
    """
