"""BlockManager against a model of lists and dicts that is too simple to be wrong.

The model knows a prefix by its content, has no hash, and searches its free list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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

from nv_core import BlockManager, SchedulingError
from nv_core.block_hash import BlockKeys, default_block_hasher
from nv_core.block_manager import CachedPrefix

Content = tuple[int, ...]

HASHERS: dict[str, Callable[[bytes, int], int]] = {
    "real": default_block_hasher,
    "constant": lambda _tokens, _parent: 5,
    "two buckets": lambda tokens, parent: (tokens[0] + parent) % 2,
    "without parent": lambda tokens, _parent: tokens[0],
}


@dataclass(eq=False)
class Holder:
    """A sequence: the content of its blocks (one number each), its table, what is published."""

    content: list[int]
    keys: BlockKeys
    table: list[int]
    prefixes: list[CachedPrefix]
    publishes: bool = True


@dataclass
class Model:
    """The pool by brute force; `order` holds published blocks, the newest last."""

    keep_copies: bool
    refs: list[int]
    free: list[int]
    content: list[Content | None]
    findable: dict[Content, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def match(self, wanted: list[int]) -> list[int]:
        found = []
        for length in range(1, len(wanted) + 1):
            block_id = self.findable.get(tuple(wanted[:length]))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def acquire(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if self.refs[block_id] == 0:
                self.free.remove(block_id)
            self.refs[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            self.refs[block_id] = 1
            content, self.content[block_id] = self.content[block_id], None
            if content is not None and self.findable.get(content) == block_id:
                del self.findable[content]
                others = [b for b in self.order if self.content[b] == content]
                if others and self.keep_copies:
                    self.findable[content] = others[-1]
        return taken

    def release(self, table: list[int]) -> None:
        for block_id in reversed(table):
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self.free.append(block_id)

    def publish(self, block_id: int, content: Content) -> None:
        self.content[block_id] = content
        self.findable[content] = block_id
        self.order = [*(b for b in self.order if b != block_id), block_id]

    def reset(self) -> None:
        self.content = [None] * len(self.content)
        self.findable = {}


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 12),
        keep_copies=st.booleans(),
        hasher=st.sampled_from(sorted(HASHERS)),
    )
    def start(self, num_blocks: int, keep_copies: bool, hasher: str) -> None:  # noqa: FBT001
        self.hash_block = HASHERS[hasher]
        self.blocks = BlockManager(num_blocks, 1, keep_copies=keep_copies)
        self.model = Model(
            keep_copies, [0] * num_blocks, list(range(num_blocks)), [None] * num_blocks
        )
        self.holders: list[Holder] = []

    @rule(content=st.lists(st.integers(0, 2), min_size=1, max_size=6), data=st.data())
    def admit(self, content: list[int], data: st.DataObject) -> None:
        keys = BlockKeys(1, self.hash_block)
        keys.extend(content)
        max_hits = data.draw(st.integers(0, len(content)))
        hits = self.blocks.match(keys, max_hits)
        expected = self.model.match(content[:max_hits])
        assert [prefix.block_id for prefix in hits] == expected
        num_taken = sum(self.model.refs[b] == 0 for b in expected)
        block_ids = self.blocks.held(hits)
        assert self.blocks.num_free_among(block_ids) == num_taken

        self.blocks.share(block_ids)
        table = block_ids
        assert table == expected
        self.model.acquire(expected)
        count = min(len(content) - len(hits), self.blocks.num_free_blocks)
        new = self.blocks.allocate(count)
        assert new == self.model.allocate(count)
        if table or new:
            held = content[: len(table) + len(new)]
            self.holders.append(Holder(held, keys, table + new, hits))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.integers(0, 2))
    def grow(self, data: st.DataObject, name: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if not self.model.free:
            with pytest.raises(SchedulingError, match="1 blocks asked for, 0 of"):
                self.blocks.allocate(1)
            return
        holder.content.append(name)
        # The holder may have been admitted with fewer blocks than it has keys.
        holder.keys = BlockKeys(1, self.hash_block)
        holder.keys.extend(holder.content)
        new = self.blocks.allocate(1)
        assert new == self.model.allocate(1)
        holder.table += new

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 6))
    def publish(self, data: st.DataObject, count: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        for _ in range(count):
            position = len(holder.prefixes)
            if position == len(holder.table) or not holder.publishes:
                return
            parent = holder.prefixes[-1] if holder.prefixes else None
            block_id = holder.table[position]
            prefix = self.blocks.publish(block_id, holder.keys, position, parent)
            holder.prefixes.append(prefix)
            self.model.publish(block_id, tuple(holder.content[: position + 1]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.blocks.release(holder.table)
        self.model.release(holder.table)

    @rule(extra=st.integers(1, 3))
    def allocate_too_much(self, extra: int) -> None:
        with pytest.raises(SchedulingError, match="blocks asked for"):
            self.blocks.allocate(len(self.model.free) + extra)

    @rule()
    def reset(self) -> None:
        self.blocks.reset_prefix_cache()
        self.model.reset()
        for holder in self.holders:
            holder.publishes = False

    @invariant()
    def agrees_with_the_model(self) -> None:
        model, blocks = self.model, self.blocks
        assert blocks.free_block_ids() == model.free
        assert blocks.num_free_blocks == len(model.free)
        assert [blocks.ref_count(b) for b in range(len(model.refs))] == model.refs
        assert blocks.num_cached_blocks == sum(content is not None for content in model.content)
        for block_id, content in enumerate(model.content):
            assert (blocks.content_of(block_id) is None) == (content is None)
            if content is not None:
                keys = BlockKeys(1, self.hash_block)
                keys.extend(list(content))
                found = [prefix.block_id for prefix in blocks.match(keys, len(content))]
                assert found == model.match(list(content))
        blocks.check_invariants([holder.table for holder in self.holders])

    def teardown(self) -> None:
        for holder in getattr(self, "holders", []):
            self.blocks.release(holder.table)
        if hasattr(self, "blocks"):
            assert self.blocks.num_free_blocks == self.blocks.num_blocks
            self.blocks.check_invariants([])


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
