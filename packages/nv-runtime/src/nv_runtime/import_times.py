"""Imports what every engine needs, first PyTorch and then our own packages, and times it.

`nv_runtime` imports this file before anything else that brings PyTorch. It is the one file whose
order of statements matters.
"""

from __future__ import annotations

import sys
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_had_torch = "torch" in sys.modules
_start = monotonic()

import torch  # noqa: E402, F401

_torch_end = monotonic()

import nv_runtime.engine  # noqa: E402
import nv_runtime.model_runner  # noqa: E402, F401

_own_end = monotonic()

IMPORT_SECONDS: Mapping[str, float] = MappingProxyType(
    ({} if _had_torch else {"torch": _torch_end - _start}) | {"nv": _own_end - _torch_end}
)
"""What was imported here -> seconds; without "torch" if the program had imported that before."""
