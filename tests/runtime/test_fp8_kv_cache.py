"""Engines with an fp8 KV cache answer as transformers does with keys and values rounded alike.

A sum of another order may push a key over the border between two fp8 numbers, which moves logits by
a hundredth. So prompts are taken whose chosen tokens lead by much more than that. KV memory is
filled with NaN before use.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import nv_runtime.builder
import tiny_checkpoints
from nv_core import ConfigError, SamplingParams
from nv_kernels import LayerKVCache
from nv_models import SINGLE_RANK, open_checkpoint
from nv_runtime import LLM
from nv_runtime.builder import build_rank
from nv_runtime.cli import plan
from nv_runtime.engine_config import EngineConfig
from nv_runtime.kv_cache import KVCacheSpec, allocate_kv_cache
from nv_runtime.vllm_options import engine_config_of
from quantised_reference import quantised_greedy, store_scales
from tiny_checkpoints import TinySpec
from tiny_engines import options, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nv_runtime import RequestOutput

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
NUM_OUTPUT_TOKENS = 6
MIN_MARGIN = 0.2
SPEC = TinySpec(num_heads=8, num_kv_heads=2)
SCALES = ((0.0125, 0.006), (0.011, 0.0075))


class Case(NamedTuple):
    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("fp8"), SPEC)
    store_scales(path, SCALES)
    model = tiny_checkpoints.make_model(SPEC).double()
    rng = random.Random(1)
    lengths = [1, 2, 3, 5, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64] * 3
    candidates = [[rng.randrange(SPEC.vocab_size) for _ in range(length)] for length in lengths]
    candidates += [candidates[-1][:40] + candidates[20], candidates[-1][:32]]
    prompts, expected = [], []
    for prompt in candidates:
        tokens, margin = quantised_greedy(model, prompt, NUM_OUTPUT_TOKENS, SCALES)
        if margin >= MIN_MARGIN:
            prompts.append(prompt)
            expected.append(tokens)
    assert len(prompts) >= 12
    return Case(path, prompts, expected)


@pytest.fixture
def make_llm(case: Case, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def poisoned(*args: Any, **kwargs: Any) -> tuple[LayerKVCache, ...]:  # noqa: ANN401
        caches = allocate_kv_cache(*args, **kwargs)
        for cache in caches:
            assert cache.key.dtype == FP8
            cache.key.fill_(torch.nan)
            cache.value.fill_(torch.nan)
        return caches

    monkeypatch.setattr(nv_runtime.builder, "allocate_kv_cache", poisoned)

    def make(**changes: Any) -> LLM:  # noqa: ANN401 - LLM's own options
        defaults = options(
            kv_cache_dtype="fp8", num_gpu_blocks_override=1000, skip_tokenizer_init=True
        )
        return LLM(str(case.path), **{**defaults, **changes})

    return make


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 1, "async_scheduling": True},
        {"block_size": 16, "max_num_seqs": 3},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 5, "async_scheduling": True},
        {"max_num_batched_tokens": 37, "scheduling_policy": "prefill_first"},
        {"enable_prefix_caching": False},
    ],
)
def test_batches_and_chunks(
    case: Case, make_llm: Callable[..., LLM], changes: dict[str, Any]
) -> None:
    outputs = generate(make_llm(**changes), case.prompts)
    assert [tokens_of(output) for output in outputs] == case.expected


def test_one_at_a_time_and_again_from_the_prefix_cache(
    case: Case, make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(kv_cache_dtype="fp8_e4m3")
    alone = [generate(llm, [prompt])[0] for prompt in case.prompts]
    assert [tokens_of(output) for output in alone] == case.expected
    again = generate(llm, case.prompts)
    assert [tokens_of(output) for output in again] == case.expected
    for prompt, output in zip(case.prompts, again, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 4 * 4


@pytest.mark.parametrize("ahead", [False, True])
def test_preemption(case: Case, make_llm: Callable[..., LLM], *, ahead: bool) -> None:
    llm = make_llm(num_gpu_blocks_override=20, async_scheduling=ahead)
    outputs = generate(llm, case.prompts)
    assert [tokens_of(output) for output in outputs] == case.expected
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0


def test_the_scales_and_the_cache_matter(
    case: Case, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests above could pass without either."""
    model = tiny_checkpoints.make_model(SPEC).double()
    for scale in (1.0, 1e-3):
        others = [
            quantised_greedy(model, prompt, NUM_OUTPUT_TOKENS, ((scale, scale),) * 2)[0]
            for prompt in case.prompts
        ]
        assert others != case.expected
    monkeypatch.undo()
    plain = make_llm(kv_cache_dtype="auto")
    reference = tiny_checkpoints.make_model(SPEC)
    # The scales in the checkpoint are in nobody's way.
    for prompt, output in zip(case.prompts, generate(plain, case.prompts), strict=True):
        expected = tiny_checkpoints.reference_greedy(reference, prompt, NUM_OUTPUT_TOKENS)
        assert tokens_of(output) == expected


def test_ranks_share_an_fp8_cache(case: Case) -> None:
    llm_options = options(
        kv_cache_dtype="fp8",
        num_gpu_blocks_override=300,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
    )
    with LLM(str(case.path), **llm_options) as llm:
        outputs = generate(llm, case.prompts[:6])
    assert [tokens_of(output) for output in outputs] == case.expected[:6]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"graph_capture": "start", "max_num_seqs": 5},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 9},
        {"num_gpu_blocks_override": 20},
        {"attention_backend": "torch"},
    ],
)
def test_on_a_gpu(case: Case, make_llm: Callable[..., LLM], changes: dict[str, Any]) -> None:
    with make_llm(device="cuda", **changes) as llm:
        for _ in range(2):  # the second time from the prefix cache, and with graphs
            outputs = generate(llm, case.prompts)
            assert [tokens_of(output) for output in outputs] == case.expected


def test_the_same_memory_holds_twice_as_much(case: Case) -> None:
    checkpoint = open_checkpoint(case.path)
    blocks = {}
    for name in ("auto", "fp8"):
        config = EngineConfig(
            model=str(case.path),
            device="cpu",
            dtype="bfloat16",
            kv_cache_dtype=name,
            kv_cache_memory_bytes=1 << 20,
            max_model_len=64,
            show_progress=False,
        )
        part = build_rank(config, checkpoint, SINGLE_RANK, None, device=CPU)
        blocks[name] = (part.num_blocks, part.block_size, part.kv_cache_dtype)
        facts = plan.gather_facts(checkpoint, torch.bfloat16, part.kv_cache_dtype)
        assert facts.kv_bytes_per_token * part.block_size * part.num_blocks <= 1 << 20
    assert blocks["auto"] == (170, 16, torch.bfloat16)
    assert blocks["fp8"] == (341, 16, FP8)


def test_a_pool_knows_its_scales() -> None:
    spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype=FP8)
    assert spec.token_bytes == 2 * 2 * 8
    caches = allocate_kv_cache(spec, 3, device=CPU, scales=SCALES)
    assert [(cache.k_scale, cache.v_scale) for cache in caches] == list(SCALES)
    assert all((c.k_scale, c.v_scale) == (1, 1) for c in allocate_kv_cache(spec, 3, device=CPU))


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_names_of_fp8(name: str, dtype: torch.dtype) -> None:
    assert engine_config_of("m", {"kv_cache_dtype": name}).resolve_kv_cache_dtype(dtype) == FP8


def test_the_activations_own_dtype_is_auto() -> None:
    for name in ("auto", "bfloat16", "bf16"):
        config = EngineConfig(model="m", kv_cache_dtype=name)
        assert config.resolve_kv_cache_dtype(torch.bfloat16) == torch.bfloat16
    with pytest.raises(ConfigError, match="kv_cache_dtype='float16' is not the dtype of the activ"):
        EngineConfig(model="m", kv_cache_dtype="float16").resolve_kv_cache_dtype(torch.bfloat16)


@pytest.mark.parametrize("name", ["fp8_e5m2", "int8", "", None, torch.float8_e4m3fn])
def test_other_caches_are_refused_by_name(name: object) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, fp8, fp8_e4m3, .*"):
        EngineConfig(model="m", kv_cache_dtype=name)  # type: ignore[arg-type]
