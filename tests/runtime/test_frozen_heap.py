"""The heap is set aside while requests run, and never for longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_checkpoints
from nv_core import RequestError, SamplingParams
from nv_runtime import LLM
from nv_runtime.frozen_heap import FrozenHeap


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    path = tiny_checkpoints.write_checkpoint(tmp_path)
    with LLM(str(path), device="cpu", skip_tokenizer_init=True, show_progress=False) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nobody_else_froze() -> None:
    assert gc.get_freeze_count() == 0


def test_a_run_gives_the_heap_back(llm: LLM) -> None:
    stream = llm.stream([[1, 2], [3]], SamplingParams(max_tokens=4, ignore_eos=True))
    next(stream)
    assert gc.get_freeze_count() > 0
    for _ in stream:
        pass
    assert gc.get_freeze_count() == 0


def test_requests_that_are_aborted_or_refused_give_it_back(llm: LLM) -> None:
    with llm.stream([[1, 2], [3]], SamplingParams(max_tokens=40, ignore_eos=True)) as stream:
        next(stream)
    assert gc.get_freeze_count() == 0
    with pytest.raises(RequestError):
        llm.generate([[1], [-5]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    heap = FrozenHeap()
    gc.freeze()
    try:
        heap.freeze()
        heap.unfreeze()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_an_engine_that_is_dropped_gives_it_back() -> None:
    heap = FrozenHeap()
    heap.freeze()
    assert gc.get_freeze_count() > 0
    del heap
    assert gc.get_freeze_count() == 0
