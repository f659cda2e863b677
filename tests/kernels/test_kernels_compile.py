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


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    pytest.mark.skipif(HAS_CUDA, reason="the other tests compile the kernels where CUDA is"),
]


def launches(tmp_path: Path, *options: str) -> list[tuple[str, int, str]]:
    """Name, bytes of shared memory and hash of what each launch of the script runs."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    return [(name, int(size), compiled) for name, size, compiled in words]


def test_batches_of_any_size_run_the_same_kernels(tmp_path: Path) -> None:
    """Otherwise a server stops for a second whenever a new size comes along."""
    compiled: dict[str, set[str]] = {}
    for name, _, version in launches(tmp_path, "--batches"):
        compiled.setdefault(name, set()).add(version)
    for name in (
        "_prefill_kernel",
        "_hopper_prefill_kernel",
        "_list_items_kernel",
        "_add_rms_norm_kernel",
        "_rows_kernel",
    ):
        assert len(compiled[name]) == 1, name


def test_every_launch_compiles_for_hopper(tmp_path: Path) -> None:
    shared_bytes = {name: size for name, size, _ in launches(tmp_path)}
    assert set(shared_bytes) == {
        "_read_state_kernel",
        "_advance_state_kernel",
        "_weigh_parts_kernel",
        "_draw_kernel",
        "_draw_filtered_kernel",
        "_join_parts_kernel",
        "_split_kernel",
        "_combine_kernel",
        "_direct_kernel",
        "_prefill_kernel",
        "_hopper_prefill_kernel",
        "_list_items_kernel",
        "_rms_norm_kernel",
        "_add_rms_norm_kernel",
        "_all_reduce_add_rms_norm_kernel",
        "_rotate_and_store_kernel",
        "_store_kv_kernel",
        "_silu_and_mul_kernel",
        "_row_kernel",
        "_rows_kernel",
    }
    assert max(shared_bytes.values()) <= MAX_SHARED_BYTES
