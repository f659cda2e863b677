"""Random weights: repeatable, finite, and the same whatever the number of ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import pytest
import torch

from nv_models import TensorParallel
from paged_runner import PagedRunner, load_paged_model
from tiny_checkpoints import FAMILIES, Family, TinySpec, make_config

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [(5 * i) % 97 for i in range(64)]


def write_config(path: Path, spec: TinySpec) -> Path:
    """Writes config.json and nothing else: random weights need no more."""
    config = make_config(spec)
    raw = {**config.to_dict(), "architectures": [f"{type(config).__name__[:-6]}ForCausalLM"]}
    raw["dtype"] = "float32"
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_finite_and_differ(family: Family, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = TinySpec(family=family, num_layers=12, hidden_size=128)
    path = write_config(tmp_path, spec)
    model = load_paged_model(path, load_format="dummy", dtype=dtype)
    logits = PagedRunner(model).prompt_logits(PROMPT)
    assert logits.isfinite().all()
    assert 0.3 < float(logits.std()) < 3.0
    assert len(set(logits.argmax(-1).tolist())) >= 5


def test_projections_keep_the_size_of_what_they_are_given(tmp_path: Path) -> None:
    model = load_paged_model(write_config(tmp_path, TinySpec()), load_format="dummy")
    matrices = [target for target in model.targets() if len(target.shape) == 2]
    assert len(matrices) > 10
    for target in matrices:
        deviation = float(target.filled_region.std()) * target.shape[1] ** 0.5
        assert deviation == pytest.approx(1.0, rel=0.05), target.name


def test_seed_decides(tmp_path: Path) -> None:
    path = write_config(tmp_path, TinySpec())
    first, same, other = (
        dict(load_paged_model(path, load_format="dummy", seed=seed).named_parameters())
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    # Tensors of equal shape get numbers of their own.
    gate, up = first["layers.0.mlp.gate_up_proj.weight"].chunk(2)
    assert not torch.equal(gate, up)


@pytest.mark.parametrize("vocab_size", [131, 9001])  # below and above the rows drawn at once
def test_ranks_hold_shares_of_the_same_weights(vocab_size: int, tmp_path: Path) -> None:
    path = write_config(tmp_path, TinySpec(vocab_size=vocab_size, num_layers=1))
    whole = {t.name: t for t in load_paged_model(path, load_format="dummy").targets()}
    group = cast("torch.distributed.ProcessGroup", object())  # loading needs no communication
    for rank in range(2):
        model = load_paged_model(
            path, load_format="dummy", tensor_parallel=TensorParallel(rank, 2, group)
        )
        for target in model.targets():
            part = tuple(slice(*bounds) for bounds in target.source)
            assert torch.equal(target.filled_region, whole[target.name].region[part]), target.name
            assert (target.region[target.filled_region.shape[0] :] == 0).all()


def test_progress_counts_bytes_of_weights(tmp_path: Path) -> None:
    path = write_config(tmp_path, TinySpec())
    calls: list[tuple[int, int]] = []
    model = load_paged_model(
        path, load_format="dummy", on_progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (model.num_weight_bytes, model.num_weight_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
