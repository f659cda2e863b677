"""A rank, started as a fresh interpreter, that fails in its fourth step."""

from __future__ import annotations

from forked_ranks import In, fail
from nv_runtime.ranks import rank_main


def main(*fds: int) -> None:
    """Runs the rank; see `nv_runtime.ranks.rank_main.main`."""
    In("nv_runtime.model_runner:ModelRunner", "launch", fail, 3)()
    rank_main.main(*fds)
