"""Compiles the kernels of a step for a Hopper GPU where there is none; run as a script.

Launches are real, up to the point where a GPU would be needed: there each kernel is compiled with
the very arguments of the launch. The interpreter, which runs the kernels on a CPU, takes much that
the compiler refuses, such as a name with two types.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime import driver  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from nv_kernels import (
    AttentionMetadata,
    LayerKVCache,
    LogitAdjustments,
    StateColumns,
    TokenFilters,
)
from nv_kernels.triton import (
    all_reduce,
    attention,
    decode_state,
    launch,
    linear,
    logprobs,
    rms_norm,
    rotate_and_store,
    sampling,
    silu_and_mul,
    store_kv,
)

HOPPER = GPUTarget("cuda", 90, 32)
READ = r"\bld\.global|\bcp\.async\.c[ag]|\bcp\.async\.bulk\S*shared\S*global"
WRITE = r"\bst\.global|\batom\.|\bred\.|\bcp\.async\.bulk\S*global\S*shared"


class Hopper:
    """A driver that knows what it would compile for, and can launch nothing."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_launches() -> None:
    """Makes every launch compile its kernel and report it, instead of running it.

    A line names the kernel, its bytes of shared memory, what was compiled for the launch, and how
    many reads and writes of global memory stand before its wait for the kernel before it.
    """
    driver.set_active(Hopper())
    run = JITFunction.run

    def compile_launch(kernel: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> None:  # noqa: ANN401
        compiled = run(kernel, *args, warmup=True, **kwargs)
        before_wait, *after_wait = compiled.asm["ptx"].split("griddepcontrol.wait")
        early = [len(re.findall(access, before_wait)) for access in (READ, WRITE)]
        sys.stdout.write(
            f"{kernel.fn.__name__} {compiled.metadata.shared} {compiled.hash} "
            f"{' '.join(map(str, early)) if after_wait else '-1 -1'}\n"
        )

    JITFunction.run = compile_launch


def attend(
    query_lens: list[int],
    context_lens: list[int],
    head_dim: int,
    block_size: int,
    cache_dtype: torch.dtype = torch.bfloat16,
    *,
    is_settled: bool = False,
) -> None:
    width = -(-max(context_lens) // block_size)
    tables = [[seq * width + block for block in range(width)] for seq in range(len(query_lens))]
    metadata = AttentionMetadata.from_lists(query_lens, context_lens, tables, block_size=block_size)
    metadata = replace(metadata, is_settled=is_settled)
    num_blocks = len(query_lens) * width
    cache = torch.zeros(2, num_blocks, 2, block_size, head_dim, dtype=cache_dtype)
    query = torch.zeros(sum(query_lens), 4, head_dim, dtype=torch.bfloat16)
    kv_cache = LayerKVCache(cache[0].transpose(1, 2), cache[1].transpose(1, 2))
    attention.paged_attention(query, kv_cache, metadata, scale=0.1)


def store(num_tokens: int, cache_dtype: torch.dtype, *, is_settled: bool) -> None:
    qkv = torch.zeros(num_tokens, 8, 128, dtype=torch.bfloat16)
    positions = torch.zeros(num_tokens, dtype=torch.int32)
    key_cache, value_cache = torch.zeros(2, 4, 16, 2, 128, dtype=cache_dtype)
    rotate_and_store.rotate_and_store(
        qkv,
        positions,
        torch.zeros(64, 128),
        key_cache,
        value_cache,
        positions,
        query_weight=qkv[0, 0],
        key_weight=qkv[0, 1],
        eps=1e-6,
        k_scale=1.0,
        v_scale=1.0,
        is_settled=is_settled,
    )
    key, value = qkv[:, :2], qkv[:, 2:4]
    store_kv.store_kv(key, value, key_cache, value_cache, positions, k_scale=1.0, v_scale=1.0)


def run_layer(num_tokens: int) -> None:
    def rows(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    rms_norm.rms_norm(rows(num_tokens, 256), rows(256), eps=1e-6)
    all_reduce.all_reduce_add_rms_norm(
        rows(num_tokens, 256),
        rows(num_tokens, 256),
        rows(256),
        eps=1e-6,
        buffers=torch.zeros(4, dtype=torch.int64),
        signals=torch.zeros(4, dtype=torch.int64),
        is_aborted=torch.zeros(1, dtype=torch.int32),
        rank=1,
        num_ranks=4,
    )
    rms_norm.add_rms_norm(rows(num_tokens, 256), rows(num_tokens, 256), rows(256), eps=1e-6)
    silu_and_mul.silu_and_mul(rows(num_tokens, 512))
    columns = StateColumns(token=0, length=1, is_active=3, first_block=12)
    state, batch = torch.zeros(9, 20, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int32)
    decode_state.read_decode_state(state, batch, columns=columns, width=20, block_size=16)
    decode_state.advance_decode_state(
        state, batch, batch.long(), columns=columns, advances_length=True
    )
    linear.linear(rows(1, 1000), rows(256, 1000), None)
    linear.linear(rows(num_tokens, 1000), rows(250, 1000), rows(250))
    linear.linear_parts(rows(num_tokens, 1024), rows(256, 1024))


def sample(num_rows: int, vocab_size: int) -> None:
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16)
    state = torch.zeros(num_rows, 14, dtype=torch.int32)
    floats, ids = state.view(torch.float32), torch.zeros(num_rows, dtype=torch.int64)
    draw = (floats[:, 2], state[:, 4:6].view(torch.int64)[:, 0], ids)
    filters = TokenFilters(state[:, 6], floats[:, 7], floats[:, 8])
    counts = torch.zeros(9, vocab_size, dtype=torch.int32)
    adjustments = LogitAdjustments(
        state[:, 0], counts[:, : -(-vocab_size // 32)], counts.float(), counts, floats[:, 9:12]
    )
    for adjusted in (None, adjustments):
        for filtered in (None, filters):
            sampling.sample_tokens(logits, *draw, adjusted, filtered)
    sampling.sample_shard(logits, *draw, first_token=vocab_size)
    for num_top in (0, 20):
        logprobs.token_logprobs(logits, ids, num_top)


def serve_batches() -> None:
    """Launches what a server launches for batches of many sizes, at one model's shapes."""
    for head_dim in (64, 128):
        for num_seqs in (2, 20, 300):
            attend([9] * num_seqs, [9] * num_seqs, head_dim, 64)
    for num_tokens in (17, 20, 32):
        rows = torch.zeros(num_tokens, 256, dtype=torch.bfloat16)
        rms_norm.add_rms_norm(rows, rows, rows[0], eps=1e-6)
        linear.linear(rows, rows[:1].expand(64, 256).contiguous(), None)


def main() -> None:
    compile_launches()
    launch._can_overlap = lambda device: True  # type: ignore[assignment]
    attention.is_hopper = lambda device: True  # type: ignore[assignment, attr-defined]
    if sys.argv[1:] == ["--batches"]:
        serve_batches()
        return
    run_layer(3)
    for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for is_settled in (False, True):
            store(3, cache_dtype, is_settled=is_settled)
            attend([1], [300], 128, 64, cache_dtype, is_settled=is_settled)  # split, combine
            lengths = [1, 1, 1, 9], [300, 5, 1, 9]
            attend(*lengths, 80, 16, cache_dtype, is_settled=is_settled)  # direct, prompts
    for vocab_size in (131, 4500, 151936):
        sample(2, vocab_size)
    attend([1, 9, 200], [300, 9, 290], 128, 16)  # prompts by Hopper's own kernel


if __name__ == "__main__":
    main()
