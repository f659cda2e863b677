"""The whole path on a CUDA device: exact tokens in float32, close logits in bfloat16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_checkpoints
from nv_core import SamplingParams, Scheduler, SchedulerConfig
from nv_kernels import available_attention_backends, select_attention_backend
from nv_models import load_model, open_checkpoint
from nv_runtime import LLM
from nv_runtime.bench.shapes import materialised
from nv_runtime.cuda_graphs import batch_buckets
from nv_runtime.input_builder import layout_of, pack_step
from nv_runtime.kv_cache import KVCacheSpec, allocate_kv_cache
from nv_runtime.mixed_step import MixedStep
from nv_runtime.step_memory import estimate_step_memory
from tiny_checkpoints import TinySpec

pytestmark = pytest.mark.gpu

# head_dim 64 is the smallest that every backend takes.
SPECS = {
    "qwen3": TinySpec(family="qwen3", head_dim=64, hidden_size=128),
    "qwen3-gqa8": TinySpec(family="qwen3", head_dim=64, num_heads=8, num_kv_heads=1),
    "qwen2": TinySpec(family="qwen2", head_dim=None, hidden_size=256, num_heads=4),
    "llama": TinySpec(family="llama", head_dim=128, tie_word_embeddings=True),
    "mistral": TinySpec(family="mistral", head_dim=64),
}
BLOCK_SIZES = {"flash_attn": 256, "flash_attn_3": 128, "triton": 16, "torch": 16}


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def paged_logits(path: Path, backend_name: str, token_ids: list[int]) -> Tensor:
    """Logits of every chunk end of a run through the paged cache: two chunks, then decodes."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    block_size = BLOCK_SIZES[backend_name]
    shape: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "block_size": block_size,
    }
    reason = available_attention_backends(**shape)[backend_name]
    if reason is not None:
        pytest.skip(f"{backend_name}: {reason}")
    backend = select_attention_backend(backend_name, **shape)
    model = load_model(checkpoint, device=device, dtype=dtype, attention_backend=backend)
    spec = KVCacheSpec(config.num_layers, model.num_kv_heads, config.head_dim, block_size, dtype)
    caches = allocate_kv_cache(spec, 8, device=device)
    for cache in caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
    prompt, rest = token_ids[:40], token_ids[40:]
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=8, block_size=block_size, max_num_batched_tokens=25)
    )
    scheduler.add(prompt, SamplingParams(max_tokens=len(rest) + 1, ignore_eos=True))
    step = MixedStep(model, caches)
    logits = []
    forced = iter([*rest, 0])
    while plan := scheduler.schedule():
        layout = layout_of(plan)
        packed = pack_step(plan, layout, block_size=block_size)
        # The last row is sampled even where the plan does not ask for it, to see its logits.
        values = packed.values.clone()
        torch.split(values, list(layout.sizes))[5][0] = layout.num_tokens - 1
        hidden, rows = step(
            values.to(device),
            layout,
            num_samples=1,
            max_query_len=packed.max_query_len,
            max_context_len=packed.max_context_len,
        )
        logits.append(model.compute_logits(hidden[rows]))
        scheduler.commit(plan, {e.seq_id: next(forced) for e in plan.sequences if e.samples})
    return torch.cat(logits).float().cpu()


@pytest.mark.parametrize("backend_name", list(BLOCK_SIZES))
@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_logits_are_close_to_float32(name: str, backend_name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    rounded = TinySpec(**{**vars(spec), "dtype": torch.bfloat16})
    path = tiny_checkpoints.write_checkpoint(tmp_path, rounded)
    token_ids = torch.randint(0, spec.vocab_size, (60,), generator=torch.manual_seed(1)).tolist()
    ours = paged_logits(path, backend_name, token_ids)
    reference = tiny_checkpoints.load_reference(path)
    expected = tiny_checkpoints.reference_logits(reference, token_ids)
    expected = expected[[24, *range(39, 60)]]
    # bfloat16 keeps 8 bits: 2**-8 relative at each of about ten roundings per layer that follow
    # one another. Measured 0.3 to 1 % of the logits' spread; a wrong mask or rotation is 50 %.
    error = (ours - expected).std() / expected.std()
    assert error < 0.03
    assert torch.isfinite(ours).all()


@pytest.mark.parametrize("name", SPECS)
def test_float32_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = tiny_checkpoints.write_checkpoint(tmp_path, SPECS[name])
    reference = tiny_checkpoints.load_reference(path)
    prompts = [
        torch.randint(0, SPECS[name].vocab_size, (n,), generator=torch.manual_seed(n)).tolist()
        for n in (1, 5, 16, 33, 70)
    ]
    expected = [tiny_checkpoints.reference_greedy(reference, p, 16) for p in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for options in (
        {},
        {"enforce_eager": True, "async_scheduling": False},
        {"enforce_eager": True},
        {"async_scheduling": False, "max_num_seqs": 3},
        {"graph_capture": "start", "max_num_seqs": 5},
        {"max_num_batched_tokens": 9},
        {"num_gpu_blocks_override": 12, "block_size": 16},
    ):
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "float32",
            "max_model_len": 128,
            "num_gpu_blocks_override": 100,
            "skip_tokenizer_init": True,
            "show_progress": False,
            **options,
        }
        with LLM(str(path), **settings) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [list(o.outputs[0].token_ids) for o in outputs] == expected


def test_graphs_captured_in_ascending_order_take_the_memory_that_is_kept_for_them() -> None:
    with materialised("qwen3-0.6b") as (path, needed):
        kept = estimate_step_memory(
            open_checkpoint(path).config,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            max_num_tokens=8192,
            max_num_seqs=256,
            use_graphs=True,
        )
        settings: dict[str, Any] = {"max_model_len": 2048, "show_progress": False, **needed}
        with LLM(path, gpu_memory_utilization=0.5, **settings) as llm:

            def run() -> list[list[int]]:
                params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
                prompts = [[i, 7, 9] for i in range(50)]
                return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]

            # Of this process: others may use the device as well.
            before = torch.cuda.memory_reserved()
            run()
            # Replays the graphs of both kinds that the first run has captured or asked for.
            expected = run()
            assert llm.capture_graphs(use_tqdm=False) == len(batch_buckets(256)) - 1
            # A pool that grew from graph to graph would take 1.2 GiB for the decode steps alone.
            taken = torch.cuda.memory_reserved() - before
            assert taken < kept.graph_bytes + kept.workspace_bytes
            assert run() == expected
            assert llm.capture_graphs(use_tqdm=False) == 0


def test_graphs_and_overlap_change_no_token(tmp_path: Path) -> None:
    """A crowd that grows, shrinks, stops early and is sampled in every way, four times over."""
    path = tiny_checkpoints.write_checkpoint(tmp_path, SPECS["qwen3"])
    vocab_size = SPECS["qwen3"].vocab_size
    generator = torch.manual_seed(7)
    prompts = [
        torch.randint(0, vocab_size, (1 + 7 * i % 60,), generator=generator).tolist()
        for i in range(40)
    ]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.6, "repetition_penalty": 1.3},
        {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": list(range(0, vocab_size, 5))},
        {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 1.0, "frequency_penalty": -0.4},
        {"temperature": 1.1, "logit_bias": {3: 3.0, 7: -9.0}, "logprobs": 4},
        {"temperature": 1.4, "allowed_token_ids": list(range(1, vocab_size, 3))},
        {"temperature": 0.6, "bad_words": [[5], [1, 2], [9, 8, 7]], "prompt_logprobs": 2},
    ]
    params = [
        SamplingParams(seed=i, max_tokens=3 + 5 * i % 37, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(prompts))
    ]
    results, logprobs = [], []
    for options in (
        {"enforce_eager": True, "async_scheduling": False},
        {"enforce_eager": True, "async_scheduling": True},
        {"enforce_eager": False, "async_scheduling": False},
        {"enforce_eager": False, "async_scheduling": True},
    ):
        with LLM(
            str(path),
            device="cuda",
            dtype="float32",
            max_model_len=128,
            max_num_seqs=21,
            num_gpu_blocks_override=60,
            block_size=16,
            skip_tokenizer_init=True,
            show_progress=False,
            **options,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([list(o.outputs[0].token_ids) for o in outputs])
            logprobs.append([o.outputs[0].logprobs for o in outputs])
            scheduler = llm._open_parts().engine.scheduler
            scheduler.check_invariants()
            assert scheduler.num_free_blocks == 60
    assert results[1:] == results[:1] * 3
    for other in logprobs[1:]:
        for ours, theirs in zip(logprobs[0], other, strict=True):
            assert (ours is None) == (theirs is None)
            for entry, twin in zip(ours or [], theirs or [], strict=True):
                assert list(entry) == list(twin)
                values = [item.logprob for item in entry.values()]
                assert [item.logprob for item in twin.values()] == pytest.approx(values, abs=1e-4)


def test_the_pool_is_sized_from_memory(tmp_path: Path) -> None:
    path = tiny_checkpoints.write_checkpoint(tmp_path, SPECS["qwen3"])
    _, total = torch.cuda.mem_get_info()
    with LLM(
        str(path),
        device="cuda",
        skip_tokenizer_init=True,
        show_progress=False,
        gpu_memory_utilization=0.5,
        max_num_seqs=4,
    ) as llm:
        free, _ = torch.cuda.mem_get_info()
        assert total - free < 0.5 * total
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)


def test_nv_generate_runs(tmp_path: Path) -> None:
    path = tiny_checkpoints.write_checkpoint(tmp_path, tokenizer=True)
    command = [
        sys.executable,
        "-c",
        "from nv_runtime.cli import main; main()",
        "generate",
        str(path),
        "the fox",
    ]
    command += ["--max-tokens", "8", "--device", "cuda", "--max-model-len", "128"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "tok" in result.stderr
