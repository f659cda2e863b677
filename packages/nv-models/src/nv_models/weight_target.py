"""TensorTarget: where one tensor of a checkpoint goes, on this rank.

Layers fuse what checkpoints keep apart (q, k and v; gate and up) and hold only their rank's share.
Each layer says so as data: for every checkpoint tensor its name, its full shape, which part of it
this rank needs, and which part of which parameter that part fills. Loaders need to know nothing
else about layers, and whether every element of every parameter is filled can be counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTarget:
    """One checkpoint tensor's destination on this rank.

    Args:
        name: The tensor's name in Hugging Face checkpoints.
        shape: Its full shape.
        source: The part this rank needs: a (start, stop) for each dimension.
        parameter: The parameter that the part fills.
        first_row: Row of the parameter where the part begins.
        num_rows: Rows of the parameter that the part accounts for. Where this is more than the
            part has (a padded vocabulary), the rest is zero.
        aliases: Other names for the same tensor; when a checkpoint has several, they must agree.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[tuple[int, int], ...]
    parameter: nn.Parameter
    first_row: int
    num_rows: int
    aliases: tuple[str, ...] = ()

    @property
    def region(self) -> Tensor:
        """The rows of the parameter that this tensor accounts for, padding included; a view."""
        return self.parameter.data[self.first_row : self.first_row + self.num_rows]

    @property
    def filled_region(self) -> Tensor:
        """The rows of the parameter that take values from the checkpoint; a view."""
        start, stop = self.source[0]
        return self.region[: stop - start]

    @property
    def num_elements(self) -> int:
        """Number of parameter elements that this tensor accounts for, padding included."""
        return self.num_rows * math.prod(self.parameter.shape[1:])


def whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns the part of a tensor that is all of it, as in `TensorTarget.source`."""
    return tuple((0, size) for size in shape)
