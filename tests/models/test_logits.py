"""Logits of every family equal transformers', however the prompt is cut and whoever shares a step.

All in fp32 on the CPU, over a paged cache whose unused memory is NaN.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from nv_kernels import AttentionMetadata
from paged_runner import PagedRunner, PagedSequence, load_paged_model
from tiny_checkpoints import (
    TinySpec,
    load_reference,
    reference_greedy,
    reference_logits,
    write_checkpoint,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

ATOL = 1e-4  # logits are around 10; fp32 sums in another order differ by 1e-5

VARIANTS = {
    "qwen3": TinySpec(family="qwen3"),
    "qwen3-tied-biased": TinySpec(family="qwen3", tie_word_embeddings=True, attention_bias=True),
    "qwen3-8-heads-share-1": TinySpec(family="qwen3", num_heads=8, num_kv_heads=1, head_dim=8),
    "qwen3-3-layers-3-kv-heads": TinySpec(
        family="qwen3", num_layers=3, num_heads=6, num_kv_heads=3, head_dim=40, vocab_size=97
    ),
    "qwen2": TinySpec(family="qwen2", head_dim=None),
    "qwen2-tied": TinySpec(family="qwen2", tie_word_embeddings=True, num_heads=8, head_dim=None),
    "qwen2-head-dim": TinySpec(family="qwen2", head_dim=32),
    "llama": TinySpec(family="llama", head_dim=None),
    "llama-no-groups-tied": TinySpec(
        family="llama", num_kv_heads=4, head_dim=None, tie_word_embeddings=True
    ),
    "llama-all-biases": TinySpec(family="llama", attention_bias=True, mlp_bias=True),
    "mistral": TinySpec(family="mistral", head_dim=None, num_heads=8, num_kv_heads=2),
    "mistral-head-dim-tied": TinySpec(family="mistral", head_dim=40, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(path, VARIANTS[request.param])


def random_prompts(vocab_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def test_prompts_one_by_one_in_chunks_and_mixed(checkpoint: Path) -> None:
    reference = load_reference(checkpoint)
    model = load_paged_model(checkpoint)
    prompts = random_prompts(model.config.vocab_size, [37, 1, 4, 16, 11])
    expected = [reference_logits(reference, prompt) for prompt in prompts]

    for prompt, logits in zip(prompts, expected, strict=True):
        assert_close(PagedRunner(model).prompt_logits(prompt), logits)
    for chunks in ([1] * 37, [36, 1], [5, 4, 3, 25], [4] * 9 + [1]):
        assert_close(PagedRunner(model).prompt_logits(prompts[0], chunks=chunks), expected[0])

    # One sequence decodes, one is in the middle of its prompt, the others start: in one step.
    runner = PagedRunner(model)
    sequences = [PagedSequence(prompt) for prompt in prompts]
    first = runner.step([(sequences[0], 36), (sequences[3], 7)])
    second = runner.step([(sequences[i], n) for i, n in ((1, 1), (0, 1), (3, 9), (2, 4), (4, 11))])
    assert_close(torch.cat([first[0], second[1]]), expected[0])
    assert_close(torch.cat([first[1], second[2]]), expected[3])
    assert_close(second[0], expected[1])
    assert_close(second[3], expected[2])
    assert_close(second[4], expected[4])


def test_greedy_tokens(checkpoint: Path) -> None:
    reference = load_reference(checkpoint)
    model = load_paged_model(checkpoint)
    for prompt in random_prompts(model.config.vocab_size, [3, 19], seed=1):
        runner, sequence = PagedRunner(model), PagedSequence(list(prompt))
        number = len(prompt)
        for _ in range(16):
            logits = runner.step([(sequence, number)])[0]
            sequence.token_ids.append(int(logits[-1].argmax()))
            number = 1
        assert sequence.token_ids[len(prompt) :] == reference_greedy(reference, prompt, 16)


def test_shares_of_blocks_written_by_another_sequence(tmp_path: Path) -> None:
    """A prefix hit: the second sequence computes only what the first has not."""
    path = write_checkpoint(tmp_path, TinySpec())
    reference, model = load_reference(path), load_paged_model(path)
    (prompt,) = random_prompts(131, [21])
    runner = PagedRunner(model, block_size=4)
    first = PagedSequence(prompt)
    runner.step([(first, 21)])
    second = PagedSequence(
        [*prompt[:16], 7, 8, 9], block_table=first.block_table[:4], num_computed_tokens=16
    )
    (logits,) = runner.step([(second, 3)])
    assert_close(logits, reference_logits(reference, second.token_ids)[16:])


def test_block_sizes_and_cache_layouts(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, TinySpec(family="llama"))
    model = load_paged_model(path)
    (prompt,) = random_prompts(131, [33])
    expected = reference_logits(load_reference(path), prompt)
    for block_size in (1, 8, 16, 64):
        runner = PagedRunner(model, block_size=block_size)
        assert_close(runner.prompt_logits(prompt, chunks=[17, 16]), expected)
    # One allocation for keys and values, heads before slots: only strides differ.
    runner = PagedRunner(model)
    for index, cache in enumerate(runner.kv_caches):
        num_blocks, block_size, num_heads, head_dim = cache.key.shape
        both = torch.full((2, num_blocks, num_heads, block_size, head_dim), torch.nan)
        runner.kv_caches[index] = type(cache)(both[0].transpose(1, 2), both[1].transpose(1, 2))
    assert_close(runner.prompt_logits(prompt, chunks=[17, 16]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_half_precision_is_close_to_fp32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, TinySpec(family=family))  # type: ignore[arg-type]
    (prompt,) = random_prompts(131, [40])
    expected = reference_logits(load_reference(path), prompt)
    model = load_paged_model(path, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    logits = PagedRunner(model).prompt_logits(prompt, chunks=[23, 17])
    limit = 0.05 if dtype == torch.bfloat16 else 0.01
    error = (logits - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < limit


def test_forward_changes_no_input_and_returns_normed_hidden_states(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, TinySpec())
    model = load_paged_model(path)
    runner = PagedRunner(model)
    sequence = PagedSequence([5, 6, 7])
    runner.step([(sequence, 2)])
    weights = {name: value.clone() for name, value in model.named_parameters()}
    token_ids, positions = torch.tensor([7]), torch.tensor([2])
    metadata = AttentionMetadata.from_lists([1], [3], [sequence.block_table], block_size=4)
    hidden = model(token_ids, positions, runner.kv_caches, metadata)
    assert token_ids.tolist() == [7]
    assert positions.tolist() == [2]
    for name, value in model.named_parameters():
        assert torch.equal(value, weights[name]), name
    # After the final norm, the mean square is that of the norm's weight, roughly.
    assert hidden.shape == (1, model.config.hidden_size)
    normalised = hidden / model.norm.weight
    torch.testing.assert_close(normalised.pow(2).mean(), torch.tensor(1.0), rtol=1e-3, atol=0)
    assert not hidden.requires_grad


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
@pytest.mark.parametrize(("query_lens", "num_tokens"), [([], 0), ([0, 0], 0), ([], 3), ([0], 3)])
def test_steps_without_a_token_of_any_sequence(
    rope_type: str,
    query_lens: list[int],
    num_tokens: int,
    tmp_path: Path,
    *,
    is_packed: bool,
) -> None:
    rope = {"rope_type": rope_type, "factor": 4.0}
    path = write_checkpoint(tmp_path, TinySpec(family="llama", rope=rope))
    model = load_paged_model(path, max_model_len=4096)
    assert model.kv_depends_on_length == (rope_type == "dynamic")
    if is_packed:
        model.pack_weights()
    runner = PagedRunner(model)
    metadata = replace(
        AttentionMetadata.from_lists(
            query_lens, [0] * len(query_lens), [[0]] * len(query_lens), block_size=4
        ),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int32),
    )
    numbers = torch.zeros(num_tokens, dtype=torch.int64)
    hidden = model(numbers, numbers, runner.kv_caches, metadata)
    assert hidden.shape == (num_tokens, model.config.hidden_size)
    assert model.compute_logits(hidden).shape == (num_tokens, model.config.vocab_size)
    assert all(bool(cache.key.isnan().all()) for cache in runner.kv_caches)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=ATOL)


def test_packed_weights_give_the_same_logits(checkpoint: Path) -> None:
    model = load_paged_model(checkpoint)
    (prompt,) = random_prompts(model.config.vocab_size, [23])
    expected = PagedRunner(model).prompt_logits(prompt)
    model.pack_weights()
    assert any(parameter.is_mkldnn for parameter in model.parameters())
    torch.testing.assert_close(
        PagedRunner(model).prompt_logits(prompt), expected, atol=ATOL, rtol=ATOL
    )
