"""Where and on what a number was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["describe_environment"]


def describe_environment(device: torch.device) -> dict[str, object]:
    """Describes machine, versions and commit.

    Args:
        device: Where the engine runs.

    Returns:
        JSON-compatible values; "unknown" or None for what cannot be found out.
    """
    return {
        "device": _device_name(device),
        "cpu": _cpu_name(),
        "num_cpus": _num_cpus(),
        "num_torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "nv-runtime": _version("nv-runtime"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "commit": _commit(),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _num_cpus() -> int | None:
    """Processors that this process may use, where the system tells, or else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _commit(file: Path = Path(__file__)) -> str:
    """The commit of the checkout that a file is part of, with a + if something is changed.

    A file that is installed into somebody else's checkout, as in an environment there, is no part
    of it.
    """
    git = ["git", "-C", str(file.parent)]
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", file.name], capture_output=True, check=False
        )
        if tracked.returncode:
            return "unknown"
        found = subprocess.run(
            [*git, "describe", "--always", "--dirty=+"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
