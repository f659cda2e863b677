"""EngineConfig: every option of `LLM(...)`, checked, with its unit and meaning.

This is the one list of options: `LLM` takes them as keywords, and the command line has a flag
for each that makes sense there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nv_core import ConfigError
from nv_core.config import MAX_COUNT, MAX_NUM_BLOCKS, check_size
from nv_core.keywords import refuse_unknown_keywords
from nv_core.policies import check_policy
from nv_models import LOAD_FORMATS, LoadFormat

if TYPE_CHECKING:
    from nv_core import Policy

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
}
"""Names of dtypes that the option `dtype` accepts."""

FP8_KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""Names of dtypes that only the KV cache can have."""

KV_CACHE_DTYPES = ("auto", *FP8_KV_CACHE_DTYPES, *DTYPES)
"""What the option `kv_cache_dtype` accepts."""

GENERATION_CONFIGS = ("auto", "vllm")

GRAPH_CAPTURES = ("idle", "lazy", "start")

MAX_NUM_SEQS = 2**16
"""Far more sequences than one device can decode at once; each has a row on the device, and objects
on the host, from the start."""

MAX_TENSOR_PARALLEL_SIZE = 8
MAX_RANK_TIMEOUT_S = 7 * 24 * 3600

DISTRIBUTED_EXECUTORS = ("mp", "external")
COLLECTIVE_BACKENDS = ("auto", "nccl", "gloo")

_EXECUTOR_OF_BACKEND = {"uni": "mp", "mp": "mp", "external_launcher": "external"}
"""vLLM's names of executors -> ours."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine; nothing in it changes after it is made.

    Args:
        model: A local directory, a `.gguf` file, or a Hub id such as `Qwen/Qwen3-0.6B`.
        revision: Branch, tag or commit on the Hub; None for the default branch.
        dtype: "auto", "bfloat16", "float16" or "float32" (or a `torch.dtype`). "auto" is the
            checkpoint's own dtype on CUDA, with float32 checkpoints in bfloat16, and float32 on
            a CPU.
        device: "auto" (CUDA if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
        max_model_len: Most tokens (prompt and output) of one sequence; None for what the model
            was trained for, which has to fit; "auto" (or -1, as in vLLM) for as much of that as
            fits.
        max_num_seqs: Most sequences that hold KV blocks at once, up to 65,536.
        max_num_batched_tokens: Token budget of one step.
        block_size: Tokens per KV block; None for the attention backend's best.
        num_gpu_blocks_override: Number of KV blocks, up to 2**24, whatever memory there is; None to
            size the pool from memory.
        gpu_memory_utilization: Share of the device's memory that the engine may fill with
            weights, activations and KV blocks; CUDA only.
        kv_cache_memory_bytes: Size of the KV pool in bytes; None to size it from memory.
        kv_cache_dtype: "auto" for the dtype of the activations; "fp8" (or "fp8_e4m3") for a byte
            an element, half of a 16-bit cache: twice the tokens fit, decode steps read them faster,
            and answers change a little. Prompts become slower on Hopper, where the kernel made for
            it reads no fp8 (16 x 1024 tokens: 293 instead of 189 us a layer). Fast from compute
            capability 8.9 on; older GPUs run PyTorch's attention, slowly and without CUDA graphs.
            Scales are the checkpoint's, or 1. The name of the activations' own dtype is "auto",
            too.
        tensor_parallel_size: Number of ranks, from 1 to 8, that share the model.
        distributed_executor: Who starts the ranks: "mp", this process, on this host, each on a
            device of its own from `device` on; or "external", a launcher such as torchrun, under
            which every rank runs the same program, with `LLM`. None is "mp".
        distributed_executor_backend: vLLM's name of the same: "mp", "external_launcher", or "uni"
            for one rank, which starts none.
        collective_backend: How ranks talk while they compute: "nccl", "gloo", or "auto" for NCCL on
            CUDA and gloo on a CPU. With gloo, ranks can share a CUDA device, without CUDA graphs.
        fused_all_reduce: Whether ranks on GPUs sum small messages in one kernel with the addition
            and the norm behind, over memory that they map into each other, instead of through NCCL.
            Where that is not possible, a warning says why, and NCCL does it.
        rank_timeout_s: Seconds that a step may take before its ranks count as lost; it holds the
            compiling of kernels and the capture of graphs.
        rank_start_timeout_s: Seconds that the ranks may take to be ready, loading included.
        enforce_eager: Never uses CUDA graphs. There are none with the attention backend "torch"
            either, which waits for the host.
        graph_capture: When the CUDA graphs of decode steps are captured: "start", all sizes before
            the engine is ready, which takes seconds; "lazy", each when a step of its size first
            occurs, which then takes tens of milliseconds longer; or "idle", like "lazy", and
            `AsyncLLM` captures the other sizes while no request is open, one at a time.
        async_scheduling: Whether the next step is planned and launched while the device still runs
            the last one; None for yes on CUDA, no on a CPU. Outputs are the same.
        enable_prefix_caching: Whether equal prefixes share KV blocks.
        attention_backend: "auto", "torch", "triton", "flash_attn" or "flash_attn_3".
        scheduling_policy: Name of a policy of nv-core, or a `Policy` object.
        load_format: "auto", "safetensors", "gguf", or "dummy" for seeded random weights.
        skip_tokenizer_init: Loads no tokenizer; prompts are token ids then, and outputs have no
            text.
        generation_config: "auto" takes the default sampling parameters from the model's
            generation_config.json; "vllm" ignores that file's sampling parameters; a folder takes
            them, and further end-of-sequence tokens, from the generation_config.json in there.
        override_generation_config: Values that stand in place of that file's, by its names, such
            as `{"temperature": 0.5, "max_new_tokens": 64}`.
        max_logprobs: Most log-probabilities that a request may ask for at each position; -1 lifts
            the limit, and lets requests ask for all tokens with -1.
        seed: Seed of dummy weights, and of the draws of requests that bring no seed.
        step_log: A file to write what each step does and when, one JSON object a line, for
            `nv_core.sim` to draw, measure and fit; `.gz` at the end packs it. Its folder must be
            there. None for no log. Of the ranks of an external launcher, rank 0 writes it.
        disable_log_stats: Whether the engine counts nothing, and writes no line about its load to
            the log from time to time. `LLM.get_metrics` needs the counts.
        log_stats_interval_s: Seconds between two such lines, which are written while it works.
        show_progress: Whether loading shows a progress bar on standard error.

    Raises:
        ConfigError: A value is out of range; the message names field, value and range.
        TypeError: An unknown keyword; the message names the nearest known one.
    """

    model: str
    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str = "auto"
    max_model_len: int | str | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    distributed_executor: str | None = None
    distributed_executor_backend: str | None = None
    collective_backend: str = "auto"
    fused_all_reduce: bool = False
    rank_timeout_s: float = 300.0
    rank_start_timeout_s: float = 600.0
    enforce_eager: bool = False
    graph_capture: str = "idle"
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    scheduling_policy: str | Policy = "mixed"
    load_format: LoadFormat = "auto"
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = field(default=None, hash=False)
    max_logprobs: int = 20
    seed: int = 0
    step_log: str | None = None
    disable_log_stats: bool = True
    log_stats_interval_s: float = 10.0
    show_progress: bool = True

    def __new__(cls, **values: object) -> EngineConfig:
        """Refuses unknown keywords before the generated `__init__` sees them."""
        refuse_unknown_keywords("LLM", values, (field.name for field in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Checks every field."""
        for name in ("model", "step_log", "generation_config"):
            if isinstance(getattr(self, name), PathLike):
                object.__setattr__(self, name, str(getattr(self, name)))
        self._check_sizes()
        self._check_ranks()
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        interval = self.log_stats_interval_s
        if not isinstance(interval, (int, float)) or not interval > 0:
            raise ConfigError(f"log_stats_interval_s must be seconds above 0, got {interval!r}")
        if self.dtype not in ("auto", *DTYPES, *DTYPES.values()):
            names = ", ".join(("auto", *DTYPES))
            raise ConfigError(f"dtype must be one of {names}, got {self.dtype!r}")
        for name in ("model", "device", "attention_backend"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a str, got {getattr(self, name)!r}")
        self._check_step_log()
        for name in (
            "enforce_eager",
            "fused_all_reduce",
            "enable_prefix_caching",
            "skip_tokenizer_init",
            "disable_log_stats",
            "show_progress",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise ConfigError(
                f"async_scheduling must be a bool or None, got {self.async_scheduling!r}"
            )
        if self.max_model_len == -1:
            object.__setattr__(self, "max_model_len", "auto")
        if self.max_model_len not in (None, "auto"):
            check_size("max_model_len", self.max_model_len)
        limit = self.max_logprobs
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < -1:
            raise ConfigError(
                f"max_logprobs must be an integer of at least -1 (no limit), got {limit!r}"
            )
        if self.max_model_len == 1:
            raise ConfigError(
                "max_model_len must be an integer of at least 2: a prompt and an output token"
            )
        # Unknown names fail here, before anything is loaded.
        try:
            check_policy(self.scheduling_policy)
        except ConfigError as error:
            raise ConfigError(f"scheduling_policy: {error}") from error
        self._check_choice("load_format", LOAD_FORMATS)
        self._check_choice("graph_capture", GRAPH_CAPTURES)
        self._check_choice("kv_cache_dtype", KV_CACHE_DTYPES)
        self._check_generation_config()
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")

    def resolve_device(self) -> torch.device:
        """Returns the device to run on; a CUDA device with its number.

        Raises:
            ConfigError: The device is unknown or absent.
        """
        if self.device == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        else:
            name = self.device
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConfigError(
                f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}"
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device={self.device!r} is not there: {torch.cuda.device_count()} CUDA devices "
                "are visible; use device='cpu' or make the device visible"
            )
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def resolve_dtype(self, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Returns the dtype of weights and activations."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        if device.type == "cpu":
            # Half precision is slower than float32 on most CPUs, and less exact on all.
            return torch.float32
        return torch.bfloat16 if checkpoint_dtype == torch.float32 else checkpoint_dtype

    def resolve_kv_cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the KV cache.

        Args:
            dtype: Of the activations, see `resolve_dtype`.

        Raises:
            ConfigError: A cache of another dtype than the activations' was asked for, and not fp8.
        """
        name = self.kv_cache_dtype
        if name in FP8_KV_CACHE_DTYPES:
            return FP8_KV_CACHE_DTYPES[name]
        if name != "auto" and DTYPES[name] != dtype:
            own = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"kv_cache_dtype={name!r} is not the dtype of the activations, {own}; use 'auto', "
                f"'fp8', or dtype={name!r} too"
            )
        return dtype

    def _check_sizes(self) -> None:
        check_size("max_num_seqs", self.max_num_seqs, most=MAX_NUM_SEQS)
        check_size("max_num_batched_tokens", self.max_num_batched_tokens)
        for name, most in (
            ("block_size", MAX_COUNT),
            ("num_gpu_blocks_override", MAX_NUM_BLOCKS),
            ("kv_cache_memory_bytes", 2**63 - 1),
        ):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name), most=most)

    def _check_ranks(self) -> None:
        check_size("tensor_parallel_size", self.tensor_parallel_size)
        if self.tensor_parallel_size > MAX_TENSOR_PARALLEL_SIZE:
            raise ConfigError(
                f"tensor_parallel_size must be from 1 to {MAX_TENSOR_PARALLEL_SIZE}, got "
                f"{self.tensor_parallel_size}"
            )
        self._check_choice("collective_backend", COLLECTIVE_BACKENDS)
        backend = self.distributed_executor_backend
        if backend is not None:
            self._check_choice("distributed_executor_backend", tuple(_EXECUTOR_OF_BACKEND))
            if backend == "uni" and self.tensor_parallel_size > 1:
                raise ConfigError(
                    "distributed_executor_backend='uni' is one process, but tensor_parallel_size="
                    f"{self.tensor_parallel_size} needs as many; use 'mp'"
                )
            executor = _EXECUTOR_OF_BACKEND[backend]
            if self.distributed_executor not in (None, executor):
                raise ConfigError(
                    f"distributed_executor={self.distributed_executor!r} contradicts "
                    f"distributed_executor_backend={backend!r}; give one of them"
                )
            object.__setattr__(self, "distributed_executor", executor)
            object.__setattr__(self, "distributed_executor_backend", None)
        if self.distributed_executor is None:
            object.__setattr__(self, "distributed_executor", "mp")
        self._check_choice("distributed_executor", DISTRIBUTED_EXECUTORS)
        for name in ("rank_timeout_s", "rank_start_timeout_s"):
            seconds = getattr(self, name)
            is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
            if not is_number or not 0 < seconds <= MAX_RANK_TIMEOUT_S:
                raise ConfigError(
                    f"{name} must be a number of seconds in (0, {MAX_RANK_TIMEOUT_S}] (a week), "
                    f"got {seconds!r}"
                )

    def _check_step_log(self) -> None:
        """Refuses, before anything is loaded, a file that cannot be made."""
        if self.step_log is None:
            return
        if not isinstance(self.step_log, str):
            raise ConfigError(f"step_log must be a path or None, got {self.step_log!r}")
        path = Path(self.step_log)
        try:
            with suppress(OSError):
                os.lstat(path)
        except ValueError as error:
            # A NUL character, or one that the file system's encoding lacks.
            raise ConfigError(
                f"step_log={self.step_log!r} is no path ({error}); name another file"
            ) from error
        if os.path.isdir(path):
            raise ConfigError(f"step_log={self.step_log!r} is a folder; name a file in it")
        if not os.path.isdir(path.parent):
            raise ConfigError(
                f"step_log={self.step_log!r} is in a folder that does not exist; make the folder "
                f"{str(path.parent)!r} first, or name another file"
            )

    def _check_generation_config(self) -> None:
        value = self.generation_config
        if value not in GENERATION_CONFIGS and not (
            isinstance(value, str) and os.path.isfile(Path(value) / "generation_config.json")
        ):
            raise ConfigError(
                f"generation_config must be one of {', '.join(GENERATION_CONFIGS)}, or a folder "
                f"with a generation_config.json, got {value!r}"
            )
        overrides = self.override_generation_config
        if overrides is None:
            return
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"override_generation_config must be a dict, got {overrides!r}")
        object.__setattr__(self, "override_generation_config", dict(overrides))

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
