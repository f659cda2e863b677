"""Damages the metadata of GGUF files, byte by byte as the format lays it down.

The `gguf` package's writer would refuse to write most of this.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import gguf

if TYPE_CHECKING:
    from pathlib import Path

_COUNTS_END = 24  # magic, version, number of tensors, number of keys
_ALIGNMENT = 32

U8, I32, U32, F32, STRING, ARRAY, U64, F64 = 0, 5, 4, 6, 8, 9, 10, 12


def text(value: bytes) -> bytes:
    """Encodes a string: its length and its bytes."""
    return struct.pack("<Q", len(value)) + value


def array(item_kind: int, count: int, items: bytes = b"") -> bytes:
    """Encodes an array; `items` may disagree with `count`."""
    return struct.pack("<IQ", item_kind, count) + items


def entry(key: str, kind: int, value: bytes) -> bytes:
    """Encodes one key with its value."""
    return text(key.encode()) + struct.pack("<I", kind) + value


def header(*entries: bytes) -> bytes:
    """Encodes a file without tensors."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)


DAMAGES: dict[str, tuple[int, bytes]] = {
    "zero": (U32, struct.pack("<I", 0)),
    "small": (U32, struct.pack("<I", 3)),
    "largest u32": (U32, struct.pack("<I", 2**32 - 1)),
    "2^40": (U64, struct.pack("<Q", 2**40)),
    "largest u64": (U64, struct.pack("<Q", 2**64 - 1)),
    "negative": (I32, struct.pack("<i", -1)),
    "nan": (F32, struct.pack("<f", float("nan"))),
    "infinity": (F64, struct.pack("<d", float("inf"))),
    "fraction": (F64, struct.pack("<d", 0.5)),
    "true": (7, b"\x01"),
    "text": (STRING, text(b"x y")),
    "empty text": (STRING, text(b"")),
    "text of no encoding": (STRING, text(b"\xff\xfe")),
    "empty list": (ARRAY, array(STRING, 0)),
    "integers": (ARRAY, array(U32, 3, struct.pack("<III", 1, 2, 2**31))),
    "equal integers": (ARRAY, array(U32, 2, struct.pack("<II", 2, 2))),
    "fractions": (ARRAY, array(F32, 2, struct.pack("<ff", float("nan"), 0.5))),
    "texts": (ARRAY, array(STRING, 2, text(b"a b") + text(b"zz"))),
    "texts of no encoding": (ARRAY, array(STRING, 1, text(b"\xff\xfe"))),
    "lists": (ARRAY, array(ARRAY, 2, array(U32, 1, struct.pack("<I", 1)) * 2)),
    "lists 5000 deep": (ARRAY, array(ARRAY, 1) * 5000),
    "bytes without end": (ARRAY, array(U8, 2**40)),
    "texts without end": (ARRAY, array(STRING, 2**40)),
    "lists without end": (ARRAY, array(ARRAY, 2**62)),
    "a text without end": (STRING, struct.pack("<Q", 2**63)),
    "an unknown kind": (99, b""),
}
"""Values of every type of the format, and some of none: (type, bytes)."""

KEYS: tuple[str, ...] = (
    "general.architecture",
    "general.alignment",
    "general.name",
    *(f"general.sampling.{name}" for name in ("temp", "top_k", "top_p", "min_p", "penalty_repeat")),
    *(
        f"llama.{name}"
        for name in (
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "expert_count",
            "logit_scale",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "attention.layer_norm_rms_epsilon",
            "attention.sliding_window",
            "attention.causal",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scale_linear",
            "rope.scaling.type",
            "rope.scaling.factor",
        )
    ),
    "split.count",
    *(
        f"tokenizer.ggml.{name}"
        for name in (
            "model",
            "pre",
            "tokens",
            "token_type",
            "scores",
            "merges",
            "bos_token_id",
            "eos_token_id",
            "eot_token_id",
            "eom_token_id",
            "unknown_token_id",
            "padding_token_id",
            "add_bos_token",
            "add_eos_token",
            "add_space_prefix",
        )
    ),
    "tokenizer.chat_template",
)
"""What is read of the metadata of a Llama, present in a file or not."""


def with_value(path: Path, key: str, kind: int, value: bytes) -> bytes:
    """Returns the content of a file with one value replaced, or added.

    Args:
        path: A whole file.
        key: The key; need not be there.
        kind: Type of the new value.
        value: Its bytes.
    """
    content = path.read_bytes()
    reader = gguf.GGUFReader(path)
    num_keys = struct.unpack_from("<Q", content, _COUNTS_END - 8)[0]
    start = end = _COUNTS_END
    if key in reader.fields:
        field = reader.fields[key]
        start = field.offset
        end = start + sum(part.nbytes for part in field.parts)
    else:
        num_keys += 1
    last = reader.tensors[-1].field
    infos_end = last.offset + sum(part.nbytes for part in last.parts)
    described = (
        content[: _COUNTS_END - 8]
        + struct.pack("<Q", num_keys)
        + content[_COUNTS_END:start]
        + entry(key, kind, value)
        + content[end:infos_end]
    )
    padding = b"\0" * (-len(described) % _ALIGNMENT)
    return described + padding + content[reader.data_offset :]
