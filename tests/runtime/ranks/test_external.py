"""Ranks that a launcher has started: the same tokens on each, and no silent divergence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from external_ranks_program import STEP_LOG, run_external
from forked_ranks import In, also_in_a_forked_child, do_nothing, fail, other_option
from nv_core import ConfigError, SamplingParams
from nv_core.step_log import read_step_log
from nv_runtime import LLM, AsyncLLM, EngineConfig
from nv_runtime.ranks.process_group import host_store

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [8] * 20, [9, 10]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that lives as long as the test, as a launcher's does."""
    store, port = host_store(60)
    yield port
    del store


def test_every_rank_gets_the_answers_of_one(checkpoint: Path, tmp_path: Path, port: int) -> None:
    expected = []
    for prompts in (PROMPTS, PROMPTS[:1]):
        with LLM(
            str(checkpoint),
            device="cpu",
            dtype="float32",
            max_model_len=128,
            num_gpu_blocks_override=100,
            skip_tokenizer_init=True,
            show_progress=False,
        ) as llm:
            params = [
                SamplingParams(temperature=0.8 * (i % 2), max_tokens=30, ignore_eos=True, seed=i)
                for i in range(len(prompts))
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            expected.append([list(output.outputs[0].token_ids) for output in outputs])
    results = run_external(tmp_path, checkpoint, [[PROMPTS, PROMPTS[:1]]] * 2, port=port)
    assert results == [{"tokens": expected}] * 2
    # One rank writes the log that all were asked for: no request and no step is in it twice.
    log = read_step_log(tmp_path / STEP_LOG)
    assert len(log.requests) == 1
    assert [step.step_id for step in log.steps] == list(range(len(log.steps)))
    assert sum(len(step.sampled) for step in log.steps) == 30
    assert not log.is_truncated


@pytest.mark.parametrize("name", ["launch", "collect"])
def test_a_forked_child_of_a_rank_is_refused(
    checkpoint: Path, tmp_path: Path, port: int, name: str
) -> None:
    executor = "nv_runtime.ranks.external_ranks:ExternalExecutor"
    forking = In(executor, name, also_in_a_forked_child, 2)
    results = run_external(
        tmp_path, checkpoint, [[PROMPTS]] * 2, port=port, faults=[forking, do_nothing]
    )
    assert "error" not in results[0]
    assert results[0] == results[1]


def test_ranks_that_plan_different_things_are_told(
    checkpoint: Path, tmp_path: Path, port: int
) -> None:
    """Of the same shape, so that the collectives notice nothing."""
    other = [PROMPTS[0], [9] * 20, PROMPTS[2]]
    results = run_external(tmp_path, checkpoint, [[PROMPTS], [other]], port=port)
    for result in results:
        assert "rank 1 does not plan what rank 0 plans" in result["error"]
        assert "every rank must run the same program" in result["error"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_prefix_caching", False),
        ("async_scheduling", True),
        ("scheduling_policy", "fair"),
        ("override_generation_config", {"temperature": 0.5}),
        ("max_num_seqs", 3),
    ],
)
def test_ranks_with_other_options_are_told_before_anything_runs(
    checkpoint: Path, tmp_path: Path, port: int, name: str, value: object
) -> None:
    """Each schedules for itself: from such options come other plans, sooner or later."""
    faults = [do_nothing, other_option(name, value)]
    results = run_external(tmp_path, checkpoint, [[PROMPTS]] * 2, port=port, faults=faults)
    for result in results:
        assert f"rank 1 disagrees with rank 0 on {name}" in result["error"]


def test_the_failure_of_one_rank_is_known_to_the_other(
    checkpoint: Path, tmp_path: Path, port: int
) -> None:
    fault = In("nv_models.decoder:CausalLM", "compute_logits_shard", fail, 3)
    results = run_external(
        tmp_path, checkpoint, [[PROMPTS]] * 2, port=port, faults=[do_nothing, fault]
    )
    assert "another rank failed first.\nrank 1:\nTraceback" in results[0]["error"]
    assert "a fault of this rank alone" in results[0]["error"]
    assert "a fault of this rank alone" in results[1]["error"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("distributed_executor", "external"),
        ("distributed_executor_backend", "external_launcher"),
    ],
)
def test_requests_that_come_at_any_time_are_not_for_ranks_of_a_launcher(
    name: str, value: str
) -> None:
    """Each rank would see them come in a step of its own, and plan something else."""
    options: dict[str, Any] = {"tensor_parallel_size": 2, name: value}
    message = "distributed_executor='external' is for LLM: .* use distributed_executor='mp'"
    with pytest.raises(ConfigError, match=message):
        AsyncLLM("no/such/model", **options)
    with pytest.raises(ConfigError, match=message):
        AsyncLLM.from_engine_args(EngineConfig(model="no/such/model", **options))


def environment(patch: pytest.MonkeyPatch, **values: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        patch.delenv(name, raising=False)
    for name, value in values.items():
        patch.setenv(name, value)


def test_a_process_without_a_launcher_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, RANK="0")
    with pytest.raises(ConfigError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"):
        LLM(str(checkpoint), device="cpu", tensor_parallel_size=2, distributed_executor="external")
    environment(monkeypatch, RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2, but the launcher started 4"):
        LLM(str(checkpoint), device="cpu", tensor_parallel_size=2, distributed_executor="external")
