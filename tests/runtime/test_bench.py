"""`nv bench` and what it is made of, on a tiny model and on known numbers."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nv_core import ConfigError
from nv_models import open_checkpoint
from nv_runtime.bench import environment
from nv_runtime.bench.latency import LatencyRun, summarise_latency
from nv_runtime.bench.profiling import device_use
from nv_runtime.bench.roofline import DeviceRates, decode_floor_s, floor_of, workload_floor
from nv_runtime.bench.shapes import SHAPES, materialised
from nv_runtime.bench.startup import StartupError, run_startup
from nv_runtime.bench.steps import StepRecord, record_steps, summarise_steps
from nv_runtime.bench.workload import random_workload
from nv_runtime.cli import main
from nv_runtime.llm import LLM

pytestmark = pytest.mark.slow

BF16: dict[str, Any] = {"dtype": torch.bfloat16, "kv_cache_dtype": torch.bfloat16}
H200 = DeviceRates(bytes_per_s=4.25e12, flops_per_s=790e12)


def load_script(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("shape", "tokens_per_s"),
    [("qwen3-0.6b", 35_800), ("qwen3-1.7b", 28_700), ("qwen3-4b", 17_500), ("qwen3-8b", 12_500)],
)
def test_the_floor_of_nano_vllms_benchmark_is_the_one_worked_out_by_hand(
    shape: str, tokens_per_s: float
) -> None:
    workload = load_script("bench_offline").nano_vllm_workload(random.Random(0))
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (142_827, 133_966)
    with materialised(shape) as (path, _):
        config = open_checkpoint(path).config
    floor = workload_floor(config, workload.lengths, **BF16, rates=H200)
    assert workload.num_output_tokens / floor.total_s == pytest.approx(tokens_per_s, rel=0.01)


def test_the_floor_of_a_decode_step() -> None:
    with materialised("qwen3-8b") as (path, _):
        config = open_checkpoint(path).config
    weights_s, kv_s = decode_floor_s(
        config, **BF16, rates=H200, num_seqs=64, num_context_tokens=64 * 1024
    )
    assert 1e3 * (weights_s + kv_s) == pytest.approx(5.835, rel=0.001)
    half_kv = {**BF16, "kv_cache_dtype": torch.float8_e4m3fn}
    assert decode_floor_s(
        config, **half_kv, rates=H200, num_seqs=64, num_context_tokens=64 * 1024
    ) == (weights_s, kv_s / 2)
    many_s, _ = decode_floor_s(config, **BF16, rates=H200, num_seqs=1000, num_context_tokens=0)
    # 2 * 1000 * 7.568e9 operations, more than the time of reading the weights
    assert many_s == pytest.approx(2 * 1000 * 7.568e9 / 790e12, rel=0.001)


def test_the_floor_counts_what_all_prompts_begin_with_once() -> None:
    """Two requests, (10, 2) and (14, 3) tokens, that share 8, against one sum after the other."""
    with materialised("qwen3-0.6b") as (path, _):
        config = open_checkpoint(path).config
    floor = workload_floor(config, [(10, 2), (14, 3)], **BF16, rates=H200, num_shared_tokens=8)
    layer = 1024 * 2 * (16 + 8) * 128 + 3 * 1024 * 3072
    head = 151936 * 1024
    # Each token computed looks at itself and at all before it.
    pairs = sum(range(1, 9)) + sum(range(9, 11)) + sum(range(9, 15))
    flops = 2 * 28 * layer * (8 + 2 + 6) + 2 * head * 2 + 4 * 28 * 16 * 128 * pairs
    assert floor.prefill_s == pytest.approx(flops / H200.flops_per_s)
    # The first decode step reads 8 shared tokens, 2 + 1 and 6 + 1; the second 14 + 2 of the longer.
    token_bytes = 2 * 28 * 8 * 128 * 2
    assert floor.kv_s == pytest.approx((18 + 16) * token_bytes / H200.bytes_per_s)


def test_ranks_have_the_rates_of_all_their_devices() -> None:
    workload = random_workload(
        3, input_len=4, output_len=5, vocab_size=9, prefix_len=8, generator=random.Random(0)
    )
    with materialised("qwen3-tiny") as (path, options), LLM(path, **options) as llm:
        alone = floor_of(llm, workload, rates=H200)
        object.__setattr__(llm.config, "tensor_parallel_size", 2)
        assert floor_of(llm, workload, rates=H200).total_s == pytest.approx(alone.total_s / 2)
        config, lengths = llm.model_config, workload.lengths
        dtypes: dict[str, Any] = dict.fromkeys(BF16, torch.float32)
        apart = workload_floor(config, lengths, **dtypes, rates=H200)
        assert alone.total_s < apart.total_s


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("throughput --output-json no/such/folder/x.json", "cannot be written; is its folder"),
        ("latency --output-json no/such/folder/x.json", "cannot be written; is its folder"),
        ("startup --output-json no/such/folder/x.json", "cannot be written; is its folder"),
        ("latency --profile no/such/folder/x.json", "cannot be written; is its folder"),
        ("throughput --num-prompts 0", "'--num-prompts'"),
        ("throughput --num-iters 0", "'--num-iters'"),
        ("throughput --num-iters-warmup -1", "'--num-iters-warmup'"),
        ("throughput --input-len 0", "'--input-len'"),
        ("throughput --random-output-len 0", "'--output-len'"),
        ("throughput --random-range-ratio 1", "'--random-range-ratio'"),
        ("throughput --prefix-len -1", "'--prefix-len'"),
        ("throughput --profile-steps 0", "'--profile-steps'"),
        ("throughput --temperature -1", "'--temperature'"),
        ("latency --batch-size 0", "'--batch-size'"),
        ("latency --num-iters 0", "'--num-iters'"),
        ("latency --output-len 0", "'--output-len'"),
        ("startup --input-len 0", "'--input-len'"),
        ("startup --num-iters-warm -1", "'--num-iters-warm'"),
        (
            "startup --num-iters-cold 0 --num-iters-warm 0",
            "--num-iters-cold and --num-iters-warm are both 0",
        ),
        (
            "startup --num-iters-cold 0 --num-iters-warmup 0 --num-iters-warm 0",
            "--num-iters-cold and --num-iters-warm are both 0",
        ),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert main(["bench", *command.split(), "--model", "no/such/model"]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_of_a_workload_that_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(output_len: int) -> dict[str, Any]:
        result = tmp_path / "result.json"
        status = main(
            "bench latency --model qwen3-tiny --device cpu --input-len 8 --batch-size 2"
            f" --output-len {output_len} --num-iters-warmup 0 --num-iters 1 --no-roofline"
            f" --profile {tmp_path / 'trace.json'} --output-json {result}".split()
        )
        assert status == 0
        report: dict[str, Any] = json.loads(result.read_text())
        return report

    # Eleven steps are the prompts' and the ten decode steps that show that steps are steady.
    assert run(output_len=11)["num_profiled_steps"] == 0
    assert "No trace: the answers end before" in capsys.readouterr().out
    assert not (tmp_path / "trace.json").exists()
    assert run(output_len=15)["num_profiled_steps"] == 4
    assert "Trace of 4 steps: " in capsys.readouterr().out
    names = [
        e.get("name") for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ]
    assert names.count("step") == 4


def test_the_commit_is_that_of_a_checkout_which_the_file_is_part_of(tmp_path: Path) -> None:
    """Not that of a project whose environment it is installed in."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("needs git")

    def run(*command: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run([git, "-C", tmp_path, *identity, *command], check=True, capture_output=True)

    installed = tmp_path / "env" / "environment.py"
    installed.parent.mkdir()
    installed.touch()
    assert environment._commit(installed) == "unknown"
    run("init")
    run("commit", "--allow-empty", "-m", "first")
    assert environment._commit(installed) == "unknown"
    run("add", "env")
    run("commit", "-m", "second")
    assert re.fullmatch("[0-9a-f]{7,}", environment._commit(installed))
    installed.write_text("changed")
    assert environment._commit(installed).endswith("+")


def test_random_workloads() -> None:
    def draw(**changes: Any) -> list[tuple[int, int]]:  # noqa: ANN401
        options: dict[str, Any] = {
            "input_len": 100,
            "output_len": 50,
            "vocab_size": 7,
            "generator": random.Random(1),
        }
        workload = random_workload(200, **{**options, **changes})
        assert {token for prompt in workload.prompts for token in prompt} <= set(range(7))
        assert all(params.ignore_eos for params in workload.sampling_params)
        return workload.lengths

    assert set(draw()) == {(100, 50)}
    prompts, outputs = zip(*draw(range_ratio=0.1), strict=True)
    assert set(prompts) == set(range(90, 111))
    assert set(outputs) == set(range(45, 56))
    prefixed = random_workload(
        3, input_len=4, output_len=1, vocab_size=99, prefix_len=8, generator=random.Random(2)
    )
    assert {tuple(prompt[:8]) for prompt in prefixed.prompts} == {tuple(prefixed.prompts[0][:8])}
    assert len({tuple(prompt) for prompt in prefixed.prompts}) == 3
    with pytest.raises(ConfigError, match=r"random_range_ratio must be in \[0, 1\), got 1"):
        draw(range_ratio=1)
    with pytest.raises(ConfigError, match="output_len must be at least 1, got 0"):
        draw(output_len=0)


def test_device_use_counts_overlap_once_and_splits_idle_time() -> None:
    use = device_use([(100, 200), (150, 180), (202, 300), (400, 500)])
    assert use.num_kernels == 4
    assert use.elapsed_ms == pytest.approx(0.4)
    assert use.busy_ms == pytest.approx(0.298)
    assert use.idle_share == pytest.approx(102 / 400)
    assert use.long_gap_share == pytest.approx(100 / 400)
    assert device_use([]).idle_share == 0


def test_times_of_steps_add_up_to_the_run() -> None:
    def step(kind: Any, launched: float, collected: float) -> StepRecord:  # noqa: ANN401
        return StepRecord(kind, 1, 2, 3, launched, launched + 0.1, collected - 0.2, collected)

    # One step ahead: each is launched before the one before it is collected.
    summary = summarise_steps(
        [step("prefill", 1, 2), step("decode", 1.5, 3), step("decode", 2.5, 5)]
    )
    assert sum(part["seconds"] for part in summary.values()) == pytest.approx(4)
    assert summary["decode"]["num_steps"] == 2
    assert summary["decode"]["num_tokens"] == 4
    assert summary["decode"]["max_ms"] == pytest.approx(2000)
    assert summary["decode"]["mean_launch_ms"] == pytest.approx(100)
    assert summary["prefill"]["mean_wait_ms"] == pytest.approx(200)


def test_recorded_steps_are_those_that_ran() -> None:
    with materialised("qwen3-tiny") as (path, options), LLM(path, **options) as llm:
        runner = llm.llm_engine.runner
        workload = random_workload(
            3, input_len=20, output_len=5, vocab_size=100, generator=random.Random(0)
        )
        with record_steps(llm.llm_engine) as steps:
            llm.generate(workload.prompts, workload.sampling_params, use_tqdm=False)
        assert llm.llm_engine.runner is runner
    assert [step.kind for step in steps] == ["prefill", *["decode"] * 4]
    assert [step.num_tokens for step in steps] == [60, 3, 3, 3, 3]
    assert [step.num_context_tokens for step in steps] == [60, 63, 66, 69, 72]
    assert all(step.collect_end_s >= step.launch_end_s for step in steps)


def test_throughput_and_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    status = main(
        "bench throughput --model qwen3-tiny --num-prompts 4 --random-input-len 24 --output-len 20"
        f" --num-iters 2 --device cpu --profile {trace} --profile-steps 3"
        f" --output-json {result}".split()
    )
    assert status == 0
    assert "output tokens/s" in capsys.readouterr().out
    report = json.loads(result.read_text())
    assert report["benchmark"] == "throughput"
    first, second = report["runs"]
    for run in (first, second):
        assert run["num_output_tokens"] == 80
        assert run["total_num_tokens"] == 80 + 4 * 24
        assert run["steps"]["decode"]["num_steps"] == 19
        assert 0 < run["roofline_share"] < 1
        in_steps = sum(part["seconds"] for part in run["steps"].values())
        assert in_steps <= run["elapsed_time"]
    assert report["environment"]["torch"] == torch.__version__
    assert report["environment"]["commit"]
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    for span in ("schedule", "collect", "commit", "launch decode, 4 seqs, 4 tokens", "step"):
        assert names.count(span) == 3


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    status = main(
        "bench latency --model qwen3-tiny --input-len 8 --output-len 4 --batch-size 2 --device cpu"
        f" --num-iters-warmup 1 --num-iters 3 --no-roofline --output-json {result}".split()
    )
    assert status == 0
    assert "50% percentile latency" in capsys.readouterr().out
    report = json.loads(result.read_text())
    assert len(report["latencies"]) == 3
    assert report["percentiles"]["50"] == sorted(report["latencies"])[1]
    assert report["median_roofline_share"] is None
    parts = zip(report["ttft_ms"], report["ms_per_token"], report["latencies"], strict=True)
    for ttft_ms, token_ms, total_s in parts:
        assert ttft_ms + 3 * token_ms == pytest.approx(1e3 * total_s)


def test_latency_of_answers_of_one_token() -> None:
    summary = summarise_latency([LatencyRun(2.0, 2.0, 0, None)])
    assert summary["median_ms_per_token"] is None
    assert summary["percentiles"]["99"] == 2.0


def test_startup_counts_the_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    status = main(
        "bench startup --model qwen3-tiny --skip-tokenizer-init --device cpu --num-iters-cold 1"
        f" --num-iters-warmup 0 --num-iters-warm 0 --output-json {result}".split()
    )
    assert status == 0
    printed = capsys.readouterr().out
    assert "cold: engine ready after" in printed
    report = json.loads(result.read_text())
    (run,) = report["cold"]["runs"]
    assert 0 < run["python_s"] < run["imported_s"] < run["ready_s"] < run["first_token_s"]
    assert "warm" not in report
    names = [phase["name"] for phase in run["phases"]]
    assert names[:3] == ["Python", "import torch", "import nv"]
    assert names[-2:] == ["first token", "everything else"]
    assert {"weights", "KV cache", "kernels", "CUDA graphs"} < set(names)
    for phase in run["phases"]:
        assert phase["seconds"] >= 0
        assert f"  {phase['name']:<17} {phase['seconds']:6.2f} s" in printed
    seconds = {phase["name"]: phase["seconds"] for phase in run["phases"]}
    assert sum(seconds.values()) == pytest.approx(run["first_token_s"])
    # The phases are the start: hardly anything lies between them.
    assert seconds["everything else"] < 0.2 * run["first_token_s"]
    assert seconds["Python"] == run["python_s"]
    assert seconds["import torch"] + seconds["import nv"] <= run["imported_s"] - run["python_s"]
    assert report["options"]["skip_tokenizer_init"] is True


def test_a_start_that_fails_says_what_the_process_said(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        run_startup(str(tmp_path), {"device": "cpu"}, num_prompt_tokens=1, cold=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_models_and_leave_nothing_behind(shape: str) -> None:
    with materialised(shape) as (path, options):
        assert open_checkpoint(path).config.num_layers == SHAPES[shape]["num_hidden_layers"]
        assert options["load_format"] == "dummy"
    assert not Path(path).exists()
    with materialised("some/model") as (path, options):
        assert (path, options) == ("some/model", {})
