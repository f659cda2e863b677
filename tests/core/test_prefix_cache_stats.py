"""PrefixCacheStats: each request once, and hits, misses and "too short" kept apart."""

from nv_core import Policy, PrefixCacheStats, SamplingParams, Scheduler, SchedulerConfig, Step
from nv_core.testing import KVOracle, run_until_idle

BLOCK_SIZE = 4


class World:
    """A scheduler and the device that it plans for."""

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        max_num_seqs: int = 8,
        enable_prefix_caching: bool = True,
        policy: str | Policy = "mixed",
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks,
                BLOCK_SIZE,
                max_num_seqs=max_num_seqs,
                enable_prefix_caching=enable_prefix_caching,
                policy=policy,
            )
        )
        self.oracle = KVOracle(num_blocks, BLOCK_SIZE)

    def run(self, *prompts: list[int], max_tokens: int = 1) -> PrefixCacheStats:
        params = SamplingParams(max_tokens=max_tokens)
        self.sequences = [self.scheduler.add(prompt, params) for prompt in prompts]
        run_until_idle(self.scheduler, self.oracle)
        return self.scheduler.prefix_cache_stats


def test_nothing_yet() -> None:
    stats = World().scheduler.prefix_cache_stats
    assert stats == PrefixCacheStats()
    assert stats.hit_rate == 0


def test_miss_then_hit() -> None:
    world = World()
    prompt = list(range(10))
    assert world.run(prompt) == PrefixCacheStats(
        num_requests=1, num_query_tokens=10, num_too_short_tokens=2
    )
    stats = world.run(prompt)
    assert stats == PrefixCacheStats(
        num_requests=2,
        num_hit_requests=1,
        num_query_tokens=20,
        num_hit_tokens=8,
        num_too_short_tokens=4,
    )
    assert (stats.num_miss_requests, stats.num_miss_tokens) == (1, 8)
    assert stats.hit_rate == 0.4


def test_prompt_without_a_usable_block_is_too_short_not_a_miss() -> None:
    world = World()
    for _ in range(2):
        # The second one fills a block, but its last token must be computed all the same.
        stats = world.run([1, 2, 3], [5, 6, 7, 8])
    assert stats.num_requests == stats.num_too_short_requests == 4
    assert stats.num_miss_requests == stats.num_miss_tokens == stats.num_hit_tokens == 0
    assert stats.num_too_short_tokens == stats.num_query_tokens == 14


def test_full_block_hit_of_a_prompt_that_ends_with_a_block() -> None:
    world = World()
    prompt = list(range(8))
    world.run(prompt)
    stats = world.run(prompt)
    assert stats.num_hit_tokens == 4
    assert stats.num_too_short_tokens == 8
    assert stats.num_miss_tokens == 4


def test_refused_admissions_do_not_count() -> None:
    world = World(max_num_seqs=1)
    stats = world.run(list(range(9)), list(range(9)), max_tokens=5)
    assert stats.num_requests == 2
    assert stats.num_query_tokens == 18
    assert stats.num_hit_tokens == 8


def test_recompute_after_preemption_does_not_count_again() -> None:
    world = World(num_blocks=5)
    first, second = list(range(7)), list(range(100, 107))
    stats = world.run(first, second, max_tokens=10)
    assert sum(seq.num_preemptions for seq in world.sequences) > 0
    assert stats.num_requests == 2
    assert stats.num_query_tokens == 14
    assert stats.num_hit_tokens == 0


def test_admission_that_is_taken_back_counts_once() -> None:
    class Hesitates:
        def schedule(self, step: Step) -> None:
            for seq in list(step.waiting):
                step.take(seq)
                if step.step_id == 0:
                    step.preempt(seq)
            for seq in list(step.running):
                step.take(seq)

    world = World(policy=Hesitates())
    assert world.run(list(range(9)), max_tokens=3).num_requests == 1
    assert world.sequences[0].num_preemptions == 1


def test_switched_off_counts_nothing() -> None:
    world = World(enable_prefix_caching=False)
    world.run(list(range(9)))
    assert world.run(list(range(9))) == PrefixCacheStats()


def test_snapshot_does_not_change() -> None:
    world = World()
    before = world.run(list(range(9)))
    world.run(list(range(9)))
    assert before.num_requests == 1
