"""Whatever a GGUF file says, it is opened or refused by name: no hang, no error of a library."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from damaged_gguf import (
    ARRAY,
    DAMAGES,
    KEYS,
    STRING,
    array,
    entry,
    header,
    text,
    with_value,
)
from nv_core.errors import ConfigError, NvError
from nv_models import ModelConfig, WeightError, open_checkpoint
from tiny_checkpoints import TOKENIZER_VOCAB_SIZE, TinySpec, write_checkpoint
from tiny_gguf import write_gguf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with a tokenizer, which opens."""
    directory = tmp_path_factory.mktemp("whole")
    spec = TinySpec(family="llama", vocab_size=TOKENIZER_VOCAB_SIZE, bos_token_id=0, eos_token_id=2)
    checkpoint = write_checkpoint(directory / "hf", spec, tokenizer=True)
    return write_gguf(directory / "model.gguf", checkpoint, tokenizer=True)


def refusal(path: Path, content: bytes) -> NvError | None:
    """Reads all that a file says about its model; returns why it was refused, if it was."""
    path.write_bytes(content)
    try:
        opened = open_checkpoint(path)
        opened.tensor_infos()
        assert opened.tokenizer_data is not None
    except NvError as error:
        return error
    return None


def test_the_whole_file_opens(whole: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path / "copy.gguf", whole.read_bytes()) is None
    renamed = with_value(whole, "general.name", STRING, text(b"a longer name than before"))
    assert refusal(tmp_path / "copy.gguf", renamed) is None


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_any_value_under_any_key(damage: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    for key in KEYS:
        error = refusal(path, with_value(whole, key, *DAMAGES[damage]))
        if "without end" in damage or "deep" in damage or "no encoding" in damage:
            assert error is not None, key
        if error is not None:
            assert len(str(error)) < 1000
            assert "damaged.gguf" in str(error) or "must be" in str(error) or key in str(error)


@pytest.mark.parametrize(
    ("key", "damage", "message"),
    [
        ("llama.block_count", "small", r"is 3, but the file has tensors of 2 layers only"),
        ("llama.block_count", "2^40", r"must be at most 2147483647, got 1099511627776"),
        ("tokenizer.ggml.eos_token_id", "largest u32", r"token id from 0 to 330, got 4294967295"),
        ("tokenizer.ggml.eos_token_id", "negative", r"a token id from 0 to 330, got -1"),
        ("tokenizer.ggml.eos_token_id", "text", r"must be a token id .*, got 'x y'"),
        ("tokenizer.ggml.eos_token_id", "fraction", r"must be a token id .*, got 0\.5"),
        ("tokenizer.ggml.padding_token_id", "largest u32", r"must be a token id"),
        ("tokenizer.ggml.tokens", "integers", r"must be a list of strings, got \[1, 2, 2147"),
        ("tokenizer.ggml.tokens", "text", r"must be a list of strings, got 'x y'"),
        ("tokenizer.ggml.tokens", "empty list", r"at least one string, got an empty one"),
        ("tokenizer.ggml.merges", "integers", r"must be a list of strings"),
        ("tokenizer.ggml.merges", "text", r"must be a list of strings"),
        ("tokenizer.ggml.token_type", "texts", r"must be a list of integers"),
        ("tokenizer.ggml.scores", "texts", r"must be a list of numbers"),
        ("tokenizer.ggml.add_bos_token", "text", r"must be true or false"),
        ("tokenizer.chat_template", "small", r"must be a string, got 3"),
        ("general.name", "text of no encoding", r"must be text in UTF-8, got b'\\xff\\xfe'"),
        ("general.sampling.temp", "text", r"must be a number, got 'x y'"),
        ("llama.attention.head_count", "texts", r"must be a list of integers"),
        ("llama.attention.head_count", "empty list", r"a value for each layer, got an empty list"),
        ("llama.context_length", "2^40", r"must be at most 2147483647, got 1099"),
        ("split.count", "text", r"must be an integer"),
    ],
)
def test_what_is_wrong_is_named(
    key: str, damage: str, message: str, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.gguf"
    error = refusal(path, with_value(whole, key, *DAMAGES[damage]))
    with pytest.raises(NvError, match=message):
        raise error or AssertionError("opened")
    assert key in str(error)
    assert "damaged.gguf" in str(error)


@pytest.mark.parametrize("kind", [*range(8), STRING, ARRAY, 10, 11, 12])
@pytest.mark.parametrize("count", [2**40, 2**63, 2**64 - 1])
def test_a_count_beyond_the_end_ends_at_the_end(kind: int, count: int, tmp_path: Path) -> None:
    path = tmp_path / "hang.gguf"
    path.write_bytes(header(entry("a", ARRAY, array(kind, count))))
    with pytest.raises(WeightError, match=r"hang\.gguf cannot be read as GGUF"):
        open_checkpoint(path)


def test_a_file_cut_anywhere_in_its_header(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    end = gguf.GGUFReader(whole).data_offset
    for keep in [*range(32), *range(32, end, 97), end]:
        assert isinstance(refusal(tmp_path / "cut.gguf", content[:keep]), WeightError), keep


@settings(max_examples=150, deadline=None)
@given(
    place=st.floats(0, 1, exclude_max=True),
    value=st.sampled_from([0, 1, 2**20, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1])
    | st.integers(0, 2**64 - 1),
    width=st.sampled_from([1, 4, 8]),
)
def test_any_number_anywhere_in_the_header(
    whole: Path, place: float, value: int, width: int
) -> None:
    content = bytearray(whole.read_bytes())
    start = int(place * gguf.GGUFReader(whole).data_offset)
    content[start : start + width] = struct.pack("<Q", value)[:width]
    refusal(whole.with_name("any.gguf"), bytes(content))


def test_layers_are_bounded_where_no_tensors_tell() -> None:
    raw = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 100_000,
        "num_attention_heads": 1,
        "max_position_embeddings": 8,
    }
    with pytest.raises(
        ConfigError, match=r"num_hidden_layers in .* must be at most 4096, got 1000"
    ):
        ModelConfig.from_dict(raw)
    assert ModelConfig.from_dict({**raw, "num_hidden_layers": 4096}).num_layers == 4096
