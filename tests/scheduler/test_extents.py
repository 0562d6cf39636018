"""Host blocks come in runs where that can be had, and always come."""

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_hisparse.scheduler.extents import Extents
from vllm_hisparse.scheduler.host_pool import HostPool


def make(num_blocks: int) -> tuple[HostPool, Extents]:
    device = BlockPool(4, True, 64)
    pool = HostPool(num_blocks, device, 0, [1])
    return pool, Extents(pool)


def grow(pool: HostPool, extents: Extents, owner: str, count: int, expected: int) -> list[KVCacheBlock]:
    blocks = [extents.take(owner, pool.null_block, expected)]
    for taken in range(1, count):
        blocks.append(extents.take(owner, blocks[-1], expected - taken))
    return blocks


def publish(pool: HostPool, blocks: list[KVCacheBlock]) -> None:
    for block in blocks:
        key = make_block_hash_with_group_id(BlockHash(b"%032d" % block.block_id), 0)
        pool._insert_block_hash(key, block, num_tokens=64)
        pool.num_published += 1


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [b.block_id for b in blocks]


def test_requests_that_grow_in_turn_stay_apart() -> None:
    pool, extents = make(100)
    owners = ["a", "b", "c"]
    rows = {owner: [extents.take(owner, pool.null_block, 20)] for owner in owners}
    for taken in range(1, 20):
        for owner in owners:
            rows[owner].append(extents.take(owner, rows[owner][-1], 20 - taken))
    assert [ids(rows[owner]) for owner in owners] == [
        list(range(1, 21)),
        list(range(21, 41)),
        list(range(41, 61)),
    ]
    assert extents.mean_run == 20.0


def test_shortest_run_that_fits_is_taken() -> None:
    pool, extents = make(40)
    blocks = pool.get_new_blocks(39)
    pool.free_blocks(blocks[4:9])  # blocks 5..9
    pool.free_blocks(blocks[19:39])  # blocks 20..39
    assert ids(grow(pool, extents, "short", 4, 4)) == [5, 6, 7, 8]
    assert ids(grow(pool, extents, "long", 10, 10)) == list(range(20, 30))


def test_a_run_is_wanted_not_owned() -> None:
    pool, extents = make(11)  # ten blocks
    first = grow(pool, extents, "first", 1, 10)
    second = grow(pool, extents, "second", 5, 5)
    assert len(set(ids(first + second))) == 6
    rest = [extents.take("first", first[-1], 9)]
    while pool.get_num_free_blocks():
        rest.append(extents.take("first", rest[-1], 1))
    assert sorted(ids(first + second + rest)) == list(range(1, 11))
    pool.check_integrity()


def test_published_pages_are_evicted_oldest_first_and_in_a_run() -> None:
    pool, extents = make(21)
    old, new = pool.get_new_blocks(10), pool.get_new_blocks(10)
    publish(pool, old + new)
    pool.free_blocks(reversed(old))  # as vLLM frees a request: from its tail
    pool.free_blocks(reversed(new))
    assert ids(grow(pool, extents, "next", 4, 4)) == [7, 8, 9, 10]
    assert pool.num_evictions == 4
    assert all(pool.is_published(b.block_id) for b in new), "newer pages stay"
    pool.check_integrity()


def test_unpublished_blocks_go_before_published_ones() -> None:
    pool, extents = make(21)
    kept, plain = pool.get_new_blocks(10), pool.get_new_blocks(10)
    publish(pool, kept)
    pool.free_blocks(reversed(kept))
    pool.free_blocks(plain)
    assert set(ids(grow(pool, extents, "next", 10, 10))) == set(ids(plain))
    assert pool.num_evictions == 0


def test_a_run_ends_at_a_page_that_somebody_may_want_again() -> None:
    """The block behind a session's pages is the first page of the next one's, which went with it."""
    pool, extents = make(100)
    rows = {owner: grow(pool, extents, owner, 10, 10) for owner in ("a", "b")}
    assert ids(rows["a"] + rows["b"]) == list(range(1, 21))
    for owner, row in rows.items():
        publish(pool, row)
        pool.free_blocks(reversed(row))
        extents.forget(owner)
    pool.touch(rows["a"])  # its next turn
    following = extents.take("a again", rows["a"][-1], 3)
    assert following.block_id > 20
    assert extents.take("a again", following, 2).block_id == following.block_id + 1
    assert pool.num_evictions == 0


def test_a_full_pool_loses_what_was_used_longest_ago() -> None:
    """Not what lies behind the run."""
    pool, extents = make(31)
    rows = [pool.get_new_blocks(10) for _ in range(3)]
    publish(pool, [block for row in rows for block in row])
    for row in (rows[2], rows[1], rows[0]):
        pool.free_blocks(reversed(row))
    pool.touch(rows[0])
    taken = [extents.take("again", rows[0][-1], 4)]
    for left in (3, 2, 1):
        taken.append(extents.take("again", taken[-1], left))
    assert ids(taken) == [27, 28, 29, 30]
    assert all(pool.is_published(b.block_id) for b in (*rows[0], *rows[1], *rows[2][:6]))


@pytest.mark.parametrize("num_blocks", [2, 3, 7])
def test_the_last_block_is_handed_out(num_blocks: int) -> None:
    pool, extents = make(num_blocks)
    taken = grow(pool, extents, "all", num_blocks - 1, 100)
    assert sorted(ids(taken)) == list(range(1, num_blocks))
    assert pool.get_num_free_blocks() == 0


def test_a_run_starts_beside_what_others_want() -> None:
    """Even where it is shorter there: the other would be cut off in the middle."""
    pool, extents = make(30)
    first = grow(pool, extents, "first", 2, 20)
    assert ids(first) == [1, 2]
    other = extents.take("other", pool.null_block, 15)
    assert other.block_id == 21
    assert extents.take("first", first[-1], 18).block_id == 3
