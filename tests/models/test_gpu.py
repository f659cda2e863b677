"""The same logits on CUDA, with every attention backend that can run there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from nv_kernels import available_attention_backends
from paged_runner import PagedRunner, PagedSequence, load_paged_model
from tiny_checkpoints import (
    FAMILIES,
    Family,
    TinySpec,
    load_reference,
    reference_logits,
    write_checkpoint,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[(n * i) % 131 for i in range(length)] for n, length in ((5, 150), (7, 1), (11, 33))]
# flash-attn wants blocks of a multiple of 256 tokens.
BLOCK_SIZE = 256


def mixed_steps(model_path: Path, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Runs three prompts: the first one in two chunks, the second of them beside the others."""
    model = load_paged_model(
        model_path, device="cuda", dtype=dtype, attention_backend=backend, block_size=BLOCK_SIZE
    )
    runner = PagedRunner(model, block_size=BLOCK_SIZE, num_blocks=8)
    first, second, third = (PagedSequence(prompt) for prompt in PROMPTS)
    (start,) = runner.step([(first, 100)])
    rest = runner.step([(second, 1), (first, 50), (third, 33)])
    return [torch.cat((start, rest[1])), rest[0], rest[2]]


@pytest.mark.parametrize("backend", ["torch", "triton", "flash_attn", "flash_attn_3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_on_each_backend(family: Family, backend: str, tmp_path: Path) -> None:
    reason = available_attention_backends(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        head_dim=64,
        num_heads=4,
        num_kv_heads=2,
        block_size=BLOCK_SIZE,
    )[backend]
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    path = write_checkpoint(tmp_path, TinySpec(family=family, head_dim=64))
    reference = load_reference(path)
    for dtype, limit in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        for prompt, logits in zip(PROMPTS, mixed_steps(path, backend, dtype), strict=True):
            expected = reference_logits(reference, prompt)
            error = (logits - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
            assert error < limit, dtype


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_on_each_backend(family: Family, backend: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, TinySpec(family=family, head_dim=40))
    reference = load_reference(path)
    for prompt, logits in zip(PROMPTS, mixed_steps(path, backend, torch.float32), strict=True):
        expected = reference_logits(reference, prompt)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3)


def test_weights_land_on_the_device_in_the_dtype_asked_for(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, TinySpec(tie_word_embeddings=True))
    for load_format in ("auto", "dummy"):
        model = load_paged_model(
            path, device="cuda", dtype=torch.bfloat16, load_format=load_format, block_size=256
        )
        assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cuda", torch.bfloat16)}
        assert model.rotary.cos_sin.device.type == "cuda"
        assert all(p.isfinite().all() for p in model.parameters())
