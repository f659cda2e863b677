"""Builds an engine from its options: checkpoint, model, KV pool, scheduler, in that order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tqdm import tqdm

from nv_core import ConfigError, SamplingParams, Scheduler, SchedulerConfig
from nv_core.step_log import LogHeader
from nv_kernels import (
    AttentionBackend,
    KernelInputError,
    KernelWatch,
    select_attention_backend,
)
from nv_models import (
    SINGLE_RANK,
    CausalLM,
    Checkpoint,
    ModelConfig,
    TensorParallel,
    check_tensor_parallel_size,
    heads_per_rank,
    load_model,
    open_checkpoint,
)
from nv_models.config import read_json_object
from nv_runtime.capture_ahead import capture_graphs
from nv_runtime.engine import Engine
from nv_runtime.engine_config import GENERATION_CONFIGS, EngineConfig
from nv_runtime.engine_stats import EngineStats
from nv_runtime.executor import Executor
from nv_runtime.generation_config import default_sampling_params, eos_token_ids
from nv_runtime.hub import resolve_model
from nv_runtime.import_times import IMPORT_SECONDS
from nv_runtime.kv_cache import (
    KVCacheSpec,
    allocate_kv_cache,
    size_kv_cache,
)
from nv_runtime.model_runner import ModelRunner
from nv_runtime.ranks.agreement import (
    Agreement,
    Facts,
    checkpoint_facts,
    code_facts,
    model_facts,
    weight_facts,
)
from nv_runtime.sampler import derive_seed
from nv_runtime.sampling_needs import lasting_needs_of
from nv_runtime.start_times import StartTimes
from nv_runtime.step_log import EngineStepLog, make_header
from nv_runtime.step_memory import estimate_step_memory

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZES = {"flash_attn": 256, "flash_attn_3": 128, "triton": 64, "torch": 16}
"""Tokens per KV block for each attention backend when the caller does not choose."""

_OPTIONS_OF_ALL_RANKS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "enforce_eager",
    "graph_capture",
    "fused_all_reduce",
    "attention_backend",
    "load_format",
    "seed",
)
"""Options on which ranks would compute different things if they differed."""

_OPTIONS_OF_SCHEDULERS = (
    "enable_prefix_caching",
    "async_scheduling",
    "generation_config",
    "override_generation_config",
)
"""Options on which ranks that schedule by themselves would plan different things."""


@dataclass(frozen=True)
class EngineParts:
    """A ready engine and what its front door needs to know.

    Attributes:
        engine: The engine.
        tokenizer: Encodes prompts and decodes answers; None if it was skipped.
        default_sampling_params: For requests that bring none.
        model_config: The model's shape.
        max_model_len: Most tokens of one sequence.
        start_times: Where the time of the start went.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    default_sampling_params: SamplingParams
    model_config: ModelConfig
    max_model_len: int
    start_times: StartTimes


@dataclass(frozen=True)
class RankPart:
    """One rank's part of an engine.

    Attributes:
        runner: Runs steps with this rank's share of the model.
        model: That share.
        dtype: Of weights and activations.
        kv_cache_dtype: Of the KV cache.
        block_size: Tokens per KV block.
        num_blocks: KV blocks, the same on every rank.
        max_model_len: Most tokens of one sequence.
    """

    runner: ModelRunner
    model: CausalLM
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    block_size: int
    num_blocks: int
    max_model_len: int


class Ranks(Protocol):
    """The ranks that share a model, as seen by one that has a scheduler."""

    def join(self) -> tuple[TensorParallel, Agreement | None]:
        """Waits for the others; returns this one's place and what compares them."""

    def make_executor(self, runner: ModelRunner) -> Executor:
        """Makes what runs steps on all ranks from what runs them on this one."""

    def shutdown(self) -> None:
        """Ends what was started; calling it again does nothing."""


def build_engine(config: EngineConfig) -> EngineParts:
    """Builds an engine; logs a table of how long each phase took.

    Raises:
        NvError: The options, the checkpoint or the memory do not allow it; the message says what
            to change.
    """
    times = StartTimes(IMPORT_SECONDS)
    path = resolve_model(config.model, revision=config.revision)
    checkpoint = open_checkpoint(path)
    times.end("configuration")
    device = _resolve_device(config)
    check_tensor_parallel_size(checkpoint.config, config.tensor_parallel_size)
    ranks = _start_ranks(config, path, device)
    try:
        return _build_engine(config, checkpoint, ranks, device=device, times=times)
    except BaseException:
        times.close()
        ranks.shutdown()
        raise


def build_rank(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tensor_parallel: TensorParallel,
    agreement: Agreement | None,
    *,
    device: torch.device,
    times: StartTimes | None = None,
) -> RankPart:
    """Builds one rank's part: its share of the model, its KV pool, and its runner.

    Args:
        config: The engine's options.
        checkpoint: The model on disk.
        tensor_parallel: Which rank of how many.
        agreement: Compares this rank with the others; None if it is the only one.
        device: Where it computes.
        times: Takes the time of each phase.

    Raises:
        NvError: The options, the checkpoint or the memory do not allow it, or the ranks disagree.
    """
    times = times or StartTimes(IMPORT_SECONDS)
    model_config = checkpoint.config
    dtype = config.resolve_dtype(model_config.dtype, device)
    kv_cache_dtype = config.resolve_kv_cache_dtype(dtype)
    max_model_len = _resolve_max_model_len(config, model_config)
    if agreement is not None:
        agreement.require_equal(_facts(config, checkpoint, dtype=dtype))
    backend, block_size = select_backend(
        config, model_config, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype
    )
    use_graphs = uses_graphs(config, device, backend, tensor_parallel)
    times.end("attention backend", backend.name)
    model = _load(
        checkpoint,
        config,
        tensor_parallel=tensor_parallel,
        backend=backend,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        load_kv_scales=kv_cache_dtype != dtype,
    )
    if device.type == "cuda":
        # Otherwise the last copies would count as the next phase's.
        torch.cuda.synchronize(device)
    times.end("weights", num_bytes=model.num_weight_bytes)

    spec = KVCacheSpec(
        num_layers=model_config.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=block_size,
        dtype=kv_cache_dtype,
    )
    num_blocks = size_kv_cache(
        spec,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        step_memory=estimate_step_memory(
            model_config,
            dtype=dtype,
            device=device,
            max_num_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            use_graphs=use_graphs,
        ),
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_blocks=config.num_gpu_blocks_override,
        may_shorten=config.max_model_len == "auto",
    )
    if agreement is not None:
        agreement.require_equal({"block size": block_size, **weight_facts(model)})
        num_blocks = agreement.smallest(num_blocks)
    if config.max_model_len == "auto" and num_blocks * block_size < max_model_len:
        max_model_len = num_blocks * block_size
        logger.info("max_model_len=%d: what the KV cache holds", max_model_len)
    kv_caches = allocate_kv_cache(spec, num_blocks, device=device, scales=model.kv_scales)
    times.end(
        "KV cache",
        f"{num_blocks} blocks of {block_size} tokens, {num_blocks * spec.block_bytes / 1e9:.2f} GB",
    )
    runner = ModelRunner(
        model,
        kv_caches,
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        device=device,
        use_graphs=use_graphs,
        seed_of=lambda seq_id: derive_seed(config.seed, seq_id),
        usual_needs=lasting_needs_of(
            _default_sampling_params(config, checkpoint), model_config.vocab_size
        ),
    )
    return RankPart(runner, model, dtype, kv_cache_dtype, block_size, num_blocks, max_model_len)


def _build_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    ranks: Ranks,
    *,
    device: torch.device,
    times: StartTimes,
) -> EngineParts:
    if device.type == "cuda":
        # The first allocation sets the device up.
        torch.empty(1, device=device)
    times.end("device", str(device))
    model_config = checkpoint.config
    tokenizer = None
    if not config.skip_tokenizer_init:
        # Imported here: an engine without text needs none of it.
        from nv_runtime.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(checkpoint)
    times.end("tokenizer", "" if tokenizer is not None else "skipped")
    tensor_parallel, agreement = ranks.join()
    if agreement is not None:
        times.end("ranks", f"{config.tensor_parallel_size} of them")
    times.watch_kernels(KernelWatch(device))
    part = build_rank(config, checkpoint, tensor_parallel, agreement, device=device, times=times)
    times.watch_captures(part.runner.graphs)
    max_model_len = part.max_model_len
    num_pool_tokens = part.num_blocks * part.block_size
    if num_pool_tokens < max_model_len:
        logger.warning(
            "the KV cache holds %d tokens, less than max_model_len=%d: longer sequences end there",
            num_pool_tokens,
            max_model_len,
        )
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=part.num_blocks,
            block_size=part.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=_all_eos_token_ids(config, checkpoint, tokenizer),
            vocab_size=model_config.vocab_size,
            enable_prefix_caching=_may_cache_prefixes(config, part.model),
            policy=config.scheduling_policy,
        )
    )
    num_steps_ahead = int(_schedules_ahead(config, device))
    step_log = None
    # Under an external launcher every rank is here, and all would write the same file.
    if config.step_log is not None and tensor_parallel.rank == 0:
        header = make_header(
            scheduler,
            model_config,
            dtype=part.dtype,
            kv_cache_dtype=part.kv_cache_dtype,
            device=device,
            num_steps_ahead=num_steps_ahead,
        )
        step_log = _open_step_log(config.step_log, header)
    stats = None
    if not config.disable_log_stats:
        stats = EngineStats(
            scheduler,
            model_name=config.model,
            num_blocks=part.num_blocks,
            max_model_len=max_model_len,
            log_interval_s=config.log_stats_interval_s,
        )
    engine = Engine(
        scheduler,
        ranks.make_executor(part.runner),
        tokenizer=tokenizer,
        vocab_size=model_config.vocab_size,
        max_logprobs=config.max_logprobs,
        num_steps_ahead=num_steps_ahead,
        step_log=step_log,
        stats=stats,
        start_times=times,
    )
    times.end("engine")
    if config.graph_capture == "start":
        try:
            capture_graphs(engine, show_progress=config.show_progress)
        except BaseException:
            engine.close()
            raise
        times.end("captures ahead")
    times.log_ready()
    return EngineParts(
        engine=engine,
        tokenizer=tokenizer,
        default_sampling_params=_default_sampling_params(config, checkpoint),
        model_config=model_config,
        max_model_len=max_model_len,
        start_times=times,
    )


class _SingleRank:
    """A process that has the model to itself."""

    def join(self) -> tuple[TensorParallel, Agreement | None]:
        """There is nobody to wait for."""
        return SINGLE_RANK, None

    def make_executor(self, runner: ModelRunner) -> Executor:
        """Returns the runner itself."""
        return runner

    def shutdown(self) -> None:
        """Nothing was started."""


def _start_ranks(config: EngineConfig, path: Path, device: torch.device) -> Ranks:
    if config.tensor_parallel_size == 1:
        return _SingleRank()
    # Imported here: one rank needs none of it.
    if config.distributed_executor == "external":
        from nv_runtime.ranks.external_ranks import ExternalRanks

        return ExternalRanks(config, device)
    from nv_runtime.ranks.local_ranks import LocalRanks

    return LocalRanks(config, path, device)


def _resolve_device(config: EngineConfig) -> torch.device:
    if config.tensor_parallel_size > 1 and config.distributed_executor == "external":
        from nv_runtime.ranks.external_ranks import external_device

        return external_device(config)
    return config.resolve_device()


def _facts(config: EngineConfig, checkpoint: Checkpoint, *, dtype: torch.dtype) -> Facts:
    """What ranks must have in common before they load anything."""
    facts = {"dtype": str(dtype), **code_facts(), **model_facts(checkpoint.config)}
    names: tuple[str, ...] = _OPTIONS_OF_ALL_RANKS
    if config.distributed_executor == "external":
        names += _OPTIONS_OF_SCHEDULERS
        policy = config.scheduling_policy
        facts["scheduling_policy"] = policy if isinstance(policy, str) else type(policy).__name__
    for name in names:
        facts[name] = repr(getattr(config, name))
    if config.load_format != "dummy":
        facts.update(checkpoint_facts(checkpoint))
    return facts


def _resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    if not isinstance(config.max_model_len, int):
        return model_config.max_position_embeddings
    longest = model_config.longest_model_len
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {longest} positions that the "
            "model and its rotary scaling reach; lower it"
        )
    return config.max_model_len


def select_backend(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
) -> tuple[AttentionBackend, int]:
    """Picks backend and block size together: each may restrict the other.

    Args:
        config: The engine's options.
        model_config: The model.
        device: Where it computes.
        dtype: Of the activations.
        kv_cache_dtype: Of the KV cache.

    Raises:
        ConfigError: The backend that was asked for cannot run here.
    """
    num_heads, num_kv_heads = heads_per_rank(model_config, config.tensor_parallel_size)

    def select(name: str, block_size: int) -> AttentionBackend:
        return select_attention_backend(
            name,
            device=device,
            dtype=dtype,
            cache_dtype=kv_cache_dtype,
            head_dim=model_config.head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
        )

    name = config.attention_backend
    try:
        if config.block_size is not None:
            return select(name, config.block_size), config.block_size
        # 256 is a size that every backend takes, so that "auto" chooses freely.
        name = select(name, DEFAULT_BLOCK_SIZES.get(name, 256)).name
        block_size = DEFAULT_BLOCK_SIZES[name]
        return select(name, block_size), block_size
    except KernelInputError as error:
        raise ConfigError(f"attention_backend: {error}") from error


def _load(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    tensor_parallel: TensorParallel,
    backend: AttentionBackend,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
    load_kv_scales: bool,
) -> CausalLM:
    with tqdm(
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not config.show_progress,
    ) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model = load_model(
            checkpoint,
            device=device,
            dtype=dtype,
            attention_backend=backend,
            tensor_parallel=tensor_parallel,
            load_format=config.load_format,
            max_model_len=max_model_len,
            seed=config.seed,
            load_kv_scales=load_kv_scales,
            on_progress=on_progress,
        )
    model.pack_weights()
    return model


def _all_eos_token_ids(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Joins what config, generation config and tokenizer each call the end of a sequence."""
    own = _own_generation_config(config)
    ids = [
        *checkpoint.config.eos_token_ids,
        *eos_token_ids(checkpoint.generation_config, source="generation_config.json"),
        *eos_token_ids(own, source=f"{config.generation_config}/generation_config.json"),
        *(tokenizer.eos_token_ids if tokenizer is not None else ()),
    ]
    vocab_size = checkpoint.config.vocab_size
    beyond = [token_id for token_id in ids if token_id >= vocab_size]
    if beyond:
        logger.warning(
            "end-of-sequence tokens %s are ignored: the model's token ids are in [0, %d)",
            beyond,
            vocab_size,
        )
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id < vocab_size))


def uses_graphs(
    config: EngineConfig,
    device: torch.device,
    backend: AttentionBackend,
    tensor_parallel: TensorParallel = SINGLE_RANK,
) -> bool:
    """Whether steps run as CUDA graphs; where that is not for the user's sake, rank 0 says why.

    Args:
        config: The engine's options.
        device: Where it computes.
        backend: Of attention.
        tensor_parallel: Which rank of how many.
    """
    if device.type != "cuda" or config.enforce_eager:
        return False
    if backend.waits_for_host:
        waits = f"attention backend {backend.name!r} waits"
    elif tensor_parallel.stages_on_host:
        waits = "collectives through gloo wait"
    else:
        return True
    if tensor_parallel.rank == 0:
        logger.info("no CUDA graphs: %s for the host, which no graph can hold", waits)
    return False


def _open_step_log(path: str, header: LogHeader) -> EngineStepLog:
    try:
        return EngineStepLog(path, header)
    except OSError as error:
        raise ConfigError(
            f"step_log={path!r} cannot be written: {error.strerror or error}; name another file, "
            "or leave step_log out"
        ) from error


def _schedules_ahead(config: EngineConfig, device: torch.device) -> bool:
    if config.async_scheduling is None:
        return device.type == "cuda"
    return config.async_scheduling


def _may_cache_prefixes(config: EngineConfig, model: CausalLM) -> bool:
    """Whether equal prefixes have equal keys, which dynamic rotary scaling breaks."""
    if config.enable_prefix_caching and model.kv_depends_on_length:
        logger.warning(
            "prefix caching is off: with dynamic rotary scaling beyond the original length, keys "
            "depend on the length of the whole sequence"
        )
        return False
    return config.enable_prefix_caching


def _own_generation_config(config: EngineConfig) -> dict[str, Any]:
    """Reads the file in the folder that `generation_config` names; empty if it names none."""
    if config.generation_config in GENERATION_CONFIGS:
        return {}
    return read_json_object(Path(config.generation_config) / "generation_config.json")


def _default_sampling_params(config: EngineConfig, checkpoint: Checkpoint) -> SamplingParams:
    if config.generation_config == "auto":
        values: Mapping[str, Any] = checkpoint.generation_config
    else:
        values = _own_generation_config(config)
    return default_sampling_params(values, config.override_generation_config)
