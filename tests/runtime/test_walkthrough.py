"""docs/walkthrough.md tells the truth: its two tables are what a real run prints.

The run uses Qwen3-0.6B's real widths with random weights, and two of its 28 equal layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from nv_core import SamplingParams, Scheduler, StepPlan
from nv_models import CausalLM
from nv_runtime import LLM
from nv_runtime.model_runner import StepHandle

DOCUMENT = Path(__file__).parents[2] / "docs" / "walkthrough.md"
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    with LLM(
        str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        dtype="bfloat16",
        block_size=16,
        max_model_len=2048,
        num_gpu_blocks_override=200,
        show_progress=False,
    ) as llm:
        yield llm


class Recorder:
    """Writes down the shape of everything that one step makes, in order, first layer only."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tensor(self, name: str, value: Tensor) -> None:
        shape = "[" + ", ".join(map(str, value.shape)) + "]"
        self.lines.append(f"{name:<22}{shape:<20}{str(value.dtype).removeprefix('torch.')}")

    def values(self, name: str, value: Tensor) -> None:
        self.tensor(name, value)
        self.lines[-1] = f"{self.lines[-1]:<50} {abbreviate(value.tolist())}"

    def plan(self, plan: StepPlan) -> None:
        for entry in plan.sequences:
            self.lines.append(
                f"sequence {entry.seq_id}: from token {entry.num_computed_tokens}, "
                f"{entry.num_scheduled_tokens} tokens, samples={entry.samples}, "
                f"blocks {abbreviate(list(entry.block_table))}"
            )


def abbreviate(values: list[Any]) -> str:
    if values and isinstance(values[0], list):
        return "[" + ", ".join(abbreviate(row) for row in values) + "]"
    if len(values) <= 6:
        return str(values)
    return f"[{values[0]}, {values[1]}, ..., {values[-1]}]"


@contextmanager
def recording(llm: LLM, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Iterator[None]:
    """Hooks a recorder into every stage between the scheduler and the commit."""
    runner: Any = llm._open_parts().engine.runner
    model: CausalLM = runner._mixed_step._model
    first: Any = model.layers[0]
    names: list[tuple[str, nn.Module]] = [
        ("embedding", model.embedding),
        ("input_norm", first.input_norm),
        ("qkv_proj", first.attention.qkv_proj),
        ("o_proj", first.attention.o_proj),
        ("gate_up_proj", first.mlp.gate_up_proj),
        ("down_proj", first.mlp.down_proj),
    ]
    handles = [
        module.register_forward_hook(lambda _m, _i, out, name=name: recorder.tensor(name, out))
        for name, module in names
    ]
    once: set[str] = set()  # the functions are shared by all layers

    def record_once(name: str, value: Tensor) -> None:
        if name not in once:
            once.add(name)
            recorder.tensor(name, value)

    # Any, because the names to replace are imported there, not exported.
    attention_layer: Any = import_module("nv_models.layers.attention")
    mlp_layer: Any = import_module("nv_models.layers.mlp")
    with monkeypatch.context() as patch:
        schedule, launch = Scheduler.schedule, runner.launch
        rotate_and_store = attention_layer.rotate_and_store
        silu_and_mul = mlp_layer.silu_and_mul
        attend, compute_logits = first.attention.backend.attend, model.compute_logits_shard

        def schedule_and_record(scheduler: Scheduler) -> StepPlan | None:
            plan = schedule(scheduler)
            if plan is not None:
                recorder.plan(plan)
            return plan

        def run_and_record(_model: nn.Module, arguments: tuple[Any, ...]) -> None:
            token_ids, positions, _, metadata = arguments
            recorder.tensor("token_ids", token_ids)
            recorder.values("positions", positions)
            recorder.values("slot_mapping", metadata.slot_mapping)
            recorder.values("cu_seqlens_q", metadata.cu_seqlens_q)
            recorder.values("context_lens", metadata.context_lens)
            recorder.values("block_table", metadata.block_table)

        def rotate_and_record(qkv: Tensor, *rest: Any, **options: Any) -> Tensor:  # noqa: ANN401
            record_once("all heads", qkv)
            query: Tensor = rotate_and_store(qkv, *rest, **options)
            record_once("query", query)
            record_once("key cache, one layer", rest[2])
            return query

        def attend_and_record(query: Tensor, *rest: Any, **options: Any) -> Tensor:  # noqa: ANN401
            output: Tensor = attend(query, *rest, **options)
            record_once("attention", output)
            return output

        def activate_and_record(gate_up: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
            output: Tensor = silu_and_mul(gate_up, **options)
            record_once("silu_and_mul", output)
            return output

        def logits_and_record(hidden: Tensor) -> Tensor:
            recorder.tensor("hidden, sampled rows", hidden)
            logits: Tensor = compute_logits(hidden)
            recorder.tensor("logits", logits)
            return logits

        def launch_and_record(plan: StepPlan) -> StepHandle:
            handle: StepHandle = launch(plan)
            recorder.tensor("sampled token ids", handle.token_ids)
            return handle

        patch.setattr(Scheduler, "schedule", schedule_and_record)
        patch.setattr(runner, "launch", launch_and_record)
        handles.append(model.register_forward_pre_hook(run_and_record))
        patch.setattr(attention_layer, "rotate_and_store", rotate_and_record)
        patch.setattr(mlp_layer, "silu_and_mul", activate_and_record)
        patch.setattr(first.attention.backend, "attend", attend_and_record)
        patch.setattr(model, "compute_logits_shard", logits_and_record)
        yield
    for handle in handles:
        handle.remove()


def record_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> str:
    recorder = Recorder()
    with recording(llm, monkeypatch, recorder):
        llm._open_parts().engine.step()
    return "\n".join(recorder.lines)


def documented(name: str) -> str:
    (block,) = re.findall(rf"```text {name}\n(.*?)\n```", DOCUMENT.read_text(), flags=re.DOTALL)
    return str(block)


def test_the_prefill_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [list(range(1000, 1300)), list(range(2000, 2050))]
    with llm.stream(prompts, SamplingParams(max_tokens=5, ignore_eos=True)):
        assert record_step(llm, monkeypatch) == documented("prefill")


def test_the_decode_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # The prefill step samples one token each, which makes the lengths those of the document.
    prompts = [[7] * 299, [8] * 999, [9] * 56]
    with llm.stream(prompts, SamplingParams(max_tokens=5, ignore_eos=True)):
        llm._open_parts().engine.step()
        assert record_step(llm, monkeypatch) == documented("decode")
