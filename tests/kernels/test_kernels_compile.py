"""The kernels in the hands of Triton's compiler, where no GPU can run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kernel_oracles import HAS_CUDA, HAS_TRITON

SCRIPT = Path(__file__).parents[1] / "support" / "compile_kernels.py"
MAX_SHARED_BYTES = 227 << 10  # of a Hopper GPU


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    pytest.mark.skipif(HAS_CUDA, reason="the other tests compile the kernels where CUDA is"),
]


class Launch(NamedTuple):
    """What one launch of the script runs."""

    name: str
    shared_bytes: int
    version: str
    early_reads: int
    """Reads of global memory before it waits for the kernel before it; -1: it does not wait."""
    early_writes: int


def launches(tmp_path: Path, *options: str) -> list[Launch]:
    """Runs the script."""
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
    return [
        Launch(name, int(shared_bytes), version, int(reads), int(writes))
        for name, shared_bytes, version, reads, writes in words
    ]


def test_batches_of_any_size_run_the_same_kernels(tmp_path: Path) -> None:
    """Otherwise a server stops for a second whenever a new size comes along."""
    compiled: dict[str, set[str]] = {}
    for launch in launches(tmp_path, "--batches"):
        compiled.setdefault(launch.name, set()).add(launch.version)
    for name in (
        "_prefill_kernel",
        "_hopper_prefill_kernel",
        "_list_items_kernel",
        "_add_rms_norm_kernel",
        "_rows_kernel",
    ):
        assert len(compiled[name]) == 1, name


def test_every_launch_compiles_for_hopper(tmp_path: Path) -> None:
    launched = launches(tmp_path)
    assert {launch.name for launch in launched} == {
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
    assert max(launch.shared_bytes for launch in launched) <= MAX_SHARED_BYTES
    # Nothing is written before the wait, and nothing is read but weights, where a kernel has any,
    # and the lengths and tables of a batch, where the caller says that they are settled.
    assert all(launch.early_writes <= 0 for launch in launched)
    early_reads: dict[str, set[int]] = {}
    for launch in launched:
        early_reads.setdefault(launch.name, set()).add(launch.early_reads)
    for name in ("_direct_kernel", "_split_kernel", "_combine_kernel"):
        assert min(early_reads.pop(name)) == 0, name
    weights = ("_row_kernel", "_rms_norm_kernel", "_add_rms_norm_kernel")
    assert all(max(early_reads.pop(name)) > 0 for name in weights)
    assert min(early_reads.pop("_rotate_and_store_kernel")) == 2  # halves of the norm's weight
    assert all(reads <= {0, -1} for reads in early_reads.values())
