"""Whatever happens to a rank: an error says what, nothing is left behind, the process goes on.

Each row of the fault table of docs/tensor_parallel.md is a test here or in `test_processes.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nv_runtime.builder
import nv_runtime.ranks.local_ranks
import tiny_checkpoints
from forked_ranks import (
    Fault,
    In,
    die,
    fail,
    fork_ranks,
    hang,
    is_running,
    other_checkpoint,
    other_code,
    slow_reader,
    small_pool,
)
from nv_core import ConfigError, SamplingParams
from nv_models import CausalLM
from nv_runtime import LLM
from nv_runtime.model_runner import ModelRunner
from nv_runtime.ranks.channel import Channel
from nv_runtime.ranks.errors import ProtocolError, RankError
from nv_runtime.ranks.processes import RankProcess
from nv_runtime.ranks.ring import RingLayout
from nv_runtime.ranks.segment import memory_folder
from tiny_checkpoints import TinySpec
from tiny_engines import options

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 20, [9, 10]]
LAUNCH = ("nv_runtime.model_runner:ModelRunner", "launch")
LOGITS = ("nv_models.decoder:CausalLM", "compute_logits_shard")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(
        tmp_path_factory.mktemp("tiny"), TinySpec(num_heads=4, num_kv_heads=2)
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    with make_llm(checkpoint, tensor_parallel_size=1) as llm:
        return answers(llm)


def make_llm(checkpoint: Path, **changes: Any) -> LLM:  # noqa: ANN401 - LLM's own options
    defaults = options(
        num_gpu_blocks_override=100,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        rank_timeout_s=60,
        rank_start_timeout_s=60,
    )
    return LLM(str(checkpoint), **{**defaults, **changes})


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def pids_of(llm: LLM) -> list[int]:
    pids: list[int] = llm._open_parts().engine.runner.pids  # type: ignore[attr-defined]
    return pids


def assert_gone(pids: list[int]) -> None:
    give_up_at = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < give_up_at, pids
        time.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(checkpoint: Path) -> Iterator[None]:
    """No file descriptor, thread, shared memory or process survives the tests of this file."""

    def resources() -> tuple[int, int, list[str]]:
        gc.collect()
        folder = memory_folder()
        names = sorted(os.listdir(folder)) if folder else []
        names = [name for name in names if not name.startswith("sem.")]  # of other programs
        return len(os.listdir("/proc/self/fd")), threading.active_count(), names

    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        make_llm(checkpoint).shutdown()  # the fork server keeps lines of its own from now on
    before = resources()
    yield
    after = resources()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1]
    assert set(after[2]) <= set(before[2])


@pytest.fixture
def start(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def start(fault: Fault | None = None, **options: Any) -> LLM:  # noqa: ANN401
        fork_ranks(monkeypatch, {} if fault is None else {1: fault})
        return make_llm(checkpoint, **options)

    return start


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (
            In("nv_runtime.builder", "_load", die),
            RankError,
            r"rank 1 \(process \d+\) was killed by SIGKILL",
        ),
        (
            In("nv_runtime.builder", "_load", fail),
            RankError,
            r"(?s)rank 1 failed:.*in fail.*a fault of this rank",
        ),
        (In("nv_runtime.ranks.channel:Channel", "receive", die), RankError, "killed by SIGKILL"),
        (other_code, ConfigError, r"rank 1 disagrees .* on nv_runtime version: it has '0.0.9'"),
    ],
    ids=["killed", "raises", "killed before it begins", "other code"],
)
def test_a_rank_that_fails_at_the_start(
    start: Callable[..., LLM],
    expected: list[list[int]],
    fault: Fault,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        start(fault)
    with start() as llm:
        assert answers(llm) == expected


def test_a_start_that_takes_too_long(start: Callable[..., LLM]) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"not ready within 2 s; raise rank_start_timeout_s"):
        start(In("nv_runtime.builder", "_load", hang), rank_start_timeout_s=2)
    with pytest.raises(RankError, match=r"1 of 1 ranks did not start in time"):
        start(In("nv_runtime.ranks.channel:Channel", "receive", hang), rank_start_timeout_s=1)
    assert time.monotonic() - began < 30


def test_a_rank_with_another_checkpoint(start: Callable[..., LLM], tmp_path: Path) -> None:
    wider = tiny_checkpoints.write_checkpoint(tmp_path / "a", TinySpec(intermediate_size=128))
    with pytest.raises(
        ConfigError, match=r"rank 1 disagrees .* on model intermediate_size: it has '128', rank 0"
    ):
        start(other_checkpoint(str(wider)))
    trained_on = tiny_checkpoints.write_checkpoint(tmp_path / "b", TinySpec(seed=1))
    with pytest.raises(ConfigError, match=r"rank 1 disagrees .* on norm weights checksum"):
        start(other_checkpoint(str(trained_on)))


def test_the_smallest_pool_counts(start: Callable[..., LLM], expected: list[list[int]]) -> None:
    with start(small_pool(63)) as llm:
        assert llm._open_parts().engine.scheduler.num_free_blocks == 63
        assert answers(llm) == expected


@pytest.mark.parametrize(
    ("where", "act", "on_call", "ahead", "message"),
    [
        (LAUNCH, die, 0, False, r"rank 1 \(process \d+\) was killed by SIGKILL"),
        (LAUNCH, die, 3, True, r"rank 1 \(process \d+\) was killed by SIGKILL"),
        (LOGITS, die, 0, True, r"rank 1 \(process \d+\) was killed by SIGKILL"),
        (LOGITS, die, 3, False, r"rank 1 \(process \d+\) was killed by SIGKILL"),
        (LAUNCH, fail, 3, False, r"(?s)rank 1 failed:.*forked_ranks.*a fault of this rank"),
        (LOGITS, fail, 0, False, r"(?s)rank 1 failed:.*_run_mixed.*a fault of this rank"),
        (LOGITS, fail, 3, True, r"(?s)rank 1 failed:.*decode_step.*a fault of this rank"),
    ],
)
def test_a_rank_that_fails_in_a_step(
    start: Callable[..., LLM],
    where: tuple[str, str],
    act: Callable[..., Any],
    on_call: int,
    ahead: bool,  # noqa: FBT001 - a parameter
    message: str,
) -> None:
    llm = start(In(*where, act, on_call), async_scheduling=ahead)
    stream = llm.stream(PROMPTS[0], GREEDY.clone(max_tokens=50))
    with pytest.raises(RankError, match=message):
        list(stream)
    # The request has been answered, and the reason is the same for whoever asks again.
    assert [output.outputs[0].finish_reason for output in stream][-1:] == ["error"]
    with pytest.raises(RankError, match=message):
        answers(llm)
    assert_gone(pids_of(llm))
    llm.shutdown()
    llm.shutdown()


def test_every_call_that_needs_the_ranks_tells_what_they_failed_of(
    start: Callable[..., LLM],
) -> None:
    with start(In(*LAUNCH, fail, 1)) as llm:
        calls: list[Callable[[], object]] = [
            lambda: answers(llm),
            lambda: llm.generate([], GREEDY),
            lambda: llm.stream(PROMPTS, GREEDY),
            lambda: llm.stream([], GREEDY),
            llm.reset_prefix_cache,
            llm.capture_graphs,
        ]
        for call in calls:
            with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*a fault of this rank alone"):
                call()
        assert not llm.llm_engine.has_work


def test_the_process_stays_usable(start: Callable[..., LLM], expected: list[list[int]]) -> None:
    broken = start(In(*LAUNCH, die, 2))
    with pytest.raises(RankError):
        answers(broken)
    with start() as llm:
        assert answers(llm) == expected
    broken.shutdown()


def test_of_several_ranks_the_one_that_failed_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others fail as well, of its absence."""
    for act, message in ((fail, "rank 2 failed"), (die, r"rank 2 \(process \d+\) was killed")):
        fork_ranks(monkeypatch, {2: In(*LOGITS, act, 2)})
        llm = make_llm(checkpoint, tensor_parallel_size=4)
        with pytest.raises(RankError, match=message):
            answers(llm)
        assert_gone(pids_of(llm))
        llm.shutdown()


@pytest.mark.parametrize(
    ("signal_number", "name"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_a_rank_killed_while_nothing_runs(
    start: Callable[..., LLM], expected: list[list[int]], signal_number: int, name: str
) -> None:
    with start() as llm:
        assert answers(llm) == expected
        (pid,) = pids_of(llm)
        os.kill(pid, signal_number)
        assert_gone([pid])
        with pytest.raises(RankError, match=rf"process {pid}\) was killed by {name}"):
            answers(llm)


@pytest.mark.parametrize("where", [LAUNCH, LOGITS], ids=["between steps", "inside"])
def test_a_rank_that_falls_silent(start: Callable[..., LLM], where: tuple[str, str]) -> None:
    llm = start(In(*where, hang, 2), rank_timeout_s=3.0)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"no answer within 3 s from rank 1 \(process \d+\)"):
        answers(llm)
    assert time.monotonic() - began < 30
    assert_gone(pids_of(llm))
    llm.shutdown()


def test_a_stopped_rank(start: Callable[..., LLM], expected: list[list[int]]) -> None:
    with start() as llm:
        assert answers(llm) == expected
        llm._open_parts().engine.runner._timeout_s = 1.0  # type: ignore[attr-defined]
        os.kill(pids_of(llm)[0], signal.SIGSTOP)
        with pytest.raises(RankError, match="no answer within 1 s from rank 1"):
            answers(llm)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_caller_may_take_longer_between_two_steps_than_a_rank_in_one(
    start: Callable[..., LLM],
    expected: list[list[int]],
    ahead: bool,  # noqa: FBT001 - a parameter
) -> None:
    with start(async_scheduling=ahead) as llm:
        assert answers(llm) == expected
        llm._open_parts().engine.runner._timeout_s = 0.3  # type: ignore[attr-defined]
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        time.sleep(0.8)
        assert list(list(stream)[-1].outputs[0].token_ids) == expected[0]


def test_a_watch_that_fails_takes_the_ranks_down(
    start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rank 0 would wait for a rank that is gone."""
    with start() as llm:
        (pid,) = pids_of(llm)
        monkeypatch.setattr(RankProcess, "exit_text", fail)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"(?s)the watch over the ranks failed:.*a fault of"):
            answers(llm)
        monkeypatch.undo()


def test_an_engine_may_be_dropped_in_the_thread_that_watches_its_ranks(
    start: Callable[..., LLM],
) -> None:
    """That is where the collector happens to run."""
    llm = start()
    pids = pids_of(llm)
    group = llm._open_parts().engine.runner._group  # type: ignore[attr-defined]
    watch = group._watch
    done = threading.Event()

    def drop() -> str:
        group.close()
        done.set()
        return "nobody"

    watch._describe_late = drop
    group.expect_progress(-1.0)
    assert done.wait(10)
    assert_gone(pids)
    watch._thread.join(10)
    assert not watch._thread.is_alive()
    llm.shutdown()


def test_a_process_with_many_open_files_has_ranks_too(
    start: Callable[..., LLM], expected: list[list[int]]
) -> None:
    """`select.select` takes no file descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        llm = stack.enter_context(start())
        assert answers(llm) == expected
        os.kill(pids_of(llm)[0], signal.SIGKILL)
        with pytest.raises(RankError, match="was killed by SIGKILL"):
            answers(llm)


def test_the_line_between_ranks_may_have_any_file_descriptor() -> None:
    """A rank's own ends have the numbers that they had in its parent."""
    ends = socket.socketpair()
    try:
        high = [fcntl.fcntl(end.fileno(), fcntl.F_DUPFD, 1100) for end in ends]
    except OSError:
        pytest.skip("this system allows too few open files")
    finally:
        for end in ends:
            end.close()
    ours, theirs = (Channel(socket.socket(fileno=fd)) for fd in high)
    assert theirs.receive_available() == ([], True)
    theirs.sleep(0.01)
    ours.wake()
    theirs.sleep(60)
    theirs.send({"kind": "ready"})
    assert ours.receive_available() == ([{"kind": "ready"}], True)
    theirs.close()
    assert ours.receive_available() == ([], False)
    ours.close()


def test_a_slow_reader_and_commands_larger_than_the_ring(
    start: Callable[..., LLM], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of three tiny slots: every prompt is many times as large."""
    prompts = [[i % 131 for i in range(100)], [7] * 90, [3]]
    params = GREEDY.clone(max_tokens=4)

    def run(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with make_llm(checkpoint, tensor_parallel_size=1) as llm:
        expected = run(llm)

    def tiny_layout(*, num_readers: int) -> RingLayout:
        return RingLayout(num_readers=num_readers, num_slots=3, slot_bytes=64)

    monkeypatch.setattr(nv_runtime.ranks.local_ranks, "RingLayout", tiny_layout)
    with start(slow_reader, async_scheduling=True) as llm:
        assert run(llm) == expected


def test_two_engines_at_once(start: Callable[..., LLM], expected: list[list[int]]) -> None:
    with start() as first, start() as second:
        streams = [llm.stream(PROMPTS, GREEDY) for llm in (first, second)]
        finals: list[dict[str, list[int]]] = [{}, {}]
        for _ in range(1000):
            outputs = [next(stream, None) for stream in streams]
            for final, output in zip(finals, outputs, strict=True):
                if output is not None:
                    final[output.request_id] = list(output.outputs[0].token_ids)
            if outputs == [None, None]:
                break
        assert [list(final.values()) for final in finals] == [expected] * 2


def test_an_error_of_rank_0_ends_the_others(
    start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start()
    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "compute_logits_shard", fail)
        with pytest.raises(ValueError, match="a fault of this rank alone"):
            answers(llm)
    with pytest.raises(RankError, match="rank 0 failed with ValueError: a fault of this rank"):
        answers(llm)
    assert_gone(pids_of(llm))
    llm.shutdown()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupt_leaves_the_engine_usable(
    start: Callable[..., LLM],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,  # noqa: FBT001 - a parameter
) -> None:
    with start(async_scheduling=ahead) as llm:
        # Inside a launch it waits for the launch to end; in a collect it comes at once.
        for owner, name in ((CausalLM, "forward"), (ModelRunner, "collect")):
            original = getattr(owner, name)
            calls = 0

            def interrupted(*args: Any, original: Any = original, **options: Any) -> Any:  # noqa: ANN401
                nonlocal calls
                calls += 1
                if calls == 4:
                    signal.raise_signal(signal.SIGINT)
                return original(*args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    answers(llm)
            assert answers(llm) == expected


@pytest.fixture
def grace(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each rank was given to end, in order."""
    given: list[float] = []
    close = RankProcess.close

    def noting(process: RankProcess, timeout_s: float) -> None:
        given.append(timeout_s)
        close(process, timeout_s)

    monkeypatch.setattr(RankProcess, "close", noting)
    return given


def test_an_interrupt_while_ranks_load_kills_them_at_once(
    start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    kill = RankProcess.kill

    def noting(process: RankProcess) -> None:
        killed.append(process.rank)
        kill(process)

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RankProcess, "kill", noting)
    # A rank that was asked to end, not killed, would be waited for until the test's own limit.
    monkeypatch.setattr(nv_runtime.ranks.local_ranks, "_STOP_S", 1000.0)
    with monkeypatch.context() as patch:
        patch.setattr(nv_runtime.builder, "_load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(In("nv_runtime.builder", "_load", hang))
    assert killed == [1]


def test_ranks_that_do_not_end_share_one_deadline(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, grace: list[float]
) -> None:
    deaf = In("nv_runtime.ranks.rank_main:RankLoop", "run", hang)
    fork_ranks(monkeypatch, dict.fromkeys((1, 2, 3), deaf))
    monkeypatch.setattr(nv_runtime.ranks.local_ranks, "_STOP_S", 0.2)
    make_llm(checkpoint, tensor_parallel_size=4).shutdown()
    assert grace[0] <= 0.2
    assert grace[1:] == [0.0, 0.0]


def test_what_cannot_be_sent_costs_nobody_anything(
    start: Callable[..., LLM], expected: list[list[int]]
) -> None:
    with start() as llm:
        odd = GREEDY.clone()
        object.__setattr__(odd, "skip_special_tokens", 1j)
        with pytest.raises(ProtocolError, match="complex cannot be sent to other ranks"):
            llm.generate([[1, 2]], odd, use_tqdm=False)
        assert answers(llm) == expected


def test_a_dropped_engine_ends_its_ranks(start: Callable[..., LLM]) -> None:
    llm = start()
    pids = pids_of(llm)
    del llm
    gc.collect()
    assert_gone(pids)


def test_a_shut_down_engine_says_so(start: Callable[..., LLM]) -> None:
    llm = start()
    executor = llm._open_parts().engine.runner
    pids = pids_of(llm)
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    llm.shutdown()
    llm.shutdown()
    executor.shutdown()
    assert_gone(pids)
    assert {output.outputs[0].finish_reason for output in stream} == {"abort"}


def test_sizes_that_do_not_fit_are_refused_before_anything_starts(
    start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nv_runtime.ranks.local_ranks, "RankProcess", fail)
    with pytest.raises(ConfigError, match=re.escape("tensor parallel size 3 does not fit")):
        start(tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="collective_backend='nccl' needs CUDA devices"):
        start(collective_backend="nccl")
