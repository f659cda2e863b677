"""BlockManager: order of reuse, sharing, exact hits, and counts that always add up."""

import pytest

from nv_core import BlockManager, SchedulingError
from nv_core.block_hash import BlockKeys, default_block_hasher
from nv_core.block_manager import CachedPrefix

BLOCK_SIZE = 2


def always_collides(tokens: bytes, parent: int) -> int:
    return 1


def keys_of(*blocks: str, collide: bool = False) -> BlockKeys:
    """Keys of blocks that are named by letters."""
    keys = BlockKeys(BLOCK_SIZE, always_collides if collide else default_block_hasher)
    keys.extend([token_id for name in blocks for token_id in (ord(name), ord(name))])
    return keys


def acquire(blocks: BlockManager, prefixes: list[CachedPrefix]) -> list[int]:
    block_ids = blocks.held(prefixes)
    blocks.share(block_ids)
    return block_ids


class Holder:
    """A sequence as the block manager knows one: a table, and what of it is published."""

    def __init__(self, blocks: BlockManager, keys: BlockKeys) -> None:
        self.blocks = blocks
        self.prefixes: list[CachedPrefix] = blocks.match(keys, len(keys.hashes))
        self.num_hits = len(self.prefixes)
        self.table = acquire(blocks, self.prefixes)
        self.table += blocks.allocate(len(keys.hashes) - self.num_hits)
        for position in range(self.num_hits, len(keys.hashes)):
            parent = self.prefixes[-1] if self.prefixes else None
            self.prefixes.append(blocks.publish(self.table[position], keys, position, parent))

    def release(self) -> None:
        self.blocks.release(self.table)


def hits(blocks: BlockManager, *names: str) -> list[int | None]:
    keys = keys_of(*names)
    return [prefix.block_id for prefix in blocks.match(keys, len(names))]


def test_new_pool_hands_out_blocks_in_id_order() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    assert blocks.num_free_blocks == 4
    assert blocks.allocate(3) == [0, 1, 2]
    assert blocks.num_free_blocks == 1
    assert [blocks.ref_count(b) for b in range(4)] == [1, 1, 1, 0]
    blocks.check_invariants([[0, 1, 2]])


def test_least_recently_freed_goes_first_and_the_tail_before_the_head() -> None:
    blocks = BlockManager(6, BLOCK_SIZE)
    first, second = blocks.allocate(3), blocks.allocate(2)
    blocks.release(second)
    blocks.release(first)
    assert blocks.free_block_ids() == [5, 4, 3, 2, 1, 0]
    assert blocks.allocate(4) == [5, 4, 3, 2]


def test_allocating_too_much_changes_nothing() -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    blocks.allocate(1)
    with pytest.raises(SchedulingError, match="3 blocks asked for, 2 of 3 are free"):
        blocks.allocate(3)
    assert blocks.free_block_ids() == [1, 2]
    blocks.check_invariants([[0]])


def test_allocating_nothing() -> None:
    blocks = BlockManager(1, BLOCK_SIZE)
    assert blocks.allocate(0) == []
    assert blocks.allocate(1) == [0]
    assert blocks.allocate(0) == []
    blocks.check_invariants([[0]])


def test_freed_content_is_found_and_leaves_the_free_list() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    holder = Holder(blocks, keys_of("a", "b", "c"))
    holder.release()
    assert blocks.num_free_blocks == 4
    assert blocks.num_cached_blocks == 3
    again = Holder(blocks, keys_of("a", "b", "d"))
    assert again.num_hits == 2
    assert again.table == [0, 1, 3]
    assert blocks.free_block_ids() == [2]
    blocks.check_invariants([again.table])


def test_match_changes_nothing() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    Holder(blocks, keys_of("a", "b")).release()
    before = blocks.free_block_ids()
    assert hits(blocks, "a", "b", "c") == [0, 1]
    assert blocks.free_block_ids() == before
    assert [blocks.ref_count(b) for b in range(4)] == [0, 0, 0, 0]


def test_match_looks_no_further_than_told() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    Holder(blocks, keys_of("a", "b", "c"))
    keys = keys_of("a", "b", "c")
    assert [len(blocks.match(keys, n)) for n in range(5)] == [0, 1, 2, 3, 3]


def test_shared_block_is_free_only_after_its_last_holder() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    one = Holder(blocks, keys_of("a"))
    two = Holder(blocks, keys_of("a"))
    assert two.table == one.table == [0]
    assert blocks.ref_count(0) == 2
    one.release()
    assert blocks.num_free_blocks == 3
    blocks.check_invariants([two.table])
    two.release()
    assert blocks.num_free_blocks == 4
    blocks.check_invariants([])


def test_taking_hits_counts_only_free_blocks() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    Holder(blocks, keys_of("a", "b")).release()
    prefixes = blocks.match(keys_of("a", "b"), 2)
    block_ids = blocks.held(prefixes)
    assert blocks.num_free_among(block_ids) == 2
    blocks.share(block_ids[:1])
    assert blocks.num_free_among(block_ids) == 1


def test_reused_block_is_forgotten() -> None:
    blocks = BlockManager(2, BLOCK_SIZE)
    Holder(blocks, keys_of("a", "b")).release()
    other = Holder(blocks, keys_of("x"))
    assert other.table == [1]
    assert hits(blocks, "a", "b") == [0]
    assert hits(blocks, "x") == [1]
    other.release()
    Holder(blocks, keys_of("y", "z"))
    assert hits(blocks, "a", "b") == hits(blocks, "x") == []
    assert blocks.num_cached_blocks == 2


def test_lost_parent_that_is_computed_again_finds_its_children() -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    parent = Holder(blocks, keys_of("a"))
    child = Holder(blocks, keys_of("a", "b"))
    parent.release()
    child.release()
    # The child is freed first, so keep it and reuse the parent's block.
    kept = acquire(blocks, blocks.match(keys_of("a", "b"), 2)[1:])
    blocks.allocate(2)
    assert hits(blocks, "a", "b") == []
    blocks.check_invariants([kept, [0], [2]])
    blocks.release([0, 2])
    again = Holder(blocks, keys_of("a"))
    assert again.num_hits == 0
    assert hits(blocks, "a", "b") == [again.table[0], kept[0]]


@pytest.mark.parametrize("collide", [False, True])
def test_block_behind_another_parent_is_no_hit(collide: bool) -> None:  # noqa: FBT001
    blocks = BlockManager(8, BLOCK_SIZE)
    Holder(blocks, keys_of("a", "b", "c", collide=collide))
    assert blocks.match(keys_of("b", "c", collide=collide), 2) == []
    assert len(blocks.match(keys_of("a", "c", collide=collide), 2)) == 1
    assert len(blocks.match(keys_of("a", "b", "c", collide=collide), 3)) == 3


def test_equal_hashes_are_told_apart_by_content() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    one = Holder(blocks, keys_of("a", "b", collide=True))
    two = Holder(blocks, keys_of("c", "b", collide=True))
    assert two.num_hits == 0
    found = [
        [prefix.block_id for prefix in blocks.match(keys_of(first, "b", collide=True), 2)]
        for first in "ac"
    ]
    assert found == [one.table, two.table]
    one.release()
    two.release()
    # Reuse takes entries out of the one bucket, one by one.
    used: list[list[int]] = []
    num_found = []
    while blocks.num_free_blocks:
        used.append(blocks.allocate(1))
        blocks.check_invariants(used)
        keys = [keys_of(first, "b", collide=True) for first in "ac"]
        num_found.append([len(blocks.match(k, 2)) for k in keys])
    assert num_found == [[2, 2]] * 4 + [[1, 2], [0, 2], [0, 1], [0, 0]]


def publish_copies(blocks: BlockManager, count: int) -> list[list[int]]:
    """Tables of sequences that computed the same block in the same step."""
    keys = keys_of("a")
    tables = [blocks.allocate(1) for _ in range(count)]
    for (block_id,) in tables:
        blocks.publish(block_id, keys, 0, None)
    return tables


def test_hit_gets_the_newest_copy_and_any_other_when_that_is_gone() -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    tables = publish_copies(blocks, 3)
    assert hits(blocks, "a") == [2]
    assert blocks.num_cached_blocks == 3
    for table in (tables[2], tables[1]):
        blocks.release(table)
    reused = blocks.allocate(2)
    assert sorted(reused) == [1, 2]
    assert hits(blocks, "a") == [0]
    blocks.check_invariants([reused, tables[0]])


def test_dropping_an_older_copy_leaves_the_newest() -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    tables = publish_copies(blocks, 3)
    blocks.release(tables[1])
    reused = blocks.allocate(1)
    assert reused == tables[1]
    assert hits(blocks, "a") == [2]
    blocks.check_invariants([reused, tables[0], tables[2]])


def test_only_the_newest_copy_is_found_without_keep_copies() -> None:
    blocks = BlockManager(3, BLOCK_SIZE, keep_copies=False)
    tables = publish_copies(blocks, 2)
    assert hits(blocks, "a") == [1]
    blocks.release(tables[1])
    reused = blocks.allocate(2)
    assert reused == [2, 1]
    assert hits(blocks, "a") == []
    blocks.check_invariants([tables[0], reused])
    # Published anew, it is found anew.
    blocks.publish(2, keys_of("a"), 0, None)
    assert hits(blocks, "a") == [2]
    blocks.check_invariants([tables[0], reused])


@pytest.mark.parametrize("keep_copies", [True, False])
def test_holder_of_an_old_copy_can_still_publish_behind_it(keep_copies: bool) -> None:  # noqa: FBT001
    """The newest copy is dropped while a running sequence builds on an older one."""
    blocks = BlockManager(4, BLOCK_SIZE, keep_copies=keep_copies)
    keys = keys_of("a", "b")
    old, new = blocks.allocate(1), blocks.allocate(1)
    prefix = blocks.publish(old[0], keys, 0, None)
    assert blocks.publish(new[0], keys, 0, None) is prefix
    blocks.release(new)
    old += blocks.allocate(1)
    filler = blocks.allocate(2)
    assert blocks.num_free_blocks == 0
    blocks.publish(old[1], keys, 1, prefix)
    blocks.check_invariants([old, filler])
    assert hits(blocks, "a", "b") == (old if keep_copies else [])
    blocks.release(filler)
    again = Holder(blocks, keys_of("a"))
    assert hits(blocks, "a", "b")[1] == old[1]
    blocks.release(old)
    blocks.allocate(blocks.num_free_blocks)
    assert hits(blocks, "a", "b") == again.table


def test_reset_forgets_all_content_and_frees_nothing() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    holder = Holder(blocks, keys_of("a", "b"))
    Holder(blocks, keys_of("c")).release()
    blocks.reset_prefix_cache()
    assert hits(blocks, "a", "b") == hits(blocks, "c") == []
    assert blocks.num_cached_blocks == 0
    assert blocks.num_free_blocks == 2
    assert blocks.content_of(0) is None
    blocks.check_invariants([holder.table])
    holder.release()
    assert Holder(blocks, keys_of("a")).num_hits == 0


def test_content_of_names_what_a_block_is_filed_under() -> None:
    blocks = BlockManager(2, BLOCK_SIZE)
    holder = Holder(blocks, keys_of("a"))
    assert blocks.content_of(0) is holder.prefixes[0]
    assert blocks.content_of(1) is None


def test_acquiring_content_that_is_gone_is_an_error() -> None:
    blocks = BlockManager(1, BLOCK_SIZE)
    holder = Holder(blocks, keys_of("a"))
    holder.release()
    blocks.allocate(1)
    with pytest.raises(SchedulingError, match="no block holds"):
        blocks.held(holder.prefixes)


def test_long_chain_goes_without_recursion() -> None:
    num_blocks = 5_000
    blocks = BlockManager(num_blocks, 1)
    keys = BlockKeys(1, default_block_hasher)
    keys.extend(list(range(num_blocks)))
    holder = Holder(blocks, keys)
    holder.release()
    assert len(blocks.match(keys, num_blocks)) == num_blocks
    blocks.allocate(num_blocks)
    assert blocks.num_cached_blocks == 0


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ([[0]], "reference counts differ"),
        ([[0, 1], [0]], "reference counts differ"),
        ([[0, 2]], "reference counts differ"),
    ],
)
def test_invariants_notice_tables_that_do_not_add_up(tables: list[list[int]], problem: str) -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    blocks.allocate(2)
    blocks.check_invariants([[0, 1]])
    with pytest.raises(SchedulingError, match=problem):
        blocks.check_invariants(tables)
