"""Latency models against arithmetic done by hand, and fits against the models they came from."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from nv_core import ConfigError, SchedulerConfig
from nv_core.sim import (
    HARDWARE,
    MODELS,
    AffineLatency,
    ConstantLatency,
    LatencyModel,
    ModelShape,
    RooflineLatency,
    StepLog,
    StepWork,
    Workload,
    WorkRequest,
    find_hardware,
    find_model,
    fit,
    fit_roofline,
    plan_capacity,
    simulate,
    split_at_idle,
)
from nv_core.sim.fit import step_seconds
from nv_core.sim.latency import work_of
from nv_core.step_log import RequestRecord, StepRecord

NOTHING = StepWork(0, 0, 0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        # As published, norms (which a shape leaves out) taken off: (2 L + 1) d, and for Qwen3
        # the 2 L head norms.
        ("llama-3-8b", 8_030_261_248 - 65 * 4096),
        ("llama-3-70b", 70_553_706_496 - 161 * 8192),
        ("llama-3.2-1b", 1_235_814_400 - 33 * 2048),
        ("qwen3-0.6b", 596_049_920 - 57 * 1024 - 28 * 2 * 128),
        ("qwen3-8b", 8_190_735_360 - 73 * 4096 - 36 * 2 * 128),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    assert find_model(name).num_parameters == num_parameters


def test_kv_bytes_of_a_token() -> None:
    assert find_model("llama-3-8b").kv_bytes_per_token == 131_072
    small = find_model("qwen3-0.6b")
    assert small.kv_bytes_per_token == 114_688
    fp8 = replace(small, kv_dtype_bytes=1)
    assert fp8.kv_bytes_per_token == 57_344
    assert fp8.weight_bytes == small.weight_bytes
    # As a log holds them, and as one from before the field existed does.
    assert ModelShape.from_header(fp8.as_dict()) == fp8
    old = {name: value for name, value in small.as_dict().items() if name != "kv_dtype_bytes"}
    assert ModelShape.from_header(old) == small
    with pytest.raises(ConfigError, match="kv_dtype_bytes must be an integer of at least 1"):
        replace(small, kv_dtype_bytes=0)


def test_a_shape_from_a_config_of_the_hub() -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 131,
    }
    shape = ModelShape.from_config(config, name="tiny")
    assert (shape.num_kv_heads, shape.head_dim) == (4, 16)
    with pytest.raises(ConfigError, match="has no 'vocab_size'"):
        ModelShape.from_config({k: v for k, v in config.items() if k != "vocab_size"})
    with pytest.raises(ConfigError, match="num_layers must be an integer of at least 1"):
        ModelShape.from_config({**config, "num_hidden_layers": 0})


def test_the_roofline_by_hand() -> None:
    """Llama-3-8B on an A100, every term computed here from the published shapes."""
    model, gpu = find_model("llama-3-8b"), find_hardware("a100")
    latency = RooflineLatency(model, gpu)
    matmul = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    head = 4096 * 128256
    # Eight decodes with 1,000 tokens each behind them, and a chunk of 512 behind 256.
    work = StepWork(520, 9, 9, 8000, 256, 512 * (256 + 256))
    compute = (2 * matmul * 520 + 2 * head * 9) / (312e12 * 0.65)
    read = 2 * (matmul + head) / (2.039e12 * 0.80)
    linear = (compute**1.5 + read**1.5) ** (1 / 1.5)
    kv = (8000 + 256) * 131_072 / (2.039e12 * 0.75)
    attention = 4 * 32 * 32 * 128 * 512 * 512 / (312e12 * 0.45)
    assert latency.seconds(work) == pytest.approx(linear + kv + attention + 32 * 38e-6)


def test_two_gpus_share_the_work_and_exchange_activations() -> None:
    model, gpu = find_model("llama-3-70b"), find_hardware("h100")
    one = RooflineLatency(model, gpu)
    two = RooflineLatency(model, gpu, tensor_parallel_size=2)
    work = StepWork(4096, 1, 1, 0, 0, 4096 * 2048.0)
    fixed = 80 * 33e-6
    exchange = 4096 * 80 * 2 * 8192 * 2 / 450e9
    assert two.seconds(work) - fixed == pytest.approx((one.seconds(work) - fixed) / 2 + exchange)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        RooflineLatency(model, replace(gpu, link_bytes_per_s=0.0), tensor_parallel_size=2)


def test_work_of_a_mixed_step() -> None:
    step = a_step(computed=(100, 7, 50), scheduled=(1, 20, 1), sampled=(0, 2))
    assert work_of(step) == StepWork(22, 3, 2, 150, 7, 20 * (7 + 10.0))
    assert work_of(a_step(computed=(4, 9), scheduled=(1, 1), sampled=(0, 1))) == StepWork(
        2, 2, 2, 13, 0, 0.0
    )


def a_step(
    *,
    computed: tuple[int, ...],
    scheduled: tuple[int, ...],
    sampled: tuple[int, ...],
    step_id: int = 0,
    planned_s: float = 0.0,
    done_s: float = 1.0,
) -> StepRecord:
    return StepRecord(
        step_id=step_id,
        planned_s=planned_s,
        launched_s=planned_s,
        done_s=done_s,
        seq_ids=tuple(range(len(computed))),
        computed=computed,
        scheduled=scheduled,
        sampled=sampled,
        preempted=(),
        dropped=(),
        released=(),
        refused=(),
        new_blocks={},
        num_scheduled_tokens=sum(scheduled),
        num_hit_tokens=0,
        num_waiting=0,
        num_running=len(computed),
        num_used_blocks=0,
        num_free_blocks=0,
        num_cached_blocks=0,
    )


def varied_log(
    latency: LatencyModel, *, ahead: int = 0, model: ModelShape | None = None
) -> StepLog:
    draw = random.Random(0)
    requests = tuple(
        WorkRequest(draw.uniform(0, 20), draw.randint(4, 3000), draw.randint(1, 60))
        for _ in range(150)
    )
    config = SchedulerConfig(20_000, 16, max_num_batched_tokens=4096)
    workload = Workload("varied", requests)
    return simulate(workload, config, latency, num_steps_ahead=ahead, model=model)


def with_noise(log: StepLog, share: float, seed: int = 0) -> StepLog:
    """The same steps, each taking a little more or less."""
    draw = random.Random(seed)
    times, now = [], 0.0
    for step, seconds in zip(log.steps, step_seconds(log), strict=True):
        now = max(now, step.planned_s)
        times.append((now, now + seconds * (1 + draw.uniform(-share, share))))
        now = times[-1][1]
    steps = [
        step._replace(planned_s=start, launched_s=start, done_s=end)
        for step, (start, end) in zip(log.steps, times, strict=True)
    ]
    return StepLog(log.header, log.requests, [], steps)


TRUE = AffineLatency(step_s=3e-3, token_s=5e-6, seq_s=2e-6, context_token_s=2e-9, pair_s=4e-10)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_fit_finds_the_model_that_made_the_log(ahead: int) -> None:
    found = fit(varied_log(TRUE, ahead=ahead))
    assert found.held_out_error < 1e-6
    assert isinstance(found.latency, AffineLatency)
    for name in ("step_s", "token_s", "seq_s", "context_token_s", "pair_s"):
        assert getattr(found.latency, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)


def test_a_fit_sees_through_noise_and_compilation() -> None:
    log = with_noise(varied_log(TRUE), 0.1)
    # Compiling something takes nine seconds in the fourth step.
    begin = log.steps[3].planned_s
    shifted = [
        step._replace(
            planned_s=step.planned_s + (9 if step.planned_s > begin else 0),
            done_s=step.done_s + (9 if step.planned_s >= begin else 0),
        )
        for step in log.steps
    ]
    requests = {
        seq_id: replace(
            r,
            arrival_s=r.arrival_s + (9 if r.arrival_s > begin else 0),
            finished_s=(r.finished_s or 0) + (9 if (r.finished_s or 0) > begin else 0),
        )
        for seq_id, r in log.requests.items()
    }
    found = fit(StepLog(log.header, requests, [], shifted))
    assert found.num_outliers == 1
    # The noise is uniform within a tenth, so its mean size is 5 %.
    assert 0.03 < found.held_out_error < 0.07
    work = StepWork(8, 8, 8, 12_000, 0, 0.0)
    assert found.latency.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.03)


GPU = replace(
    find_hardware("h100"), flops_share=0.5, bytes_share=0.7, kv_share=0.6, seq_overhead_s=3e-6
)


def log_of(name: str) -> StepLog:
    return varied_log(RooflineLatency(find_model(name), GPU), model=find_model(name))


def test_a_fitted_roofline_predicts_its_own_model() -> None:
    found = fit_roofline(log_of("qwen3-0.6b"), find_hardware("h100"))
    assert found.held_out_error < 0.01
    there = RooflineLatency(find_model("qwen3-0.6b"), found.hardware)
    truth = RooflineLatency(find_model("qwen3-0.6b"), GPU)
    for work in (StepWork(8, 8, 8, 8000, 0, 0.0), StepWork(4096, 2, 2, 0, 0, 4096 * 1024.0)):
        assert there.seconds(work) == pytest.approx(truth.seconds(work), rel=0.03)


def test_a_roofline_that_was_fitted_to_two_models_predicts_a_third() -> None:
    logs = [log_of("qwen3-0.6b"), log_of("qwen3-14b")]
    found = fit_roofline(logs, find_hardware("h100"))
    assert found.held_out_error < 0.01
    there = RooflineLatency(find_model("qwen3-4b"), found.hardware)
    truth = RooflineLatency(find_model("qwen3-4b"), GPU)
    for work in (StepWork(8, 8, 8, 8000, 0, 0.0), StepWork(4096, 2, 2, 0, 0, 4096 * 1024.0)):
        assert there.seconds(work) == pytest.approx(truth.seconds(work), rel=0.05)


def test_a_roofline_needs_to_know_the_model() -> None:
    with pytest.raises(ConfigError, match="shape of the model"):
        fit_roofline(varied_log(TRUE), find_hardware("h100"))


def test_weights_are_never_negative() -> None:
    # Larger batches are faster here, which no model of ours can say.
    odd = [
        a_step(
            computed=(10,) * size,
            scheduled=(1,) * size,
            sampled=tuple(range(size)),
            step_id=i,
            planned_s=float(i),
            done_s=i + 1 / size,
        )
        for i, size in enumerate([1, 2, 4, 8] * 10)
    ]
    header = varied_log(ConstantLatency(1.0)).header
    # One open request keeps the engine busy all through.
    requests = {0: RequestRecord(seq_id=0, request_id="0", arrival_s=0.0, num_prompt_tokens=1)}
    found = fit(StepLog(header, requests, [], odd)).latency
    assert isinstance(found, AffineLatency)
    assert min(found.step_s, found.token_s, found.seq_s, found.context_token_s, found.pair_s) >= 0
    assert found.seconds(NOTHING) > 0


def test_too_few_steps_are_refused() -> None:
    log = varied_log(TRUE)
    with pytest.raises(ConfigError, match="at least 20 steps, the log has 5"):
        fit(StepLog(log.header, log.requests, [], log.steps[:5]))


def test_too_few_steps_that_are_alike_are_refused() -> None:
    model = find_model("qwen3-0.6b")
    log = varied_log(RooflineLatency(model, GPU), model=model)
    endless = log.steps[3]._replace(done_s=float(2**53))
    broken = StepLog(log.header, log.requests, [], [*log.steps[:3], endless, *log.steps[4:]])
    with pytest.raises(ConfigError, match=r"at least 20 steps that are alike, but only \d+ of"):
        fit(broken)
    with pytest.raises(ConfigError, match=r"at least 20 steps that are alike, but only \d+ of"):
        fit_roofline(broken, find_hardware("h100"))


@pytest.mark.parametrize("ahead", [0, 1])
def test_idle_time_is_no_step_s(ahead: int) -> None:
    requests = (WorkRequest(0, 50, 9), WorkRequest(0.01, 50, 9), WorkRequest(900, 50, 9))
    config = SchedulerConfig(100, 16)
    log = simulate(Workload("gap", requests), config, ConstantLatency(0.5), num_steps_ahead=ahead)
    assert list(step_seconds(log)) == pytest.approx([0.5] * len(log.steps))
    parts = split_at_idle(log)
    assert [len(part.requests) for part in parts] == [2, 1]
    assert sum(len(part.steps) for part in parts) == len(log.steps)


def test_presets_are_found_by_name_and_others_refused() -> None:
    for name in HARDWARE:
        for model in MODELS:
            seconds = RooflineLatency(find_model(model), find_hardware(name)).seconds(
                StepWork(32, 32, 32, 32_000, 0, 0.0)
            )
            assert 0 < seconds < 1
    with pytest.raises(ConfigError, match="gpu must be one of a100"):
        find_hardware("abacus")
    with pytest.raises(ConfigError, match=r"model must be one of qwen3-0\.6b"):
        find_model("eliza")
    with pytest.raises(ConfigError, match="norm must be a positive number"):
        replace(find_hardware("a100"), norm=0.5)


def test_capacity_by_hand() -> None:
    model, gpu = find_model("llama-3-8b"), find_hardware("h100")
    capacity = plan_capacity(model, gpu, max_model_len=8192)
    per_token = 3 * 4096 + 3 * 14336
    step = 8192 * per_token * 2 + 256 * 128256 * (2 + 24)
    # A layer of 218,103,808 weights keeps the GPU busy for longer than its launch from 1,237 tokens
    # on: graphs for 16, ..., 512, 640, 768, 896, 1024 and 1237 tokens, and two for each of 35 sizes
    # of decodes.
    graphs = 1237 * per_token * 2 + 256 * (per_token + 128256) * 3 + ((13 + 70) * 2 + 128) * 2**20
    left = int(79 * 2**30 * 0.9) - 2 * model.num_parameters - step - graphs
    assert capacity.num_blocks == left // (131_072 * 16)
    assert capacity.fits
    assert capacity.concurrency(8192) == pytest.approx(capacity.num_blocks * 16 / 8192)


def test_what_does_not_fit_has_no_blocks() -> None:
    capacity = plan_capacity(find_model("llama-3-70b"), find_hardware("h100"))
    assert capacity.num_blocks == 0
    assert not capacity.fits
    shared = plan_capacity(find_model("llama-3-70b"), find_hardware("h100"), tensor_parallel_size=4)
    assert shared.fits
    with pytest.raises(ConfigError, match="memory_share"):
        plan_capacity(find_model("llama-3-8b"), find_hardware("h100"), memory_share=1.5)


def test_the_pool_is_no_larger_than_all_sequences_can_use() -> None:
    capacity = plan_capacity(
        find_model("qwen3-0.6b"), find_hardware("h200"), max_num_seqs=2, max_model_len=1000
    )
    assert capacity.num_blocks == 2 * math.ceil(1000 / 16)


@pytest.mark.parametrize(
    ("name", "fitting"), [("qwen3-8b", [1, 2, 4, 8, 16, 32]), ("llama-3.2-3b", [1, 2, 4, 8])]
)
def test_only_so_many_gpus_share_a_model_as_the_engine_lets(name: str, fitting: list[int]) -> None:
    model, gpu = find_model(name), find_hardware("h100")
    for size in range(34):
        if size in fitting:
            RooflineLatency(model, gpu, tensor_parallel_size=size)
            plan_capacity(model, gpu, tensor_parallel_size=size)
            continue
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            RooflineLatency(model, gpu, tensor_parallel_size=size)
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            plan_capacity(model, gpu, tensor_parallel_size=size)
