"""From the start of a process to its first token, imports counted.

Each measurement is a new Python process, timed from before it is made. "Cold" means an empty cache
of compiled Triton kernels; files are as the machine's page cache has them in both cases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from nv_core import NvError
from nv_runtime.start_times import StartPhase

__all__ = ["StartupRun", "median_run", "run_startup", "summarise_startup"]


class StartupError(NvError, RuntimeError):
    """The process that was to be timed failed."""


@dataclass(frozen=True)
class StartupRun:
    """Seconds since the process was asked for.

    Args:
        python_s: The interpreter runs our first line; neither torch nor the engine is imported yet.
        imported_s: `nv_runtime.LLM` is imported.
        ready_s: The engine is constructed.
        first_token_s: The first token is known.
        phases: Where the time went, from the request for the process to the first token: rows of
            name, seconds and detail whose seconds add up to `first_token_s`.
    """

    python_s: float
    imported_s: float
    ready_s: float
    first_token_s: float
    phases: tuple[StartPhase, ...]


def run_startup(
    model: str, options: Mapping[str, Any], *, num_prompt_tokens: int, cold: bool
) -> StartupRun:
    """Starts one process and times it to its first token.

    Args:
        model: For `LLM(...)`.
        options: For `LLM(...)`; JSON-compatible. The process shows no progress bar.
        num_prompt_tokens: Length of the prompt.
        cold: Whether the process finds an empty cache of compiled kernels.

    Raises:
        StartupError: The process failed; the message ends with what it said.
    """
    with TemporaryDirectory() as folder:
        # The one setting of Triton's that has no other door; it is for the new process alone.
        environment = {**os.environ, **({"TRITON_CACHE_DIR": folder} if cold else {})}
        job = json.dumps(
            {"model": model, "options": dict(options), "num_prompt_tokens": num_prompt_tokens}
        )
        # Wall-clock time, which both processes share.
        start = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "nv_runtime.bench.first_token", job],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
    if done.returncode:
        raise StartupError(f"the timed process failed: {done.stderr.strip()[-2000:]}")
    report = json.loads(done.stdout.splitlines()[-1])
    marks = {name: mark - start for name, mark in report["marks"].items()}
    phases = [
        StartPhase("Python", marks["python_s"]),
        *(StartPhase(f"import {name}", seconds) for name, seconds in report["imports"].items()),
        *(StartPhase(**phase) for phase in report["phases"]),
    ]
    rest = marks["first_token_s"] - sum(phase.seconds for phase in phases)
    phases.append(StartPhase("everything else", rest))
    return StartupRun(**marks, phases=tuple(phases))


def median_run(runs: list[StartupRun]) -> StartupRun:
    """The run whose first token came neither early nor late; of two, the earlier.

    Args:
        runs: At least one.
    """
    return sorted(runs, key=lambda run: run.first_token_s)[(len(runs) - 1) // 2]


def summarise_startup(runs: list[StartupRun]) -> dict[str, Any]:
    """Medians over several runs, and every run.

    Args:
        runs: At least one.
    """
    return {
        "median_ready_s": median(run.ready_s for run in runs),
        "median_first_token_s": median(run.first_token_s for run in runs),
        "runs": [asdict(run) for run in runs],
    }
