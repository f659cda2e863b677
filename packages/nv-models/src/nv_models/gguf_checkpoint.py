"""GGUF files: one file with metadata, tokenizer and weights, which may be quantised.

Weights are dequantised as they are read, some rows at a time, into the dtype of the model. Layout
of the format: the specification in ggml's docs/gguf.md; block formats: the `gguf` package.
"""

from __future__ import annotations

import re
import struct
import sys
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize

from nv_models.checkpoint import (
    Checkpoint,
    CheckpointFormat,
    CheckpointTensor,
    Copy,
    TensorInfo,
    plain_copy,
)
from nv_models.config_values import shown
from nv_models.errors import UnsupportedModelError, WeightError
from nv_models.gguf_metadata import (
    GGUFTokenizerData,
    read_gguf_config,
    read_gguf_generation_config,
    read_gguf_tokenizer,
)
from nv_models.registry import find_architecture

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt
    from gguf.gguf_reader import ReaderTensor
    from torch import Tensor

# Elements dequantised at once: bounds the fp32 copy to 64 MiB, whatever the size of the tensor.
_CHUNK_ELEMENTS = 16 * 1024 * 1024

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# The package checks little: damage shows as whatever its arithmetic runs into.
_DAMAGE = (ValueError, KeyError, IndexError, ArithmeticError, TypeError, OSError)

# No model needs arrays inside arrays; each level takes a level of recursion.
_MAX_ARRAY_DEPTH = 8

_ROPE_DIVISORS = "rope_freqs.weight"

# As long as the vocabulary, and not needed for the config.
_VOCABULARY_KEYS = frozenset(
    f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges")
)


class GGUFCheckpoint(Checkpoint):
    """One GGUF file.

    Its config declares the stored dtype when all weights of more than one dimension have the same
    float type, and bfloat16 when they are quantised.

    Args:
        path: The file.

    Raises:
        ConfigError: Metadata is missing or of the wrong type.
        UnsupportedModelError: The model needs something that this package does not compute.
        WeightError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._reader = _open_reader(path)
        shapes = {tensor.name: _shape(tensor) for tensor in self._reader.tensors}
        metadata = _read_metadata(self._reader, path, without=_VOCABULARY_KEYS)
        config = read_gguf_config(
            metadata,
            shapes,
            dtype=_declared_dtype(self._reader.tensors),
            frequency_divisors=self._read_rope_divisors(),
            source=path.name,
        )
        super().__init__(path, config, read_gguf_generation_config(metadata, source=path.name))
        self._interleaved_heads = (
            {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
            if find_architecture(config.architecture).gguf_interleaves_qk
            else {}
        )

    @property
    def format(self) -> CheckpointFormat:
        """The format of the weights."""
        return "gguf"

    @property
    def tokenizer_data(self) -> GGUFTokenizerData:
        """The tokenizer in the file; read anew by each access."""
        metadata = _read_metadata(self._reader, self.path)
        return read_gguf_tokenizer(metadata, source=self.path.name)

    def tensor_infos(self) -> Mapping[str, TensorInfo]:
        """Lists the tensors by Hugging Face name; see `Checkpoint.tensor_infos`.

        Tensors that no supported architecture has keep their GGUF name.
        """
        infos = {}
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_DIVISORS:  # part of the config
                continue
            name = _hugging_face_name(tensor.name)
            infos[name] = TensorInfo(
                name, _shape(tensor), tensor.tensor_type.name, int(tensor.n_bytes)
            )
        return infos

    def tensors(self, names: Collection[str]) -> Iterator[CheckpointTensor]:
        """Yields tensors in file order; see `Checkpoint.tensors`."""
        infos = self.tensor_infos()
        wanted = set(names)
        for tensor in self._reader.tensors:
            name = _hugging_face_name(tensor.name)
            if name in wanted:
                projection = name.split(".")[-2]
                yield _StoredTensor(
                    infos[name], tensor, interleaved_heads=self._interleaved_heads.get(projection)
                )

    def _read_rope_divisors(self) -> tuple[float, ...] | None:
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_DIVISORS:
                return tuple(_dequantize(tensor, tensor.data).reshape(-1).tolist())
        return None


class _StoredTensor(CheckpointTensor):
    """One tensor of a GGUF file.

    Args:
        info: Its description.
        stored: Where its bytes are.
        interleaved_heads: Number of heads whose two halves are interleaved row by row, or None for
            a tensor in Hugging Face's order.
    """

    def __init__(
        self, info: TensorInfo, stored: ReaderTensor, *, interleaved_heads: int | None
    ) -> None:
        self.info = info
        self._stored = stored
        self._interleaved_heads = interleaved_heads

    def copy_to(
        self, destination: Tensor, part: Sequence[tuple[int, int]], *, copy: Copy = plain_copy
    ) -> None:
        """Reads whole rows, some at a time, and keeps the part; see `CheckpointTensor.copy_to`."""
        (start, stop), *columns = part
        rows = np.arange(start, stop)
        if self._interleaved_heads is not None:
            rows = _interleaved_rows(rows, self.info.shape[0] // self._interleaved_heads)
        if not columns:  # blocks of a vector lie along its rows: it is read whole
            values = _dequantize(self._stored, self._stored.data)
            copy(destination, torch.from_numpy(values[rows]))
            return
        ((first, last),) = columns
        num_rows = max(1, _CHUNK_ELEMENTS // self.info.shape[1])
        for begin in range(0, len(rows), num_rows):
            # An array of rows copies them, so that torch never sees the read-only file itself.
            chunk = rows[begin : begin + num_rows]
            values = _dequantize(self._stored, self._stored.data[chunk])[:, first:last]
            copy(destination[begin : begin + len(chunk)], torch.from_numpy(values))


def _interleaved_rows(rows: npt.NDArray[np.int64], head_dim: int) -> npt.NDArray[np.int64]:
    """Returns where rows in Hugging Face's order lie in a file that interleaves halves of heads.

    Rotary embedding turns pairs. Hugging Face pairs row i of a head with row i + head_dim / 2;
    llama.cpp's llama keeps pairs side by side: 2 i and 2 i + 1.
    """
    row = rows % head_dim
    half, pair = row // (head_dim // 2), row % (head_dim // 2)
    interleaved: npt.NDArray[np.int64] = rows - row + 2 * pair + half
    return interleaved


class _Reader(GGUFReader):
    """The reader of the `gguf` package, many times as fast, and strict about the end of the file.

    It cuts hundreds of thousands of small pieces, the vocabulary, from a mapped file. Each is an
    object of NumPy's class for mapped memory, which is slow to make; a plain view of the same
    memory cuts plain pieces.

    Past the end the package reads empty pieces without an error, as often as a damaged count says.
    Here a count is compared with the bytes that are left, and an array of numbers is one piece.
    """

    def __init__(self, path: Path) -> None:
        self._array_depth = 0
        super().__init__(path)

    @property  # type: ignore[override]  # a plain array instead of its subclass
    def data(self) -> npt.NDArray[np.uint8]:
        """The mapped file."""
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        piece = super()._get(offset, dtype, count, override_order)
        if len(piece) != count:
            raise ValueError(
                f"it has {len(self._data)} bytes, and {count} items of {np.dtype(dtype).name} at "
                f"byte {offset} do not fit"
            )
        return piece

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        """Returns a value's size in bytes, its pieces, which of them are data, and its types."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_kind = self._get(orig_offs, np.uint32)
        length = self._get(orig_offs + raw_kind.nbytes, np.uint64)
        kind, count = GGUFValueType(raw_kind[0]), int(length[0])
        start = orig_offs + raw_kind.nbytes + length.nbytes
        scalar = self.gguf_scalar_to_np.get(kind)
        if scalar is not None:
            items = self._get(start, scalar, count)
            parts = [raw_kind, length, items]
            return start - orig_offs + items.nbytes, parts, [2], [GGUFValueType.ARRAY, kind]
        if kind == GGUFValueType.STRING:
            size, texts = self._get_texts(start, count)
            data = list(range(2, 2 + count))
            types = [GGUFValueType.ARRAY, kind]
            return start - orig_offs + size, [raw_kind, length, *texts], data, types
        # Arrays in an array: each has a type of 4 bytes and a length of 8.
        if count * 12 > len(self._data) - start:
            raise ValueError(
                f"it has {len(self._data)} bytes, and {count} items of an array at byte "
                f"{orig_offs} do not fit"
            )
        if self._array_depth == _MAX_ARRAY_DEPTH:
            raise ValueError(f"arrays at byte {orig_offs} are more than {_MAX_ARRAY_DEPTH} deep")
        self._array_depth += 1
        found = super()._get_field_parts(orig_offs, raw_type)
        self._array_depth -= 1
        return found

    def _get_texts(self, start: int, count: int) -> tuple[int, list[npt.NDArray[Any]]]:
        """Returns the size in bytes of `count` strings one after the other, and their bytes."""
        is_little = (sys.byteorder == "little") == (self.byte_order == "I")
        read_length = struct.Struct("<Q" if is_little else ">Q").unpack_from
        data, end, place = self._data, len(self._data), start
        raw = data.data
        texts = []
        for _ in range(count):
            first = place + 8
            place = end + 1 if first > end else first + read_length(raw, place)[0]
            if place > end:
                raise ValueError(
                    f"it has {end} bytes, and {count} strings at byte {start} do not fit"
                )
            texts.append(data[first:place])
        return place - start, texts


def _open_reader(path: Path) -> GGUFReader:
    try:
        with np.errstate(over="raise"):  # offsets must not wrap around
            reader = _Reader(path)
    except _DAMAGE as error:
        raise WeightError(
            f"{path} cannot be read as GGUF ({error}). It is damaged, incomplete, or a Git LFS "
            "pointer: download it again"
        ) from error
    if reader.byte_order != "I":
        raise UnsupportedModelError(
            f"{path} was written for machines of the other byte order, which is not supported"
        )
    return reader


def _read_metadata(
    reader: GGUFReader, path: Path, *, without: Collection[str] = ()
) -> dict[str, Any]:
    metadata = {}
    for key, field in reader.fields.items():
        if key in without:
            continue
        try:
            metadata[key] = field.contents()
        except UnicodeDecodeError as error:
            raise WeightError(
                f"{key} in {path} must be text in UTF-8, got {shown(error.object)} ({error.reason} "
                f"at byte {error.start}). The file is damaged: download it again"
            ) from error
    return metadata


def _dequantize(tensor: ReaderTensor, data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Turns rows of stored bytes into numbers; for F32 these are the bytes themselves."""
    try:
        values = dequantize(data, tensor.tensor_type)
    except NotImplementedError as error:
        raise WeightError(
            f"tensor {tensor.name} is stored as {tensor.tensor_type.name}, which cannot be "
            "dequantised; use a file of another quantisation"
        ) from error
    return np.asarray(values, dtype=np.float32)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts from the last one


def _hugging_face_name(name: str) -> str:
    """Translates a GGUF tensor name; one that no supported architecture has stays as it is."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{_GLOBAL_NAMES[part]}.{kind}" if part in _GLOBAL_NAMES else name


def _declared_dtype(tensors: Sequence[ReaderTensor]) -> torch.dtype:
    types = {tensor.tensor_type for tensor in tensors if len(tensor.shape) > 1}
    if types == {GGMLQuantizationType.F32}:
        return torch.float32
    if types == {GGMLQuantizationType.F16}:
        return torch.float16
    return torch.bfloat16
