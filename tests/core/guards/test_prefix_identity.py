"""Guards of the prefix cache: who may share, what is found, and how long it lives."""

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, Sequence
from nv_core.block_hash import pack_namespace
from nv_core.testing import KVOracle, reference_tokens, run_until_idle


class World:
    def __init__(
        self, num_blocks: int = 16, *, max_num_batched_tokens: int = 4096, collide: bool = False
    ) -> None:
        config = SchedulerConfig(
            num_blocks, 4, max_num_seqs=1024, max_num_batched_tokens=max_num_batched_tokens
        )
        if collide:
            self.scheduler = Scheduler(config, hash_block=lambda _tokens, _parent: 0)
        else:
            self.scheduler = Scheduler(config)
        self.oracle = KVOracle(num_blocks, 4)

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(plan, self.oracle.execute(plan))
        self.scheduler.check_invariants()

    def run(self, *prompts: list[int], max_tokens: int = 1) -> list[int]:
        """Runs prompts together to their end; returns the cached tokens of each."""
        sequences = [self.scheduler.add(p, SamplingParams(max_tokens=max_tokens)) for p in prompts]
        run_until_idle(self.scheduler, self.oracle)
        for prompt, seq in zip(prompts, sequences, strict=True):
            assert seq.output_token_ids == reference_tokens(prompt, max_tokens)
        return [seq.num_cached_tokens for seq in sequences]


def numbers(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_wholly_cached_prompt_still_computes_its_last_token() -> None:
    """Its logits are needed: a step without a token to compute has no answer."""
    world = World()
    prompt = numbers(1, 8)
    assert world.run(prompt, max_tokens=3) == [0]
    assert world.run(prompt, max_tokens=3) == [4]


def test_many_copies_of_a_wholly_cached_prompt_at_once() -> None:
    world = World(num_blocks=600)
    prompt = numbers(1, 8)
    world.run(prompt)
    assert world.run(*[prompt] * 513) == [4] * 513


def test_block_that_was_handed_out_again_is_not_found_under_its_old_content() -> None:
    world = World(num_blocks=4)
    x, y = numbers(1, 13), numbers(101, 13)
    world.run(x)
    assert world.run(x) == [12]
    world.run(y)
    assert world.run(x) == [0]
    assert world.run(y) == [0]


def test_finished_request_leaves_its_prefix_behind() -> None:
    """Forgetting content as soon as its block is freed would be safe, and useless."""
    world = World()
    prompt = numbers(1, 9)
    world.run(prompt)
    assert world.run(prompt) == [8]


def test_hit_on_a_free_block_keeps_it_findable_for_others() -> None:
    world = World()
    prompt = numbers(1, 9)
    world.run(prompt)
    params = SamplingParams(max_tokens=9)
    second, third = (world.scheduler.add(prompt, params) for _ in range(2))
    world.step()
    assert second.num_cached_tokens == third.num_cached_tokens == 8
    assert second.block_table[:2] == third.block_table[:2]
    assert second.block_table[2] != third.block_table[2]
    run_until_idle(world.scheduler, world.oracle)


def test_hits_in_free_blocks_are_not_free_of_charge() -> None:
    """They leave the free list too: a request of 3 hits and 3 more does not fit 5 free blocks."""
    world = World(num_blocks=6)
    prompt = numbers(1, 13)
    world.run([*prompt[:12], 99])
    blocker = world.scheduler.add([7, 7], SamplingParams(max_tokens=2))
    world.step()
    free_before = world.scheduler._blocks.free_block_ids()
    assert len(free_before) == 5
    large = world.scheduler.add(numbers(1, 12) + numbers(200, 10), SamplingParams(max_tokens=1))
    plan = world.scheduler.schedule()
    assert plan is not None
    assert [entry.seq_id for entry in plan.sequences] == [blocker.seq_id]
    assert large.wait_reason == "blocks"
    assert world.scheduler._blocks.free_block_ids() == free_before
    world.scheduler.check_invariants()
    world.scheduler.commit(plan, world.oracle.execute(plan))
    run_until_idle(world.scheduler, world.oracle)
    assert large.num_cached_tokens == 12


def test_block_is_found_only_after_it_was_computed() -> None:
    """All blocks of a prompt are allocated with its first chunk; an abort leaves most empty."""
    world = World(max_num_batched_tokens=4)
    prompt = numbers(1, 12)
    gone = world.scheduler.add(prompt)
    world.step()
    assert len(gone.block_table) == 3
    world.scheduler.abort(gone.seq_id)
    assert world.run(prompt, max_tokens=3) == [4]


@pytest.mark.parametrize("victim", [0, 1])
def test_either_of_two_equal_prompts_of_one_step_may_go_first(victim: int) -> None:
    world = World(num_blocks=8)
    prompt = numbers(1, 9)
    params = SamplingParams(max_tokens=4)
    pair = [world.scheduler.add(prompt, params) for _ in range(2)]
    world.step()
    assert not set(pair[0].block_table) & set(pair[1].block_table)
    world.scheduler.abort(pair[victim].seq_id)
    # Reuse what the victim held, then ask for the prefix, which the other still holds.
    filler = world.scheduler.add(numbers(50, 18), SamplingParams(max_tokens=2))
    world.step()
    assert set(filler.block_table) & {0, 1, 2, 3, 4, 5}
    third = world.scheduler.add(prompt, params)
    run_until_idle(world.scheduler, world.oracle)
    assert third.num_cached_tokens == 8
    assert third.output_token_ids == reference_tokens(prompt, 4)
    assert pair[1 - victim].output_token_ids == reference_tokens(prompt, 4)


def test_survivor_of_two_equal_prompts_goes_on_undisturbed() -> None:
    """Merging copies and freeing one of them must not touch a table that is in use."""
    world = World(num_blocks=12)
    prompt = numbers(1, 9)
    short = world.scheduler.add(prompt, SamplingParams(max_tokens=2))
    long = world.scheduler.add(prompt, SamplingParams(max_tokens=20))
    while not short.is_finished:
        world.step()
    others = [world.scheduler.add(numbers(i, 9), SamplingParams(max_tokens=3)) for i in (40, 60)]
    run_until_idle(world.scheduler, world.oracle)
    assert long.output_token_ids == reference_tokens(prompt, 20)
    assert all(seq.is_finished for seq in others)


@pytest.mark.parametrize("collide", [False, True])
def test_block_content_counts_only_behind_the_same_prefix(collide: bool) -> None:  # noqa: FBT001
    """A hash of the block alone would find [B, C] after [A, B, C]; a collision does the same."""
    world = World(collide=collide)
    a, b, c = numbers(1, 4), numbers(11, 4), numbers(21, 4)
    world.run([*a, *b, *c, 5])
    assert world.run([*b, *c, 5]) == [0]
    assert world.run([*a, *c, 5]) == [4]
    assert world.run([*a, *b, *c, 5]) == [12]


def test_colliding_hashes_never_select_a_block() -> None:
    world = World(num_blocks=32, collide=True)
    prompts = [numbers(10 * i, 9) for i in range(6)]
    for prompt in prompts:
        assert world.run(prompt, max_tokens=2) == [0]
    for prompt in prompts:
        assert world.run(prompt, max_tokens=2) == [8]


def test_equal_texts_in_different_namespaces_are_different() -> None:
    """An adapter named like somebody's salt must not open that one's cache."""
    assert pack_namespace({"cache_salt": "x"}) != pack_namespace({"adapter": "x"})
    assert pack_namespace({"adapter": "x", "cache_salt": "yz"}) != pack_namespace(
        {"adapter": "xy", "cache_salt": "z"}
    )


def test_tail_of_a_prefix_is_reused_before_its_head() -> None:
    """A head without its tail is useful; a tail that nobody can reach is not."""
    world = World(num_blocks=4)
    prompt = numbers(1, 13)
    world.run(prompt)
    world.run([99])
    assert world.run(prompt) == [12], "the block behind the last full one goes first"
    world.run([98, 97, 96, 95, 94])
    assert world.run(prompt) == [8]


def test_shared_prefix_is_free_after_its_last_holder_and_evictable_then() -> None:
    """Counts of holders that drift keep blocks for ever, or free them under somebody's feet."""
    world = World(num_blocks=8)
    prompt = numbers(1, 9)
    world.run(prompt)
    holders: list[Sequence] = []
    for last in range(3):
        holders.append(world.scheduler.add([*prompt, last], SamplingParams(max_tokens=50)))
        world.step()
    shared = holders[0].block_table[0]
    counts = [world.scheduler._blocks.ref_count(shared)]
    for seq in holders:
        world.scheduler.abort(seq.seq_id)
        world.scheduler.check_invariants()
        counts.append(world.scheduler._blocks.ref_count(shared))
    assert counts == [3, 2, 1, 0]
    assert world.scheduler.num_free_blocks == 8
    world.run(numbers(100, 32))
    assert world.run(prompt) == [0]


def test_only_as_many_blocks_are_evicted_as_are_needed() -> None:
    """Counting tokens as blocks, or rounding up, throws away more of the cache than it must."""
    world = World(num_blocks=10)
    kept, newer = numbers(1, 13), numbers(100, 13)
    world.run(kept)
    world.run(newer)
    world.run(numbers(200, 16))
    assert world.run(newer) == [12]
    world = World(num_blocks=10)
    world.run(kept)
    world.run(newer)
    world.run(numbers(200, 12))
    assert world.run(kept) == [12]


def test_prefix_shorter_than_a_block_is_told_from_a_miss() -> None:
    """A hit rate of 0 looks like a fault when prompts fill no block at all."""
    world = World()
    for last in range(3):
        world.run([1, 2, last])
    stats = world.scheduler.prefix_cache_stats
    assert stats.num_too_short_requests == stats.num_requests == 3
    assert stats.num_miss_requests == 0
