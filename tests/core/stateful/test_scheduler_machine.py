"""Random lives of a scheduler: whatever happens, every request gets what it would get alone.

One machine drives a scheduler and its twin, whose hash function always collides, through random
requests with one to four answers, aborts, stops, cache resets and plans in flight, under every
shipped policy, with and without its options, and under one that asks for nonsense. The oracle
executes the plans late and in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from nv_core import (
    FinishReason,
    Mixed,
    Policy,
    Priority,
    RequestError,
    SamplingParams,
    ScheduledBatch,
    Scheduler,
    SchedulerConfig,
    SchedulingError,
    Sequence,
    SkipAhead,
    Step,
    StepPlan,
)
from nv_core.policies import SHIPPED_POLICIES
from nv_core.testing import KVOracle, reference_tokens

VOCAB_SIZE = 12
EOS_TOKEN_IDS = (3, 4)
BASES = [[i % m for i in range(80)] for m in (5, 7)]


class PolicyBugError(Exception):
    """What a careless policy lets out."""


class Hostile:
    """Asks for nonsense and changes its mind at random, until it is told to behave."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: list[Sequence] = []
        self.behaves = False
        self.polite = Mixed()

    def schedule(self, step: Step) -> None:
        if self.behaves:
            self.polite.schedule(step)
            return
        if self.random.random() < 0.5:
            self.polite.schedule(step)
        else:
            self.ask_for_anything(step)
        if step.has_grants and self.random.random() < 0.3:
            step.preempt(self.random.choice(list(step.grants)).sequence)

    def ask_for_anything(self, step: Step) -> None:
        alive = [*step.running, *step.waiting]
        self.known += [seq for seq in alive if seq not in self.known]
        for _ in range(self.random.randrange(10)):
            candidates = alive if alive and self.random.random() < 0.9 else self.known
            if candidates:
                self.act(step, self.random.choice(candidates))

    def act(self, step: Step, seq: Sequence) -> None:
        rng = self.random
        action = rng.randrange(53)
        if action == 0:
            raise PolicyBugError
        if action == 1:
            # It may be refused before the argument is looked at.
            with contextlib.suppress(TypeError):
                assert step.take(seq, 1.5) == 0  # type: ignore[arg-type]
        elif 45 <= action < 50:
            step.take_all(rng.choices([seq, *step.running, *self.known], k=rng.randrange(9)))
        elif action == 50:
            if seq.is_finished:
                with pytest.raises(SchedulingError, match="unfinished"):
                    step.drop(seq, "no")
            else:
                step.drop(seq, "no")
        elif action <= 10:
            try:
                step.preempt(seq)
            except SchedulingError:
                assert seq.status.value != "running"
        else:
            n = rng.choice([None, None, None, -3, 0, 1, 2, 5, 10**9])
            reserve = rng.choice([0, 0, 0, -5, len(seq.token_ids), len(seq.token_ids) + 9, 10**9])
            keep_free = rng.choice([0, 0, 0, -2, 1, 3, 10**9])
            after = rng.sample(list(step.running), min(len(step.running), rng.randrange(3)))
            assert isinstance(step.fits(seq, after=after, keep_free=keep_free), bool)
            will_run = self.must_be_granted(step, seq)
            if will_run:
                n, reserve, keep_free = None, len(seq.token_ids), 0
            granted = step.take(
                seq, n, reserve=reserve, keep_free=keep_free, exceed_budget=rng.random() < 0.2
            )
            assert granted or not will_run
            assert granted >= 0
            assert n is None or granted <= max(0, n)
            assert granted > 0 or seq.is_finished or seq.status.value in ("waiting", "running")

    def must_be_granted(self, step: Step, seq: Sequence) -> bool:
        """Whether `fits` promises that taking all of a waiting sequence will succeed."""
        if seq.status.value != "waiting" or seq.seq_id in step.preempted:
            return False
        return seq._family is None and step.budget > 0 and step.slots > 0 and step.fits(seq)


@dataclass
class Request:
    """What was asked, and the sequences that serve it: the scheduler's and the twin's."""

    prompt: list[int]
    params: SamplingParams
    sequences: tuple[Sequence, Sequence]
    ended_by_caller: FinishReason | None = None


POLICIES: dict[str, Callable[[int], str | Policy]] = {
    "hostile": Hostile,
    "mixed with options": lambda seed: Mixed(
        max_chunk_tokens=1 + seed % 7,
        max_partial_prompts=1 + seed % 3,
        whole_prompts=seed % 2 == 0,
        watermark=(seed % 4) / 5,
        cooldown_steps=seed % 5,
    ),
    "preemptive": lambda seed: Priority(preemptive=True, ageing=1 + seed % 9, watermark=0.2),
    "impatient": lambda seed: SkipAhead(patience=seed % 9, cooldown_steps=2),
}
SHIPPED = sorted(SHIPPED_POLICIES)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 2, 3, 4, 4, 8, 16, 32]),
        num_tokens_in_pool=st.sampled_from([4, 12, 20, 30, 50, 300]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 2, 5, 16, 100]),
        max_model_len=st.sampled_from([None, None, 20]),
        policy=st.sampled_from([*sorted(POLICIES), *SHIPPED, "hostile"]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        findable_copies=st.sampled_from(["all", "newest", None]),
        depth=st.integers(1, 3),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        block_size: int,
        num_tokens_in_pool: int,
        policy: str,
        depth: int,
        seed: int,
        **limits: object,
    ) -> None:
        num_blocks = max(1, num_tokens_in_pool // block_size)
        self.schedulers: list[Scheduler] = []
        self.hostile: list[Hostile] = []
        for hash_block in (None, lambda _tokens, _parent: 9):
            chosen = POLICIES[policy](seed) if policy in POLICIES else policy
            if isinstance(chosen, Hostile):
                self.hostile.append(chosen)
            config = SchedulerConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                policy=chosen,
                eos_token_ids=EOS_TOKEN_IDS,
                vocab_size=VOCAB_SIZE,
                **limits,  # type: ignore[arg-type]
            )
            if hash_block is None:
                self.schedulers.append(Scheduler(config))
            else:
                self.schedulers.append(Scheduler(config, hash_block=hash_block))
        self.scheduler, self.twin = self.schedulers
        self.oracle = KVOracle(num_blocks, block_size, vocab_size=VOCAB_SIZE)
        self.depth = depth
        self.requests: dict[int, Request] = {}
        self.in_flight: list[tuple[StepPlan, StepPlan]] = []
        self.tokens: list[dict[int, int]] = []
        self.resident: set[int] = set()

    # Requests --------------------------------------------------------------------------------

    @rule(data=st.data(), base=st.sampled_from(BASES))
    def add(self, data: st.DataObject, base: list[int]) -> None:
        self.add_prompt(data, base)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        """As the next turn of a conversation does, or an impatient user."""
        seq_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.add_prompt(data, self.requests[seq_id].sequences[0].token_ids)

    def add_prompt(self, data: st.DataObject, base: list[int]) -> None:
        longest = self.scheduler.max_prompt_tokens
        lengths = [n for n in (1, 2, 4, 8, 9, 16, 17, 33, 40) if n <= longest]
        length = data.draw(st.sampled_from(lengths))
        tail = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2))
        prompt = [*base[:length], *tail][:longest]
        max_tokens = data.draw(st.sampled_from([1, 2, 5, 12, None]))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=data.draw(st.integers(0, min(6, max_tokens or 6))),
            ignore_eos=data.draw(st.booleans()),
            stop_token_ids=tuple(data.draw(st.lists(st.integers(0, 11), max_size=1))),
        )
        for_policies = {
            "cache_salt": data.draw(st.sampled_from([None] * 5 + ["a"])),
            "priority": data.draw(st.integers(-1, 2)),
            "user": data.draw(st.sampled_from([None, "a", "b"])),
            "deadline": data.draw(st.sampled_from([None, 1.0, 2.5])),
            "predicted_output_tokens": data.draw(st.sampled_from([None, 0, 20])),
        }
        one, two = (
            s.add(prompt, params, **for_policies)  # type: ignore[arg-type]
            for s in self.schedulers
        )
        assert one.seq_id == two.seq_id
        self.requests[one.seq_id] = Request(prompt, params, (one, two))
        for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 3]))):
            self.fork(one.seq_id)

    @precondition(lambda self: any(not r.sequences[0].is_finished for r in self.requests.values()))
    @rule(data=st.data())
    def fork_late(self, data: st.DataObject) -> None:
        alive = [i for i, r in self.requests.items() if not r.sequences[0].is_finished]
        self.fork(data.draw(st.sampled_from(alive)))

    def fork(self, seq_id: int) -> None:
        request = self.requests[seq_id]
        one, two = (s.fork(seq) for s, seq in zip(self.schedulers, request.sequences, strict=True))
        self.requests[one.seq_id] = Request(request.prompt, request.params, (one, two))

    @rule(excess=st.integers(1, 50), kind=st.sampled_from(["long", "empty", "range", "negative"]))
    def add_what_cannot_be_served(self, excess: int, kind: str) -> None:
        prompts = {
            "long": [1] * (self.scheduler.max_prompt_tokens + excess),
            "empty": [],
            "range": [1, VOCAB_SIZE - 1 + excess],
            "negative": [-excess],
        }
        for scheduler in self.schedulers:
            num_waiting = scheduler.num_waiting
            with pytest.raises(RequestError, match="prompt"):
                scheduler.add(prompts[kind])
            assert scheduler.num_waiting == num_waiting

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        """By the caller; also of requests that have ended already."""
        seq_id = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[seq_id]
        was_finished = request.sequences[0].is_finished
        for scheduler, seq in zip(self.schedulers, request.sequences, strict=True):
            if reason is FinishReason.ABORT:
                ended = scheduler.abort(seq_id)
            else:
                ended = scheduler.finish(seq_id, reason)
            assert ended is (None if was_finished else seq)
        if not was_finished:
            request.ended_by_caller = reason

    # Steps -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        self.try_to_schedule()

    def try_to_schedule(self) -> bool:
        """Makes a plan and its twin; says whether there was one."""
        plans, errors = [], []
        for scheduler in self.schedulers:
            try:
                plans.append(scheduler.schedule())
            except (PolicyBugError, SchedulingError) as error:
                assert self.hostile, "only a hostile policy fails or stalls"
                errors.append(type(error))
        if errors:
            assert len(errors) == 2
            assert errors[0] is errors[1]
            return False
        one, two = plans
        if one is None or two is None:
            assert one is two
            return False
        assert describe(one) == describe(two), "equal hashes change nothing"
        for seq in (*one.dropped, *two.dropped):
            self.requests[seq.seq_id].ended_by_caller = FinishReason.ERROR
            assert seq.drop_reason == "no"
        self.check_plan(one)
        self.in_flight.append((one, two))
        return True

    @precondition(lambda self: len(self.tokens) < len(self.in_flight))
    @rule()
    def execute(self) -> None:
        plan, _ = self.in_flight[len(self.tokens)]
        self.tokens.append(self.oracle.execute(plan))

    @precondition(lambda self: self.tokens)
    @rule()
    def commit(self) -> None:
        plans, tokens = self.in_flight.pop(0), self.tokens.pop(0)
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            events = scheduler.commit(plan, tokens)
            for seq in events.finished:
                self.check_finished(seq)
            assert set(events.finished) <= set(events.sampled)

    @rule(count=st.integers(1, 12))
    def run(self, count: int) -> None:
        """Goes on as an engine does: keeps the device busy, then takes the oldest result."""
        for _ in range(count):
            while len(self.in_flight) < self.depth and self.try_to_schedule():
                pass
            if not self.in_flight:
                return
            if not self.tokens:
                self.execute()
            self.commit()

    @precondition(lambda self: self.scheduler.prefix_cache_stats.num_hit_tokens)
    @rule()
    def reset_prefix_cache(self) -> None:
        while len(self.tokens) < len(self.in_flight):
            self.execute()
        self.oracle.retire_contents()
        for scheduler in self.schedulers:
            scheduler.reset_prefix_cache()

    # Checks ----------------------------------------------------------------------------------

    def check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        entries = plan.sequences
        assert entries or plan.preempted or plan.dropped
        assert len({entry.seq_id for entry in entries}) == len(entries)
        num_tokens = sum(entry.num_scheduled_tokens for entry in entries)
        assert num_tokens == plan.num_scheduled_tokens
        # `exceed_budget` may add the one token of each decoding sequence, and nothing else.
        may_exceed = config.policy == "prefill_first" or isinstance(config.policy, Hostile)
        num_extra = config.max_num_seqs if may_exceed else 0
        assert num_tokens <= plan.token_budget + num_extra
        assert plan.token_budget == config.max_num_batched_tokens
        assert plan.num_used_blocks + plan.num_free_blocks == config.num_blocks
        assert plan.num_used_blocks == len({b for seq in self.running for b in seq.block_table})
        assert plan.num_cached_blocks <= config.num_blocks
        assert plan.num_hit_tokens <= sum(entry.num_computed_tokens for entry in entries)
        assert plan.sampled_seq_ids == tuple(entry.seq_id for entry in entries if entry.samples)
        assert plan.num_running <= config.max_num_seqs
        assert plan.num_running == self.scheduler.num_running
        for entry in entries:
            assert entry.num_scheduled_tokens >= 1
            assert entry.seq_id not in plan.preempted
            length = entry.num_computed_tokens + entry.num_scheduled_tokens
            assert length <= len(entry.block_table) * config.block_size
            # Parts of a batch are taken over from the one before where nothing can have changed.
            seq = entry.sequence
            assert (entry.seq_id, entry.growing_table) == (seq.seq_id, seq.block_table)
            assert entry.growing_table is seq.block_table
            assert seq.wait_reason is None
            assert entry.num_blocks == len(seq.block_table)
            assert entry.num_pending_tokens == seq.num_pending_tokens - entry.samples
            assert len(entry.token_ids) == entry.num_scheduled_tokens - bool(
                entry.num_pending_tokens
            )
        # A runner that keeps state for each sequence learns of each one that loses its blocks.
        assert len(set(plan.released)) == len(plan.released)
        assert set(plan.preempted) <= set(plan.released)
        assert not set(plan.released) & {entry.seq_id for entry in entries}
        self.resident -= set(plan.released)
        assert self.resident <= {seq.seq_id for seq in self.running}
        self.resident |= {entry.seq_id for entry in entries}
        if not config.enable_prefix_caching and not any(e.sequence._family for e in entries):
            blocks = [block_id for entry in entries for block_id in entry.block_table]
            assert len(set(blocks)) == len(blocks)
        # No block is written by two, not even by two forks of one prompt.
        size = config.block_size
        written = [
            entry.block_table[position // size] * size + position % size
            for entry in entries
            for position in range(
                entry.num_computed_tokens, entry.num_computed_tokens + entry.num_scheduled_tokens
            )
        ]
        assert len(set(written)) == len(written)

    @property
    def running(self) -> list[Sequence]:
        return list(self.scheduler._step.running)

    def expected_tokens(self, seq: Sequence) -> list[int]:
        request = self.requests[seq.seq_id]
        params = request.params
        config = self.scheduler.config
        limit = config.num_blocks * config.block_size + 1
        if config.max_model_len is not None:
            limit = min(limit, config.max_model_len)
        max_tokens = limit - len(request.prompt)
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        return reference_tokens(
            request.prompt,
            max_tokens,
            vocab_size=VOCAB_SIZE,
            stop_token_ids={*params.stop_token_ids, *(() if params.ignore_eos else EOS_TOKEN_IDS)},
            min_tokens=params.min_tokens,
        )

    def check_finished(self, seq: Sequence) -> None:
        request = self.requests[seq.seq_id]
        output, expected = seq.output_token_ids, self.expected_tokens(seq)
        assert seq.prompt_token_ids == request.prompt
        if request.ended_by_caller is not None:
            assert seq.finish_reason is request.ended_by_caller
            assert output == expected[: len(output)]
            return
        assert output == expected
        stops = {*request.params.stop_token_ids}
        if not request.params.ignore_eos:
            stops.update(EOS_TOKEN_IDS)
        stopped = output[-1] in stops and len(output) > request.params.min_tokens
        assert seq.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)

    @invariant()
    def everything_adds_up(self) -> None:
        for scheduler in self.schedulers:
            scheduler.check_invariants()
        assert self.scheduler.num_free_blocks == self.twin.num_free_blocks
        assert self.scheduler.prefix_cache_stats == self.twin.prefix_cache_stats
        for seq_id, request in self.requests.items():
            one, two = request.sequences
            assert one.num_cached_tokens == two.num_cached_tokens
            if not one.is_finished:
                explanation = self.scheduler.explain(seq_id)
                assert explanation == self.twin.explain(seq_id)

    def teardown(self) -> None:
        if not hasattr(self, "schedulers"):
            return
        for hostile in self.hostile:
            hostile.behaves = True
        sequences = [request.sequences[0] for request in self.requests.values()]
        alive = [seq for seq in sequences if not seq.is_finished]
        # Generous: each sequence might be computed anew for each other one.
        num_tokens = sum(len(seq.token_ids) + len(self.expected_tokens(seq)) for seq in alive)
        num_plans_left = (len(alive) + 1) * num_tokens + 10
        while self.scheduler.has_unfinished or self.in_flight:
            while len(self.in_flight) < self.depth and self.try_to_schedule():
                num_plans_left -= 1
            assert num_plans_left > 0, "every request ends within a bounded number of steps"
            if not self.tokens:
                self.execute()
            self.commit()
            self.everything_adds_up()
        assert not self.twin.has_unfinished
        for seq in sequences:
            self.check_finished(seq)
        for scheduler in self.schedulers:
            assert not any(map(scheduler._blocks.ref_count, range(scheduler.config.num_blocks)))
            assert scheduler.num_free_blocks == scheduler.config.num_blocks


def describe(plan: StepPlan) -> tuple[object, ...]:
    """Everything that a plan says."""
    entries = [(repr(entry), entry.token_ids) for entry in plan.sequences]
    return repr(dataclasses.replace(plan, sequences=ScheduledBatch(), dropped=())), entries


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
