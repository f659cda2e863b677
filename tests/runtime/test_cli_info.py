"""`nv info` against models that are really built."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import nv_runtime.builder
from nv_kernels import select_attention_backend
from nv_kernels.attention.torch_backend import TorchAttention
from nv_kernels.attention.triton_backend import TritonAttention
from nv_models import load_model, open_checkpoint
from nv_runtime import kv_cache
from nv_runtime.cli import main, plan
from nv_runtime.engine_config import EngineConfig
from nv_runtime.step_memory import StepMemory
from tiny_checkpoints import FAMILIES, TinySpec, write_checkpoint

GIB = 1024**3

SPECS: dict[str, TinySpec] = {
    **{str(family): TinySpec(family=family) for family in FAMILIES},
    "tied": TinySpec(tie_word_embeddings=True),
    "llama with biases": TinySpec(family="llama", attention_bias=True, mlp_bias=True),
    "qwen3 with biases": TinySpec(family="qwen3", attention_bias=True),
}


@pytest.mark.parametrize("name", SPECS)
def test_parameters_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, SPECS[name])
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    device = torch.device("cpu")
    backend = select_attention_backend(
        "torch",
        device=device,
        dtype=torch.float32,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        block_size=16,
    )
    model = load_model(checkpoint, device=device, dtype=torch.float32, attention_backend=backend)
    assert plan.count_parameters(config) * 4 == model.num_weight_bytes
    facts = plan.gather_facts(checkpoint, torch.bfloat16, torch.bfloat16)
    assert facts.weight_bytes * 2 == model.num_weight_bytes
    assert facts.kv_bytes_per_token == 2 * 2 * config.num_layers * config.num_kv_heads * (
        config.head_dim
    )


def run_info(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(["info", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_tables_show_what_a_reader_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_checkpoint(tmp_path, TinySpec())
    out = run_info(capsys, str(tmp_path), "--dtype", "bfloat16")
    assert "Qwen3ForCausalLM" in out
    assert "4 heads of 24, 2 for keys/values" in out
    assert "64 hidden, 96 in the MLP" in out
    assert "131 tokens" in out
    assert "(safetensors, F32)" in out
    # 2 (keys, values) * 2 layers * 2 heads * 24 elements * 2 bytes
    assert "384 B" in out
    assert "sequences of 512 tokens" in out


def test_json_holds_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, TinySpec())
    content: dict[str, Any] = json.loads(
        run_info(capsys, str(tmp_path), "--json", "--memory", "3GiB", "--dtype", "float16")
    )
    model, fit = content["model"], content["fit"]
    assert model["dtype"] == "float16"
    assert model["weight_bytes"] == 2 * model["num_parameters"]
    assert model["stored_bytes"] == 4 * model["num_parameters"]
    assert model["kv_bytes_per_token"] == 384
    assert fit["memory_bytes"] == int(3 * GIB * 0.9)
    left = int(3 * GIB * 0.9) - model["weight_bytes"] - fit["activation_bytes"]
    # All sequences at full length could use no more.
    left = min(left, 256 * 512 * 384)
    assert fit["kv_cache_bytes"] == left
    assert fit["num_kv_tokens"] == left // 384


def test_an_fp8_cache_takes_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, TinySpec())
    flags = ["--json", "--memory", "3GiB", "--dtype", "float16", "--kv-cache-dtype"]
    plain, fp8 = (
        json.loads(run_info(capsys, str(tmp_path), *flags, name)) for name in ("auto", "fp8")
    )
    assert plain["model"]["kv_cache_dtype"] == "float16"
    assert fp8["model"]["kv_cache_dtype"] == "float8_e4m3fn"
    assert fp8["model"]["kv_bytes_per_token"] == 192
    assert fp8["model"]["weight_bytes"] == plain["model"]["weight_bytes"]
    # All sequences at full length fit here, in half of the bytes.
    assert fp8["fit"]["num_kv_tokens"] == plain["fit"]["num_kv_tokens"] == 256 * 512
    assert 2 * fp8["fit"]["kv_cache_bytes"] == plain["fit"]["kv_cache_bytes"]


def test_a_gpu_can_be_planned_for_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, TinySpec(dtype=torch.bfloat16))
    planned = json.loads(run_info(capsys, str(tmp_path), "--json", "--memory", "80GB"))
    assert planned["model"]["dtype"] == "bfloat16"
    here = json.loads(run_info(capsys, str(tmp_path), "--json", "--device", "cpu"))
    assert here["model"]["dtype"] == "float32"


def test_memory_of_a_machine_without_gpu_is_planned_as_the_engine_would_use_it_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, TinySpec(dtype=torch.bfloat16))
    flags = ["--json", "--device", "cpu"]
    planned = json.loads(run_info(capsys, str(tmp_path), *flags, "--memory", "24GiB"))
    assert planned["model"]["dtype"] == "float32"
    assert planned["fit"]["memory_bytes"] == 24 * GIB
    monkeypatch.setattr(plan, "available_cpu_bytes", lambda: 24 * GIB)
    here = json.loads(run_info(capsys, str(tmp_path), *flags))
    assert here["model"] == planned["model"]
    assert here["fit"] == {**planned["fit"], "memory": "free memory of this machine"}


def test_a_config_without_weights_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, TinySpec())
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    assert "no weight files here" in run_info(capsys, str(tmp_path))
    content = json.loads(run_info(capsys, str(tmp_path), "--json"))
    assert content["model"]["stored_bytes"] is None
    assert content["model"]["num_parameters"] > 0


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, TinySpec())
    out = run_info(capsys, str(tmp_path), "--memory", "100KiB")
    assert "Does not fit: " in out
    assert "sequences of" not in out


# Many sequences fill the default share of the memory; few never need as much.
@pytest.mark.parametrize("num_seqs", [2**16, 3])
def test_memory_is_planned_as_the_engine_divides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_seqs: int
) -> None:
    write_checkpoint(tmp_path, TinySpec())
    config = open_checkpoint(tmp_path).config
    real = os.sysconf
    pages = 40 * GIB // real("SC_PAGE_SIZE")
    monkeypatch.setattr(
        os, "sysconf", lambda name: pages if name == "SC_AVPHYS_PAGES" else real(name)
    )
    fit = plan.fit_memory(
        config,
        EngineConfig(model="m", max_num_seqs=num_seqs),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    spec = kv_cache.KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=1,
        dtype=torch.float32,
    )
    num_blocks = kv_cache.size_kv_cache(
        spec,
        device=torch.device("cpu"),
        max_model_len=config.max_position_embeddings,
        max_num_seqs=num_seqs,
        step_memory=StepMemory(0, 0, 0, 0),
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=None,
        num_blocks=None,
    )
    assert fit.num_kv_tokens == num_blocks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, TinySpec())
    content = json.loads(run_info(capsys, str(tmp_path), "--json", "--device", "cuda"))
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < content["fit"]["memory_bytes"] < total
    assert torch.cuda.get_device_name(0) in content["fit"]["memory"]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_graphs_take_memory_where_there_are_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_checkpoint(tmp_path, TinySpec())
    config = open_checkpoint(tmp_path).config
    backend = TorchAttention() if name == "torch" else TritonAttention()
    monkeypatch.setattr(nv_runtime.builder, "select_attention_backend", lambda *_, **__: backend)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30 * GIB, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")

    def fit(**options: Any) -> plan.Fit:  # noqa: ANN401 - EngineConfig's own
        engine = EngineConfig(model="m", block_size=16, **options)
        device = torch.device("cuda")
        return plan.fit_memory(config, engine, device=device, dtype=torch.bfloat16)

    has_graphs = fit().activation_bytes > fit(enforce_eager=True).activation_bytes
    assert has_graphs == (name == "triton")


def test_a_wrong_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path / "absent")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("nv: model: there is no ")
    assert error.count("\n") == 1
    assert main(["info", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
