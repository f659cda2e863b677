"""Ranks that start in milliseconds, healthy or with a fault.

A rank of the engine is a fresh interpreter, which takes seconds to import torch. These are forked
from a server that has imported it already; everything else about them is the same. The functions
that run in them live here, because a forked process can import only modules on the path.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import pytest

Fault = Callable[[], None]
"""Prepares a rank's process for its fault, before the rank runs; a module-level function."""


def fork_ranks(patch: pytest.MonkeyPatch, faults: dict[int, Fault] | None = None) -> None:
    """Makes engines start their ranks by forking.

    Args:
        patch: Undoes it.
        faults: What goes wrong, by rank. The first engine that starts has them.
    """
    import nv_runtime.ranks.processes

    left = dict(faults or {})
    rank = 0

    def start(fds: tuple[int, int, int]) -> ForkedProcess:
        nonlocal rank
        rank += 1
        return ForkedProcess(fds, left.pop(rank, do_nothing))

    patch.setattr(nv_runtime.ranks.processes, "start_process", start)


def is_running(pid: int) -> bool:
    """Whether a process is alive; a zombie is not, though nobody may be there to bury it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the second one if it ends meanwhile
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class ForkedProcess:
    """Looks like the `subprocess.Popen` of a rank."""

    def __init__(self, fds: tuple[int, int, int], fault: Fault) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["nv_runtime.ranks.rank_main", "nv_runtime.builder"])
        inherited = tuple(_Inherited(fd) for fd in fds)
        self._process = context.Process(target=_run_rank, args=(inherited, fault))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class _Inherited:
    """A file descriptor on its way to a forked process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self.fd),)


def _detach(duplicate: Any) -> int:  # noqa: ANN401 - a private class of multiprocessing
    fd: int = duplicate.detach()
    return fd


def _run_rank(fds: tuple[int, int, int], fault: Fault) -> None:
    from nv_runtime.ranks.rank_main import main

    os.setsid()
    fault()
    main(*fds)


def do_nothing() -> None:
    """No fault."""


def die(*_: object, **__: object) -> Any:  # noqa: ANN401 - stands for any function
    """Ends the process as a lack of memory would."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: object, **__: object) -> Any:  # noqa: ANN401 - stands for any function
    raise ValueError("a fault of this rank alone")


def hang(*_: object, **__: object) -> Any:  # noqa: ANN401 - stands for any function
    time.sleep(1000)


def also_in_a_forked_child(original: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401
    """Calls a function in a copy of this process first, where the ranks must refuse it."""
    from nv_runtime.ranks.errors import RankError

    pid = os.fork()
    if pid == 0:
        try:
            original(*args, **options)
        except RankError as error:
            os._exit(0 if "forked from it" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return original(*args, **options)


@dataclass(frozen=True)
class In:
    """Lets a function of a module or class do something else.

    Args:
        owner: The module, or "module:class".
        name: The function.
        act: What it does instead; `die`, `fail` and `hang` end there, others are given the original
            and its arguments.
        on_call: At which call, from 0; None for all. Other calls are as ever.
    """

    owner: str
    name: str
    act: Callable[..., Any]
    on_call: int | None = None

    def __call__(self) -> None:
        import importlib

        module, _, class_name = self.owner.partition(":")
        owner: Any = importlib.import_module(module)
        if class_name:
            owner = getattr(owner, class_name)
        original = getattr(owner, self.name)
        num_calls = 0

        def replacement(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            nonlocal num_calls
            num_calls += 1
            if self.on_call is not None and num_calls != self.on_call + 1:
                return original(*args, **options)
            if self.act in (die, fail, hang):
                return self.act()
            return self.act(original, *args, **options)

        setattr(owner, self.name, replacement)


def small_pool(num_blocks: int) -> Fault:
    """A rank that has room for so many blocks only."""
    return In("nv_runtime.builder", "size_kv_cache", partial(_return, num_blocks))


def other_checkpoint(path: str) -> Fault:
    """A rank that reads another checkpoint."""
    return In("nv_models", "open_checkpoint", partial(_open, path))


def other_option(name: str, value: object) -> Fault:
    """A rank of a launcher whose program passes another option."""
    return In("nv_runtime.llm", "engine_config_of", partial(_with_option, name, value))


def other_code() -> None:
    """A rank whose code is of another version."""
    In("nv_runtime.builder", "code_facts", _age)()


def slow_reader() -> None:
    """A rank that takes its time with every command."""
    In("nv_runtime.ranks.ring:RingReader", "read", _nap_before)()


def poisoned_pool() -> None:
    """A rank whose unused KV memory is NaN, so that reading it shows."""
    In("nv_runtime.builder", "allocate_kv_cache", fill_with_nan)()


def fill_with_nan(original: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401
    caches = original(*args, **options)
    for cache in caches:
        cache.key.fill_(float("nan"))
        cache.value.fill_(float("nan"))
    return caches


def _return(value: Any, *_: object, **__: object) -> Any:  # noqa: ANN401
    return value


def _with_option(
    name: str,
    value: object,
    original: Callable[..., Any],
    model: str,
    options: dict[str, Any],
) -> Any:  # noqa: ANN401
    return original(model, {**options, name: value})


def _age(original: Callable[..., Any]) -> Any:  # noqa: ANN401
    return {**original(), "nv_runtime version": "0.0.9"}


def _open(path: str, original: Callable[..., Any], *_: object) -> Any:  # noqa: ANN401
    return original(path)


def _nap_before(original: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
    time.sleep(0.02)
    return original(*args)


def biased(original: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401
    """Samples as another device may: not quite the same."""
    return original(*args, **options) * 0
