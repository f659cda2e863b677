"""Guards against starvation: who waits, and for how long at most."""

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, Sequence, Step
from nv_core.testing import KVOracle, run_until_idle


class World:
    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.oracle = KVOracle(config.num_blocks, config.block_size)

    def add(self, length: int, max_tokens: int = 100, *, priority: int = 0) -> Sequence:
        token_id = self.scheduler._next_seq_id
        params = SamplingParams(max_tokens=max_tokens)
        return self.scheduler.add([token_id] * length, params, priority=priority)

    def step(self) -> list[int]:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(plan, self.oracle.execute(plan))
        self.scheduler.check_invariants()
        return [entry.seq_id for entry in plan.sequences]


def test_decoding_goes_on_while_a_long_prompt_is_chunked() -> None:
    """With prompts first, a prompt of 100 chunks stops every answer for 100 steps."""
    world = World(SchedulerConfig(300, 4, max_num_batched_tokens=8))
    decoding = world.add(3, max_tokens=200)
    world.step()
    prompt = world.add(700)
    while prompt.num_output_tokens == 0:
        before = decoding.num_output_tokens
        world.step()
        assert decoding.num_output_tokens == before + 1


def test_decoding_goes_on_while_prompts_keep_arriving() -> None:
    world = World(SchedulerConfig(300, 4, max_num_batched_tokens=8))
    decoding = world.add(3, max_tokens=60)
    for _ in range(50):
        before = decoding.num_output_tokens
        world.add(7, max_tokens=1)
        world.step()
        assert decoding.num_output_tokens == before + 1


def test_large_request_at_the_head_is_not_overtaken_for_ever() -> None:
    """`mixed` does not skip: small requests behind wait, and the large one is next to run."""
    world = World(SchedulerConfig(10, 4))
    running = [world.add(5, max_tokens=8) for _ in range(2)]
    world.step()
    large, small = world.add(30, max_tokens=2), world.add(1, max_tokens=2)
    while large.num_output_tokens == 0:
        assert small.num_output_tokens == 0
        world.step()
    assert all(seq.is_finished for seq in running)
    run_until_idle(world.scheduler, world.oracle)
    assert small.is_finished


class SkipsUpTo:
    """Lets small requests overtake a head that does not fit, but only so many."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.overtaken: dict[int, int] = {}

    def schedule(self, step: Step) -> None:
        for seq in list(step.running):
            step.take(seq)
        head: Sequence | None = None
        for seq in list(step.waiting):
            if head is not None and self.overtaken.get(head.seq_id, 0) >= self.limit:
                break
            if step.take(seq, reserve=len(seq.token_ids)):
                if head is not None:
                    self.overtaken[head.seq_id] = self.overtaken.get(head.seq_id, 0) + 1
            elif head is None:
                head = seq


def test_bounded_overtaking_is_a_policy_of_a_few_lines() -> None:
    world = World(SchedulerConfig(10, 4, policy=SkipsUpTo(3)))
    running = world.add(9, max_tokens=6)
    world.step()
    large = world.add(32, max_tokens=2)
    small = [world.add(1, max_tokens=2) for _ in range(8)]
    world.step()
    assert [seq.num_output_tokens for seq in small] == [1, 1, 1, 0, 0, 0, 0, 0]
    while large.num_output_tokens == 0:
        assert small[3].num_output_tokens == 0
        world.step()
    assert running.is_finished
    run_until_idle(world.scheduler, world.oracle)


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_short_prompt_waits_for_the_prompts_before_it_and_no_longer(policy: str) -> None:
    world = World(SchedulerConfig(300, 4, max_num_batched_tokens=16, policy=policy))
    world.add(600)
    short = world.add(10)
    num_steps = 0
    while short.num_output_tokens == 0:
        world.step()
        num_steps += 1
    assert num_steps <= -(-610 // 16) + 1


def test_newcomer_is_admitted_though_long_prompts_use_the_whole_budget() -> None:
    world = World(SchedulerConfig(600, 4, max_num_seqs=8, max_num_batched_tokens=16))
    world.add(100)
    newcomer = world.add(20)
    num_steps = 0
    while newcomer.num_computed_tokens == 0:
        world.add(100)
        world.step()
        num_steps += 1
        assert num_steps < 12


class Urgent:
    """Admits by priority, and evicts less urgent sequences when the slots are full."""

    def schedule(self, step: Step) -> None:
        for seq in sorted(step.waiting, key=lambda s: s.priority):
            victim = max(step.running, key=lambda s: s.priority, default=None)
            if not step.slots and victim is not None and victim.priority > seq.priority:
                step.preempt(victim)
            step.take(seq)
        for seq in list(step.running):
            step.take(seq)


def test_urgent_request_need_not_wait_for_a_slot() -> None:
    """A limit of sequences, not of memory, is what keeps it out."""
    world = World(SchedulerConfig(64, 4, max_num_seqs=1, policy=Urgent()))
    low = world.add(3, max_tokens=9, priority=5)
    for _ in range(3):
        world.step()
    high = world.add(3, max_tokens=4, priority=1)
    assert world.step() == [high.seq_id]
    run_until_idle(world.scheduler, world.oracle)
    assert low.num_preemptions == 1
    assert low.num_output_tokens == 9
