"""KernelWatch against Triton's own compiler and cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_oracles import HAS_CUDA, HAS_TRITON
from nv_kernels import KernelWatch, silu_and_mul

SUPPORT = Path(__file__).parents[1] / "support"

WATCH = """
import json, time
import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from compile_kernels import Hopper
from nv_kernels import KernelWatch
from nv_kernels.triton.silu_and_mul import silu_and_mul

driver.set_active(Hopper())
run = JITFunction.run
JITFunction.run = lambda kernel, *args, **options: run(kernel, *args, **{**options, "warmup": True})

def use(width):
    silu_and_mul(torch.zeros(2, width, dtype=torch.bfloat16))

before, heard = knobs.compilation.listener, []
knobs.compilation.listener = lambda **report: heard.append(report["cache_hit"])
ours = knobs.compilation.listener
outer, inner = KernelWatch(torch.device("cuda")), KernelWatch(torch.device("cuda"))
start = time.monotonic()
use(512)
elapsed = time.monotonic() - start
use(512)
outer.close()
use(4096)
inner.close()
inner.close()
use(99)
print(json.dumps({
    "outer": [outer.num_compiled, outer.num_from_cache, outer.seconds],
    "inner": [inner.num_compiled, inner.num_from_cache, inner.seconds],
    "elapsed": elapsed,
    "heard": heard,
    "hooks": len(knobs.runtime.kernel_load_start_hook.calls)
    + len(knobs.runtime.kernel_load_end_hook.calls),
}))
"""


def watch(cache: Path) -> dict[str, Any]:
    paths = [str(SUPPORT), *sys.path]
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", WATCH], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or HAS_CUDA, reason="needs Triton, and no CUDA device")
def test_what_is_compiled_once_comes_from_the_cache_then(tmp_path: Path) -> None:
    cold, warm = watch(tmp_path), watch(tmp_path)
    for name, num_kernels in (("outer", 1), ("inner", 2)):
        assert cold[name][:2] == [num_kernels, 0]
        assert warm[name][:2] == [0, num_kernels]
        assert min(cold[name][2], warm[name][2]) > 0
    # Compiling is most of what the first use of a kernel takes.
    assert 0.5 * cold["elapsed"] < cold["outer"][2] <= cold["elapsed"]
    # Whoever listened before hears everything, also after the watches are closed.
    assert cold["heard"] == [False] * 3
    assert warm["heard"] == [True] * 3
    assert cold["hooks"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_kernels_that_are_loaded_on_a_device_are_counted() -> None:
    kernels = KernelWatch(torch.device("cuda"))
    # No other test has this width.
    silu_and_mul(torch.zeros(3, 2 * 7 * 11 * 13, device="cuda"))
    kernels.close()
    assert kernels.num_compiled + kernels.num_from_cache >= 1
    assert kernels.seconds > 0


def test_where_triton_cannot_run_there_is_nothing_to_count() -> None:
    kernels = KernelWatch(torch.device("cpu"))
    kernels.close()
    assert (kernels.num_compiled, kernels.num_from_cache, kernels.seconds) == (0, 0, 0.0)
