"""Runs checkpoints on several ranks, each a process of its own, talking through gloo.

The functions that run in the child processes live here because a spawned process can import only
modules on the path, which test files are not.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from nv_models import TensorParallel
from paged_runner import PagedRunner, load_paged_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RankCase:
    """One checkpoint to run on all ranks.

    Args:
        name: Unique name.
        path: The checkpoint.
        prompts: Prompts, run one after the other, each in two chunks.
        load_format: As in `load_model`.
    """

    name: str
    path: Path
    prompts: tuple[tuple[int, ...], ...]
    load_format: str = "auto"


def run_ranks(
    size: int, cases: Sequence[RankCase], folder: Path
) -> dict[str, list[list[npt.NDArray[np.float32]]]]:
    """Runs cases on `size` ranks.

    Returns:
        For each case the logits of each prompt, as computed by each rank.

    Raises:
        RuntimeError: A rank failed or did not end in time; the message is its traceback.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run_rank, args=(rank, size, tuple(cases), folder), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        # A rank that fails leaves the others waiting for it, so watch all of them.
        while any(process.is_alive() for process in processes):
            failed = [process for process in processes if process.exitcode not in (0, None)]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    if any(codes) or None in codes:
        errors = [file.read_text() for file in sorted(folder.glob("error-*.txt"))]
        raise RuntimeError(f"ranks ended with {codes}:\n" + "\n".join(errors))
    return {
        case.name: [
            [np.load(folder / f"{case.name}-{i}-{rank}.npy") for rank in range(size)]
            for i in range(len(case.prompts))
        ]
        for case in cases
    }


def _run_rank(rank: int, size: int, cases: tuple[RankCase, ...], folder: Path) -> None:
    try:
        torch.set_num_threads(1)
        # A file as the meeting point: no port that another process could take.
        meeting_point = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=size)
        tensor_parallel = TensorParallel(rank, size, dist.group.WORLD)
        for case in cases:
            model = load_paged_model(
                case.path, tensor_parallel=tensor_parallel, load_format=case.load_format
            )
            for index, prompt in enumerate(case.prompts):
                half = len(prompt) // 2
                logits = PagedRunner(model).prompt_logits(prompt, chunks=[half, len(prompt) - half])
                np.save(folder / f"{case.name}-{index}-{rank}.npy", logits.numpy())
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
