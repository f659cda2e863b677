"""BlockKeys: made once, in any portions, and different where content differs."""

import itertools

import pytest
import xxhash

from nv_core.block_hash import (
    ROOT_HASH,
    BlockKeys,
    default_block_hasher,
    pack_namespace,
    pack_tokens,
    unpack_tokens,
)


def keys_of(token_ids: list[int], block_size: int = 4, *, namespace: bytes = b"") -> BlockKeys:
    keys = BlockKeys(block_size, default_block_hasher, namespace=namespace)
    keys.extend_packed(pack_tokens(token_ids))
    return keys


def test_hash_chains_block_by_block() -> None:
    keys = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    first, second = pack_tokens([1, 2, 3, 4]), pack_tokens([5, 6, 7, 8])
    assert keys.packed == [first, second]
    parent = xxhash.xxh64_intdigest(first, ROOT_HASH)
    assert keys.hashes == [parent, xxhash.xxh64_intdigest(second, parent)]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("namespace", [b"", b"abc"])
def test_growing_token_by_token_gives_the_keys_of_the_whole(
    block_size: int, namespace: bytes
) -> None:
    token_ids = list(range(50))
    whole = keys_of(token_ids, block_size, namespace=namespace)
    grown = keys_of(token_ids[:7], block_size, namespace=namespace)
    for length in range(7, 51):
        grown.extend(token_ids[:length])
        assert len(grown.hashes) == length // block_size
    assert grown.hashes == whole.hashes
    assert grown.packed == whole.packed


def test_no_block_is_hashed_twice() -> None:
    hashed: list[bytes] = []

    def hash_block(tokens: bytes, parent: int) -> int:
        hashed.append(tokens)
        return default_block_hasher(tokens, parent)

    keys = BlockKeys(4, hash_block)
    keys.extend_packed(pack_tokens(list(range(9))))
    for length in range(9, 41):
        keys.extend(list(range(length)))
    assert len(hashed) == len(set(hashed)) == 10


def test_same_block_behind_another_parent_has_another_hash() -> None:
    assert keys_of([1, 1, 1, 1, 2, 2, 2, 2]).hashes[1] != keys_of([2, 2, 2, 2]).hashes[0]


@pytest.mark.parametrize(
    ("token_ids", "error"), [([-1], OverflowError), ([2**32], OverflowError), ([1.5], TypeError)]
)
def test_only_32_bit_ids_can_be_packed(token_ids: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        pack_tokens(token_ids)


def test_packing_keeps_every_id() -> None:
    token_ids = [0, 1, 255, 256, 2**31, 2**32 - 1]
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids
    assert len(pack_tokens(token_ids)) == 4 * len(token_ids)


def test_any_integer_type_unpacks_to_int() -> None:
    class Own:
        def __index__(self) -> int:
            return 7

    mixed: list[int] = [True, Own()]  # type: ignore[list-item]
    assert [type(t) for t in unpack_tokens(pack_tokens(mixed))] == [int, int]


NAMESPACES: list[dict[str, str | None]] = [
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"adapter": "a"},
    {"adapter": "a", "cache_salt": "a"},
    {"adapter": "ab", "cache_salt": "c"},
    {"adapter": "a", "cache_salt": "bc"},
    {"adapter": "a", "cache_salt": ""},
    {"cache_salt": "adapter"},
    {"cache_salt": "ä"},
    {"cache_salt": "\ud800"},
    {"cache_salt": "\x00"},
    {"cache_salt": None},
]


def test_namespaces_differ_in_field_value_and_cut() -> None:
    packed = [pack_namespace(fields) for fields in NAMESPACES]
    assert len(set(packed)) == len(packed)


def test_namespace_does_not_depend_on_order_or_absent_fields() -> None:
    assert pack_namespace({}) == pack_namespace({"cache_salt": None}) == b""
    one, other = {"a": "1", "b": "2"}, {"b": "2", "c": None, "a": "1"}
    assert pack_namespace(one) == pack_namespace(other)


def test_namespaces_never_share_a_key() -> None:
    """Compared by content, not by hash; also when tokens imitate the bytes of a namespace."""
    namespace = pack_namespace({"cache_salt": "imitates"})
    imitation = unpack_tokens(namespace[: len(namespace) // 4 * 4])
    prompts = ([1, 2, 3, 4], imitation[:4], imitation[-4:])
    first_blocks = []
    for fields in NAMESPACES:
        for token_ids in prompts:
            keys = BlockKeys(4, default_block_hasher, namespace=pack_namespace(fields))
            keys.extend(token_ids)
            first_blocks.append(keys.packed[0])
    assert all(a != b for a, b in itertools.combinations(first_blocks, 2))
