"""Options and checks for engines on tiny checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nv_runtime import RequestOutput
    from nv_runtime.engine import Engine

NUM_BLOCKS = 200


def options(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - LLM's own options
    """Returns options of a small engine in float32 on the CPU, with some changed."""
    return {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "max_model_len": 128,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "show_progress": False,
        **changes,
    }


def assert_idle(engine: Engine, *, num_blocks: int = NUM_BLOCKS) -> None:
    """Checks that nothing is left of any request."""
    engine.scheduler.check_invariants()
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.num_free_blocks == num_blocks
    assert engine.scheduler.num_in_flight == 0
    assert not engine._requests
    assert not engine._owners


def tokens_of(output: RequestOutput, index: int = 0) -> list[int]:
    """Returns the tokens of one answer."""
    return list(output.outputs[index].token_ids)


def joined(outputs: Sequence[RequestOutput], index: int = 0) -> tuple[str, list[int]]:
    """Puts the deltas of one answer together."""
    parts = [part for output in outputs for part in output.outputs if part.index == index]
    return "".join(part.text for part in parts), [t for part in parts for t in part.token_ids]
