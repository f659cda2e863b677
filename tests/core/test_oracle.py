"""The oracle of nv_core.testing accepts right plans and catches wrong ones.

The second half plants faults in the core, one at a time, and runs random work through it: each
must be caught, or the oracle proves nothing when it is silent. The plans of the first half are
written by hand.
"""

import dataclasses
import random
from collections.abc import Callable

import pytest

from nv_core import (
    BlockManager,
    NvError,
    Policy,
    RequestError,
    SamplingParams,
    ScheduledBatch,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
    SchedulingError,
    Step,
    StepPlan,
)
from nv_core.block_hash import BlockHasher, BlockKeys, default_block_hasher
from nv_core.block_manager import CachedPrefix
from nv_core.sequence import Sequence
from nv_core.testing import KVMismatchError, KVOracle, reference_tokens, run_until_idle


@dataclasses.dataclass
class Entry:
    """The part of a plan's entry that a runner may read."""

    seq_id: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    samples: bool = False
    num_unknown_tokens: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids) + self.num_unknown_tokens


class Device:
    """An oracle of 4 blocks of 2 tokens, fed with hand-written plans."""

    def __init__(self, *, strict: bool = True) -> None:
        self.oracle = KVOracle(4, 2, strict=strict)
        self.num_steps = 0

    def run(self, *entries: Entry, preempted: tuple[int, ...] = ()) -> dict[int, int]:
        plan = StepPlan(
            step_id=self.num_steps,
            sequences=entries,  # type: ignore[arg-type]
            sampled_seq_ids=tuple(entry.seq_id for entry in entries if entry.samples),
            preempted=preempted,
            dropped=(),
            released=preempted,
            refused=(),
            token_budget=100,
            num_scheduled_tokens=sum(entry.num_scheduled_tokens for entry in entries),
            num_hit_tokens=0,
            num_waiting=0,
            num_running=len(entries),
            num_used_blocks=4,
            num_free_blocks=0,
            num_cached_blocks=0,
        )
        self.num_steps += 1
        return self.oracle.execute(plan)


def test_prompt_and_decodes_give_the_reference() -> None:
    device = Device()
    expected = reference_tokens([7, 8, 9], 3)
    (first,) = device.run(Entry(0, 0, (7, 8, 9), (3, 1), samples=True)).values()
    (second,) = device.run(Entry(0, 3, (first,), (3, 1), samples=True)).values()
    (third,) = device.run(Entry(0, 4, (second,), (3, 1, 0), samples=True)).values()
    assert [first, second, third] == expected


def test_chunks_give_the_reference_and_only_the_last_yields() -> None:
    device = Device()
    assert device.run(Entry(0, 0, (7, 8), (0,))) == {}
    sampled = device.run(Entry(0, 2, (9,), (0, 1), samples=True))
    assert sampled == {0: reference_tokens([7, 8, 9], 1)[0]}


def test_token_that_only_the_device_knows() -> None:
    device = Device()
    device.run(Entry(0, 0, (7, 8, 9), (0, 1), samples=True))
    sampled = device.run(Entry(0, 3, (), (0, 1), samples=True, num_unknown_tokens=1))
    assert sampled == {0: reference_tokens([7, 8, 9], 2)[1]}


def test_shared_prefix_gives_the_reference() -> None:
    device = Device()
    device.run(Entry(0, 0, (1, 2, 3), (0, 1)))
    sampled = device.run(Entry(1, 2, (5,), (0, 2), samples=True))
    assert sampled == {1: reference_tokens([1, 2, 5], 1)[0]}


def test_prefix_that_is_written_in_the_same_step_may_be_shared() -> None:
    """As in a model, where each layer stores all keys before anybody attends to them."""
    device = Device()
    reader, writer = Entry(1, 2, (5,), (0, 2), samples=True), Entry(0, 0, (1, 2, 3), (0, 1))
    assert device.run(reader, writer) == {1: reference_tokens([1, 2, 5], 1)[0]}


def test_preempted_sequence_starts_again() -> None:
    device = Device()
    device.run(Entry(0, 0, (1, 2, 3), (0, 1), samples=True))
    device.run(Entry(1, 0, (4,), (0,)), preempted=(0,))
    sampled = device.run(Entry(0, 0, (1, 2, 3), (2, 3), samples=True))
    assert sampled == {0: reference_tokens([1, 2, 3], 1)[0]}


def test_empty_plan() -> None:
    assert Device().run(preempted=(5,)) == {}


@dataclasses.dataclass
class Fault:
    """Entries of steps of which the last is wrong."""

    message: str
    steps: list[list[Entry]]


FAULTS = {
    "reads a slot that was never written": Fault(
        r"sequence 0, position 0: slot 0 \(block 0, offset 0\) was never written; "
        r"expected position 0 of its own prefix \(it computes positions 2 to 2\)",
        [[Entry(0, 2, (9,), (0, 1))]],
    ),
    "reads a block of another prefix": Fault(
        r"sequence 1, position 2: slot 2 \(block 1, offset 0\) holds position 2 \(token 3\) of "
        r"sequence 0, written in step 0, of another prefix",
        [
            [Entry(0, 0, (1, 2, 3, 4), (0, 1)), Entry(2, 0, (5, 6), (2,))],
            [Entry(1, 4, (9,), (2, 1, 3))],
        ],
    ),
    "reads blocks in the wrong order": Fault(
        r"sequence 1, position 0: slot 2 \(block 1, offset 0\) holds position 2",
        [[Entry(0, 0, (1, 2, 3, 4), (0, 1))], [Entry(1, 4, (9,), (1, 0, 2))]],
    ),
    "reads a block that was reused": Fault(
        r"sequence 0, position 0: slot 0 .* holds position 0 \(token 5\) of sequence 1",
        [
            [Entry(0, 0, (1, 2, 3), (0, 1))],
            [Entry(1, 0, (5,), (0,))],
            [Entry(0, 3, (4,), (0, 1))],
        ],
    ),
    "whole table is of another sequence": Fault(
        r"sequence 0, position 0: slot 2 .* holds position 0 \(token 5\) of sequence 1, written",
        [
            [Entry(0, 0, (1, 2), (0,)), Entry(1, 0, (5, 6), (1,))],
            [Entry(0, 2, (4,), (1, 2))],
        ],
    ),
    "two sequences write the same slot in one step": Fault(
        r"sequence 0, position 0: slot 0 .* was overwritten with position 0 \(token 5\)",
        [[Entry(0, 0, (1,), (0,)), Entry(1, 0, (5,), (0,))]],
    ),
    "two sequences write the same token to the same slot": Fault(
        r"sequence 0, position 0: slot 0 .* was overwritten with position 0 \(token 1\)",
        [[Entry(0, 0, (1,), (0,)), Entry(1, 0, (1,), (0,))]],
    ),
    "overwrites what a third one reads in the same step": Fault(
        r"sequence 0, position 0: slot 0 .* holds position 0 \(token 5\) of sequence 1",
        [
            [Entry(0, 0, (1, 2), (0,))],
            [Entry(0, 2, (3,), (0, 1)), Entry(1, 0, (5, 6), (0,))],
        ],
    ),
    "skips a token": Fault(
        r"sequence 0: the plan starts at position 2, expected 1",
        [[Entry(0, 0, (1,), (0,))], [Entry(0, 2, (3,), (0, 1))]],
    ),
    "computes a token twice": Fault(
        r"sequence 0: the plan starts at position 0, expected 1",
        [[Entry(0, 0, (1,), (0,))], [Entry(0, 0, (1,), (0,))]],
    ),
    "computes nothing": Fault(
        "sequence 0: the plan computes no token of it",
        [[Entry(0, 0, (1,), (0,))], [Entry(0, 1, (), (0,), samples=True)]],
    ),
    "table is too short": Fault(
        r"sequence 0: position 2 needs block 1 of its table, which has 1",
        [[Entry(0, 0, (1, 2, 3), (0,))]],
    ),
    "block does not exist": Fault(
        r"sequence 0: block id 4 is not in \[0, 4\)", [[Entry(0, 0, (1,), (4,))]]
    ),
    "block id is a padding value": Fault(
        r"sequence 0: block id -1 is not in \[0, 4\)", [[Entry(0, 0, (1,), (-1,))]]
    ),
    "runs ahead of a step that samples nothing": Fault(
        r"sequence 0: the plan computes 1 tokens from position 1 on, but holds 0; "
        r"the step before sampled 0",
        [[Entry(0, 0, (1,), (0,))], [Entry(0, 1, (), (0,), num_unknown_tokens=1)]],
    ),
    "runs two tokens ahead in one step": Fault(
        r"computes 2 tokens from position 1 on, but holds 0; the step before sampled 1",
        [
            [Entry(0, 0, (1,), (0,), samples=True)],
            [Entry(0, 1, (), (0, 1), num_unknown_tokens=2)],
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_wrong_plan_is_named(fault: Fault) -> None:
    device = Device()
    for step in fault.steps[:-1]:
        device.run(*step)
    with pytest.raises(KVMismatchError, match=fault.message) as caught:
        device.run(*fault.steps[-1])
    assert isinstance(caught.value, NvError)
    assert isinstance(caught.value, AssertionError)


def test_retired_content_must_not_reach_sequences_admitted_later() -> None:
    device = Device()
    device.run(Entry(0, 0, (1, 2), (0,)))
    device.oracle.retire_contents()
    device.run(Entry(0, 2, (3, 4), (0, 1)))
    for shared, table in (((0, 1), (0, 2)), ((0, 1, 2, 3), (0, 1, 2))):
        with pytest.raises(KVMismatchError, match="written in step 0, which was retired"):
            device.run(Entry(9, len(shared), (9,), table), preempted=(9,))
    device.run(Entry(1, 0, (1, 2), (2,)))
    device.run(Entry(2, 2, (9,), (2, 3)))


@pytest.mark.parametrize(
    ("name", "token_ids"),
    [
        ("reads a block of another prefix", (5, 6, 3, 4, 9)),
        ("reads blocks in the wrong order", (1, 2, 3, 4, 9)),
        ("reads a block that was reused", (1, 2, 3, 4)),
        ("whole table is of another sequence", (1, 2, 4)),
        ("overwrites what a third one reads in the same step", (1, 2, 3)),
    ],
)
def test_without_strict_the_fault_changes_the_token(name: str, token_ids: tuple[int, ...]) -> None:
    device = Device(strict=False)
    for step in FAULTS[name].steps[:-1]:
        device.run(*step)
    last = [dataclasses.replace(entry, samples=True) for entry in FAULTS[name].steps[-1]]
    assert device.run(*last)[last[0].seq_id] != reference_tokens(token_ids, 1)[0]


def test_reference_stops_where_a_scheduler_would() -> None:
    tokens = reference_tokens([1, 2], 50, vocab_size=10)
    assert len(tokens) == 50
    assert set(tokens) <= set(range(10))
    stop = tokens[5]
    first = tokens.index(stop)
    early = reference_tokens([1, 2], 50, vocab_size=10, stop_token_ids=(stop,))
    assert early == tokens[: first + 1]
    late = reference_tokens([1, 2], 50, vocab_size=10, stop_token_ids=(stop,), min_tokens=20)
    assert late == tokens[: tokens.index(stop, 20) + 1]
    with pytest.raises(RequestError, match="prompt_token_ids is empty"):
        reference_tokens([], 1)


def test_reference_depends_on_every_token_and_its_place() -> None:
    prompts = [[1, 2, 3], [1, 2], [2, 1, 3], [1, 3, 3], [0, 2, 3], [0, 1, 2, 3], [1, 2, 3, 0], [0]]
    outputs = [tuple(reference_tokens(prompt, 2)) for prompt in prompts]
    assert len(set(outputs)) == len(prompts)


def test_run_until_idle_gives_up() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 4))
    scheduler.add([1], SamplingParams(max_tokens=20))
    with pytest.raises(SchedulingError, match="not idle after 10 steps"):
        run_until_idle(scheduler, KVOracle(8, 4), max_steps=10)


# The test of the test ------------------------------------------------------------------------


class Restless:
    """Takes chunks of any size, and preempts now and then what it has just taken."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schedule(self, step: Step) -> None:
        for seq in [*step.running, *step.waiting]:
            if step.take(seq, self.random.randint(1, 6), reserve=len(seq.token_ids)) == 0:
                for victim in list(step.running)[-1:]:
                    step.preempt(victim)
        for seq in list(step.running):
            if self.random.random() < 0.05 and step.has_grants:
                step.preempt(seq)
        if not step.has_grants:
            for seq in [*step.running, *step.waiting]:
                step.take(seq)


def run_world(seed: int, hash_block: BlockHasher) -> None:
    """Random requests with common prefixes and aborts in a small pool, one step ahead or not."""
    rng = random.Random(seed)
    num_blocks, block_size, vocab_size = rng.randint(4, 12), rng.choice([1, 2, 4]), 1_000
    policies: list[str | Policy] = ["mixed", "prefill_first", Restless(seed)]
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks,
            block_size,
            max_num_batched_tokens=rng.randint(2, 20),
            policy=rng.choice(policies),
            findable_copies=rng.choice(["all", "newest"]),
        ),
        hash_block=hash_block,
    )
    oracle = KVOracle(num_blocks, block_size, vocab_size=vocab_size)
    bases = [[rng.randrange(3) for _ in range(40)] for _ in range(2)]
    in_flight: list[StepPlan] = []
    sequences: list[tuple[Sequence, int]] = []
    depth, num_requests, num_steps = rng.choice([1, 2]), 14, 0
    while num_requests or scheduler.has_unfinished or in_flight:
        if num_requests and rng.random() < 0.5:
            num_requests -= 1
            length = rng.randint(1, min(30, scheduler.max_prompt_tokens))
            prompt = rng.choice(bases)[: rng.randint(0, length)]
            prompt = prompt + [rng.randrange(3) for _ in range(length - len(prompt))]
            seq = scheduler.add(prompt, SamplingParams(max_tokens=rng.randint(1, 12)))
            sequences.append((seq, seq.max_total_tokens - length))
        if rng.random() < 0.1 and sequences:
            scheduler.abort(rng.choice(sequences)[0].seq_id)
        plan = scheduler.schedule() if len(in_flight) < depth else None
        if plan is not None:
            in_flight.append(plan)
        elif in_flight:
            oldest = in_flight.pop(0)
            scheduler.commit(oldest, oracle.execute(oldest))
        num_steps += 1
        assert num_steps < 3_000
    for seq, max_tokens in sequences:
        expected = reference_tokens(seq.prompt_token_ids, max_tokens, vocab_size=vocab_size)
        output = seq.output_token_ids
        assert output == expected[: len(output)]
        assert len(output) == len(expected) or seq.finish_reason == "abort"


NUM_WORLDS = 60


@pytest.mark.parametrize("hash_block", [default_block_hasher, lambda _tokens, _parent: 7])
def test_sound_core_passes(hash_block: BlockHasher) -> None:
    for seed in range(NUM_WORLDS):
        run_world(seed, hash_block)


def plant_match_without_parent_check(patch: pytest.MonkeyPatch) -> None:
    def match(self: BlockManager, keys: BlockKeys, max_blocks: int) -> list[CachedPrefix]:
        found = []
        for position in range(min(max_blocks, len(keys.hashes))):
            content_hash = keys.hashes[position]
            entries = [self._index.get(content_hash), *self._colliding.get(content_hash, ())]
            equal = [e for e in entries if e is not None and e.tokens == keys.packed[position]]
            if not equal or equal[0].block_id is None:
                break
            found.append(equal[0])
        return found

    patch.setattr(BlockManager, "match", match)


def plant_match_without_token_check(patch: pytest.MonkeyPatch) -> None:
    def match(self: BlockManager, keys: BlockKeys, max_blocks: int) -> list[CachedPrefix]:
        found: list[CachedPrefix] = []
        for position in range(min(max_blocks, len(keys.hashes))):
            prefix = self._index.get(keys.hashes[position])
            if prefix is None or prefix.block_id is None:
                break
            found.append(prefix)
        return found

    patch.setattr(BlockManager, "match", match)


def plant_publish_when_allocated(patch: pytest.MonkeyPatch) -> None:
    grant = Step._grant

    def grant_and_publish(self: Step, seq: Sequence, count: int, samples: bool) -> int:  # noqa: FBT001
        granted = grant(self, seq, count, samples)
        num_full = min(len(seq.keys.hashes), len(seq.block_table))
        for position in range(len(seq.prefixes), num_full):
            parent = seq.prefixes[-1] if seq.prefixes else None
            block_id = seq.block_table[position]
            seq.prefixes.append(self._blocks.publish(block_id, seq.keys, position, parent))
        return granted

    patch.setattr(Step, "_grant", grant_and_publish)


def plant_publish_of_blocks_lost_meanwhile(patch: pytest.MonkeyPatch) -> None:
    """A commit that does not ask whether the plan's blocks are still the sequence's."""
    commit = Scheduler.commit

    def commit_whoever_owns(self: Scheduler, plan: StepPlan, token_ids: dict[int, int]) -> object:
        events = commit(self, plan, token_ids)
        for entry in plan.sequences:
            seq, parent = entry.sequence, None
            length = entry.num_computed_tokens + entry.num_scheduled_tokens
            num_full = min(length // self.config.block_size, len(seq.keys.hashes))
            if entry.growing_table is not seq.block_table:
                for position, block_id in enumerate(entry.block_table[:num_full]):
                    if self._blocks.content_of(block_id) is not None:
                        break
                    parent = self._blocks.publish(block_id, seq.keys, position, parent)
        return events

    patch.setattr(Scheduler, "commit", commit_whoever_owns)


def plant_release_that_keeps_the_count(patch: pytest.MonkeyPatch) -> None:
    def release(self: BlockManager, block_table: list[int]) -> None:
        tail = self._prev[self._sentinel]
        for block_id in reversed(block_table):
            self._next[tail] = block_id
            self._prev[block_id] = tail
            tail = block_id
            self.num_free_blocks += 1
        self._next[tail] = self._sentinel
        self._prev[self._sentinel] = tail

    patch.setattr(BlockManager, "release", release)


def plant_release_of_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release

    def release_for_all(self: BlockManager, block_table: list[int]) -> None:
        for block_id in block_table:
            self._ref_counts[block_id] = 1
        release(self, block_table)

    patch.setattr(BlockManager, "release", release_for_all)


def plant_index_entry_that_outlives_its_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_forget", lambda _self, _block_id, _prefix: None)


def plant_in_every_entry(
    patch: pytest.MonkeyPatch, change: Callable[[ScheduledSequence], ScheduledSequence]
) -> None:
    make = Step.plan

    def make_changed(self: Step) -> StepPlan:
        plan = make(self)
        return dataclasses.replace(plan, sequences=ScheduledBatch.of(map(change, plan.sequences)))

    patch.setattr(Step, "plan", make_changed)


def plant_start_one_token_early(patch: pytest.MonkeyPatch) -> None:
    """Decodes behind a full block start at the block's last slot."""

    def one_early(entry: ScheduledSequence) -> ScheduledSequence:
        computed = entry.num_computed_tokens
        if entry.num_scheduled_tokens > 1 or computed % 2:
            return entry
        return entry._replace(num_computed_tokens=max(0, computed - 1))

    plant_in_every_entry(patch, one_early)


def plant_block_one_token_late(patch: pytest.MonkeyPatch) -> None:
    """The plan sees the table without a block that the step needs for its last slot."""
    plant_in_every_entry(patch, lambda entry: entry._replace(num_blocks=entry.num_blocks - 1))


def plant_slot_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A runner that writes and reads each slot beside the right one."""
    slot_ids = KVOracle._slot_ids

    def next_slot_ids(self: KVOracle, entry: ScheduledSequence) -> list[int]:
        return [(slot_id + 1) % len(self._slots) for slot_id in slot_ids(self, entry)]

    def write_tokens(
        self: KVOracle, step_id: int, entry: ScheduledSequence, row: object, _slots: list[int]
    ) -> None:
        write(self, step_id, entry, row, next_slot_ids(self, entry))  # type: ignore[arg-type]

    write = KVOracle._write_tokens
    patch.setattr(KVOracle, "_write_tokens", write_tokens)


def plant_hit_of_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    """The last token's block counts as cached, so that nothing is left to compute."""
    patch.setattr(
        Step, "_max_hits", lambda self, seq: len(seq.token_ids) // self._blocks.block_size
    )


def collides(_tokens: bytes, _parent: int) -> int:
    return 7


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], BlockHasher]] = [
    (plant_match_without_parent_check, collides),
    (plant_match_without_token_check, collides),
    (plant_publish_when_allocated, default_block_hasher),
    (plant_publish_of_blocks_lost_meanwhile, default_block_hasher),
    (plant_release_that_keeps_the_count, default_block_hasher),
    (plant_release_of_shared_blocks, default_block_hasher),
    (plant_index_entry_that_outlives_its_block, default_block_hasher),
    (plant_start_one_token_early, default_block_hasher),
    (plant_block_one_token_late, default_block_hasher),
    (plant_slot_off_by_one, default_block_hasher),
    (plant_hit_of_the_whole_prompt, default_block_hasher),
]


@pytest.mark.parametrize(
    ("plant", "hash_block"), PLANTED, ids=[plant.__name__[6:] for plant, _ in PLANTED]
)
def test_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    hash_block: BlockHasher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    caught = 0
    for seed in range(NUM_WORLDS):
        try:
            run_world(seed, hash_block)
        except KVMismatchError:
            caught += 1
        except (AssertionError, IndexError, KeyError):
            # A corrupted core may also break by itself; that is not the oracle's merit.
            continue
    assert caught >= 3, f"caught in {caught} of {NUM_WORLDS} worlds"


def test_leak_is_caught_by_the_invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak corrupts nothing, so it is for `check_invariants` to find, which the loop calls."""
    release = BlockManager.release
    monkeypatch.setattr(BlockManager, "release", lambda self, table: release(self, table[1:]))
    scheduler = Scheduler(SchedulerConfig(8, 2))
    scheduler.add([1, 2, 3], SamplingParams(max_tokens=1))
    with pytest.raises(SchedulingError, match="reference counts differ from the block tables"):
        run_until_idle(scheduler, KVOracle(8, 2))
