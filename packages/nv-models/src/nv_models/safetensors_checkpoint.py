"""Hugging Face checkpoints: a directory with config.json and one or more safetensors files."""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from nv_models.checkpoint import (
    Checkpoint,
    CheckpointFormat,
    CheckpointTensor,
    Copy,
    TensorInfo,
    plain_copy,
)
from nv_models.config import ModelConfig, read_json_object
from nv_models.config_values import shown
from nv_models.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"

FLOAT_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The stored dtypes that can be loaded, by their name in safetensors files."""

_DTYPE_BITS = {"F32": 32, "F16": 16, "BF16": 16, "F64": 64, "I64": 64, "I32": 32, "I16": 16}

_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_FILE_NAME = re.compile(r"[^/\\\0]{1,200}\.safetensors")

_SHARD_NAME = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


class SafetensorsCheckpoint(Checkpoint):
    """A directory with config.json and safetensors files.

    The weight files are looked for only when weights are asked for, so a directory with nothing
    but config.json can be opened for random weights.

    Args:
        path: The directory.

    Raises:
        ConfigError: config.json is missing or wrong.
        UnsupportedModelError: The model needs something that this package does not compute.
    """

    def __init__(self, path: Path) -> None:
        raw = read_json_object(path / "config.json")
        config = ModelConfig.from_dict(raw, source=str(path / "config.json"))
        generation_path = path / "generation_config.json"
        generation_config = read_json_object(generation_path) if generation_path.exists() else {}
        super().__init__(path, config, generation_config)
        if raw.get("dtype") is None and raw.get("torch_dtype") is None:
            self.config = dataclasses.replace(config, dtype=self._stored_dtype(config.dtype))

    @property
    def format(self) -> CheckpointFormat:
        """The format of the weights."""
        return "safetensors"

    def tensor_infos(self) -> Mapping[str, TensorInfo]:
        """Lists the tensors of all files; see `Checkpoint.tensor_infos`."""
        return {
            name: info for infos in self._infos_by_file().values() for name, info in infos.items()
        }

    def tensors(self, names: Collection[str]) -> Iterator[CheckpointTensor]:
        """Yields tensors file by file; see `Checkpoint.tensors`."""
        wanted = set(names)
        for path, infos in self._infos_by_file().items():
            here = [info for name, info in infos.items() if name in wanted]
            if not here:
                continue
            with _open_file(path) as file:
                for info in here:
                    _check_dtype(info)
                    yield _StoredTensor(info, file)

    def _infos_by_file(self) -> dict[Path, dict[str, TensorInfo]]:
        """Reads the headers of all weight files, tensors in the order of their bytes."""
        listed = self._read_index()
        if listed is None:
            paths = self._find_files()
        else:
            paths = [self.path / name for name in sorted(set(listed.values()))]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise WeightError(
                f"weight files are missing in {self.path}: {', '.join(missing)}; "
                "download the checkpoint again"
            )
        infos = {path: _read_header(path) for path in paths}
        _check_names(self.path, infos, listed)
        return infos

    def _read_index(self) -> dict[str, str] | None:
        """Returns the file of each tensor as the index lists it, or None without an index."""
        path = self.path / INDEX_NAME
        if not path.exists():
            return None
        listed = read_json_object(path).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise WeightError(f"{path} has no weight_map; download it again")
        # A name with a folder in it could lead out of the checkpoint.
        bad = [file for file in listed.values() if not _FILE_NAME.fullmatch(str(file))]
        if bad:
            raise WeightError(
                f"{path} must name .safetensors files of its own folder, got {shown(bad[0])}; "
                "download it again"
            )
        return {str(name): str(file) for name, file in listed.items()}

    def _find_files(self) -> list[Path]:
        single = self.path / "model.safetensors"
        if single.exists():
            return [single]
        # Mistral's repositories carry a second copy in a format of its own under this name.
        found = [
            path
            for path in sorted(self.path.glob("*.safetensors"))
            if not path.name.startswith("consolidated")
        ]
        if not found:
            raise _no_weights_error(self.path)
        return _all_shards(found)

    def _stored_dtype(self, default: torch.dtype) -> torch.dtype:
        """Returns the dtype of the stored weights, for a config.json that names none."""
        try:
            infos = self.tensor_infos()
        except WeightError:  # no weights: reported when they are needed, which may be never
            return default
        stored = (FLOAT_DTYPES.get(info.dtype) for info in infos.values())
        return next((dtype for dtype in stored if dtype is not None), default)


class _StoredTensor(CheckpointTensor):
    def __init__(self, info: TensorInfo, file: Any) -> None:  # noqa: ANN401 - safetensors has no types
        self.info = info
        self._file = file

    def copy_to(
        self, destination: Tensor, part: Sequence[tuple[int, int]], *, copy: Copy = plain_copy
    ) -> None:
        """Reads a part of the tensor; see `CheckpointTensor.copy_to`."""
        if all(bounds == (0, size) for bounds, size in zip(part, self.info.shape, strict=True)):
            values = self._file.get_tensor(self.info.name)
        else:
            slices = tuple(slice(start, stop) for start, stop in part)
            values = self._file.get_slice(self.info.name)[slices]
        copy(destination, values)


def _check_dtype(info: TensorInfo) -> None:
    if info.dtype not in FLOAT_DTYPES:
        raise WeightError(
            f"tensor {info.name} is stored as {info.dtype}; only {', '.join(FLOAT_DTYPES)} can be "
            "loaded (quantised weights: use an unquantised checkpoint, or a GGUF file)"
        )


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightError(
            f"{path} cannot be read as safetensors ({error}). It is damaged, incomplete, or a "
            "Git LFS pointer: download it again"
        ) from error
    with file as opened:
        yield opened


def _read_header(path: Path) -> dict[str, TensorInfo]:
    infos = {}
    with _open_file(path) as file:
        for name in file.offset_keys():
            stored = file.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            num_bytes = math.prod(shape) * _DTYPE_BITS.get(dtype, 8) // 8
            infos[name] = TensorInfo(name, shape, dtype, num_bytes)
    return infos


def _check_names(
    directory: Path, infos: dict[Path, dict[str, TensorInfo]], listed: dict[str, str] | None
) -> None:
    """Checks that the index tells the truth and that no tensor is stored twice."""
    for name, file in (listed or {}).items():
        if name not in infos[directory / file]:
            raise WeightError(
                f"{INDEX_NAME} says that tensor {name} is in {file}, but it is not there; "
                "the files are of different versions: download the checkpoint again"
            )
    first_file: dict[str, Path] = {}
    for path, names in infos.items():
        for name in names:
            if name in first_file:
                raise WeightError(
                    f"tensor {name} is stored twice in {directory}: in {first_file[name].name} "
                    f"and in {path.name}; remove the file that does not belong there"
                )
            first_file[name] = path


def _all_shards(found: list[Path]) -> list[Path]:
    """Adds the shards that a name like "x-00001-of-00003" promises to those that were found."""
    match = _SHARD_NAME.fullmatch(found[0].name)
    if match is None:
        return found
    stem, width, count = match[1], len(match[2]), int(match[3])
    numbers = range(1, count + 1)
    names = {f"{stem}-{n:0{width}d}-of-{match[3]}.safetensors" for n in numbers}
    return sorted({*found, *(found[0].parent / name for name in names)})


def _no_weights_error(directory: Path) -> WeightError:
    pickles = sorted({p.name for pattern in _PICKLE_PATTERNS for p in directory.glob(pattern)})
    if not pickles:
        gguf_files = ", ".join(sorted(path.name for path in directory.glob("*.gguf")))
        advice = f"; for its GGUF weights, give the path of the file ({gguf_files})"
        return WeightError(
            f"no weights in {directory}: there is no .safetensors file{advice * bool(gguf_files)}"
        )
    return WeightError(
        f"{directory} holds weights only as pickle ({', '.join(pickles)}), which can run any code "
        "when it is read, so it is refused. Convert it once, where you trust it: "
        "AutoModelForCausalLM.from_pretrained(directory).save_pretrained(new_directory)"
    )
