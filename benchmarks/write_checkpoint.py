"""Writes a checkpoint with random bf16 weights of a real shape, to measure loading from files.

python benchmarks/write_checkpoint.py qwen3-8b FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from nv_kernels import select_attention_backend
from nv_models import open_checkpoint
from nv_models.decoder import CausalLM
from nv_runtime.bench.shapes import SHAPES

SHARD_BYTES = 4 * 10**9


def write_checkpoint(shape: str, folder: Path) -> None:
    """Writes config.json and as many safetensors files as the size needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    config = open_checkpoint(folder).config
    backend = select_attention_backend(
        "torch",
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        block_size=16,
    )
    # The meta device: what is needed of the model is the names and shapes of its tensors.
    model = CausalLM(config, device="meta", dtype=torch.bfloat16, attention_backend=backend)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for target in model.targets():
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        bound = (3 / target.shape[-1]) ** 0.5
        drawn = torch.empty(target.shape, dtype=torch.bfloat16, device=device)
        tensor = drawn.uniform_(-bound, bound) if drawn.dim() > 1 else drawn.fill_(1)
        shards[-1][target.name] = tensor.cpu()
        size += tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name)
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def main() -> None:
    """Reads the command line and writes the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_checkpoint(arguments.shape, arguments.folder)


if __name__ == "__main__":
    main()
