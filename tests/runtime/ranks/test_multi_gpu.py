"""Ranks on GPUs: one GPU shared through gloo, and several through NCCL, whole and with faults."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import nv_runtime.ranks.processes
import tiny_checkpoints
from nv_core import ConfigError, SamplingParams
from nv_runtime import LLM
from nv_runtime.ranks.errors import RankError
from tiny_checkpoints import TinySpec

PROMPTS = [[(7 * i + k) % 131 for i in range(length)] for k, length in enumerate((1, 9, 40, 77))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
MIXED = [
    GREEDY,
    GREEDY.clone(temperature=0.9, seed=3),
    GREEDY.clone(temperature=0.8, seed=4, top_k=7),
    GREEDY.clone(repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinySpec(
        family="qwen3",
        head_dim=64,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=2,
        max_position_embeddings=4096,
    )
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), spec)


def make_llm(checkpoint: Path, **options: Any) -> LLM:  # noqa: ANN401 - LLM's own options
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": 256,
        "num_gpu_blocks_override": 64,
        "skip_tokenizer_init": True,
        "show_progress": False,
        "rank_timeout_s": 120,
    }
    return LLM(str(checkpoint), **{**defaults, **options})


def answers(llm: LLM, params: Any = GREEDY) -> list[list[int]]:  # noqa: ANN401
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.gpu
def test_two_ranks_share_one_gpu_through_gloo(checkpoint: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with make_llm(checkpoint) as llm:
        expected = answers(llm, MIXED)
    options: dict[str, Any] = {"device": "cuda:0", "collective_backend": "gloo"}
    with make_llm(checkpoint, tensor_parallel_size=2, **options) as llm:
        assert answers(llm, MIXED) == expected


@pytest.mark.gpu
def test_more_ranks_than_gpus_are_refused(checkpoint: Path) -> None:
    count = torch.cuda.device_count()
    if count not in (1, 2, 4):
        pytest.skip("needs 1, 2 or 4 CUDA devices")
    with pytest.raises(ConfigError, match=f"needs {2 * count} CUDA devices .* {count} are visible"):
        make_llm(checkpoint, tensor_parallel_size=2 * count)


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
class TestTwoGpus:
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("eager", [False, True])
    def test_tokens_are_those_of_one_gpu(
        self,
        checkpoint: Path,
        eager: bool,  # noqa: FBT001 - a parameter
        fused: bool,  # noqa: FBT001 - a parameter
    ) -> None:
        with make_llm(checkpoint) as llm:
            expected = answers(llm, MIXED)
        options = {"enforce_eager": eager, "fused_all_reduce": fused}
        with make_llm(checkpoint, tensor_parallel_size=2, **options) as llm:
            # Twice: the second time replays what the first has captured.
            assert answers(llm, MIXED) == expected
            assert answers(llm, MIXED) == expected

    def test_ranks_capture_graphs_together(self, checkpoint: Path) -> None:
        with make_llm(checkpoint) as llm:
            expected = answers(llm, MIXED)
        options = {"graph_capture": "start", "max_num_seqs": 12}
        with make_llm(checkpoint, tensor_parallel_size=2, **options) as llm:
            assert answers(llm, MIXED) == expected
            assert llm.capture_graphs(use_tqdm=False) > 0  # for what the last step needed
            assert answers(llm, MIXED) == expected

    @pytest.mark.parametrize(("delay_s", "fused"), [(0.0, False), (0.5, False), (0.5, True)])
    def test_a_killed_rank(
        self,
        checkpoint: Path,
        delay_s: float,
        fused: bool,  # noqa: FBT001 - a parameter
    ) -> None:
        options = {"max_model_len": 4096, "fused_all_reduce": fused}
        llm = make_llm(checkpoint, tensor_parallel_size=2, **options)
        executor: Any = llm._open_parts().engine.runner
        (pid,) = executor.pids
        stream = llm.stream(PROMPTS, GREEDY.clone(max_tokens=3000))
        next(stream)
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankError, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - began < 30
        llm.shutdown()
        with make_llm(checkpoint, tensor_parallel_size=2) as again:
            assert len(answers(again)) == len(PROMPTS)

    def test_a_stopped_rank(self, checkpoint: Path) -> None:
        with make_llm(checkpoint, tensor_parallel_size=2) as llm:
            answers(llm)  # captures graphs, for which two seconds may be short
            executor: Any = llm._open_parts().engine.runner
            executor._timeout_s = 2.0
            os.kill(executor.pids[0], signal.SIGSTOP)
            with pytest.raises(RankError, match="no answer within 2 s from rank 1"):
                answers(llm)

    def test_a_rank_that_fails_tells_why(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nv_runtime.ranks.processes, "RANK_MAIN", "failing_rank:main")
        llm = make_llm(checkpoint, tensor_parallel_size=2)
        with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*a fault of this rank alone"):
            answers(llm)
        llm.shutdown()

    def test_two_engines_on_gpus_of_their_own(self, checkpoint: Path) -> None:
        if torch.cuda.device_count() < 4:
            with make_llm(checkpoint) as llm:
                expected = answers(llm)
            with (
                make_llm(checkpoint, device="cuda:0") as a,
                make_llm(checkpoint, device="cuda:1") as b,
            ):
                assert answers(a) == answers(b) == expected
            return
        with (
            make_llm(checkpoint, tensor_parallel_size=2, device="cuda:0") as first,
            make_llm(checkpoint, tensor_parallel_size=2, device="cuda:2") as second,
        ):
            assert answers(first) == answers(second)

    def test_two_engines_with_ranks_on_the_same_gpus(self, checkpoint: Path) -> None:
        with make_llm(checkpoint) as llm:
            expected = answers(llm)
        with (
            make_llm(checkpoint, tensor_parallel_size=2) as first,
            make_llm(checkpoint, tensor_parallel_size=2) as second,
        ):
            assert answers(first) == expected
            assert answers(second) == expected
            assert answers(first) == expected
