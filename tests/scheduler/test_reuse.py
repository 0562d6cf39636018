"""What the pool hands out first: pages that the host has too, before what only the device has."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from vllm_hisparse.testing.scheduler import SchedulerRig

# A page is 4 tokens and takes a resident and an indexer block.
POOL = {"num_device_blocks": 61, "high": 0.9}


def run_one(rig: SchedulerRig, request_id: str, tokens: range) -> None:
    rig.add(request_id, tokens, max_tokens=1)
    rig.run()


def num_hit_tokens(rig: SchedulerRig, tokens: range) -> int:
    request = rig.add("probe", [*tokens, 39], max_tokens=1)
    num_tokens = rig.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
    rig.scheduler.finish_requests("probe", RequestStatus.FINISHED_ABORTED)
    return int(num_tokens)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_keys_outlive_pages_that_the_host_has(make_rig: Any, num_parts: int) -> None:
    """Other requests have used all blocks but as many as hold its keys and the page that was never copied."""
    rig = make_rig(num_device_blocks=1 + 60 * (num_parts + 1) // 2, num_parts=num_parts, low=0.0, high=0.9)
    run_one(rig, "a", range(40))
    pool = rig.coordinator.pool
    assert num_hit_tokens(rig, range(40)) == 40
    num_on_host = sum(rig.coordinator.host_pool.is_published(block) for block in range(1, 120))
    assert num_on_host >= 4
    kept = 10 + (10 - num_on_host) * num_parts
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - kept)
    assert num_hit_tokens(rig, range(40)) == 40
    pool.free_blocks(taken)


def test_keys_outlive_pages_that_end_behind_them(make_rig: Any) -> None:
    """Requests end while most of the pool is empty, one's keys before the other's pages; then it fills up."""
    rig = make_rig(num_device_blocks=201, low=0.0, high=0.99)
    run_one(rig, "a", range(40))
    run_one(rig, "b", range(100, 140))
    pool = rig.coordinator.pool
    free = pool.free_block_queue.get_all_free_blocks()
    spare = [b for b in free if b.block_hash is None or b.block_id in pool._reuse_watchers]
    assert len(spare) > 150 and len(free) - len(spare) >= 20
    taken = pool.get_new_blocks(len(spare))
    assert num_hit_tokens(rig, range(40)) == num_hit_tokens(rig, range(100, 140)) == 40
    pool.free_blocks(taken)


@pytest.mark.parametrize(("share", "gives_up"), [(0.0, False), (0.5, True)])
def test_kept_keys_are_not_free(make_rig: Any, share: float, gives_up: bool) -> None:
    """Twelve blocks are free when b decodes: above low, but the keys of a are in them."""
    rig = make_rig(**POOL, low=0.15, prefix_share=share)
    run_one(rig, "a", range(48))
    rig.add("b", range(100, 194), max_tokens=2)
    while "b" not in rig.coordinator.records or rig.model.requests["b"].num_computed < 94:
        rig.step()
    assert (rig.coordinator.records["b"].region is not None) is gives_up
    assert rig.coordinator.pressure.low == 9
    rig.run()


def test_what_is_kept_is_bounded(make_rig: Any) -> None:
    rig = make_rig(**POOL, low=0.0, prefix_share=0.1)
    order = rig.coordinator.leases.order
    assert order.num_spare() == 60
    run_one(rig, "a", range(48))
    assert rig.coordinator.pool.get_num_free_blocks() == 60
    assert order.num_spare() == 60 - 6
    assert order.num_unkept == 60 - order.num_kept < 60 - 6


def test_what_is_kept_is_counted_as_blocks_come_and_go(make_rig: Any) -> None:
    rig = make_rig(**POOL, low=0.0)
    run_one(rig, "a", range(48))
    pool, order = rig.coordinator.pool, rig.coordinator.leases.order
    kept = [b for b in pool.free_block_queue.get_all_free_blocks() if order._count_kept([b])]
    num_kept = order.num_kept
    assert num_kept == len(kept) >= 12  # the keys of twelve pages

    def changed_by(count: int) -> None:
        order.check_integrity()
        assert order.num_kept == num_kept + count

    pool.touch(kept[:3])
    changed_by(-3)
    pool.touch(kept[:4])
    changed_by(-4)
    pool.free_blocks([*kept[:3], *kept[:3], rig.coordinator.host_pool.null_block])
    changed_by(-1)
    pool.free_blocks(kept[3:4])
    changed_by(0)
    for _ in range(2):
        pool.evict_blocks({b.block_id for b in kept[:2]})
        changed_by(-2)
    with pytest.raises(ValueError, match="free blocks"):
        pool.get_new_blocks(61)
    changed_by(-2)
    taken = pool.get_new_blocks(60 - 5)  # the last five are the four that were in use, and one before
    changed_by(3 - num_kept)
    pool.free_blocks(taken)
    changed_by(3 - num_kept)
    assert pool.reset_prefix_cache()
    changed_by(-num_kept)


def test_host_pages_are_published_with_events(make_rig: Any) -> None:
    """vLLM describes a published block by its place in the row, which here is the only one there is."""
    rig = make_rig(**POOL, low=0.0)
    pools = (rig.coordinator.pool, rig.coordinator.host_pool)
    for pool in pools:
        pool.enable_kv_cache_events = True
    events: list[Any] = []
    take = rig.coordinator.pool.take_events
    rig.coordinator.pool.take_events = lambda: events.extend(taken := take()) or taken
    run_one(rig, "a", range(24))
    stored = [e for e in events if type(e).__name__ == "BlockStored"]
    on_host = [e for e in stored if e.medium == "CPU"]
    assert len(on_host) >= 4
    assert [e.token_ids for e in on_host] == [[4 * p + i for i in range(4)] for p in range(len(on_host))]
    assert all(e.parent_block_hash is not None for e in on_host[1:])


def test_a_reset_keeps_nothing(make_rig: Any) -> None:
    rig = make_rig(**POOL, low=0.0, prefix_share=0.5)
    run_one(rig, "a", range(48))
    assert rig.coordinator.leases.order.num_spare() < 60
    assert rig.reset()
    run_one(rig, "b", range(50, 54))
    assert rig.coordinator.leases.order.num_spare() >= 58
