"""Runs the Triton kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(
            "triton was imported before tests/kernels/conftest.py could switch its interpreter "
            "on. Set TRITON_INTERPRET=1, or run tests/kernels in a process of its own."
        )
    if find_spec("triton") is not None and find_spec("numpy") is None:
        raise pytest.UsageError(
            "Triton's interpreter, which runs the kernels where there is no GPU, needs NumPy. "
            "Install it with: pip install numpy"
        )
    # Only kernels that are called for by name run there: "auto" takes PyTorch for CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"
else:
    # The fixture below asks for determinism, which cuBLAS grants only with this setting.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills fresh memory with NaN, so that an element nobody wrote shows up."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
