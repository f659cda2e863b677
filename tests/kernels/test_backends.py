"""Which implementation runs, what a refusal says, and that nothing optional is imported early."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from nv_kernels import (
    KernelInputError,
    available_attention_backends,
    rms_norm,
    select_attention_backend,
)
from nv_kernels.reference.rms_norm import rms_norm as rms_norm_reference

CPU: dict[str, Any] = {
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "head_dim": 64,
    "num_heads": 9,
    "num_kv_heads": 3,
    "block_size": 16,
}


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter whose warnings are errors, without Triton's interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- elementwise


def test_auto_on_cpu_is_pytorch_even_when_triton_could_interpret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def recorded(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        calls.append("torch")
        return rms_norm_reference(x, weight, eps=eps)

    monkeypatch.setattr("nv_kernels.ops.rms_norm.rms_norm_reference", recorded)
    rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-6)
    assert calls == ["torch"]


def test_unknown_backend() -> None:
    with pytest.raises(KernelInputError, match=r"'cuda'.*must be 'auto', 'torch' or 'triton'"):
        rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-6, backend="cuda")


def test_triton_on_cpu_without_its_interpreter_is_refused() -> None:
    message = run_python(
        "import torch, nv_kernels\n"
        "try: nv_kernels.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-6, backend='triton')\n"
        "except nv_kernels.KernelInputError as error: print(error)\n"
    )
    assert "backend is 'triton', but Triton has no compiler for cpu tensors" in message
    assert "backend='auto'" in message


# --- what an import loads


def test_import_needs_neither_triton_nor_flash_attn() -> None:
    """Blocks the optional packages, then runs every op on the CPU."""
    message = run_python(
        "import sys\n"
        "for name in ('triton', 'flash_attn', 'flash_attn_interface'): sys.modules[name] = None\n"
        "import torch, nv_kernels as nk\n"
        "x, weight = torch.ones(3, 2, 8), torch.ones(8)\n"
        "metadata = nk.AttentionMetadata.from_lists([3], [3], [[1]], block_size=4)\n"
        "cache = nk.LayerKVCache(torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8))\n"
        "nk.rms_norm(x, weight, eps=1e-6); nk.add_rms_norm(x, x, weight, eps=1e-6)\n"
        "nk.silu_and_mul(x); nk.rotary_embedding(x, x, torch.arange(3), torch.ones(4, 8))\n"
        "nk.store_kv(x, x, cache.key, cache.value, metadata.slot_mapping)\n"
        "assert nk.paged_attention(x, cache, metadata, scale=1.0).eq(1).all()\n"
        "try: nk.rms_norm(x, weight, eps=1e-6, backend='triton')\n"
        "except nk.KernelInputError as error: print(error)\n"
    )
    assert "Triton cannot be imported here (ModuleNotFoundError" in message


def test_import_is_lazy() -> None:
    loaded = run_python(
        "import sys, nv_kernels\n"
        "optional = ('triton', 'flash_attn', 'flash_attn_interface', 'nv_kernels.triton')\n"
        "print([n for n in optional if n in sys.modules])"
    )
    assert loaded == "[]"


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_all_kernels_are_decorated_at_once() -> None:
    """Were some decorated later, a process might interpret some and compile others."""
    missing = run_python(
        "import pkgutil, sys, nv_kernels.triton as kernels\n"
        "files = {f'nv_kernels.triton.{m.name}' for m in pkgutil.iter_modules(kernels.__path__)}\n"
        "print(*(files - set(sys.modules)))"
    )
    assert missing == "nv_kernels.triton.hopper_prefill_attention"  # which no interpreter runs


# --- attention


def test_auto_on_cpu_is_torch() -> None:
    assert select_attention_backend(**CPU).name == "torch"
    assert select_attention_backend("auto", **CPU).name == "torch"


def test_every_backend_has_an_answer() -> None:
    reasons = available_attention_backends(**CPU)
    assert list(reasons) == ["torch", "triton", "flash_attn", "flash_attn_3"]
    assert reasons["torch"] is None
    assert reasons["flash_attn"] is not None
    assert reasons["flash_attn_3"] is not None


def test_a_backend_that_cannot_run_says_why_and_what_can() -> None:
    with pytest.raises(
        KernelInputError, match=r"'flash_attn' cannot run here: it needs a CUDA device, not cpu"
    ) as error:
        select_attention_backend("flash_attn", **CPU)
    assert "Backends that can: torch" in str(error.value)


@pytest.mark.parametrize(
    ("backend", "advice"),
    [("flash_attn", "pip install 'nv-kernels[flash-attn]'"), ("flash_attn_3", "build")],
)
def test_a_package_is_asked_for_only_where_it_would_do(
    backend: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {**CPU, "device": torch.device("cuda"), "dtype": torch.bfloat16, "block_size": 512}
    module = importlib.import_module(f"nv_kernels.attention.{backend}_backend")
    monkeypatch.setattr(module, "_import_error", lambda: "ImportError: not there")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    reason = str(available_attention_backends(**shape)[backend])
    assert "cannot be imported here (ImportError: not there)" in reason
    assert advice in reason
    for change in ({"device": torch.device("cpu")}, {"cache_dtype": FP8}, {"head_dim": 264}):
        reason = str(available_attention_backends(**{**shape, **change})[backend])
        assert "import" not in reason
        assert advice not in reason


def test_unknown_attention_backend_names_the_nearest() -> None:
    with pytest.raises(KernelInputError, match="Did you mean 'flash_attn'"):
        select_attention_backend("flash-attn", **CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 60}, "head_dim is 60, but must be a multiple of 8"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_kv_heads": 2}, "num_heads is 9 and num_kv_heads 2"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"dtype": torch.float64}, "'torch' cannot run here: .*not torch.float64.*can: none"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        select_attention_backend(**{**CPU, **change})


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where CUDA is")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": torch.bfloat16}, "interpreter multiplies bfloat16"),
        ({"head_dim": 264}, "head_dim up to 256"),
        ({"num_heads": 129, "num_kv_heads": 1}, "up to 128 query heads per key head"),
    ],
)
def test_limits_of_triton(change: dict[str, Any], reason: str | None) -> None:
    actual = available_attention_backends(**{**CPU, **change})["triton"]
    assert actual is None if reason is None else actual is not None and reason in actual


HOPPER = (9, 0)
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("backend", "change", "capability", "reason"),
    [
        *(
            (backend, change, HOPPER, reason)
            for backend in ("flash_attn", "flash_attn_3")
            for change, reason in (
                ({}, None),
                ({"device": torch.device("cpu")}, "needs a CUDA device, not cpu"),
                ({"dtype": torch.float32}, "float16 and bfloat16, not torch.float32"),
                ({"cache_dtype": FP8}, "reads no cache of torch.float8_e4m3fn, only of"),
                ({"head_dim": 264}, "head_dim up to 256, not 264"),
            )
        ),
        ("flash_attn", {"block_size": 128}, HOPPER, "multiple of 256, not 128"),
        ("flash_attn", {}, (7, 5), "compute capability 8.0 or higher, and this device has (7, 5)"),
        ("flash_attn_3", {"block_size": 24}, HOPPER, None),
        ("flash_attn_3", {}, (8, 9), "compute capability 9.x (Hopper), and this device has (8, 9)"),
        ("flash_attn_3", {}, (10, 0), "and this device has (10, 0)"),
    ],
)
def test_limits_of_flash_attn(
    backend: str,
    change: dict[str, Any],
    capability: tuple[int, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the package and a device simulated, each limit has its own reason."""
    shape = {**CPU, "device": torch.device("cuda"), "dtype": torch.bfloat16, "block_size": 512}
    module = importlib.import_module(f"nv_kernels.attention.{backend}_backend")
    monkeypatch.setattr(module, "_import_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    actual = available_attention_backends(**{**shape, **change})[backend]
    assert actual is None if reason is None else actual is not None and reason in actual


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_on_cuda_is_triton() -> None:
    shape = {**CPU, "device": torch.device("cuda"), "dtype": torch.bfloat16}
    assert select_attention_backend(**shape).name == "triton"
    assert isinstance(sys.modules.get("triton"), types.ModuleType)
