"""The two tiers' lookup, and hot regions as leases."""

from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_group_id

from vllm_hisparse.scheduler.host_pool import HostPool
from vllm_hisparse.testing.scheduler import SchedulerRig


@pytest.fixture
def written(make_rig: Any) -> SchedulerRig:
    """A rig in which a request of 15 pages has come and gone; both tiers have the first 14 or 15 pages."""
    rig = make_rig(num_device_blocks=41, low=0.0, high=0.99)
    rig.add("a", range(60), max_tokens=4)
    rig.run()
    return rig


def hashes(rig: SchedulerRig) -> list[Any]:
    return list(rig.add("again", range(60), max_tokens=1).block_hashes)


def evict(rig: SchedulerRig, page_hash: Any) -> None:
    coordinator = rig.coordinator
    blocks = coordinator.host_pool.on_device.find(page_hash)
    assert blocks is not None
    coordinator.pool.evict_blocks({b.block_id for b in blocks})


def test_the_device_answers_before_the_host(written: SchedulerRig) -> None:
    host = written.coordinator.host_pool
    first, second = hashes(written)[:2]
    evict(written, first)
    found = [host.get_cached_block(h, [0]) for h in (first, second)]
    assert [blocks[0].pool is host for blocks in found if blocks] == [True, False]
    on_host = host.host_block(second)
    assert on_host is not None
    assert on_host.pool is host


def test_a_page_that_lacks_a_part_is_not_on_the_device(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=91, num_parts=3, low=0.0, high=0.99)
    rig.add("a", range(60), max_tokens=4)
    rig.run()
    host = rig.coordinator.host_pool
    page_hash = hashes(rig)[0]
    blocks = host.on_device.find(page_hash)
    assert blocks is not None
    assert [get_group_id(b.block_hash) for b in blocks if b.block_hash] == [2, 3, 4]
    rig.coordinator.pool.evict_blocks({blocks[1].block_id})
    assert host.on_device.find(page_hash) is None
    assert host.get_cached_block(page_hash, [0])[0].pool is host  # type: ignore[index]


def test_a_page_that_comes_again_is_found_where_it_is_now(make_rig: Any) -> None:
    """What a lookup remembers ends with the blocks' hashes."""
    rig = make_rig(num_device_blocks=91, num_parts=3, low=0.0, high=0.99)
    rig.add("a", range(60), max_tokens=4)
    rig.run()
    host, pool = rig.coordinator.host_pool, rig.coordinator.pool
    page_hash = hashes(rig)[0]
    before = host.on_device.find(page_hash)
    assert before is not None and host.on_device.find(page_hash) == before
    pool.evict_blocks({b.block_id for b in before})
    assert host.on_device.find(page_hash) is None
    assert host.reset_prefix_cache()  # nor on the host: it is computed again
    rig.run()
    after = host.on_device.find(page_hash)
    assert after is not None
    assert after == pool.get_cached_block(
        page_hash, [get_group_id(b.block_hash) for b in after if b.block_hash]
    )


def test_an_unknown_page(written: SchedulerRig) -> None:
    request = written.add("other", range(1, 61), max_tokens=1)
    assert written.coordinator.host_pool.get_cached_block(request.block_hashes[0], [0]) is None


def test_events_go_to_the_queue_that_vllm_drains(written: SchedulerRig) -> None:
    host, pool = written.coordinator.host_pool, written.coordinator.pool
    assert host.kv_event_queue is pool.kv_event_queue
    pool.kv_event_queue = []
    assert host.kv_event_queue is pool.kv_event_queue


def test_reset_forgets_and_counts(written: SchedulerRig) -> None:
    host: HostPool = written.coordinator.host_pool
    page_hash = hashes(written)[0]
    assert host.get_cached_block(page_hash, [0]) is not None
    assert (host.epoch, host.num_published > 0) == (0, True)
    assert host.reset_prefix_cache()
    assert (host.epoch, host.num_published) == (1, 0)
    evict(written, page_hash)
    assert host.get_cached_block(page_hash, [0]) is None


def test_a_leased_block_prevents_a_reset(written: SchedulerRig) -> None:
    host = written.coordinator.host_pool
    (block,) = host.get_new_blocks(1)
    assert not host.reset_prefix_cache()
    assert host.epoch == 0
    host.check_integrity()
    host.free_blocks([block])
    assert host.reset_prefix_cache()


def test_regions_grow_shrink_and_close(make_rig: Any) -> None:
    """Three parts: 6 blocks to start with, 4 a part at the cap, 1 at the floor."""
    rig = make_rig(num_device_blocks=81, num_parts=3, max_hot_rows=16)
    regions, pool = rig.coordinator.regions, rig.coordinator.pool
    free = pool.get_num_free_blocks()
    region = regions.lease()
    assert (regions.num_blocks, region.num_blocks, region.num_rows) == (6, 2, 8)
    assert pool.get_num_free_blocks() == free - 6
    assert (regions.room_to_grow(region), regions.excess(region)) == (2, 1)
    before = region.block_ids
    regions.grow(region, 2)
    assert (region.num_rows, pool.get_num_free_blocks()) == (16, free - 12)
    cut = regions.shrink(region, 2)
    assert region.block_ids == before
    assert pool.get_num_free_blocks() == free - 12  # until it is acknowledged
    regions.check_integrity([region], [cut])
    regions.release(cut)
    assert pool.get_num_free_blocks() == free - 6
    closed = regions.close(region)
    regions.check_integrity([], [closed])
    num_ids = regions.num_free_ids
    regions.release(closed)
    assert (regions.num_free_ids, pool.get_num_free_blocks()) == (num_ids + 1, free)
    regions.check_integrity([], [])


def test_a_lost_region_is_noticed(make_rig: Any) -> None:
    rig = make_rig()
    rig.coordinator.regions.lease()
    with pytest.raises(AssertionError, match="without a holder"):
        rig.check()
