"""A short version of benchmarks/soak.py, which runs for ten thousand requests on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from nv_runtime import LLM
from nv_runtime.bench.shapes import materialised

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_random_requests_with_aborts_leave_nothing_behind(*, async_scheduling: bool) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "soak", script)
        spec.loader.exec_module(script)
        with (
            materialised("qwen3-tiny") as (model, options),
            LLM(
                model,
                device="cpu",
                max_model_len=160,
                max_num_seqs=6,
                block_size=8,
                num_gpu_blocks_override=30,
                async_scheduling=async_scheduling,
                show_progress=False,
                **options,
            ) as llm,
        ):
            report = script.soak(llm, num_requests=120, max_prompt_len=80, seed=1)
    assert report.num_requests == 120
    assert report.num_aborted > 5
    assert report.num_preemptions > 0
    assert report.num_tokens > 500
