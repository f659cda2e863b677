"""The README's example runs and predicts what transformers predicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiny_checkpoints import load_reference, reference_logits, write_checkpoint

README = Path(__file__).parents[2] / "packages" / "nv-models" / "README.md"


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The example reads a folder beside the reader.
    path = write_checkpoint(tmp_path / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0]
    scope: dict[str, object] = {}
    exec(code, scope)
    expected = reference_logits(load_reference(path), [11, 22, 33])[-1].argmax()
    assert scope["next_token"] == int(expected)
