"""The kernels in the hands of Triton's compiler, where no GPU can run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_oracles import HAS_CUDA, HAS_TRITON

SCRIPT = Path(__file__).parents[1] / "support" / "compile_kernels.py"
MAX_SHARED_BYTES = 227 << 10  # of a Hopper GPU


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.skipif(HAS_CUDA, reason="the other tests compile the kernels where CUDA is")
def test_every_launch_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shared_bytes = {
        name: int(size) for name, size in (line.split() for line in done.stdout.splitlines())
    }
    assert set(shared_bytes) == {
        "_weigh_parts_kernel",
        "_draw_kernel",
        "_draw_filtered_kernel",
        "_join_parts_kernel",
        "_split_kernel",
        "_combine_kernel",
        "_direct_kernel",
        "_prefill_kernel",
        "_rms_norm_kernel",
        "_add_rms_norm_kernel",
        "_all_reduce_add_rms_norm_kernel",
        "_rotate_and_store_kernel",
        "_silu_and_mul_kernel",
        "_row_kernel",
        "_rows_kernel",
    }
    assert max(shared_bytes.values()) <= MAX_SHARED_BYTES
