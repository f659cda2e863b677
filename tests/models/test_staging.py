"""Copies through staging buffers, with buffers far smaller than the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import nv_models.loader
from nv_models.staging import StagedCopies
from paged_runner import load_paged_model
from tiny_checkpoints import TinySpec, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (1000,), (7, 64), (3, 5000), (0, 8), (40, 2, 3)])
def test_every_element_arrives(shape: tuple[int, ...], stored: torch.dtype) -> None:
    copies = StagedCopies(buffer_bytes=4096, num_buffers=2, pin_memory=False)
    generator = torch.Generator().manual_seed(len(shape))
    for _ in range(3):  # buffers are used again
        values = torch.randn(shape, generator=generator).to(stored)
        destination = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        copies.copy(destination, values)
        assert torch.equal(destination, values.to(torch.bfloat16))


def test_strided_values_and_regions_of_a_larger_tensor() -> None:
    copies = StagedCopies(buffer_bytes=1024, pin_memory=False)
    values = torch.arange(64.0 * 30).view(30, 64).T  # as a rank's share of columns
    whole = torch.zeros(100, 30)
    copies.copy(whole[10:74], values)
    assert torch.equal(whole[10:74], values)
    assert not whole[:10].any()
    assert not whole[74:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_arrives_on_the_device_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    path = write_checkpoint(tmp_path, TinySpec(tie_word_embeddings=True))
    expected = dict(load_paged_model(path, dtype=dtype).named_parameters())
    # Few small buffers, so that each is used again while the device may still fetch from it.
    monkeypatch.setattr(nv_models.loader, "StagedCopies", lambda: StagedCopies(buffer_bytes=4096))
    model = load_paged_model(path, dtype=dtype, device="cuda")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), expected[name]), name
