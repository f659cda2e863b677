"""The engine: `LLM`, the paged KV pool, the model runner, the sampler and the `nv` command.

Names are imported on first use, so that `nv --help` and the data classes do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nv_core import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    NvError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    SchedulingError,
)

if TYPE_CHECKING:
    from nv_runtime.async_llm import AsyncLLM
    from nv_runtime.engine_config import EngineConfig
    from nv_runtime.llm import LLM
    from nv_runtime.one_thread import ConcurrentUseError
    from nv_runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from nv_runtime.prompt import TextPrompt, TokensPrompt
    from nv_runtime.ranks.errors import RankError

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ConcurrentUseError",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "NvError",
    "RankError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulingError",
    "TextPrompt",
    "TokensPrompt",
]

_HOME_OF = {
    "LLM": "nv_runtime.llm",
    "AsyncLLM": "nv_runtime.async_llm",
    "EngineConfig": "nv_runtime.engine_config",
    "ConcurrentUseError": "nv_runtime.one_thread",
    "CompletionOutput": "nv_runtime.outputs",
    "RequestMetrics": "nv_runtime.outputs",
    "RequestOutput": "nv_runtime.outputs",
    "TextPrompt": "nv_runtime.prompt",
    "TokensPrompt": "nv_runtime.prompt",
    "RankError": "nv_runtime.ranks.errors",
}


_NEEDS_TORCH = ("LLM", "AsyncLLM", "EngineConfig")


def __getattr__(name: str) -> object:
    """Imports a public name when it is first asked for."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEEDS_TORCH:
        # Before all other imports, since it times them.
        import_module("nv_runtime.import_times")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, imported or not."""
    return sorted(__all__)
