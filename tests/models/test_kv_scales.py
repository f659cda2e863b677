"""Scales of an fp8 KV cache in checkpoints, and models with such a cache against fp64."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from nv_models import TensorParallel, UnsupportedModelError, WeightError, open_checkpoint
from paged_runner import PagedRunner, load_paged_model
from quantised_reference import quantised_logits, store_scales
from tiny_checkpoints import TinySpec, load_reference, reference_logits, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FP8 = torch.float8_e4m3fn
PROMPT = [(7 * i + i * i) % 131 for i in range(40)]
SCALES = ((0.0135, 0.013), (0.0125, 0.0135))
ONES = ((1.0, 1.0),) * 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, TinySpec())


def add_tensors(path: Path, **tensors: Tensor) -> None:
    """Adds tensors below the first layer's attention; `__` in a name stands for a dot."""
    file = path / "model.safetensors"
    prefix = "model.layers.0.self_attn."
    added = {prefix + name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(file), **added}, file)


def scales_of(path: Path) -> tuple[tuple[float, float], ...]:
    return load_paged_model(path, load_kv_scales=True).kv_scales


@pytest.mark.parametrize(
    "name",
    ["{kind}_scale", "attn.{kind}_scale", "{kind}_proj.{kind}_scale", "{kind}_proj.output_scale"],
)
def test_names_of_scales(checkpoint: Path, name: str) -> None:
    store_scales(checkpoint, SCALES, name)
    assert scales_of(checkpoint) == tuple(
        tuple(torch.tensor(scale).item() for scale in pair) for pair in SCALES
    )
    # Whoever wants none is not disturbed by them.
    assert load_paged_model(checkpoint).kv_scales == ONES


def test_a_checkpoint_without_scales_says_what_is_used(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nv_models.kv_scales")
    assert scales_of(checkpoint) == ONES
    add_tensors(checkpoint, k_scale=torch.tensor(0.5))
    assert scales_of(checkpoint) == ((0.5, 1.0), (1.0, 1.0))
    assert [message.removeprefix(f"{checkpoint} has ") for message in caplog.messages] == [
        "no scales for an fp8 KV cache: 1.0 is used",
        "1 of 4 scales for an fp8 KV cache: 1.0 is used for the others",
    ]
    caplog.clear()
    # Nor does a plain cache miss them, nor a rank repeat what the first one says.
    load_paged_model(checkpoint)
    group = cast("torch.distributed.ProcessGroup", object())  # loading needs no communication
    second = TensorParallel(1, 2, group)
    model = load_paged_model(checkpoint, tensor_parallel=second, load_kv_scales=True)
    assert model.kv_scales == ((0.5, 1.0), (1.0, 1.0))
    assert not caplog.messages


def test_a_checkpoint_with_all_scales_says_nothing(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nv_models.kv_scales")
    store_scales(checkpoint, SCALES)
    scales_of(checkpoint)
    assert not caplog.messages


def test_one_scale_for_both_and_what_only_quantised_attention_needs(checkpoint: Path) -> None:
    add_tensors(
        checkpoint,
        kv_scale=torch.tensor([0.25], dtype=torch.bfloat16),
        q_scale=torch.ones(1),
        attn__prob_scale=torch.ones(()),
    )
    assert scales_of(checkpoint) == ((0.25, 0.25), (1.0, 1.0))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k_scale": torch.ones(2)}, "has shape [2], but a scale of the KV cache must be"),
        ({"v_scale": torch.tensor(0.0)}, "is 0.0, but a scale must be positive"),
        ({"v_scale": torch.tensor(-1.0)}, "is -1.0, but a scale must be positive"),
        ({"v_scale": torch.tensor(1e-40)}, "e-41, but a scale must be positive and from 1.18e-38"),
        ({"v_scale": torch.tensor(3e38)}, "e+38, but a scale must be positive and from"),
        ({"attn__k_scale": torch.tensor(torch.nan)}, "is nan, but a scale must be"),
        ({"attn__k_scale": torch.tensor(torch.inf)}, "is inf, but a scale must be"),
        (
            {"attn__k_scale": torch.ones(1), "k_scale": torch.ones(1)},
            "are scales of the same thing; keep one",
        ),
    ],
)
def test_scales_that_are_none(checkpoint: Path, tensors: dict[str, Tensor], message: str) -> None:
    add_tensors(checkpoint, **tensors)
    with pytest.raises(WeightError, match=re.escape(message)) as error:
        scales_of(checkpoint)
    assert f"model.layers.0.self_attn.{next(iter(tensors)).replace('__', '.')}" in str(error.value)
    if len(tensors) == 1:
        assert str(checkpoint) in str(error.value)
    # Nothing reads them for a plain cache.
    assert load_paged_model(checkpoint).kv_scales == ONES


def test_scales_of_layers_that_are_not_there(checkpoint: Path) -> None:
    store_scales(checkpoint, (*SCALES, (1.0, 1.0)))
    with pytest.raises(WeightError, match="the model has 2 layers only"):
        scales_of(checkpoint)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": None,
    "kv_cache_quant_algo": "FP8",
}
MODELOPT_SCHEME: dict[str, Any] = {
    "quant_method": "modelopt",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}


def edit_quantization(path: Path, quantization: dict[str, Any]) -> None:
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("quantization", [COMPRESSED, MODELOPT, MODELOPT_SCHEME])
def test_a_checkpoint_calibrated_for_its_cache_only(
    checkpoint: Path, quantization: dict[str, Any]
) -> None:
    store_scales(checkpoint, SCALES)
    edit_quantization(checkpoint, quantization)
    assert scales_of(checkpoint)[1][0] == pytest.approx(SCALES[1][0])
    for name, value in (
        ("config_groups", {"group_0": {}}),
        ("quant_algo", "FP8"),
        ("quant_method", "fp8"),
        ("quant_method", None),
        ("quant_method", []),
    ):
        edit_quantization(checkpoint, {**quantization, name: value})
        with pytest.raises(UnsupportedModelError, match="quantised weights"):
            open_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({**COMPRESSED, "kv_cache_scheme": {**SCHEME, "num_bits": 4}}, "num_bits 4 of"),
        ({**COMPRESSED, "kv_cache_scheme": {**SCHEME, "type": "int"}}, "type 'int' of"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8}}, "type 'int' of"),
        ({**COMPRESSED, "kv_cache_scheme": {**SCHEME, "strategy": "channel"}}, "strategy 'channel"),
        ({**COMPRESSED, "kv_cache_scheme": {**SCHEME, "symmetric": False}}, "symmetric False of"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not 'FP8'"),
    ],
)
def test_a_cache_of_another_kind_is_refused(
    checkpoint: Path, quantization: dict[str, Any], message: str
) -> None:
    edit_quantization(checkpoint, quantization)
    with pytest.raises(
        UnsupportedModelError, match="only 8-bit floats with a scale per tensor"
    ) as error:
        open_checkpoint(checkpoint)
    assert message in str(error.value)
    assert "kv_cache_dtype='auto'" in str(error.value)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("has_scales", [True, False])
def test_logits_are_those_of_rounded_keys_and_values(
    tmp_path: Path, family: Literal["qwen3", "llama"], *, has_scales: bool
) -> None:
    """To rounding, but for keys at the border of two fp8 numbers, which may fall either way."""
    path = write_checkpoint(tmp_path, TinySpec(family=family))
    scales = SCALES if has_scales else ONES
    if has_scales:
        store_scales(path, SCALES)
    runner = PagedRunner(load_paged_model(path, load_kv_scales=True), cache_dtype=FP8)
    reference = load_reference(path)
    plain = reference_logits(reference, PROMPT)
    expected = quantised_logits(reference.double(), PROMPT, scales)
    for chunks in ((), (1,) * len(PROMPT), (7, 1, 20, 12)):
        logits = runner.prompt_logits(PROMPT, chunks=chunks)
        error = (logits - expected).abs().amax(dim=1)
        assert error.median() < 1e-4
        assert error.max() < 0.1
        # Rounding keys and values to three bits of mantissa moves logits by some hundredths.
        loss = (logits - plain).norm() / plain.norm()
        assert 1e-3 < loss < 0.15
