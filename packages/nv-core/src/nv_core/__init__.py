"""A pure-Python continuous-batching scheduler core.

Sequences, paged KV blocks with an exact prefix cache, policies, and a `Scheduler` that turns
requests and sampled tokens into step plans. It needs no torch and no GPU.
"""

from nv_core.block_manager import BlockManager
from nv_core.config import SchedulerConfig
from nv_core.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    NvError,
    RequestError,
    SchedulingError,
)
from nv_core.plan import ScheduledBatch, ScheduledSequence, StepPlan
from nv_core.policies import (
    Deadline,
    Fair,
    LeastRecompute,
    LongestPrefix,
    Mixed,
    Ordered,
    Policy,
    PrefillFirst,
    Priority,
    ShortestFirst,
    SkipAhead,
    take_or_preempt,
)
from nv_core.prefix_cache_stats import PrefixCacheStats
from nv_core.sampling_params import RequestOutputKind, SamplingParams
from nv_core.scheduler import Explanation, Scheduler, StepEvents
from nv_core.sequence import FinishReason, Sequence, SequenceStatus, WaitReason
from nv_core.step import Step

__version__ = "0.1.0"

__all__ = [
    "BlockManager",
    "CapacityError",
    "ConfigError",
    "Deadline",
    "EngineDeadError",
    "Explanation",
    "Fair",
    "FinishReason",
    "LeastRecompute",
    "LongestPrefix",
    "Mixed",
    "NvError",
    "Ordered",
    "Policy",
    "PrefillFirst",
    "PrefixCacheStats",
    "Priority",
    "RequestError",
    "RequestOutputKind",
    "SamplingParams",
    "ScheduledBatch",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulingError",
    "Sequence",
    "SequenceStatus",
    "ShortestFirst",
    "SkipAhead",
    "Step",
    "StepEvents",
    "StepPlan",
    "WaitReason",
    "take_or_preempt",
]
