"""Rebuilds a tokenizer from the data inside a GGUF file.

A GGUF file holds the vocabulary, not the program that uses it: the splitting of text into words
is only named (`tokenizer.ggml.pre`), and a SentencePiece vocabulary has scores where the
`tokenizers` library wants merges. This module supplies both.

Two kinds are read: `gpt2` (byte-level BPE, as in GPT-2, Llama 3, Qwen and SmolLM) and `llama`
(SentencePiece BPE with word marks and byte fallback, as in Llama 2 and Mistral 7B).

Where transformers' reading of the same file differs, the original tokenizer of the model is
followed here:
- a named pre-tokenizer that transformers does not know falls back to GPT-2's there; here it is
  known, or an error;
- Llama 3 and Tekken vocabularies take a whole word that is a token as that token, whatever the
  merges say;
- Qwen text is brought to Unicode form NFC first;
- a `llama` vocabulary puts its word mark before the text and after every special token, and also
  when the text starts with a space, as SentencePiece does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from nv_core.errors import ConfigError

if TYPE_CHECKING:
    from nv_models import GGUFTokenizerData

__all__ = ["GGUFTokenizer", "build_gguf_tokenizer"]

# Values of tokenizer.ggml.token_type.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4

_WORD_MARK = "\u2581"


@dataclass(frozen=True)
class GGUFTokenizer:
    """A tokenizer rebuilt from a GGUF file.

    Args:
        backend: The tokenizer.
        special_tokens: The text of the named special tokens (`bos_token`, `eos_token`, ...).
        eos_token_ids: The tokens that end a text: the file's eos, eot and eom, without repeats.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]


def build_gguf_tokenizer(data: GGUFTokenizerData) -> GGUFTokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Raises:
        ConfigError: The file's tokenizer is of an unknown kind, names an unknown pre-tokenizer,
            lacks what its kind needs, or has merges that its vocabulary does not hold.
    """
    if data.model == "gpt2":
        backend, adds_bos = _byte_level(data)
    elif data.model == "llama":
        backend, adds_bos = _sentencepiece(data)
    else:
        raise ConfigError(
            f"tokenizer.ggml.model: {data.model!r} is not supported (in {data.source}); "
            "supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)."
        )
    _add_special_tokens(backend, data)
    if data.add_bos is not None:
        adds_bos = data.add_bos
    adds_eos = bool(data.add_eos)
    backend.post_processor = _frame(data, adds_bos=adds_bos, adds_eos=adds_eos)
    named = {
        "bos_token": data.bos_token_id,
        "eos_token": data.eos_token_id,
        "unk_token": data.unknown_token_id,
        "pad_token": data.padding_token_id,
    }
    ends = (data.eos_token_id, data.eot_token_id, data.eom_token_id)
    return GGUFTokenizer(
        backend=backend,
        special_tokens={
            name: data.tokens[token_id] for name, token_id in named.items() if token_id is not None
        },
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


@dataclass(frozen=True)
class _PreTokenizer:
    """How a byte-level vocabulary cuts text into the words that merges stay inside of.

    Args:
        patterns: Regular expressions, each cutting what the one before has left.
        ignore_merges: Whether a word that is a token is taken whole, whatever the merges say.
        adds_bos: Whether BOS opens a text if the file does not say.
        is_nfc: Whether text is brought to Unicode form NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    is_nfc: bool = False


def _pre_tokenizers() -> dict[str, _PreTokenizer]:
    """The known pre-tokenizers by the name that GGUF files give them.

    Source: the tokenizer.json files of the models after which they are named.
    """
    contractions = "'s|'t|'re|'ve|'m|'ll|'d"
    spaces = r"\s+(?!\S)"
    gpt2_words = rf"{contractions}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{spaces}|\s+"
    line_ends = rf"\s*[\r\n]+|{spaces}|\s+"

    def modern_words(max_digits: str) -> str:
        return (
            rf"(?i:{contractions})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{max_digits}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{line_ends}"
        )

    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    tekken_words = (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{line_ends}"
    )
    gpt2 = _PreTokenizer((gpt2_words,))
    single_digits = _PreTokenizer((r"\p{N}", gpt2_words))
    llama3 = _PreTokenizer((modern_words("{1,3}"),), ignore_merges=True, adds_bos=True)
    qwen2 = _PreTokenizer((modern_words(""),), is_nfc=True)
    return {
        "default": _PreTokenizer(
            (r"[\p{P}\$\+<=>\^~\|]+", gpt2_words, r"\p{N}+", "[0-9][0-9][0-9]")
        ),
        "gpt-2": gpt2,
        "olmo": gpt2,
        "smollm": single_digits,
        "starcoder": single_digits,
        "refact": single_digits,
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "falcon3": llama3,
        "smaug-bpe": _PreTokenizer((modern_words("{1,3}"),)),
        "qwen2": qwen2,
        "deepseek-r1-qwen": _PreTokenizer((modern_words(""),)),
        "tekken": _PreTokenizer((tekken_words,), ignore_merges=True, adds_bos=True),
    }


def _byte_level(data: GGUFTokenizerData) -> tuple[tokenizers.Tokenizer, bool]:
    known = _pre_tokenizers()
    # Files older than the key have none; they were made when all were cut in one way.
    name = data.pre or "default"
    pre = known.get(name)
    if pre is None:
        raise ConfigError(
            f"tokenizer.ggml.pre: the pre-tokenizer {name!r} is not known (in {data.source}), and "
            f"any other would give wrong token ids; known are {sorted(known)}. Use the "
            "model's Hugging Face directory, or pass token ids with skip_tokenizer_init=True."
        )
    if not data.merges:
        raise ConfigError(
            f"tokenizer.ggml.merges: a byte-level (gpt2) tokenizer needs merges, and {data.source} "
            "has none."
        )
    backend = tokenizers.Tokenizer(
        _byte_pair_model(
            data,
            vocab=_vocabulary(data),
            merges=[_pair(merge) for merge in data.merges],
            ignore_merges=pre.ignore_merges,
        )
    )
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(data: GGUFTokenizerData) -> tuple[tokenizers.Tokenizer, bool]:
    vocabulary = _vocabulary(data)
    unknown = None if data.unknown_token_id is None else data.tokens[data.unknown_token_id]
    backend = tokenizers.Tokenizer(
        _byte_pair_model(
            data,
            vocab=vocabulary,
            merges=_merges_from_scores(data, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = data.add_space_prefix is not False
    marks = [normalizers.Replace(" ", _WORD_MARK)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_WORD_MARK), *marks] if has_prefix else marks
    )
    text = [decoders.Replace(_WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if has_prefix else text)
    return backend, True


def _byte_pair_model(
    data: GGUFTokenizerData,
    **settings: Any,  # noqa: ANN401 - those of the library
) -> models.BPE:
    try:
        return models.BPE(**settings)
    except Exception as error:  # the library raises no narrower class
        raise ConfigError(
            f"tokenizer.ggml.merges in {data.source} must each be two tokens of the vocabulary "
            f"that make a third, with a space between: {error}. Download the file again."
        ) from error


def _merges_from_scores(
    data: GGUFTokenizerData, vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Turns piece scores into merges.

    SentencePiece joins the two neighbours whose joined piece has the best score, so every way to
    put a piece together from two others is a merge, and the best piece comes first.

    Source: "SentencePiece" (arXiv:1808.06226), section 3.
    """
    if data.merges:
        return [_pair(merge) for merge in data.merges]
    if data.scores is None or len(data.scores) != len(data.tokens):
        raise ConfigError(
            "tokenizer.ggml.scores: a SentencePiece (llama) tokenizer needs one score per token, "
            f"got {0 if data.scores is None else len(data.scores)} for {len(data.tokens)} tokens "
            f"in {data.source}."
        )
    scores, types = data.scores, data.token_types
    joined = [i for i in range(len(data.tokens)) if not types or types[i] == _NORMAL]
    merges = []
    for token_id in sorted(joined, key=lambda i: (-scores[i], i)):
        token = data.tokens[token_id]
        cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
        known = [
            (left, right) for left, right in cuts if left in vocabulary and right in vocabulary
        ]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _vocabulary(data: GGUFTokenizerData) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(data.tokens):
        # Of two equal spellings the first is the one that text can reach.
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _add_special_tokens(backend: tokenizers.Tokenizer, data: GGUFTokenizerData) -> None:
    """Makes control and user-defined tokens match as a whole; only the former are special."""
    types: Sequence[int] = data.token_types or ()
    named = {data.bos_token_id, data.eos_token_id, data.eot_token_id, data.eom_token_id}
    added = []
    for token_id, token in enumerate(data.tokens):
        kind = types[token_id] if token_id < len(types) else _NORMAL
        is_special = kind in (_CONTROL, _UNKNOWN) or token_id in named
        if is_special or kind == _USER_DEFINED:
            added.append(AddedToken(token, normalized=False, special=is_special))
    backend.add_tokens(added)


def _frame(
    data: GGUFTokenizerData, *, adds_bos: bool, adds_eos: bool
) -> processors.TemplateProcessing | None:
    """Puts BOS before and EOS after a text, where the file wants them."""
    bos = data.bos_token_id if adds_bos else None
    eos = data.eos_token_id if adds_eos else None
    framing = [(data.tokens[end], end) for end in (bos, eos) if end is not None]
    if not framing:
        return None
    before = [data.tokens[bos]] if bos is not None else []
    after = [data.tokens[eos]] if eos is not None else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=list(dict.fromkeys(framing)),
    )
