"""Engines with ranks as users start them: fresh interpreters, from a script without a guard."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from forked_ranks import is_running
from nv_core import SamplingParams
from nv_runtime import LLM
from nv_runtime.ranks.segment import memory_folder
from tiny_engines import options

pytestmark = pytest.mark.slow

OPTIONS = options(num_gpu_blocks_override=100, skip_tokenizer_init=True)

# Read from standard input, where no process can import it again, and without a main guard.
PROGRAM = """
import json, os, signal, sys
import nv_runtime.builder
from nv_runtime import LLM, SamplingParams

path, options = sys.argv[1], json.loads(sys.argv[2])
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

def tell(**facts):
    print(json.dumps(facts), flush=True)

def make():
    return LLM(path, tensor_parallel_size=2, **options)

def answer(llm):
    return list(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)

def pids(llm):
    return llm._open_parts().engine.runner.pids
"""

INTERRUPTED = """
load = nv_runtime.builder._load
def interrupted(*args, **kwargs):
    nv_runtime.builder._load = load
    signal.raise_signal(signal.SIGINT)
nv_runtime.builder._load = interrupted
try:
    make()
except KeyboardInterrupt:
    tell(interrupted=True)
llm = make()
tell(pids=pids(llm), tokens=answer(llm))
# It ends without a shutdown.
"""

ENDLESS = """
llm = make()
tell(pids=pids(llm))
while True:
    answer(llm)
"""

FORKED = """
llm = make()
expected = answer(llm)
stream = llm.stream([[5, 6, 7]], params)
next(stream)
pid = os.fork()
if pid == 0:
    calls = {
        "generate": lambda: answer(llm),
        "next": lambda: next(stream),
        "stream": lambda: llm.stream([[5, 6, 7]], params),
        "reset_prefix_cache": llm.reset_prefix_cache,
        "capture_graphs": llm.capture_graphs,
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    tell(errors=errors)
    if ENDS == "shutdown":
        llm.shutdown()
    sys.exit(0)
os.waitpid(pid, 0)
tell(streamed=list(list(stream)[-1].outputs[0].token_ids), tokens=answer(llm), expected=expected)
tell(pids=pids(llm))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"))


def run(checkpoint: Path, program: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-", str(checkpoint), json.dumps(OPTIONS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(PROGRAM + program)
    process.stdin.close()
    process.stdin = None
    return process


def told(process: subprocess.Popen[str]) -> Any:  # noqa: ANN401 - JSON
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=30)[1]
    return json.loads(line)


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def shared_memory() -> set[str]:
    folder = memory_folder()
    names = os.listdir(folder) if folder else []
    # Semaphores are those of other programs: there is none in here.
    return {name for name in names if not name.startswith("sem.")}


def test_an_interrupted_start_a_good_one_and_an_end_without_shutdown(checkpoint: Path) -> None:
    """Ports that other engines are known to fix are taken, and so is the one in the environment."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(checkpoint), **OPTIONS) as llm:
        (alone,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    before = shared_memory()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        process = run(checkpoint, INTERRUPTED, **environment)
        assert told(process) == {"interrupted": True}
        facts = told(process)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    assert errors == ""
    assert facts["tokens"] == list(alone.outputs[0].token_ids)
    assert not any(map(is_running, facts["pids"]))
    assert shared_memory() <= before


def test_a_killed_parent_takes_its_ranks_with_it_and_leaves_nothing(checkpoint: Path) -> None:
    """Another engine, started at the same time, goes on; and the next one starts."""
    before = shared_memory()
    process, other = run(checkpoint, ENDLESS), run(checkpoint, ENDLESS)
    pids, other_pids = told(process)["pids"], told(other)["pids"]
    assert all(map(is_running, pids + other_pids))
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, pids)))
    again = run(checkpoint, "tell(tokens=answer(make()))")
    assert len(told(again)["tokens"]) == 8
    assert again.communicate(timeout=60)[1] == ""
    assert again.returncode == 0
    assert other.poll() is None
    assert all(map(is_running, other_pids))
    other.kill()
    for ended in (process, other):
        ended.communicate(timeout=60)
    wait_until(lambda: not any(map(is_running, other_pids)))
    assert shared_memory() <= before


def test_an_interrupt_from_the_keyboard_reaches_the_parent_alone(checkpoint: Path) -> None:
    process = run(checkpoint, ENDLESS)
    pids = told(process)["pids"]
    # As a terminal does: to the whole group of processes.
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "RankError" not in errors
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("ends", ["shutdown", "exit"])
def test_a_forked_child_is_refused_and_leaves_its_parent_alone(checkpoint: Path, ends: str) -> None:
    before = shared_memory()
    process = run(checkpoint, f"ENDS = {ends!r}\n{FORKED}")
    # Without the refusal the child waits for ever.
    watchdog = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        errors = told(process)["errors"]
        facts = told(process)
        pids = told(process)["pids"]
        output = process.communicate(timeout=60)[1]
    finally:
        watchdog.cancel()
    assert set(errors) == {"generate", "next", "stream", "reset_prefix_cache", "capture_graphs"}
    for error in errors.values():
        assert re.match(r"RankError: this engine's ranks belong to process \d+, and this is", error)
    assert facts["tokens"] == facts["streamed"] == facts["expected"]
    assert process.returncode == 0, output
    assert not any(map(is_running, pids))
    assert shared_memory() <= before
