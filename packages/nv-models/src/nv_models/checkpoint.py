"""Checkpoint: a model's configuration and weights on disk, whatever the format.

A checkpoint can be opened, asked what it holds, and read tensor by tensor; it never holds weights
in memory. Only formats that cannot run code are read: safetensors and GGUF, never pickle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from nv_models.config import ModelConfig
    from nv_models.gguf_metadata import GGUFTokenizerData

CheckpointFormat = Literal["safetensors", "gguf"]


Copy = Callable[["Tensor", "Tensor"], object]
"""Copies to the first tensor from the second, which is on the CPU."""


def plain_copy(destination: Tensor, values: Tensor) -> None:
    """Copies and waits."""
    destination.copy_(values)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint says about one tensor without reading it.

    Args:
        name: Hugging Face name, also for formats with names of their own.
        shape: Shape as the model sees it.
        dtype: The format's name of the stored type, for example "BF16" or "Q4_K".
        num_bytes: Bytes on disk.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class CheckpointTensor(ABC):
    """One stored tensor, readable in parts while its checkpoint iterates over it."""

    info: TensorInfo

    @abstractmethod
    def copy_to(
        self, destination: Tensor, part: Sequence[tuple[int, int]], *, copy: Copy = plain_copy
    ) -> None:
        """Reads a part of the tensor.

        Args:
            destination: Receives the part; any float dtype, any device, any strides.
            part: (start, stop) for each dimension, of the shape of `destination`. Nothing beside
                the part is read, or no more than the format's blocks force.
            copy: Copies values on the CPU to a destination of the same shape.
        """


class Checkpoint(ABC):
    """A checkpoint on disk.

    Args:
        path: The directory or file.
        config: The model.
        generation_config: Sampling defaults that came with the model, in the names of
            generation_config.json; empty when there are none.
    """

    def __init__(self, path: Path, config: ModelConfig, generation_config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config

    @property
    @abstractmethod
    def format(self) -> CheckpointFormat:
        """The format of the weights."""

    @property
    def tokenizer_data(self) -> GGUFTokenizerData | None:
        """The tokenizer that a GGUF file carries; None for directories, which have files for it."""
        return None

    @abstractmethod
    def tensor_infos(self) -> Mapping[str, TensorInfo]:
        """Lists the tensors, by Hugging Face name.

        Raises:
            WeightError: A weight file is missing or damaged, or the index disagrees with it.
        """

    @abstractmethod
    def tensors(self, names: Collection[str]) -> Iterator[CheckpointTensor]:
        """Yields tensors in the order that they lie on disk, one at a time.

        A tensor may be read only until the next one is asked for.

        Args:
            names: Those to yield; each must be in `tensor_infos()`.

        Raises:
            WeightError: A weight file is missing or damaged.
        """


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a checkpoint: reads its configuration, and no weights yet.

    Args:
        path: A directory with config.json and safetensors files, a .gguf file, or a directory that
            holds just one of these.

    Raises:
        ConfigError: There is no checkpoint here, or its configuration is wrong.
        UnsupportedModelError: The model needs something that this package does not compute.
        WeightError: A GGUF file is damaged.
    """
    # Imported here: the format classes extend the ones above, and reading safetensors should not
    # cost the import of the gguf package.
    from nv_models.safetensors_checkpoint import SafetensorsCheckpoint

    path = Path(path)
    if not path.exists():
        raise ConfigError(f"no checkpoint at {path}: the path does not exist")
    if path.is_dir():
        gguf_files = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not gguf_files:
            return SafetensorsCheckpoint(path)
        if len(gguf_files) > 1:
            names = ", ".join(file.name for file in gguf_files)
            raise ConfigError(f"{path} holds several GGUF files ({names}): give the path of one")
        path = gguf_files[0]
    if path.suffix != ".gguf":
        raise ConfigError(
            f"{path} is not a checkpoint: give the directory of a Hugging Face checkpoint, or a "
            ".gguf file"
        )
    from nv_models.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
