"""SchedulerConfig: the limits under which one scheduler works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields

from nv_core.errors import ConfigError
from nv_core.integers import shown
from nv_core.keywords import refuse_unknown_keywords
from nv_core.policies import Policy, PrefillFirst, check_policy

MAX_NUM_BLOCKS = 2**24
"""More KV blocks than any device has memory for; a pool's lists take 64 bytes of the host's memory
for each, 1 GiB for this many."""

MAX_COUNT = 2**31 - 1
"""The largest number of tokens or sequences: devices count them in 32 bits."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and choices of one scheduler; nothing in it changes after it is made.

    Args:
        num_blocks: Number of KV blocks in the pool, at most 2**24. The other sizes are below 2**31.
        block_size: Number of tokens whose keys and values one block holds.
        max_num_seqs: Most sequences that may hold blocks at once.
        max_num_batched_tokens: Token budget of one step. With "prefill_first" it cuts prompts
            only: a step of decodes runs up to `max_num_seqs` tokens.
        max_model_len: Most tokens (prompt and output) of one sequence, at least 2; None leaves
            the pool's size as the only limit.
        eos_token_ids: Tokens that end a sequence unless it ignores them.
        enable_prefix_caching: Whether full blocks are shared between equal prefixes.
        policy: Name of a shipped policy (see `nv_core.policies`), or a `Policy` object.
        vocab_size: Token ids at or above this are refused in prompts; None checks only that
            they fit 32 bits.
        findable_copies: When several blocks hold the same prefix: whether a hit can find "all" of
            them, so that the prefix outlives any one, or the "newest" only. None means "newest"
            for the policy `PrefillFirst`, whose schedules equal nano-vLLM's block for block, and
            "all" for every other.

    Raises:
        ConfigError: A value is out of range; the message names field, value and range.
        TypeError: An unknown keyword; the message names the nearest known one.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    policy: str | Policy = "mixed"
    _: KW_ONLY
    vocab_size: int | None = None
    findable_copies: str | None = None

    def __new__(cls, *args: object, **values: object) -> SchedulerConfig:
        """Refuses unknown keywords before the generated `__init__` sees them."""
        refuse_unknown_keywords(cls.__name__, values, (field.name for field in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Checks every field; turns `eos_token_ids` into a tuple."""
        if not isinstance(self.eos_token_ids, Iterable) or isinstance(self.eos_token_ids, str):
            raise ConfigError(f"eos_token_ids must be token ids, got {self.eos_token_ids!r}")
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        check_size("num_blocks", self.num_blocks, most=MAX_NUM_BLOCKS)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_size(name, getattr(self, name))
        for name in ("max_model_len", "vocab_size"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if self.max_model_len == 1:
            raise ConfigError("max_model_len must be at least 2 (prompt and output), got 1")
        for token_id in self.eos_token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ConfigError(
                    f"eos_token_ids must hold integers of at least 0, got {token_id!r}"
                )
        if self.findable_copies not in (None, "all", "newest"):
            raise ConfigError(
                f"findable_copies must be 'all', 'newest' or None, got {self.findable_copies!r}"
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching must be a bool, got {self.enable_prefix_caching!r}"
            )
        check_policy(self.policy)

    @property
    def keeps_copies(self) -> bool:
        """Whether every block of equal content can be found (see `findable_copies`)."""
        if self.findable_copies is None:
            return not (self.policy == "prefill_first" or isinstance(self.policy, PrefillFirst))
        return self.findable_copies == "all"


def check_size(name: str, value: object, *, most: int = MAX_COUNT) -> None:
    """Raises unless a value is an integer from 1 to `most`.

    Args:
        name: The field's name.
        value: What it was given.
        most: The largest that anything can have.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {shown(value)}")
    if value > most:
        raise ConfigError(f"{name} must be at most {most}, got {shown(value)}; lower it")
