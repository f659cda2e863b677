"""BlockKeys: the packed tokens and the chained hash of a sequence's full blocks.

A key depends on content alone, so it is made once in a sequence's life: when the prompt
arrives, and when an output fills a block. What else the keys and values of a block depend on (a
namespace, such as a salt) is part of the first block's key, and through the chain of all that
follow. Nothing here knows of pools or requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from struct import iter_unpack, pack

import xxhash

BlockHasher = Callable[[bytes, int], int]
"""Hashes one block: (its tokens, four bytes each; the hash of the block before it) -> hash."""

ROOT_HASH = 0
"""Stands for "the block before" of a first block."""

default_block_hasher: BlockHasher = xxhash.xxh64_intdigest
"""64-bit xxHash with the parent's hash as the seed: the fastest chaining that we measured.

It is not collision-proof, and need not be: the block manager verifies every hit.
"""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Packs token ids into four bytes each.

    Raises:
        OverflowError: An id is negative or does not fit 32 bits.
        TypeError: An id is not an integer.
    """
    return array("I", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Returns the token ids, as plain integers whatever kind of integer was packed."""
    return memoryview(packed).cast("I").tolist()


def pack_namespace(fields: Mapping[str, str | None]) -> bytes:
    """Packs what separates one family of prefixes from all others.

    Args:
        fields: Values by the name of what they are; None stands for an absent one.

    Returns:
        Bytes that are equal only if all fields are: each name and value is preceded by its
        length, so that the same text in another field, or cut at another place, differs. Empty
        if no field has a value.
    """
    parts = []
    for name, value in sorted(fields.items()):
        if value is not None:
            for text in (name, value):
                encoded = text.encode("utf-8", "surrogatepass")
                parts += [len(encoded).to_bytes(8, "little"), encoded]
    return b"".join(parts)


class BlockKeys:
    """Keys of the full blocks of one growing list of tokens.

    Attributes:
        packed: Each full block's tokens, four bytes each; before those of the first block, the
            namespace. Its length tells the two apart, so that the keys of two namespaces differ.
        hashes: Each full block's hash, chained through all blocks before it.
    """

    __slots__ = (
        "_block_bytes",
        "_block_size",
        "_format",
        "_hash_block",
        "_namespace",
        "hashes",
        "packed",
    )

    def __init__(self, block_size: int, hash_block: BlockHasher, *, namespace: bytes = b"") -> None:
        """Makes the keys of no tokens.

        Args:
            block_size: Tokens per block.
            hash_block: The chained hash.
            namespace: Only sequences of the same namespace share blocks; see `pack_namespace`.
        """
        self._namespace = namespace
        self._block_size = block_size
        self._block_bytes = 4 * block_size
        self._format = f"{block_size}I"
        self._hash_block = hash_block
        self.packed: list[bytes] = []
        self.hashes: list[int] = []

    def extend_packed(self, packed_tokens: bytes) -> None:
        """Adds the full blocks of a prompt that was packed in one go.

        Args:
            packed_tokens: All tokens from the first on, four bytes each; a partial block at the
                end is left for `extend`.
        """
        step, hash_block = self._block_bytes, self._hash_block
        stop = len(packed_tokens) - len(packed_tokens) % step
        new = memoryview(packed_tokens)[len(self.packed) * step : stop]
        # Half the time of slicing block by block.
        blocks = [block for (block,) in iter_unpack(f"{step}s", new)]
        if blocks and not self.packed:
            blocks[0] = self._namespace + blocks[0]
        parent = self.hashes[-1] if self.hashes else ROOT_HASH
        add = self.hashes.append
        for block in blocks:
            parent = hash_block(block, parent)
            add(parent)
        self.packed += blocks

    def of_first(self, num_tokens: int) -> BlockKeys:
        """Keys of the full blocks of the first `num_tokens` tokens, as far as they are there."""
        keys = BlockKeys(self._block_size, self._hash_block, namespace=self._namespace)
        num_blocks = num_tokens // self._block_size
        keys.packed, keys.hashes = self.packed[:num_blocks], self.hashes[:num_blocks]
        return keys

    def extend(self, token_ids: list[int]) -> None:
        """Adds the blocks that have become full since the last call.

        Args:
            token_ids: All tokens from the first on.
        """
        packed, hashes, size = self.packed, self.hashes, self._block_size
        start = len(packed) * size
        while (stop := start + size) <= len(token_ids):
            # For one block a third faster than `pack_tokens`.
            block = pack(self._format, *token_ids[start:stop])
            if start == 0:
                block = self._namespace + block
            parent = hashes[-1] if start else ROOT_HASH
            packed.append(block)
            hashes.append(self._hash_block(block, parent))
            start = stop
