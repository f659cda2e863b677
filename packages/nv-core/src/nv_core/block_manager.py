"""BlockManager: who owns which KV block, and which blocks hold which prefix.

It knows block ids and packed tokens; it knows nothing of requests, budgets or devices.

Every block is either used (`ref_count > 0`) or on the free list. The free list is also the
cache: a freed block keeps its content, and its place in the prefix index, until it is handed
out again. Blocks are handed out in id order at first, then least recently freed first.

The prefix index is exact. Each full block that has been computed is filed under a
`CachedPrefix`: its own tokens together with the `CachedPrefix` before it. The chained 64-bit
hash only finds candidates; a hit requires that the tokens are equal and that the parent is the
very object already verified, so equal hashes of different content can never select a block
(64-bit xxHash collisions can be built on purpose). Copies of the same content share one
`CachedPrefix`, also when one copy was dropped and computed again, so a parent that comes back
finds its children. For that an entry stays as long as any block holds its content or any entry
has it as its parent; what nothing needs any more goes at once.

Cost: O(1) a block for every operation, whatever the size of the pool. The free list is a
doubly linked list in two plain lists, since taking a hit out of its middle must not search.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import cast

from nv_core.block_hash import BlockKeys
from nv_core.errors import SchedulingError


class CachedPrefix:
    """The content of a prefix that ends at a block boundary.

    There is one for each cached block, so what only few of them need (further copies, further
    contents of the same hash) is kept by the manager.

    Attributes:
        hash: Chained hash of the content.
        parent: The content of all blocks but the last; None for a first block.
        tokens: The last block's tokens, four bytes each.
        block_id: The block that a hit gets, the newest that holds it; None while a hit gets none.
        num_children: How many indexed prefixes have this one as their parent.
    """

    __slots__ = ("block_id", "hash", "num_children", "parent", "tokens")

    def __init__(self, content_hash: int, parent: CachedPrefix | None, tokens: bytes) -> None:
        """Makes a prefix that no block holds yet."""
        self.hash = content_hash
        self.parent = parent
        self.tokens = tokens
        self.block_id: int | None = None
        self.num_children = 0


class BlockManager:
    """The pool of KV blocks and its prefix index.

    Attributes:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        num_free_blocks: Blocks that can be handed out now, those with cached content included.
        num_cached_blocks: Blocks, free or used, that are filed in the prefix index.
    """

    def __init__(self, num_blocks: int, block_size: int, *, keep_copies: bool = True) -> None:
        """Makes a pool in which every block is free and empty.

        Args:
            num_blocks: Size of the pool.
            block_size: Tokens per block.
            keep_copies: Whether every block of equal content can be found. If false, only the
                newest can, and the content cannot be found after that one was handed out again
                until it is published anew (as in nano-vLLM).
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free_blocks = num_blocks
        self.num_cached_blocks = 0
        self._keep_copies = keep_copies
        self._ref_counts = [0] * num_blocks
        self._prefix_of: list[CachedPrefix | None] = [None] * num_blocks
        # The linked free list; index `num_blocks` is the sentinel that stands before the head
        # and after the tail. The id objects are shared between all lists to save memory.
        ids = list(range(num_blocks + 1))
        self._sentinel = num_blocks
        self._next = [*ids[1:], ids[0]] if num_blocks else [0]
        self._prev = [ids[num_blocks], *ids[:num_blocks]]
        self._index: dict[int, CachedPrefix] = {}
        # Contents whose hash the index holds for another one already.
        self._colliding: dict[int, list[CachedPrefix]] = {}
        # Further blocks that hold a content, newest last (an ordered set, so that any of them can
        # go in O(1)).
        self._older: dict[CachedPrefix, dict[int, None]] = {}

    def match(self, keys: BlockKeys, max_blocks: int) -> list[CachedPrefix]:
        """Finds the longest run of leading blocks that the cache holds; changes nothing.

        Args:
            keys: Keys of the sequence's full blocks.
            max_blocks: Looks at no more than this many.

        Returns:
            The prefixes found, one per block.
        """
        found: list[CachedPrefix] = []
        parent: CachedPrefix | None = None
        get, add = self._index.get, found.append
        hashes = keys.hashes
        if max_blocks < len(hashes):
            hashes = hashes[:max_blocks]
        for content_hash, tokens in zip(hashes, keys.packed, strict=False):
            prefix = get(content_hash)
            if prefix is not None and (prefix.parent is not parent or prefix.tokens != tokens):
                prefix = self._find(content_hash, parent, tokens)
            if prefix is None or prefix.block_id is None:
                break
            add(prefix)
            parent = prefix
        return found

    def held(self, prefixes: Iterable[CachedPrefix]) -> list[int]:
        """The blocks that hits on these prefixes get.

        Raises:
            SchedulingError: A prefix is held by no block any more.
        """
        block_ids = [prefix.block_id for prefix in prefixes]
        if None in block_ids:
            raise SchedulingError("a prefix that no block holds cannot be acquired")
        return cast("list[int]", block_ids)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many blocks `share(block_ids)` would take off the free list."""
        refs = self._ref_counts
        return [refs[block_id] for block_id in block_ids].count(0)

    def share(self, block_ids: Seq[int]) -> None:
        """Takes one more reference to each of these blocks, used ones or free ones."""
        refs, next_, prev = self._ref_counts, self._next, self._prev
        num_used_before = 0
        for block_id in block_ids:
            count = refs[block_id]
            refs[block_id] = count + 1
            if count:
                num_used_before += 1
            else:
                before, after = prev[block_id], next_[block_id]
                next_[before] = after
                prev[after] = before
        self.num_free_blocks -= len(block_ids) - num_used_before

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks, least recently freed first, and forgets what they held.

        Raises:
            SchedulingError: Fewer than `count` blocks are free; nothing is changed.
        """
        if count > self.num_free_blocks:
            raise SchedulingError(
                f"{count} blocks asked for, {self.num_free_blocks} of {self.num_blocks} are free"
            )
        next_, refs, prefix_of = self._next, self._ref_counts, self._prefix_of
        block_ids = []
        block_id = next_[self._sentinel]
        for _ in range(count):
            block_ids.append(block_id)
            refs[block_id] = 1
            prefix = prefix_of[block_id]
            if prefix is not None:
                self._forget(block_id, prefix)
            block_id = next_[block_id]
        next_[self._sentinel] = block_id
        self._prev[block_id] = self._sentinel
        self.num_free_blocks -= count
        return block_ids

    def release(self, block_table: Seq[int]) -> None:
        """Gives back one reference to each block of a table, the last block first.

        The tail goes first so that it is also reused first: a prefix without its tail is
        useful, a tail without its prefix is not. Contents stay findable until then.
        """
        refs, next_, prev = self._ref_counts, self._next, self._prev
        sentinel = self._sentinel
        tail = prev[sentinel]
        num_kept = 0
        for block_id in reversed(block_table):
            count = refs[block_id] = refs[block_id] - 1
            if count:
                num_kept += 1
            else:
                next_[tail] = block_id
                prev[block_id] = tail
                tail = block_id
        next_[tail] = sentinel
        prev[sentinel] = tail
        self.num_free_blocks += len(block_table) - num_kept

    def publish(
        self, block_id: int, keys: BlockKeys, position: int, parent: CachedPrefix | None
    ) -> CachedPrefix:
        """Files a used, full and completely computed block under its content.

        One that is filed already, by another sequence that shares it, stays as it is.

        Args:
            block_id: The block.
            keys: Keys of the sequence that computed it.
            position: The block's place in that sequence.
            parent: The content before it, as returned when that was published or matched; None
                at position 0.

        Returns:
            The content's entry, the parent of the next block.
        """
        prefix = self._prefix_of[block_id]
        if prefix is not None:
            return prefix
        content_hash, tokens = keys.hashes[position], keys.packed[position]
        prefix = self._find(content_hash, parent, tokens)
        if prefix is None:
            prefix = CachedPrefix(content_hash, parent, tokens)
            if self._index.setdefault(content_hash, prefix) is not prefix:
                self._colliding.setdefault(content_hash, []).append(prefix)
            if parent is not None:
                parent.num_children += 1
        elif prefix.block_id is not None:
            self._older.setdefault(prefix, {})[prefix.block_id] = None
        prefix.block_id = block_id
        self._prefix_of[block_id] = prefix
        self.num_cached_blocks += 1
        return prefix

    def reset_prefix_cache(self) -> None:
        """Forgets the content of every block; used blocks stay used.

        Prefixes that were returned before must not be passed in again, so what a sequence has
        computed so far, and what it computes on top of that, cannot be published any more.
        """
        self._index.clear()
        self._colliding.clear()
        self._older.clear()
        self._prefix_of = [None] * self.num_blocks
        self.num_cached_blocks = 0

    def content_of(self, block_id: int) -> CachedPrefix | None:
        """The content that a block is filed under, or None."""
        return self._prefix_of[block_id]

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold the block."""
        return self._ref_counts[block_id]

    def free_block_ids(self) -> list[int]:
        """All free blocks in the order in which they would be handed out; O(free blocks)."""
        block_ids = []
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def check_invariants(self, block_tables: Iterable[Seq[int]]) -> None:
        """Recounts everything from the block tables of all sequences; O(pool), for tests.

        Raises:
            SchedulingError: A count, a link or an index entry contradicts another.
        """
        expected = [0] * self.num_blocks
        for table in block_tables:
            for block_id in table:
                expected[block_id] += 1
        _require(expected == self._ref_counts, "reference counts differ from the block tables")
        free = self.free_block_ids()
        _require(len(free) == self.num_free_blocks, "num_free_blocks differs from the free list")
        unused = [b for b in range(self.num_blocks) if expected[b] == 0]
        _require(sorted(free) == unused, "the free list differs from the unused blocks")
        _require(
            all(self._prev[self._next[b]] == b for b in [*free, self._sentinel]),
            "the free list's links disagree",
        )
        self._check_index()

    def _check_index(self) -> None:
        num_children: dict[int, int] = {}
        holders: dict[int, CachedPrefix] = {}
        entries = list(self._index.values())
        for content_hash, others in self._colliding.items():
            _require(content_hash in self._index, "contents collide with nothing")
            _require(bool(others), "an empty list of collisions is kept")
            entries += others
        for prefix in entries:
            if prefix.parent is not None:
                key = id(prefix.parent)
                num_children[key] = num_children.get(key, 0) + 1
            for block_id in self._block_ids(prefix):
                _require(block_id not in holders, f"block {block_id} holds two contents")
                holders[block_id] = prefix
        for prefix in entries:
            children = num_children.get(id(prefix), 0)
            _require(prefix.num_children == children, "a prefix miscounts its children")
            _require(self._is_needed(prefix), "the index keeps a prefix that nothing needs")
            _require(
                prefix.block_id is not None or not (self._keep_copies and prefix in self._older),
                "a prefix that blocks hold cannot be found",
            )
        for block_id, held in enumerate(self._prefix_of):
            _require(holders.get(block_id) is held, f"block {block_id} is filed wrongly")
        _require(len(holders) == self.num_cached_blocks, "num_cached_blocks is wrong")
        _require(all(self._older.values()), "an empty set of copies is kept")

    def _block_ids(self, prefix: CachedPrefix) -> list[int]:
        """All blocks that hold a content, oldest first."""
        older = list(self._older.get(prefix, ()))
        return older if prefix.block_id is None else [*older, prefix.block_id]

    def _is_needed(self, prefix: CachedPrefix) -> bool:
        """Whether a block holds the content or an indexed prefix continues it."""
        return prefix.block_id is not None or prefix.num_children > 0 or prefix in self._older

    def _find(
        self, content_hash: int, parent: CachedPrefix | None, tokens: bytes
    ) -> CachedPrefix | None:
        """The entry of exactly this content, or None."""
        prefix = self._index.get(content_hash)
        if prefix is None or (prefix.parent is parent and prefix.tokens == tokens):
            return prefix
        for other in self._colliding.get(content_hash, ()):
            if other.parent is parent and other.tokens == tokens:
                return other
        return None

    def _forget(self, block_id: int, prefix: CachedPrefix) -> None:
        """Takes a block out of the index, and every entry that nothing needs any more."""
        self._prefix_of[block_id] = None
        self.num_cached_blocks -= 1
        if prefix.block_id != block_id:
            self._forget_copy(prefix, block_id)
        elif self._keep_copies and prefix in self._older:
            prefix.block_id = newest = next(reversed(self._older[prefix]))
            self._forget_copy(prefix, newest)
        else:
            prefix.block_id = None
        node: CachedPrefix | None = prefix
        while node is not None and not self._is_needed(node):
            self._unlink(node)
            node = node.parent
            if node is not None:
                node.num_children -= 1

    def _forget_copy(self, prefix: CachedPrefix, block_id: int) -> None:
        older = self._older[prefix]
        del older[block_id]
        if not older:
            del self._older[prefix]

    def _unlink(self, prefix: CachedPrefix) -> None:
        content_hash = prefix.hash
        others = self._colliding.get(content_hash)
        if others is None:
            del self._index[content_hash]
            return
        if self._index[content_hash] is prefix:
            self._index[content_hash] = others.pop()
        else:
            others.remove(prefix)
        if not others:
            del self._colliding[content_hash]


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise SchedulingError(f"invariant broken: {what}")
