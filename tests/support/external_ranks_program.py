"""The program of a rank that a launcher such as torchrun has started, for tests.

Forked from a server that has imported torch, with the environment that torchrun gives.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

from forked_ranks import Fault, do_nothing

Requests = list[list[int]]

STEP_LOG = "log.jsonl"
"""Name of the step log that every rank is asked for, in the folder of the results."""


def run_external(
    folder: Path,
    checkpoint: Path,
    requests_of_ranks: list[list[Requests]],
    *,
    port: int,
    faults: list[Fault] | None = None,
) -> list[dict[str, Any]]:
    """Runs one program on several ranks.

    Args:
        folder: For the results and the step log of the last engine.
        checkpoint: The model.
        requests_of_ranks: For each rank, the prompts that it gives to each of its engines.
        port: Of the launcher's store.
        faults: What goes wrong, for each rank; None for nothing.

    Returns:
        What each rank found: "tokens", or "error".
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nv_runtime.ranks.rank_main", "nv_runtime.builder"])
    size = len(requests_of_ranks)
    processes = [
        context.Process(target=_run, args=(folder, checkpoint, rank, size, port, requests, fault))
        for rank, (requests, fault) in enumerate(
            zip(requests_of_ranks, faults or [do_nothing] * size, strict=True)
        )
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _run(
    folder: Path,
    checkpoint: Path,
    rank: int,
    size: int,
    port: int,
    engines: list[Requests],
    fault: Fault,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    fault()
    result: dict[str, Any] = {"tokens": []}
    try:
        for prompts in engines:
            result["tokens"].append(_answers(checkpoint, size, prompts, folder / STEP_LOG))
    except Exception:  # noqa: BLE001 - the test looks at it
        result["error"] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def _answers(checkpoint: Path, size: int, prompts: Requests, log: Path) -> list[list[int]]:
    from nv_runtime import LLM, SamplingParams

    params = [
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=30, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    with LLM(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        block_size=4,
        max_model_len=128,
        num_gpu_blocks_override=100,
        skip_tokenizer_init=True,
        show_progress=False,
        tensor_parallel_size=size,
        distributed_executor_backend="external_launcher",
        rank_timeout_s=20,
        step_log=log,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
