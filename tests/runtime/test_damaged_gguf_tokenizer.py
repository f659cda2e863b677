"""Whatever a GGUF file says of its tokenizer and sampling, it works or is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from damaged_gguf import ARRAY, DAMAGES, KEYS, STRING, array, text, with_value
from nv_core.errors import ConfigError, NvError
from nv_models import open_checkpoint
from nv_runtime.generation_config import default_sampling_params
from nv_runtime.tokenizer import load_tokenizer
from tiny_checkpoints import TOKENIZER_VOCAB_SIZE, TinySpec, write_checkpoint
from tiny_gguf import write_gguf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with a tokenizer, which works."""
    directory = tmp_path_factory.mktemp("whole")
    spec = TinySpec(family="llama", vocab_size=TOKENIZER_VOCAB_SIZE, eos_token_id=2)
    checkpoint = write_checkpoint(directory / "hf", spec, tokenizer=True)
    return write_gguf(directory / "model.gguf", checkpoint, tokenizer=True)


def test_any_value_under_any_key_of_the_tokenizer(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    num_working = 0
    for key in KEYS:
        if not key.startswith(("tokenizer.", "general.sampling.")):
            continue
        for kind, value in DAMAGES.values():
            path.write_bytes(with_value(whole, key, kind, value))
            try:
                checkpoint = open_checkpoint(path)
                default_sampling_params(checkpoint.generation_config)
                tokenizer = load_tokenizer(checkpoint)
            except NvError:
                continue
            tokenizer.decode(tokenizer.encode("hello world"))
            num_working += 1
    assert num_working > 20


@pytest.mark.parametrize("merge", [b"", b"x", b"a", b" ", b"a b c", b"\xe2\x98\x83 a", b"a a"])
def test_merges_that_the_vocabulary_does_not_hold(
    merge: bytes, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.gguf"
    value = array(STRING, 1, text(merge))
    path.write_bytes(with_value(whole, "tokenizer.ggml.merges", ARRAY, value))
    expected = r"tokenizer\.ggml\.merges in damaged\.gguf must each be two tokens"
    with pytest.raises(ConfigError, match=expected):
        load_tokenizer(open_checkpoint(path))
