"""What ranks must agree on before they compute together, compared through the ranks' store.

Ranks that differ would not fail: they would wait for each other for ever, or compute nonsense. So
each publishes what it has, and compares itself with all the others.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import nv_core
import nv_kernels
import nv_models
import nv_runtime
from nv_core import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from nv_models import CausalLM, Checkpoint, ModelConfig

Facts = Mapping[str, str | int]
"""What a rank has, by field."""

_POLL_S = 0.01


class Agreement:
    """Compares ranks; every rank calls the same methods in the same order."""

    def __init__(self, store: Store, *, rank: int, size: int, check: Callable[[], None]) -> None:
        """Takes the store where all ranks meet.

        Args:
            store: Theirs alone.
            rank: This process's.
            size: Number of ranks.
            check: Called while waiting for others; raises to give up.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._check = check
        self._round = 0

    def require_equal(self, facts: Facts) -> None:
        """Checks that every rank has the same facts.

        Raises:
            ConfigError: One differs from rank 0; the message names rank, field and both values, of
                the first field in the order of `facts` where they differ.
        """
        everyone = self._exchange(facts)
        first = everyone[0]
        for rank, theirs in enumerate(everyone):
            for field in dict.fromkeys([*first, *theirs]):
                if theirs.get(field) != first.get(field):
                    raise ConfigError(
                        f"rank {rank} disagrees with rank 0 on {field}: it has "
                        f"{theirs.get(field)!r}, rank 0 has {first.get(field)!r}; all ranks must "
                        "run the same code with the same options on the same checkpoint"
                    )

    def smallest(self, count: int) -> int:
        """Returns the smallest of all ranks' counts."""
        return min(int(theirs["count"]) for theirs in self._exchange({"count": count}))

    def _exchange(self, facts: Facts) -> list[Facts]:
        self._round += 1
        self._store.set(self._key(self._rank), json.dumps(dict(facts)))
        everyone: list[Facts] = []
        for rank in range(self._size):
            key = self._key(rank)
            while not self._store.check([key]):
                self._check()
                time.sleep(_POLL_S)
            everyone.append(json.loads(self._store.get(key)))
        return everyone

    def _key(self, rank: int) -> str:
        return f"agreement/{self._round}/{rank}"


def code_facts() -> Facts:
    """Describes the code that this rank runs."""
    packages = (nv_core, nv_kernels, nv_models, nv_runtime)
    facts: dict[str, str | int] = {"torch version": torch.__version__}
    for package in packages:
        folder = Path(str(package.__file__)).parent
        facts[f"{package.__name__} version"] = package.__version__
        facts[f"{package.__name__} code checksum"] = _code_checksum(folder)
    return facts


def model_facts(config: ModelConfig) -> Facts:
    """Describes a model's configuration, field by field."""
    return {f"model {name}": repr(value) for name, value in asdict(config).items()}


def checkpoint_facts(checkpoint: Checkpoint) -> Facts:
    """Describes the tensors of a checkpoint: their names, shapes, types and sizes."""
    infos = sorted(repr(info) for info in checkpoint.tensor_infos().values())
    return {
        "checkpoint tensors": len(infos),
        "checkpoint shapes checksum": zlib.crc32("\n".join(infos).encode()),
    }


def weight_facts(model: CausalLM) -> Facts:
    """Describes what every rank holds whole: the weights of the norms, and the cache's scales.

    They tell a checkpoint from another of the same shapes.
    """
    checksum = 0
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            values = parameter.detach().cpu().contiguous().view(torch.uint8).numpy()
            checksum = zlib.crc32(values.tobytes(), zlib.crc32(name.encode(), checksum))
    return {
        "norm weights checksum": checksum,
        "KV cache scales checksum": zlib.crc32(repr(model.kv_scales).encode()),
    }


@cache
def _code_checksum(folder: Path) -> int:
    checksum = 0
    for path in sorted(folder.rglob("*.py")):
        checksum = zlib.crc32(str(path.relative_to(folder)).encode(), checksum)
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum
