"""Frequencies, cosines and sines equal transformers' for every scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from nv_core.errors import ConfigError
from nv_models import ModelConfig, RopeConfig
from nv_models.rope import (
    cos_sin_table,
    dynamic_inverse_frequencies,
    inverse_frequencies,
    read_rope_config,
)
from paged_runner import PagedRunner, PagedSequence, load_paged_model
from tiny_checkpoints import (
    TinySpec,
    load_reference,
    make_config,
    reference_greedy,
    reference_logits,
    write_checkpoint,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default-theta": {"rope_type": "default", "rope_theta": 1000000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3-narrow": {**LLAMA3, "low_freq_factor": 1.5, "high_freq_factor": 2.0, "factor": 3.0},
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-no-ramp": {**YARN, "original_max_position_embeddings": 6},  # both its ends are pair 0
    "yarn-short": {**YARN, "original_max_position_embeddings": 16, "factor": 1.5},
    "yarn-small-theta": {**YARN, "rope_theta": 50.0},
    "yarn-no-original": {"rope_type": "yarn", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def reference_rotary(spec: TinySpec) -> Any:  # noqa: ANN401 - transformers' class
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary: Any = LlamaRotaryEmbedding
    return rotary(make_config(spec))


def reference_table(rotary: Any, positions: Tensor) -> Tensor:  # noqa: ANN401
    cos, sin = rotary(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


def our_rope(spec: TinySpec) -> RopeConfig:
    return ModelConfig.from_dict(make_config(spec).to_dict()).rope


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_table_equals_transformers(name: str, head_dim: int) -> None:
    spec = TinySpec(
        family="llama", rope=SETTINGS[name], head_dim=head_dim, max_position_embeddings=2048
    )
    rope = our_rope(spec)
    positions = torch.cat((torch.arange(2048), torch.tensor([4095, 30000, 131071])))
    if name == "dynamic":  # beyond its original length it depends on the length: below
        positions = positions[:2048]
    table = cos_sin_table(
        inverse_frequencies(rope, head_dim), positions, attention_factor=rope.attention_factor
    )
    expected = reference_table(reference_rotary(spec), positions)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", [2.0, 1.7])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 1000])
def test_dynamic_frequencies_equal_transformers_for_each_length(length: int, factor: float) -> None:
    spec = TinySpec(
        family="llama",
        rope={"rope_type": "dynamic", "factor": factor},
        head_dim=32,
        max_position_embeddings=64,
    )
    positions = torch.arange(length)
    # A fresh object each time: transformers' remembers the longest length it has seen.
    expected = reference_table(reference_rotary(spec), positions)
    frequencies = dynamic_inverse_frequencies(our_rope(spec), 32, torch.full((length,), length))
    table = cos_sin_table(frequencies, positions, attention_factor=1.0)
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-5)


def test_dynamic_frequencies_take_a_length_for_each_token() -> None:
    rope = RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=8)
    lengths = torch.tensor([3, 100, 8, 9])
    together = dynamic_inverse_frequencies(rope, 16, lengths)
    for row, length in zip(together, lengths, strict=True):
        alone = dynamic_inverse_frequencies(rope, 16, length[None])
        assert torch.equal(row, alone[0])
    assert torch.equal(together[0], inverse_frequencies(rope, 16))
    assert torch.equal(together[2], inverse_frequencies(rope, 16))
    assert not torch.equal(together[3], together[2])


@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if name.startswith(("yarn", "ll", "li"))]
)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    spec = TinySpec(family="qwen3", rope=SETTINGS[name], max_position_embeddings=1024)
    path = write_checkpoint(tmp_path, spec)
    prompt = [(7 * i) % 131 for i in range(300)]
    runner = PagedRunner(load_paged_model(path), block_size=16)
    logits = runner.prompt_logits(prompt, chunks=[120, 180])
    expected = reference_logits(load_reference(path), prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinySpec(
        family="llama",
        rope={"rope_type": "dynamic", "factor": 4.0},
        max_position_embeddings=32,
    )
    return write_checkpoint(tmp_path_factory.mktemp("dynamic"), spec)


def test_dynamic_within_the_original_length_chunks_do_not_matter(dynamic: Path) -> None:
    prompt = [(11 * i) % 131 for i in range(32)]
    expected = reference_logits(load_reference(dynamic), prompt)
    for max_model_len in (None, 128):
        model = load_paged_model(dynamic, max_model_len=max_model_len)
        logits = PagedRunner(model).prompt_logits(prompt, chunks=[9, 23])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_dynamic_prompt_beyond_it_in_one_step(dynamic: Path) -> None:
    model = load_paged_model(dynamic, max_model_len=128)
    for length in (33, 80, 128):
        prompt = [(13 * i) % 131 for i in range(length)]
        expected = reference_logits(load_reference(dynamic), prompt)
        logits = PagedRunner(model).prompt_logits(prompt)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_dynamic_sequences_of_a_batch_keep_their_own_lengths(dynamic: Path) -> None:
    model = load_paged_model(dynamic, max_model_len=128)
    prompts = [[(n * i) % 131 for i in range(length)] for n, length in ((3, 90), (5, 20), (7, 40))]
    sequences = [PagedSequence(prompt) for prompt in prompts]
    batch = [(sequence, len(sequence.token_ids)) for sequence in sequences]
    for prompt, logits in zip(prompts, PagedRunner(model).step(batch), strict=True):
        expected = reference_logits(load_reference(dynamic), prompt)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_the_model_tells_when_blocks_must_not_be_shared(dynamic: Path) -> None:
    assert not load_paged_model(dynamic).kv_depends_on_length
    assert load_paged_model(dynamic, max_model_len=33).kv_depends_on_length


def test_dynamic_sequences_decode_side_by_side(dynamic: Path) -> None:
    """Each token of a step takes the length of its own sequence, not of a neighbour's."""
    model = load_paged_model(dynamic, max_model_len=128)
    prompts = [[(n * i) % 131 for i in range(length)] for n, length in ((3, 90), (5, 20), (7, 41))]
    together = PagedRunner(model)
    batch = [PagedSequence(prompt) for prompt in prompts]
    steps = [[(s, len(s.token_ids) - 1) for s in batch], [(s, 1) for s in batch]]
    logits = [together.step(step) for step in steps][1]
    for prompt, actual in zip(prompts, logits, strict=True):
        alone = PagedRunner(model).prompt_logits(prompt, chunks=[len(prompt) - 1, 1])
        torch.testing.assert_close(actual, alone[-1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("prompt_len", [20, 50])
def test_dynamic_decoding_across_and_beyond_the_original_length(
    dynamic: Path, prompt_len: int
) -> None:
    prompt = [(17 * i) % 131 for i in range(prompt_len)]
    runner = PagedRunner(load_paged_model(dynamic, max_model_len=128))
    sequence = PagedSequence(list(prompt))
    number = prompt_len
    for _ in range(30):
        logits = runner.step([(sequence, number)])[0]
        sequence.token_ids.append(int(logits[-1].argmax()))
        number = 1
    expected = reference_greedy(load_reference(dynamic), prompt, 30)
    assert sequence.token_ids[prompt_len:] == expected


def test_depends_on_length_only_for_dynamic_beyond_its_original_length() -> None:
    dynamic = RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=64)
    assert not dynamic.depends_on_length(64)
    assert dynamic.depends_on_length(65)
    yarn = RopeConfig(rope_type="yarn", factor=2.0, original_max_position_embeddings=64)
    assert not yarn.depends_on_length(100000)


@pytest.mark.parametrize(
    ("rope", "declared", "longest"),
    [
        (RopeConfig(), 4096, 4096),
        (RopeConfig(rope_type="linear", factor=2.5), 4096, 10240),
        (RopeConfig(rope_type="linear", factor=0.5), 4096, 4096),
        (
            RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=4096),
            4096,
            8192,
        ),
        # Qwen3 with YaRN switched on as its model card says; and declared after the scaling.
        (
            RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
            40960,
            131072,
        ),
        (
            RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
            131072,
            131072,
        ),
        (
            RopeConfig(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192),
            131072,
            131072,
        ),
    ],
)
def test_longest_len(rope: RopeConfig, declared: int, longest: int) -> None:
    assert rope.longest_len(declared) == longest


def test_frequency_divisors_are_llama3_in_another_form() -> None:
    llama3 = RopeConfig(
        theta=500000.0, rope_type="llama3", factor=8.0, original_max_position_embeddings=256
    )
    plain = RopeConfig(theta=500000.0)
    divisors = inverse_frequencies(plain, 64) / inverse_frequencies(llama3, 64)
    divided = RopeConfig(theta=500000.0, frequency_divisors=tuple(divisors.tolist()))
    torch.testing.assert_close(
        inverse_frequencies(divided, 64), inverse_frequencies(llama3, 64), rtol=1e-6, atol=0
    )
    with pytest.raises(ConfigError, match="must hold head_dim / 2 = 16 numbers, got 32"):
        inverse_frequencies(divided, 32)


def read(raw: dict[str, Any]) -> RopeConfig:
    return read_rope_config(raw, max_position_embeddings=512, source="config.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ({"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ({"rope_theta": 5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5.0}}),
        (
            {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}},
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"},
            },
            {"rope_parameters": YARN},
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
            },
            {"rope_parameters": LLAMA3},
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": None},
                "original_max_position_embeddings": 128,
            },
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        (
            {"rope_theta": 1e6},
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        ),
    ],
)
def test_old_and_new_spelling(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(old) == read(new)


def test_values_inside_the_mapping_win() -> None:
    rope = read({"rope_theta": 1.5, "rope_parameters": {"rope_theta": 7.0}})
    assert rope == RopeConfig(theta=7.0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' in config.json is not supp"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope'.*supported are default, linear, dynamic"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "'proportional'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embedding.*0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial rotary embedding.*0.25"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing in rope_scaling in config.json"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope factor must be positive, .* got 0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor in rope_scaling .* a number"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "must be a number, got True"),
        ({"rope_scaling": [1]}, "rope_scaling in config.json must be an object"),
        ({"rope_theta": -1.0}, "rope theta must be above 1 and at most .*, got -1.0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            r"high_freq_factor \(1.0\) must be above low_freq_factor \(1.0\)",
        ),
    ],
)
def test_refused_settings(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(raw)
