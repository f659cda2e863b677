"""Compiles the kernels of a step for a Hopper GPU where there is none; run as a script.

Launches are real, up to the point where a GPU would be needed: there each kernel is compiled with
the very arguments of the launch. The interpreter, which runs the kernels on a CPU, takes much that
the compiler refuses, such as a name with two types.
"""

from __future__ import annotations

import sys

import torch
from triton import compile as triton_compile  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from nv_kernels import AttentionMetadata, LayerKVCache
from nv_kernels.triton import (
    all_reduce,
    attention,
    launch,
    linear,
    rms_norm,
    rotate_and_store,
    silu_and_mul,
)

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
DTYPES = {torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.float32: "fp32"}


def compile_launch(
    kernel: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object
) -> None:
    """Stands in for `JITFunction.run`."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int], list[list[str | int]]] = {}
    for param in kernel.params:
        value = values[param.name]
        if param.is_constexpr:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            if isinstance(value, torch.Tensor):
                signature[param.name] = f"*{DTYPES[value.dtype]}"
                is_aligned = True
            else:
                signature[param.name] = "i32"
                is_aligned = isinstance(value, int) and value % 16 == 0
            if is_aligned and not param.do_not_specialize:
                attributes[(param.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton_compile(source, target=HOPPER, options=options)
    sys.stdout.write(f"{kernel.fn.__name__} {compiled.metadata.shared}\n")


def attend(query_lens: list[int], context_lens: list[int], head_dim: int, block_size: int) -> None:
    width = -(-max(context_lens) // block_size)
    tables = [[seq * width + block for block in range(width)] for seq in range(len(query_lens))]
    metadata = AttentionMetadata.from_lists(query_lens, context_lens, tables, block_size=block_size)
    num_blocks = len(query_lens) * width
    cache = torch.zeros(2, num_blocks, 2, block_size, head_dim, dtype=torch.bfloat16)
    query = torch.zeros(sum(query_lens), 4, head_dim, dtype=torch.bfloat16)
    kv_cache = LayerKVCache(*(half.transpose(1, 2) for half in cache))
    attention.paged_attention(query, kv_cache, metadata, scale=0.1)


def run_layer(num_tokens: int) -> None:
    def rows(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    positions = torch.zeros(num_tokens, dtype=torch.int32)
    key_cache, value_cache = rows(2, 4, 16, 2, 128)
    rms_norm.rms_norm(rows(num_tokens, 256), rows(256), eps=1e-6)
    all_reduce.all_reduce_add_rms_norm(
        rows(num_tokens, 256),
        rows(num_tokens, 256),
        rows(256),
        eps=1e-6,
        buffers=torch.zeros(4, dtype=torch.int64),
        signals=torch.zeros(4, dtype=torch.int64),
        rank=1,
        num_ranks=4,
    )
    rms_norm.add_rms_norm(rows(num_tokens, 256), rows(num_tokens, 256), rows(256), eps=1e-6)
    rotate_and_store.rotate_and_store(
        rows(num_tokens, 8, 128),
        positions,
        torch.zeros(64, 128),
        key_cache,
        value_cache,
        positions,
        query_weight=rows(128),
        key_weight=rows(128),
        eps=1e-6,
    )
    silu_and_mul.silu_and_mul(rows(num_tokens, 512))
    linear.linear(rows(1, 1000), rows(256, 1000), None)
    linear.linear(rows(num_tokens, 1000), rows(250, 1000), rows(250))
    linear.linear_parts(rows(num_tokens, 1024), rows(256, 1024))


def main() -> None:
    JITFunction.run = compile_launch
    launch._can_overlap = lambda device: True  # type: ignore[assignment]
    run_layer(3)
    attend([1], [300], 128, 64)  # split, combine
    attend([1, 1, 1, 9], [300, 5, 1, 9], 80, 16)  # direct, prompts


if __name__ == "__main__":
    main()
