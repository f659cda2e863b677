"""How large the KV pool becomes, on a pretended GPU: by arithmetic, beside other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nv_core import CapacityError, ConfigError
from nv_models import CausalLM, ModelConfig, open_checkpoint
from nv_runtime import LLM, EngineConfig, SamplingParams
from nv_runtime.bench.shapes import SHAPES, materialised
from nv_runtime.cuda_graphs import batch_buckets, token_buckets
from nv_runtime.kv_cache import KVCacheSpec, size_kv_cache
from nv_runtime.step_memory import StepMemory, estimate_step_memory

if TYPE_CHECKING:
    from nv_kernels import AttentionBackend

GIB = 2**30
CUDA = torch.device("cuda:0")
SPEC = KVCacheSpec(num_layers=28, num_kv_heads=8, head_dim=128, block_size=64, dtype=torch.bfloat16)
RESERVE = StepMemory(
    activation_bytes=GIB, sampling_bytes=GIB // 2, graph_bytes=GIB // 4, workspace_bytes=GIB // 4
)


def size(*, free: int, total: int, **changes: Any) -> int:  # noqa: ANN401
    options: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "step_memory": RESERVE,
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory_bytes": None,
        "num_blocks": None,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        return size_kv_cache(SPEC, device=CUDA, **{**options, **changes})


@given(
    total=st.integers(8 * GIB, 200 * GIB),
    in_use=st.floats(0, 0.5),
    share=st.floats(0.6, 1),
    max_model_len=st.integers(2, 40_000),
)
def test_the_pool_fills_the_share_and_no_more(
    total: int, in_use: float, share: float, max_model_len: int
) -> None:
    used = int(total * in_use)
    options = {"gpu_memory_utilization": share, "max_model_len": max_model_len}
    left = int(total * share) - used - RESERVE.total_bytes
    needed = -(-max_model_len // SPEC.block_size)
    try:
        count = size(free=total - used, total=total, **options)
    except CapacityError:
        assert left < needed * SPEC.block_bytes
        return
    assert count * SPEC.block_bytes <= left
    assert count >= needed
    # Nothing is left over, unless all sequences fit at full length.
    assert (count + 1) * SPEC.block_bytes > left or count == needed * 256


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(CapacityError, match=r"lower max_model_len to \d+ or less") as caught:
        size(free=5 * GIB, total=16 * GIB, max_model_len=40_960)
    for advice in ("max_num_batched_tokens", "gpu_memory_utilization=0.9", "free the device"):
        assert advice in str(caught.value)
    fits = int(str(caught.value).partition("lower max_model_len to ")[2].split()[0])
    assert size(free=5 * GIB, total=16 * GIB, max_model_len=fits) * SPEC.block_size == fits
    auto = size(free=5 * GIB, total=16 * GIB, max_model_len=40_960, may_shorten=True)
    assert auto * SPEC.block_size == fits
    with pytest.raises(CapacityError) as caught:
        size(free=2 * GIB, total=16 * GIB, may_shorten=True)
    # Not even a short sequence fits: no length would help.
    assert "lower max_model_len" not in str(caught.value)
    assert "raise gpu_memory_utilization" in str(caught.value)
    with pytest.raises(CapacityError, match=r"\(kv_cache_memory_bytes=1\); raise kv_cache_memory"):
        size(free=5 * GIB, total=16 * GIB, kv_cache_memory_bytes=1)


def test_the_longest_sequence_that_fits() -> None:
    with materialised("qwen3-tiny") as (path, options):
        # 2 layers, 2 heads of 32, keys and values, fp32: 1,024 bytes per token
        options = {**options, "device": "cpu", "kv_cache_memory_bytes": 1024 * 3000}
        with pytest.raises(CapacityError, match="lower max_model_len to 2992 or less"):
            LLM(path, **options)
        with LLM(path, max_model_len="auto", **options) as llm:
            assert llm.max_model_len == 2992  # 187 blocks of 16
            (output,) = llm.generate(
                [1] * 2980, SamplingParams(ignore_eos=True, max_tokens=100), use_tqdm=False
            )
            assert len(output.outputs[0].token_ids) == 12
        with LLM(path, max_model_len="auto", **{**options, "kv_cache_memory_bytes": GIB}) as llm:
            assert llm.max_model_len == 40_960
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineConfig(model="m", max_model_len="longest")


def config_of(shape: str) -> ModelConfig:
    with materialised(shape) as (path, _):
        return open_checkpoint(path).config


def estimate(shape: str = "qwen3-0.6b", **changes: Any) -> StepMemory:  # noqa: ANN401
    options: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "device": CUDA,
        "max_num_tokens": 8192,
        "max_num_seqs": 256,
        "use_graphs": True,
    }
    return estimate_step_memory(config_of(shape), **{**options, **changes})


def test_a_steps_memory_grows_with_what_it_is_for() -> None:
    usual = estimate()
    # 8,192 rows of residual, input, gate-and-up product and activation, two bytes each
    assert usual.activation_bytes == 8192 * 2 * (3 * 1024 + 3 * 3072 + 1024)
    assert usual.sampling_bytes == 256 * 151_936 * (2 + 24)
    assert GIB // 2 < usual.graph_bytes < 0.6 * GIB
    assert usual.total_bytes < 3 * GIB
    assert estimate(max_num_tokens=16384).activation_bytes == 2 * usual.activation_bytes
    assert estimate(use_graphs=False).graph_bytes == 0
    assert estimate(device=torch.device("cpu")).workspace_bytes == 0


def test_graphs_count_only_up_to_the_longest_step_that_has_one() -> None:
    def graph_bytes(**changes: Any) -> int:  # noqa: ANN401
        return estimate("qwen3-8b", **changes).graph_bytes

    # Query, output, two of key and value, and gate, up and down; two operations per weight.
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    longest = int(0.9e-3 * 600e12 / (2 * layer))
    assert longest == 1399
    token_bytes = 2 * (3 * 4096 + 3 * 12288)
    # 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280 and 1399; and two for each of
    # 35 sizes of decodes
    own = (14 + 70) * 2 * 2**20
    decodes = 256 * (token_bytes + 151_936 * 2) * 3 // 2
    assert graph_bytes() == longest * token_bytes + decodes + own
    # A longer budget changes nothing, a shorter one does, and so does a share of each layer.
    assert graph_bytes(max_num_tokens=32768) == graph_bytes()
    assert graph_bytes(max_num_tokens=1024) < graph_bytes()
    two = (2 * longest + 1) * token_bytes + decodes
    assert graph_bytes(tensor_parallel_size=2) - two == pytest.approx(own, rel=0.1)


@pytest.mark.parametrize("name", SHAPES)
def test_the_weights_of_a_layer_are_known_before_the_model_is_loaded(name: str) -> None:
    config = config_of(name)
    model = CausalLM(
        config,
        device="meta",
        dtype=torch.bfloat16,
        attention_backend=cast("AttentionBackend", None),
    )
    assert sum(p.numel() for p in model.layers[0].parameters()) == config.num_layer_weights


@given(st.integers(1, 3000))
def test_every_batch_has_a_bucket(limit: int) -> None:
    for buckets in (batch_buckets(limit), token_buckets(limit)):
        assert buckets == sorted(set(buckets))
        assert buckets[0] >= 1
        assert buckets[-1] == limit
