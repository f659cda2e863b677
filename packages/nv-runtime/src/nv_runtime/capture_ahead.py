"""Captures CUDA graphs before a step needs them, all at once with a progress bar.

`nv_runtime.engine_thread` does the same one by one, while nobody asks for anything. What is worth
capturing is `nv_runtime.cuda_graphs.DecodeGraphs`' business.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from nv_runtime.engine import Engine

logger = logging.getLogger(__name__)


def capture_graphs(engine: Engine, *, show_progress: bool) -> int:
    """Captures every graph of decode steps that is worth it and not there yet.

    Args:
        engine: Captures them between its steps.
        show_progress: Whether to show a bar on standard error.

    Returns:
        How many graphs were captured; fewer than there were to do where memory ran out.
    """
    start = monotonic()
    num_left = engine.num_graphs_ahead
    with tqdm(
        total=num_left,
        desc="Capturing CUDA graphs",
        unit="graph",
        disable=not (show_progress and num_left),
    ) as bar:
        num_captured = 0
        while engine.capture_next_graph():
            num_captured += 1
            bar.update()
    if num_captured:
        logger.info("captured %d CUDA graphs in %.2f s", num_captured, monotonic() - start)
    return num_captured
