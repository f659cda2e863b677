"""A communicator whose collectives stand in graphs ends after them, and nobody waits for ever.

The communicator here behaves as NCCL's: `abort` first ends what runs, then waits for every graph.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import nv_runtime.captured_graphs
from nv_models import TensorParallel
from nv_runtime.captured_graphs import CapturedGraphs
from nv_runtime.ranks.process_group import RankGroup

LIMIT_S = 20.0

POOL: Any = SimpleNamespace(handle=lambda _stream: None)


class Communicator:
    """Counts the graphs that hold its collectives."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.is_aborted = threading.Event()
        self.has_ended = threading.Event()

    def abort(self) -> None:
        self.is_aborted.set()
        stop = time.monotonic() + LIMIT_S
        while self.num_graphs and time.monotonic() < stop:
            time.sleep(0.001)
        if not self.num_graphs:
            self.has_ended.set()


class Graph:
    """A graph with a collective in it."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        communicator.num_graphs += 1
        self.num_replays = 0
        self.is_replaying = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()

    def replay(self) -> None:
        self.num_replays += 1
        self.is_replaying.set()
        assert self.may_return.wait(LIMIT_S)

    def reset(self) -> None:
        self._communicator.num_graphs -= 1


@pytest.fixture
def communicator() -> Communicator:
    return Communicator()


@pytest.fixture
def graphs(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> CapturedGraphs:
    def capture(run: Callable[[], object], *_where: object) -> tuple[Graph, object]:
        return Graph(communicator), run()

    monkeypatch.setattr(nv_runtime.captured_graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return CapturedGraphs()


def group_of(communicator: Communicator, *, over_host: bool = False) -> RankGroup:
    group = cast("torch.distributed.ProcessGroup", communicator)
    host = group if over_host else cast("torch.distributed.ProcessGroup", object())
    return RankGroup(TensorParallel(0, 2, group), TensorParallel(0, 2, host))


def test_the_graphs_end_before_the_communicator(
    communicator: Communicator, graphs: CapturedGraphs
) -> None:
    captured = [graphs.capture(lambda: "output", POOL)[0] for _ in range(3)]
    assert (graphs.num_graphs, communicator.num_graphs) == (3, 3)
    graphs.replay(captured[1])
    assert cast("Any", captured[1]).num_replays == 1
    for _ in range(2):  # a failure ends it, and then the end of the engine
        group_of(communicator).abort(graphs)
        assert communicator.has_ended.is_set()
        assert communicator.num_graphs == 0


def test_nothing_is_replayed_or_captured_any_more(
    communicator: Communicator, graphs: CapturedGraphs
) -> None:
    graph, _ = graphs.capture(lambda: "output", POOL)
    group_of(communicator).abort(graphs)
    with pytest.raises(RuntimeError, match="have been released"):
        graphs.replay(graph)
    with pytest.raises(RuntimeError, match="have been released"):
        graphs.capture(lambda: "output", POOL)
    assert cast("Any", graph).num_replays == communicator.num_graphs == 0


@pytest.mark.parametrize("what", ["replay", "capture"])
def test_a_thread_amid_a_launch_finishes_it_first(
    communicator: Communicator, graphs: CapturedGraphs, what: str
) -> None:
    """The communicator is left alone meanwhile: a capture that it waits for could never end."""
    graph = cast("Any", graphs.capture(lambda: "output", POOL)[0])
    graph.may_return.clear()
    begun = threading.Event()

    def record() -> None:
        begun.set()
        assert graph.may_return.wait(LIMIT_S)

    if what == "replay":
        launch = threading.Thread(target=lambda: graphs.replay(graph))
        launch.start()
        assert graph.is_replaying.wait(LIMIT_S)
    else:
        launch = threading.Thread(target=lambda: graphs.capture(record, POOL))
        launch.start()
        assert begun.wait(LIMIT_S)
    abort = threading.Thread(target=lambda: group_of(communicator).abort(graphs))
    abort.start()
    assert not communicator.is_aborted.wait(0.1)
    graph.may_return.set()
    for thread in (launch, abort):
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert communicator.has_ended.is_set()


def test_an_engine_without_graphs(communicator: Communicator) -> None:
    group_of(communicator).abort(None)
    assert communicator.has_ended.is_set()


def test_a_group_over_host_memory_ends_by_itself(communicator: Communicator) -> None:
    group_of(communicator, over_host=True).abort(CapturedGraphs())
    assert not communicator.is_aborted.is_set()
