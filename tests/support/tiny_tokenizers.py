"""Small tokenizers of the kinds that real models use, trained on a few lines of text.

Each is built with the parts (normalizer, pre-tokenizer, decoder, frame) of the family after which
it is named, so that what is proved on them holds for the big ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's 2024, and they've seen 365 days go by!",
    "In the beginning there was a prompt, and the prompt was with the model.",
    "def add(a, b):\n    return a + b  # 1234567890\n\n\nprint(add(12, 30))\n",
    "Der schnelle braune Fuchs springt über den faulen Hund. Größe, Straße, Äpfel.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Le cœur déçu mais l'âme plutôt naïve.",
    "世界你好。今天天气很好。日本語のテキストです。안녕하세요 세계.",
    "Привет, мир! Съешь ещё этих мягких французских булок.",
    "العالم مرحبا، हिन्दी में नमस्ते दुनिया।",
    "What is the capital of France? The capital of France is Paris. LLMs. It works, it's fine.",
)

SAMPLE_TEXTS = (
    "",
    " ",
    "Hello world",
    "  two leading spaces and   three inside",
    "It's 2024: they'VE counted 1234567 tokens, haven't they?",
    "line one\nline two\r\n\n\n    indented\ttabs \n ",
    "über Größe, naïve cœur, ďábelské ódy",
    "世界你好 🌶️ 👩‍👩‍👧‍👦 🇫🇷 done",
    "e\u0301 and \u00e9, A\u030a and \u00c5",
    "1 22 333 4444 ½ Ⅷ ٣٤٥ 55555",
    "\x00\x01 control \ufffd and \U0010ffff",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>[INST] hi [/INST]</s> trailing",
    "a<think>b</think> c <|eot_id|>d",
)

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def qwen_like() -> Tokenizer:
    """Byte-level BPE with NFC, one token per digit, no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split_words(_QWEN2_WORDS)
    tokenizer.decoder = decoders.ByteLevel()
    _train_byte_level(tokenizer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    tokenizer.add_tokens([AddedToken("</think>", normalized=False, special=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def llama3_like() -> Tokenizer:
    """Byte-level BPE with up to three digits per token, whole-word tokens first, and BOS."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = _split_words(_LLAMA3_WORDS)
    tokenizer.decoder = decoders.ByteLevel()
    _train_byte_level(tokenizer)
    tokenizer.add_special_tokens(
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    )
    _frame(tokenizer, "<|begin_of_text|>")
    return tokenizer


def smollm_like() -> Tokenizer:
    """Byte-level BPE whose digits always stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train_byte_level(tokenizer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def llama2_like() -> Tokenizer:
    """SentencePiece-like BPE: word marks by a normalizer, byte fallback, BOS."""
    tokenizer = _sentencepiece_like()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer


def mistral_like() -> Tokenizer:
    """SentencePiece-like BPE: word marks by Metaspace at the start of the text only."""
    tokenizer = _sentencepiece_like()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "first", split=False)
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "qwen": qwen_like,
    "llama3": llama3_like,
    "smollm": smollm_like,
    "llama2": llama2_like,
    "mistral": mistral_like,
}

BYTE_LEVEL_KINDS = ("qwen", "llama3", "smollm")

_NAMED_TOKENS: Mapping[str, Mapping[str, str]] = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "smollm": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}


def save_tokenizer(kind: str, directory: Path, **config: object) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and a config.json into a directory.

    Args:
        kind: One of `KINDS`.
        directory: Made if it does not exist.
        **config: Entries of tokenizer_config.json, beside the kind's named special tokens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(directory / "tokenizer.json"))
    entries = {"tokenizer_class": "PreTrainedTokenizerFast", **_NAMED_TOKENS[kind], **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(entries), encoding="utf-8")
    model_type = {"qwen": "qwen3", "mistral": "mistral"}.get(kind, "llama")
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def _split_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _train_byte_level(tokenizer: Tokenizer) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)


def _sentencepiece_like() -> Tokenizer:
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "always")
    # A small alphabet leaves the rarer scripts to byte fallback, as in the real ones.
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 400, limit_alphabet=80, special_tokens=special, show_progress=False
    )
    learner.train_from_iterator(CORPUS * 3, trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    ordered = [*special, *byte_tokens, *(piece for piece in pieces if piece not in special)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(ordered)},
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    _frame(tokenizer, "<s>")
    return tokenizer


def _frame(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
