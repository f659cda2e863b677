"""Streams against the `tokenizers` library's decoding of the whole sequence."""

from __future__ import annotations

import functools
import itertools
import time
import unicodedata
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from nv_core.errors import ConfigError
from nv_runtime.detokenizer import StreamDecoder, TokenBytes
from tiny_tokenizers import BYTE_LEVEL_KINDS, KINDS, SAMPLE_TEXTS

REPLACEMENT = "\ufffd"

scripts = st.text(
    st.one_of(
        st.characters(min_codepoint=0x20, max_codepoint=0x24F),
        st.characters(min_codepoint=0x400, max_codepoint=0x6FF),
        st.characters(min_codepoint=0x900, max_codepoint=0xE7F),
        st.characters(min_codepoint=0x3040, max_codepoint=0x9FFF),
        st.characters(min_codepoint=0x1F300, max_codepoint=0x1FAFF),
        st.sampled_from(" \n\t\u200d\ufe0f\u0301\u2581"),
    ),
    max_size=40,
)


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


@functools.cache
def token_bytes(kind: str) -> TokenBytes:
    return TokenBytes(tokenizer(kind))


def id_of(kind: str, token: str) -> int:
    token_id = tokenizer(kind).token_to_id(token)
    assert token_id is not None
    return token_id


def stream(decoder: StreamDecoder, ids: Iterable[int]) -> list[str]:
    return [*(decoder.push([token_id]) for token_id in ids), decoder.finish()]


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(place % (len(ids) + 1) for place in places), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", SAMPLE_TEXTS)
def test_deltas_add_up_to_the_whole_text(kind: str, text: str, *, skip: bool) -> None:
    ids = tokenizer(kind).encode(text).ids
    decoder = StreamDecoder(token_bytes(kind), skip_special_tokens=skip)
    whole = tokenizer(kind).decode(ids, skip_special_tokens=skip)
    assert "".join(stream(decoder, ids)) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(text=scripts, places=st.lists(st.integers(0, 200), max_size=8), end=st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_any_cut_of_any_script(kind: str, text: str, places: list[int], end: int) -> None:
    ids = tokenizer(kind).encode(text).ids
    ids = ids[: end % (len(ids) + 1)]
    decoder = StreamDecoder(token_bytes(kind))
    deltas = [decoder.push(part) for part in cut(ids, places)] + [decoder.finish()]
    assert "".join(deltas) == tokenizer(kind).decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_token_ids(kind: str, data: st.DataObject) -> None:
    # Ids past the end are those of a padded model vocabulary.
    any_id = st.integers(0, tokenizer(kind).get_vocab_size() + 5)
    ids = data.draw(st.lists(any_id, max_size=60))
    skip = data.draw(st.booleans())
    decoder = StreamDecoder(token_bytes(kind), skip_special_tokens=skip)
    whole = tokenizer(kind).decode(ids, skip_special_tokens=skip)
    assert "".join(stream(decoder, ids)) == whole


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS)
@given(data=st.binary(max_size=40))
@example(b"\xf0\x9f\x98\x80\xf0\x9f\xff\xed\xa0\x80\xc0\xaf\xf4\x90\x80\x80\xe4\xbd")
@settings(max_examples=60, deadline=None)
def test_any_bytes_one_token_each(kind: str, data: bytes) -> None:
    by_byte = {token_bytes(kind).piece(i).data: i for i in range(300)}
    ids = [by_byte[bytes([value])] for value in data]
    deltas = stream(StreamDecoder(token_bytes(kind)), ids)
    assert "".join(deltas) == tokenizer(kind).decode(ids)
    assert "".join(deltas) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("kind", KINDS)
def test_no_replacement_character_while_one_may_complete(kind: str) -> None:
    text = "🌶 ďábelské 世界 👩‍👩‍👧‍👦"
    ids = tokenizer(kind).encode(text, add_special_tokens=False).ids
    deltas = stream(StreamDecoder(token_bytes(kind)), ids)
    assert len(ids) > len(deltas[:-1]) / 2
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert "".join(deltas) == text


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS)
def test_a_character_is_sent_with_its_last_byte(kind: str) -> None:
    by_byte = {token_bytes(kind).piece(i).data: i for i in range(300)}
    decoder = StreamDecoder(token_bytes(kind))
    sent = [decoder.push([by_byte[bytes([value])]]) for value in "é🌶".encode()]
    assert sent == ["", "é", "", "", "", "🌶"]


@pytest.mark.parametrize("kind", KINDS)
def test_finish_flushes_a_cut_character(kind: str) -> None:
    ids = tokenizer(kind).encode("ok 🌶", add_special_tokens=False).ids[:-1]
    decoder = StreamDecoder(token_bytes(kind))
    shown = "".join(decoder.push([token_id]) for token_id in ids)
    assert shown.strip() == "ok"
    rest = decoder.finish()
    # Byte-level decoding makes one mark of a cut character, byte fallback one of each byte.
    assert rest == REPLACEMENT * (1 if kind in BYTE_LEVEL_KINDS else 3)
    assert shown + rest == tokenizer(kind).decode(ids)
    assert decoder.finish() == ""
    with pytest.raises(RuntimeError, match="finish"):
        decoder.push(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_genuine_replacement_characters_arrive_at_once(kind: str) -> None:
    name = "ÿ" if kind in BYTE_LEVEL_KINDS else "<0xFF>"
    token_id = id_of(kind, name)
    decoder = StreamDecoder(token_bytes(kind))
    assert [decoder.push([token_id]) for _ in range(500)] == [REPLACEMENT] * 500
    assert decoder.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_work_per_token_does_not_grow(kind: str) -> None:
    lead = "ð" if kind in BYTE_LEVEL_KINDS else "<0xF0>"
    token_id = id_of(kind, lead)
    decoder = StreamDecoder(token_bytes(kind))
    start = time.perf_counter()
    for _ in range(100_000):
        decoder.push([token_id])
    # Takes a tenth of a second; decoding all tokens again for each would take an hour.
    assert time.perf_counter() - start < 20


def test_a_long_run_of_byte_tokens_does_not_wait_for_its_end() -> None:
    table = token_bytes("llama2")
    ids = [id_of("llama2", f"<0x{byte:02X}>") for byte in "ខ្មែរ".encode() * 20]
    decoder = StreamDecoder(table)
    longest, waiting, text = 0, 0, ""
    for token_id in ids:
        delta = decoder.push([token_id])
        waiting = 0 if delta else waiting + 1
        longest, text = max(longest, waiting), text + delta
    assert longest <= 64
    assert text + decoder.finish() == "ខ្មែរ" * 20


def test_merged_spaces_survive_between_tokens() -> None:
    for kind in KINDS:
        text = "LLMs. It works,  it's   fine."
        ids = tokenizer(kind).encode(text, add_special_tokens=False).ids
        assert "".join(stream(StreamDecoder(token_bytes(kind)), ids)) == text


def test_text_that_carries_on_keeps_its_leading_space() -> None:
    ids = tokenizer("llama2").encode("Paris", add_special_tokens=False).ids
    table = token_bytes("llama2")
    assert "".join(stream(StreamDecoder(table), ids)) == "Paris"
    assert "".join(stream(StreamDecoder(table, continues_text=True), ids)) == " Paris"


def test_words_without_a_decoder_are_joined_by_spaces() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "\u2581\u2581c": 2}, unk_token="a"))
    assert "".join(stream(StreamDecoder(TokenBytes(words)), [0, 1, 9, 0])) == "a b a"
    words.decoder = decoders.Metaspace()
    for ids in ([2, 0, 2], [0, 2]):
        assert "".join(stream(StreamDecoder(TokenBytes(words)), ids)) == words.decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Replace(Regex("a+"), "b"),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
    ],
)
def test_a_decoder_that_needs_neighbours_is_refused(decoder: decoders.Decoder) -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoder
    with pytest.raises(ConfigError, match=r"tokenizer decoder: the part .* is not supported"):
        TokenBytes(words)


def test_every_byte_has_a_printable_stand_in() -> None:
    table = token_bytes("qwen")
    singles = [table.piece(i).data for i in range(256)]
    assert sorted(singles) == [bytes([value]) for value in range(256)]
    names = [tokenizer("qwen").id_to_token(i) or "" for i in range(256)]
    assert all(unicodedata.category(name)[0] not in "CZ" for name in names)


@pytest.mark.parametrize("kind", KINDS)
@given(text=scripts)
@settings(max_examples=40, deadline=None)
def test_the_librarys_own_stream_says_the_same_as_far_as_it_goes(kind: str, text: str) -> None:
    # It waits for ever behind a replacement character, even a genuine one, and decodes all that
    # waits anew with every token: that is why it is not used.
    ids = tokenizer(kind).encode(text, add_special_tokens=False).ids
    theirs, ours = decoders.DecodeStream(), StreamDecoder(token_bytes(kind))
    said = "".join(theirs.step(tokenizer(kind), token_id) or "" for token_id in ids)
    whole = "".join(stream(ours, ids))
    assert whole.startswith(said)
    if REPLACEMENT not in text:
        assert whole == said


def test_the_librarys_own_stream_waits_behind_a_broken_character() -> None:
    ids = [id_of("qwen", "ÿ"), *tokenizer("qwen").encode(" fine").ids]
    theirs, ours = decoders.DecodeStream(), StreamDecoder(token_bytes("qwen"))
    assert theirs.step(tokenizer("qwen"), ids[0]) is None
    assert stream(ours, ids)[0] == REPLACEMENT


def test_spaces_between_added_tokens_may_be_left_out() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.add_special_tokens(["<x>", "<y>"])
    words.add_tokens(["plain"])
    ids = [2, 3, 0, 4, 2, 1, 3]

    def text(**options: bool) -> str:
        return "".join(stream(StreamDecoder(TokenBytes(words), **options), ids))

    assert text(skip_special_tokens=False) == "<x> <y> a plain <x> b <y>"
    shown = text(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert shown == "<x><y> a plain<x> b <y>"
    # As in vLLM, the option says nothing while special tokens are skipped.
    skipped = text(spaces_between_special_tokens=False)
    assert skipped == text() == words.decode(ids)
