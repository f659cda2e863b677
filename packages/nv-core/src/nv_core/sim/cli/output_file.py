"""OutputFile: an option that names a file to write, refused before anything is simulated for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click


class OutputFile(click.Path):
    """A path that can be written.

    Args:
        suffixes: What its name may end in; empty for anything.
    """

    def __init__(self, suffixes: Sequence[str] = ()) -> None:
        """Remembers the endings."""
        super().__init__(path_type=Path)
        self._suffixes = tuple(suffixes)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        """Returns the path; fails, naming the option, if no file can be written there."""
        path = Path(value)
        if self._suffixes and path.suffix not in self._suffixes:
            self.fail(
                f"the name must end in {', '.join(self._suffixes)}, got {path.name!r}", param, ctx
            )
        if path.is_dir():
            self.fail(f"{path} is a directory; name a file", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no directory {path.parent}; make it first", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{path} may not be written", param, ctx)
        return path
