"""Tokenizer directories against transformers' AutoTokenizer on the same files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nv_core.errors import ConfigError, RequestError
from nv_runtime.tokenizer import Tokenizer, load_tokenizer_from_directory
from tiny_tokenizers import BYTE_LEVEL_KINDS, KINDS, SAMPLE_TEXTS, save_tokenizer


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: save_tokenizer(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def ours(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer_from_directory(path) for kind, path in directories.items()}


@pytest.fixture(scope="module")
def oracles(directories: dict[str, Path]) -> dict[str, Any]:
    return {kind: AutoTokenizer.from_pretrained(path) for kind, path in directories.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_transformers(
    ours: dict[str, Tokenizer], oracles: dict[str, Any], kind: str, *, add_special_tokens: bool
) -> None:
    for text in SAMPLE_TEXTS:
        expected = oracles[kind](text, add_special_tokens=add_special_tokens)["input_ids"]
        assert ours[kind].encode(text, add_special_tokens=add_special_tokens) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_ids_and_text_equal_transformers_for_any_text(
    ours: dict[str, Tokenizer], oracles: dict[str, Any], kind: str, text: str
) -> None:
    ids = ours[kind].encode(text)
    assert ids == oracles[kind](text)["input_ids"]
    for skip in (True, False):
        expected = oracles[kind].decode(ids, skip_special_tokens=skip)
        assert ours[kind].decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_equal_transformers(
    ours: dict[str, Tokenizer], oracles: dict[str, Any], kind: str
) -> None:
    tokenizer, oracle = ours[kind], oracles[kind]
    assert tokenizer.special_tokens == oracle.special_tokens_map
    assert tokenizer.bos_token_id == oracle.bos_token_id
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.eos_token_ids == (oracle.eos_token_id,)
    assert tokenizer.vocab_size == len(oracle)
    assert set(oracle.all_special_ids) <= tokenizer.special_token_ids


def test_bos_is_added_by_the_models_that_want_it(ours: dict[str, Tokenizer]) -> None:
    for kind in ("llama3", "llama2", "mistral"):
        bos = ours[kind].bos_token_id
        assert bos is not None
        assert ours[kind].encode("hi").count(bos) == 1
        assert ours[kind].encode("hi")[0] == bos
        assert bos not in ours[kind].encode("hi", add_special_tokens=False)
    assert ours["qwen"].bos_token_id is None
    assert ours["qwen"].encode("hi") == ours["qwen"].encode("hi", add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"pad_token": "<|new_pad|>"},
        {"extra_special_tokens": ["<|a|>", "<|b|>"]},
        {"additional_special_tokens": ["<|a|>", "the"]},
        {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True},
        {
            "added_tokens_decoder": {
                "0": {"content": "<|a|>", "lstrip": True, "rstrip": True, "special": True},
                "1": {"content": " brown", "normalized": False, "special": False},
            }
        },
    ],
    ids=lambda config: "-".join(config),
)
def test_config_entries_act_as_in_transformers(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    path = save_tokenizer(kind, tmp_path, **config)
    tokenizer, oracle = load_tokenizer_from_directory(path), AutoTokenizer.from_pretrained(path)
    for text in (*SAMPLE_TEXTS, "x <|a|> y<|b|> the quick brown fox <|new_pad|>z"):
        ids = oracle(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(
                ids, skip_special_tokens=skip
            )
    assert tokenizer.vocab_size == len(oracle)


@pytest.mark.parametrize(
    ("kind", "tokenizer_class", "model_type"),
    [
        ("qwen", "Qwen2Tokenizer", "qwen3"),
        ("qwen", "Qwen2TokenizerFast", "qwen2"),
        ("mistral", "LlamaTokenizer", "llama"),
        ("mistral", "LlamaTokenizerFast", "mistral"),
        ("llama3", "PreTrainedTokenizer", "llama"),
    ],
)
def test_the_class_names_of_real_checkpoints_change_nothing(
    tmp_path: Path, kind: str, tokenizer_class: str, model_type: str
) -> None:
    path = save_tokenizer(kind, tmp_path, tokenizer_class=tokenizer_class)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer, oracle = load_tokenizer_from_directory(path), AutoTokenizer.from_pretrained(path)
    for text in SAMPLE_TEXTS:
        assert tokenizer.encode(text) == oracle(text)["input_ids"]


@pytest.mark.parametrize("kind", ["qwen", "llama2"])
def test_legacy_files_act_as_in_transformers(tmp_path: Path, kind: str) -> None:
    path = save_tokenizer(kind, tmp_path)
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    special = {"eos_token": "</end>", "pad_token": {"content": "<pad>", "lstrip": True}}
    (path / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer, oracle = load_tokenizer_from_directory(path), AutoTokenizer.from_pretrained(path)
    for text in ("a </end> b <pad> c", *SAMPLE_TEXTS):
        assert tokenizer.encode(text) == oracle(text)["input_ids"]
    assert tokenizer.special_tokens == oracle.special_tokens_map
    assert tokenizer.eos_token_id == oracle.eos_token_id


def test_a_directory_with_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    path = save_tokenizer("qwen", tmp_path)
    (path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer_from_directory(path)
    assert tokenizer.decode(tokenizer.encode("Hello 世界")) == "Hello 世界"
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.eos_token_id is None


def test_training_time_truncation_and_padding_are_dropped(tmp_path: Path) -> None:
    path = save_tokenizer("qwen", tmp_path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    text = "The quick brown fox jumps over the lazy dog"
    assert (
        load_tokenizer_from_directory(path).encode(text)
        == (AutoTokenizer.from_pretrained(path)(text)["input_ids"])
    )


def test_ids_outside_the_vocabulary_add_no_text(ours: dict[str, Tokenizer]) -> None:
    tokenizer = ours["qwen"]
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([10**6, *ids, tokenizer.vocab_size, -1]) == "ab"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS)
def test_token_bytes_spell_the_text(ours: dict[str, Tokenizer], kind: str) -> None:
    text = "naïve 世界 🌶"
    ids = ours[kind].encode(text, add_special_tokens=False)
    assert b"".join(ours[kind].token_bytes(token_id) for token_id in ids) == text.encode()


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS)
def test_one_token_is_decoded_as_a_list_of_it_is(ours: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = ours[kind]
    (token_id,) = tokenizer.encode("a", add_special_tokens=False)
    for one in (token_id, np.int64(token_id), np.array(token_id), torch.tensor(token_id)):
        assert tokenizer.decode(one) == "a"
    for several in ((token_id, token_id), np.array([token_id] * 2), iter([token_id] * 2)):
        assert tokenizer.decode(several) == "aa"
    assert tokenizer.decode(10**30) == tokenizer.decode([2**32, -1]) == ""
    values: list[Any] = ["ab", ["a"], None, 5.0, [5.5], [[token_id]], torch.tensor([[1, 2]])]
    for value in values:
        with pytest.raises(RequestError, match="token_ids must be a token id or several"):
            tokenizer.decode(value)


def test_text_that_is_no_text_is_refused(ours: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate '\\ud800' at character 1"):
        ours["qwen"].encode("a\ud800b")
    with pytest.raises(RequestError, match="must be a string, got int"):
        ours["qwen"].encode(3)  # type: ignore[arg-type]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*save_pretrained"):
        load_tokenizer_from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer_from_directory(tmp_path)
    save_tokenizer("qwen", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json must hold a JSON object"):
        load_tokenizer_from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is no valid JSON"):
        load_tokenizer_from_directory(tmp_path)


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 1.5, "x", "", [], [[]], [1], {}, {"a": 1}, {"x": {}}, {"1": {}}, {"1": 5}),
    *({"1": {"content": 5}}, {"-1": {"content": "zz"}}, {"9" * 30: {"content": "zz"}}),
    *([{"name": "default"}], [{"name": "default", "template": 5}]),
)
"""What a field of a damaged file may hold."""

CONFIG_FIELDS = (
    *("added_tokens_decoder", "eos_token", "extra_special_tokens", "additional_special_tokens"),
    *("split_special_tokens", "chat_template"),
)


def load_and_use(path: Path) -> None:
    tokenizer = load_tokenizer_from_directory(path)
    assert tokenizer.decode(tokenizer.encode("sea")).strip() == "sea"
    if tokenizer.chat_template is not None:
        with contextlib.suppress(RequestError):
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("field", CONFIG_FIELDS)
def test_a_field_of_another_kind_is_refused_or_does_no_harm(tmp_path: Path, field: str) -> None:
    path = save_tokenizer("qwen", tmp_path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text())
    num_loaded = 0
    for legacy in (False, True):
        if legacy:
            config.pop("added_tokens_decoder", None)
        for value in ODD_VALUES:
            (path / "tokenizer_config.json").write_text(json.dumps({**config, field: value}))
            with contextlib.suppress(ConfigError):
                load_and_use(path)
                num_loaded += 1
    # Null is as good as nothing, at least.
    assert num_loaded >= 2


@pytest.mark.parametrize(
    "name", ["added_tokens.json", "special_tokens_map.json", "chat_template.json"]
)
def test_a_file_of_another_kind_is_refused_or_does_no_harm(tmp_path: Path, name: str) -> None:
    path = save_tokenizer("qwen", tmp_path)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (path / file).unlink(missing_ok=True)
    fields = ("a", "eos_token", "chat_template")
    contents = [*ODD_VALUES, *({field: value} for field in fields for value in ODD_VALUES)]
    num_loaded = 0
    for text in (*map(json.dumps, contents), '{"a": 1, "b": "c"}', "[" * 100_000):
        (path / name).write_text(text)
        with contextlib.suppress(ConfigError):
            load_and_use(path)
            num_loaded += 1
    assert num_loaded > 0
    (path / name).write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=f"{name} is no valid JSON"):
        load_tokenizer_from_directory(path)


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = save_tokenizer("qwen", tmp_path)
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is no UTF-8 text"):
        load_tokenizer_from_directory(path)


def write_templates(path: Path, places: str) -> None:
    config = json.loads((path / "tokenizer_config.json").read_text())
    if "list" in places:
        config["chat_template"] = [
            {"name": "default", "template": "config default"},
            {"name": "tool_use", "template": "config tools"},
        ]
    elif "config" in places:
        config["chat_template"] = "config"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if "file" in places:
        (path / "chat_template.jinja").write_text("file")
    if "extra" in places:
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "rag.jinja").write_text("rag")


@pytest.mark.parametrize(
    "places", ["none", "config", "list", "file", "config+file", "list+file+extra", "file+extra"]
)
def test_chat_templates_are_found_where_transformers_finds_them(
    tmp_path: Path, places: str
) -> None:
    path = save_tokenizer("qwen", tmp_path)
    write_templates(path, places)
    tokenizer, oracle = load_tokenizer_from_directory(path), AutoTokenizer.from_pretrained(path)
    expected = oracle.chat_template
    if isinstance(expected, dict):
        assert tokenizer.chat_template == expected["default"]
        for name, source in expected.items():
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}], chat_template=name
            )
            assert rendered == source
    else:
        assert tokenizer.chat_template == expected


def test_a_processors_template_file_is_the_last_resort(tmp_path: Path) -> None:
    path = save_tokenizer("qwen", tmp_path)
    (path / "chat_template.json").write_text('{"chat_template": "from the processor"}')
    assert load_tokenizer_from_directory(path).chat_template == "from the processor"
    write_templates(path, "config")
    assert load_tokenizer_from_directory(path).chat_template == "config"
