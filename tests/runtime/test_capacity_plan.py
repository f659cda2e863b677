"""`nv-sim plan` knows no torch, but its arithmetic is the engine's own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints
from nv_models import ModelConfig, heads_per_rank, open_checkpoint
from nv_runtime.bench.shapes import SHAPES, materialised
from nv_runtime.cli.plan import count_parameters
from nv_runtime.kv_cache import KVCacheSpec
from nv_runtime.step_memory import StepMemory, estimate_step_memory

sim = pytest.importorskip("nv_core.sim", reason="needs the extra nv-core[sim]")


def step_memory(config: ModelConfig, **changes: Any) -> StepMemory:  # noqa: ANN401
    return estimate_step_memory(
        config,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        max_num_tokens=8192,
        max_num_seqs=256,
        use_graphs=True,
        **changes,
    )


def check(path: Path) -> None:
    config = open_checkpoint(path).config
    shape = sim.ModelShape.from_config(json.loads((path / "config.json").read_text()))
    capacity = sim.plan_capacity(shape, sim.find_hardware("h200"))
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=1,
        dtype=torch.bfloat16,
    )
    assert capacity.kv_bytes_per_token == spec.token_bytes
    memory = step_memory(config)
    assert capacity.activation_bytes == memory.activation_bytes + memory.sampling_bytes
    # The engine lists its graphs, the plan counts them, and leaves norms out of a layer.
    graph_bytes = memory.graph_bytes + memory.workspace_bytes
    assert capacity.graph_bytes == pytest.approx(graph_bytes, rel=0.005)
    if config.num_kv_heads % 2 == 0:
        shared = sim.plan_capacity(shape, sim.find_hardware("h200"), tensor_parallel_size=2)
        memory = step_memory(config, tensor_parallel_size=2)
        graph_bytes = memory.graph_bytes + memory.workspace_bytes
        assert shared.graph_bytes == pytest.approx(2 * graph_bytes, rel=0.005)
    for size in (2, 4):
        if config.num_heads % size or config.intermediate_size % size:
            continue
        shared = sim.plan_capacity(shape, sim.find_hardware("h200"), tensor_parallel_size=size)
        # More ranks than key/value heads keep copies of them.
        _, heads = heads_per_rank(config, size)
        assert (
            shared.kv_bytes_per_token
            == size * dataclasses.replace(spec, num_kv_heads=heads).token_bytes
        )
    # Norms and biases are left out of a shape.
    num_small = count_parameters(config) - shape.num_parameters
    assert 0 <= num_small < (1e-3 if config.hidden_size > 500 else 0.1) * count_parameters(config)


@pytest.mark.parametrize("family", tiny_checkpoints.FAMILIES)
def test_tiny_models(family: tiny_checkpoints.Family, tmp_path: Path) -> None:
    check(tiny_checkpoints.write_checkpoint(tmp_path, tiny_checkpoints.TinySpec(family=family)))


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes(name: str) -> None:
    with materialised(name) as (path, _):
        check(Path(path))
