"""The command line on the real engine: a tiny model on the CPU, from argument to text."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from nv_core import SamplingParams
from nv_models import CausalLM
from nv_runtime import LLM
from nv_runtime.cli import main

PROMPT = "the quick brown fox"
MESSAGE = "what is the capital of France?"
FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch"),
    *("--max-model-len", "128", "--block-size", "4", "--num-gpu-blocks-override", "100"),
]
SAMPLING = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=100,
        show_progress=False,
    ) as llm:
        yield llm


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("num_presses", "ends"), [(1, True), (2, True), (3, False)])
def test_ctrl_c_within_a_step_is_heard_at_once(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    num_presses: int,
    ends: bool,  # noqa: FBT001 - a parameter
) -> None:
    """The step ends first, unless the user insists: a step of a long prompt may take minutes."""
    num_begun = num_ended = 0
    forward = CausalLM.forward

    def pressed(*args: Any) -> Any:  # noqa: ANN401 - stands in for the method
        nonlocal num_begun, num_ended
        num_begun += 1
        if num_begun == 3:
            for _ in range(num_presses):
                signal.raise_signal(signal.SIGINT)
            assert ("once more to leave" in capsys.readouterr().err) == (num_presses > 1)
        hidden = forward(*args)
        num_ended += 1
        return hidden

    monkeypatch.setattr(CausalLM, "forward", pressed)
    assert main(["generate", str(checkpoint), PROMPT, *FLAGS, *SAMPLING]) == 130
    assert (num_begun, num_ended) == (3, 3 if ends else 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_generate_prints_what_llm_generates(
    checkpoint: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    (expected,) = llm.generate(PROMPT, greedy(), use_tqdm=False)
    out = run(capsys, "generate", str(checkpoint), PROMPT, *FLAGS, *SAMPLING)
    text = expected.outputs[0].text
    assert text
    assert out == (text if text.endswith("\n") else text + "\n")


def test_a_seed_makes_sampling_repeatable(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(checkpoint), PROMPT, *FLAGS, "--max-tokens", "20", "--ignore-eos"]
    first = run(capsys, *argv, "--seed", "1")
    assert run(capsys, *argv, "--seed", "1") == first
    assert run(capsys, *argv, "--seed", "2") != first


def test_generate_as_chat_prints_what_llm_chats(
    checkpoint: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    (expected,) = llm.chat([{"role": "user", "content": MESSAGE}], greedy(), use_tqdm=False)
    out = run(capsys, "generate", str(checkpoint), MESSAGE, "--chat", *FLAGS, *SAMPLING)
    assert out.removesuffix("\n") == expected.outputs[0].text.removesuffix("\n")


def test_chat_answers_with_the_whole_conversation(
    checkpoint: Path,
    llm: LLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation = [{"role": "user", "content": MESSAGE}]
    (first,) = llm.chat(conversation, greedy(), use_tqdm=False)
    conversation += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "and again?"},
    ]
    (second,) = llm.chat(conversation, greedy(), use_tqdm=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{MESSAGE}\nand again?\n/exit\n"))
    out = run(capsys, "chat", str(checkpoint), *FLAGS, *SAMPLING)
    texts = [output.outputs[0].text for output in (first, second)]
    assert out == "".join(text if text.endswith("\n") else text + "\n" for text in texts)


def test_chat_survives_a_message_that_is_too_long(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox " * 200 + "\nhello\n"))
    capsys.readouterr()
    assert main(["chat", str(checkpoint), *FLAGS, *SAMPLING]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("nv: ")
    assert "128" in captured.err
    assert captured.out


def test_errors_of_the_engine_are_one_line(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["generate", str(checkpoint), PROMPT, *FLAGS, "--dtype", "int3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("nv: dtype must be one of ")
    assert error.count("\n") == 1
    assert main(["generate", str(checkpoint / "absent"), PROMPT]) == 1
    assert capsys.readouterr().err.startswith("nv: model: there is no ")


def test_verbose_logs_the_kv_budget(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    packages = [logging.getLogger(name) for name in ("nv_core", "nv_models", "nv_runtime")]
    levels = [package.level for package in packages]
    try:
        # Without its last flag, which sets the size of the pool already.
        flags = [*FLAGS[:-2], "--kv-cache-memory-bytes", "1MiB"]
        run(capsys, "generate", str(checkpoint), PROMPT, *flags, *SAMPLING, "--verbose")
    finally:
        for package, level in zip(packages, levels, strict=True):
            package.setLevel(level)
    assert "KV cache: " in caplog.text
    assert "ready in " in caplog.text


def test_the_installed_command_runs(checkpoint: Path) -> None:
    command = Path(sys.executable).parent / "nv"
    if not command.exists():
        pytest.skip("nv-runtime is on the path, but not installed")
    done = subprocess.run(
        [command, "info", checkpoint, "--json", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["model"]["architecture"] == "Qwen3ForCausalLM"
