"""PrefixCacheStats: what the prefix cache has saved, in tokens and in requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixCacheStats:
    """Counts since the scheduler was made.

    A request counts once, when it first gets blocks: neither a refused admission nor the
    recompute after a preemption counts again. Its tokens are then of three kinds: hits, misses,
    and those that no cache could have served because they fill no block. A low hit rate over
    many misses says that prompts share little, or that the pool is too small to keep what they
    share; many tokens of the third kind say that blocks are large for such prompts. What two
    prompts share beyond their last common full block counts as a miss.

    Attributes:
        num_requests: Requests counted.
        num_hit_requests: Those that found at least one block.
        num_too_short_requests: Those without one block that the cache could have served.
        num_query_tokens: Prompt tokens of all counted requests.
        num_hit_tokens: Those that were found.
        num_too_short_tokens: Those behind the last full block, and the full block that ends with
            the prompt: a prompt's last token is always computed, since its logits are needed.
    """

    num_requests: int = 0
    num_hit_requests: int = 0
    num_too_short_requests: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_too_short_tokens: int = 0

    @property
    def num_miss_requests(self) -> int:
        """Requests that the cache could have served in part, and did not."""
        return self.num_requests - self.num_hit_requests - self.num_too_short_requests

    @property
    def num_miss_tokens(self) -> int:
        """Tokens that the cache could have served, and did not."""
        return self.num_query_tokens - self.num_hit_tokens - self.num_too_short_tokens

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that was found; 0 before the first request."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0

    def with_request(
        self, num_tokens: int, *, num_cacheable_tokens: int, num_hit_tokens: int
    ) -> PrefixCacheStats:
        """Returns the counts with one more request.

        Args:
            num_tokens: Length of its prompt.
            num_cacheable_tokens: The part of it that a full cache would have served.
            num_hit_tokens: The part of it that was found.
        """
        return PrefixCacheStats(
            num_requests=self.num_requests + 1,
            num_hit_requests=self.num_hit_requests + (num_hit_tokens > 0),
            num_too_short_requests=self.num_too_short_requests + (num_cacheable_tokens == 0),
            num_query_tokens=self.num_query_tokens + num_tokens,
            num_hit_tokens=self.num_hit_tokens + num_hit_tokens,
            num_too_short_tokens=self.num_too_short_tokens + num_tokens - num_cacheable_tokens,
        )
