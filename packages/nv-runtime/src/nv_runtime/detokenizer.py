"""Turns token ids back into text, all at once or as they arrive.

A decoder-only tokenizer is a table of byte strings: the text of a sequence is the bytes of its
tokens, one after the other, read as UTF-8. `TokenBytes` reads that table out of a Hugging Face
tokenizer, and `StreamDecoder` reads the bytes incrementally. So the pieces of a stream add up to
the whole text however the tokens were cut, a character split over tokens is held back until it is
complete, and the work per token is constant, however broken the bytes are.

The text is the one that the `tokenizers` library decodes. Its two ways with broken bytes are kept:
byte-level vocabularies lose only the invalid bytes, while in byte-fallback vocabularies one invalid
byte spoils the run of byte tokens around it, so that a run is held back until it has ended.

The library's own `DecodeStream` is not used: it waits for ever behind a replacement character, even
one that no further token can complete, and decodes everything that waits anew with every token.

This module knows nothing of requests, stop strings or chat; read `nv_runtime.tokenizer` next.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tokenizers

from nv_core.errors import ConfigError

__all__ = ["StreamDecoder", "TokenBytes", "TokenPiece"]

_PieceStep = Callable[[str, bool], str]
"""(token text, is this the first token of the text) -> changed token text."""

# Scripts that a vocabulary has no pieces for can make a sentence of byte tokens. A run this long
# is taken for good text, so that a stream does not wait for the end of the sentence.
_MAX_HELD_BYTES = 64


class TokenPiece(NamedTuple):
    """What one token adds to the text.

    Args:
        data: Its bytes; perhaps only a part of a character.
        is_fallback_byte: Whether it is one raw byte of a byte-fallback vocabulary.
    """

    data: bytes
    is_fallback_byte: bool


_NO_TEXT = TokenPiece(b"", is_fallback_byte=False)


class TokenBytes:
    """The bytes that each token id adds to the text.

    Entries are made on first use and kept, so opening a tokenizer with 150 000 tokens costs
    nothing up front.

    Args:
        backend: The tokenizer whose vocabulary and decoder are read, as they are now.

    Raises:
        ConfigError: The tokenizer's decoder does something that cannot be done token by token.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._rules = _read_decoder(backend)
        self._first: dict[int, TokenPiece] = {}
        self._later: dict[int, TokenPiece] = {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}

    @property
    def num_leading_spaces(self) -> int:
        """How many spaces the decoder removes from the start of the text (0 or 1 in practice)."""
        return self._rules.num_leading_spaces

    def piece(self, token_id: int, *, first: bool = False) -> TokenPiece:
        """Returns what one token adds; nothing for an id that the tokenizer does not have.

        Args:
            token_id: The token.
            first: Whether the token opens the text; some decoders drop its word mark then.
        """
        known = self._first if first else self._later
        piece = known.get(token_id)
        if piece is None:
            # A model's vocabulary is often padded to a round size: those ids have no text.
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            piece = _NO_TEXT if token is None else self._rules.apply(token, first=first)
            known[token_id] = piece
        return piece


class StreamDecoder:
    """Decodes one sequence of token ids incrementally.

    The concatenation of everything that `push` and `finish` return is the decoded text of all
    pushed tokens, however they were split over the calls. U+FFFD appears only where no further
    token can complete a character, and then at once. Time and memory per token are constant.

    Args:
        token_bytes: The tokenizer's byte table.
        skip_special_tokens: Whether tokens marked special add no text.
        spaces_between_special_tokens: Whether an added token that follows another one keeps the
            space that some decoders put before every token. Byte-level decoders put none. Of no
            effect while special tokens are skipped, as in vLLM.
        continues_text: Whether the tokens carry on an earlier text, so that the space which a
            word-mark tokenizer drops at the start of a text is kept.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._joins_added_tokens = not (skip_special_tokens or spaces_between_special_tokens)
        self._follows_added_token = False
        self._skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._at_start = not continues_text
        self._spaces_to_drop = 0 if continues_text else token_bytes.num_leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = _FallbackRun()
        self._finished = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that became certain, possibly empty.

        Raises:
            RuntimeError: `finish` was called before.
        """
        if self._finished:
            raise RuntimeError("StreamDecoder.push after finish: make a new decoder per sequence.")
        texts: list[str] = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            piece = self._piece(token_id)
            self._at_start = False
            if piece.is_fallback_byte:
                texts.append(self._run.push(piece.data))
            elif piece.data:
                texts.append(self._run.end())
                texts.append(self._utf8.decode(piece.data))
        return self._drop_leading_spaces("".join(texts))

    def finish(self) -> str:
        """Ends the text and returns what was held back: U+FFFD for a character left incomplete.

        A second call returns the empty string.
        """
        if self._finished:
            return ""
        self._finished = True
        return self._drop_leading_spaces(self._run.end() + self._utf8.decode(b"", final=True))

    def _piece(self, token_id: int) -> TokenPiece:
        added_token = self._token_bytes.added_tokens.get(token_id)
        is_joined = self._joins_added_tokens and self._follows_added_token
        self._follows_added_token = added_token is not None
        if is_joined and added_token is not None:
            return TokenPiece(added_token.encode("utf-8"), is_fallback_byte=False)
        return self._token_bytes.piece(token_id, first=self._at_start)

    def _drop_leading_spaces(self, text: str) -> str:
        if not self._spaces_to_drop or not text:
            return text
        kept = text.lstrip(" ")
        num_dropped = min(len(text) - len(kept), self._spaces_to_drop)
        # The first character that is no space ends the start of the text.
        self._spaces_to_drop = 0 if kept else self._spaces_to_drop - num_dropped
        return text[num_dropped:]


class _FallbackRun:
    """A run of byte tokens: text if all of it is valid UTF-8, else one U+FFFD for each byte."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._text: list[str] = []
        self._num_bytes = 0
        self._is_broken = False

    def push(self, byte: bytes) -> str:
        """Takes the run's next byte and returns what became certain."""
        if self._is_broken:
            return "\ufffd"
        self._num_bytes += 1
        try:
            self._text.append(self._utf8.decode(byte))
        except UnicodeDecodeError:
            self._is_broken = True
            return "\ufffd" * self._num_bytes
        return self._release() if self._num_bytes >= _MAX_HELD_BYTES else ""

    def end(self) -> str:
        """Ends the run, if there is one, and returns what was held back."""
        if self._num_bytes == 0:
            return ""
        is_incomplete = bool(self._utf8.getstate()[0])
        if self._is_broken:
            text = ""
        elif is_incomplete:
            text = "\ufffd" * self._num_bytes
        else:
            text = "".join(self._text)
        self._start()
        return text

    def _release(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        self._num_bytes = len(self._utf8.getstate()[0])
        return text


class _DecoderRules:
    """A tokenizer's decoder as an operation on single tokens."""

    def __init__(self) -> None:
        self.steps: list[_PieceStep] = []
        self.byte_alphabet: dict[str, int] | None = None
        self.byte_fallback = False
        self.num_leading_spaces = 0
        self.fused = False

    def apply(self, token: str, *, first: bool) -> TokenPiece:
        for step in self.steps:
            token = step(token, first)
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return TokenPiece(bytes([byte]), is_fallback_byte=True)
        if self.byte_alphabet is not None:
            values = [self.byte_alphabet.get(character) for character in token]
            # An added token is stored as plain text; one character outside the alphabet marks it.
            if None not in values:
                data = bytes(value for value in values if value is not None)
                return TokenPiece(data, is_fallback_byte=False)
        return TokenPiece(token.encode("utf-8"), is_fallback_byte=False)


def _read_decoder(backend: tokenizers.Tokenizer) -> _DecoderRules:
    """Reads a tokenizer's decoder.

    Raises:
        ConfigError: A part of it is unknown or does not work token by token.
    """
    rules = _DecoderRules()
    if backend.decoder is None:
        rules.steps.append(lambda token, first: token if first else " " + token)
        return rules
    for part in _flatten(json.loads(backend.decoder.__getstate__())):
        _add_part(rules, part)
    return rules


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flatten(inner)]


def _add_part(rules: _DecoderRules, part: dict[str, Any]) -> None:
    kind = part["type"]
    if kind == "Fuse":
        rules.fused = True
    elif kind == "ByteFallback" and not rules.fused:
        rules.byte_fallback = True
    elif kind == "ByteLevel" and not rules.fused:
        rules.byte_alphabet = _byte_alphabet()
    elif kind == "Metaspace" and not rules.fused:
        rules.steps.append(
            _metaspace_step(part["replacement"], drops_first=part["prepend_scheme"] != "never")
        )
    elif kind == "Replace" and not rules.fused and "String" in part["pattern"]:
        rules.steps.append(_replace_step(part["pattern"]["String"], part["content"]))
    elif kind == "Strip" and rules.fused and part["content"] == " " and part["stop"] == 0:
        rules.num_leading_spaces += part["start"]
    else:
        raise ConfigError(
            f"tokenizer decoder: the part {json.dumps(part, ensure_ascii=False)} is not "
            "supported; supported are ByteLevel, Metaspace, ByteFallback, Replace of a plain "
            "string, Fuse, and after Fuse a Strip of leading spaces. Use another tokenizer, or "
            "pass token ids with skip_tokenizer_init=True."
        )


def _metaspace_step(mark: str, *, drops_first: bool) -> _PieceStep:
    return lambda token, first: token.replace(mark, "" if first and drops_first else " ")


def _replace_step(old: str, new: str) -> _PieceStep:
    return lambda token, first: token.replace(old, new)


def _fallback_byte(token: str) -> int | None:
    """Returns the byte that a byte-fallback token such as `<0x0A>` stands for."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in characters of byte-level BPE, each with its byte.

    Bytes that Latin-1 prints stand for themselves; the other 68 are numbered from U+0100 on.

    Source: "Language Models are Unsupervised Multitask Learners" (GPT-2), its published encoder.
    """
    printable: Sequence[range] = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
    own = {value for values in printable for value in values}
    others = [value for value in range(256) if value not in own]
    alphabet = {chr(value): value for value in own}
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(others)})
    return alphabet
