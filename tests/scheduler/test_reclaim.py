"""Whose pages are reclaimed, in which order, and that a query promises no more than reclaiming frees.

A page is 4 tokens and one block; a region takes two.
"""

from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_group_id

from vllm_hisparse.messages import Acknowledgement, Progress
from vllm_hisparse.scheduler.admission import NO_HIT, Hit
from vllm_hisparse.scheduler.records import Record
from vllm_hisparse.scheduler.residency import PageState
from vllm_hisparse.testing.scheduler import SchedulerRig

AWAY = (PageState.LOOSE, PageState.HOST)


def decoding(make_rig: Any, **pages: int) -> SchedulerRig:
    """A rig with requests of so many pages each that both tiers have, and a page that is being written."""
    rig = make_rig(num_device_blocks=301, low=0.0, high=0.99, max_requests=6, max_step_tokens=400)
    for name, num_pages in pages.items():
        first = 1000 * ord(name)
        rig.add(name, range(first, first + 4 * num_pages), max_tokens=40)
    for _ in range(3):
        rig.step()
    for name, num_pages in pages.items():
        assert record(rig, name).pages.count(PageState.CLEAN) == num_pages
    return rig  # type: ignore[no-any-return]


def record(rig: SchedulerRig, name: str) -> Record:
    return rig.coordinator.records[name]


def num_away(rig: SchedulerRig, *names: str) -> list[int]:
    return [record(rig, name).pages.count(*AWAY) for name in names]


def reclaim(rig: SchedulerRig, num_blocks: int) -> int:
    """Ask for `num_blocks` more free blocks; how many there are then."""
    pool = rig.coordinator.pool
    before = pool.get_num_free_blocks()
    rig.coordinator.reclaimer.reclaim(before + num_blocks)
    return int(pool.get_num_free_blocks() - before)


def test_who_has_most_to_give_goes_first(make_rig: Any) -> None:
    rig = decoding(make_rig, a=6, b=12, c=9)
    assert reclaim(rig, 4) == 4
    assert num_away(rig, "a", "b", "c") == [0, 6, 0]


def test_who_has_a_region_goes_before(make_rig: Any) -> None:
    rig = decoding(make_rig, a=6, b=12, c=9)
    rig.coordinator.grant_region(record(rig, "a"))
    assert reclaim(rig, 4) == 4
    assert num_away(rig, "a", "b", "c") == [4, 0, 0]
    assert reclaim(rig, 6) == 6  # two are left of a, the others cost a region
    assert num_away(rig, "a", "b", "c") == [6, 6, 0]


def test_what_only_pays_for_its_region_stays(make_rig: Any) -> None:
    rig = decoding(make_rig, a=2)
    assert rig.coordinator.reclaimer.num_reclaimable(9, NO_HIT) == 0
    assert reclaim(rig, 9) == 0
    assert num_away(rig, "a") == [0]
    assert record(rig, "a").region is None


@pytest.mark.parametrize(("num_ids", "freed"), [(0, 0), (1, 10), (2, 17), (3, 21)])
def test_regions_that_can_be_named_bound_the_promise(make_rig: Any, num_ids: int, freed: int) -> None:
    rig = decoding(make_rig, a=6, b=12, c=9)
    coordinator = rig.coordinator
    del coordinator.regions._free_ids[num_ids:]
    assert coordinator.reclaimer.num_reclaimable(100, NO_HIT) == freed
    assert reclaim(rig, 100) == freed


@pytest.mark.parametrize(("num_ids", "own"), [(0, 0), (1, 5)])
def test_a_hit_that_is_given_up_needs_a_region(make_rig: Any, num_ids: int, own: int) -> None:
    rig = decoding(make_rig, a=1)
    del rig.coordinator.regions._free_ids[num_ids:]
    assert rig.coordinator.reclaimer.num_reclaimable(100, Hit(num_clean=7)) == own
    assert rig.coordinator.reclaimer.num_reclaimable(100, Hit(num_clean=7, num_host_only=1)) == 7


def test_the_coldest_page_is_reused_first(make_rig: Any) -> None:
    rig = decoding(make_rig, a=12)
    pool = rig.coordinator.pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 2)  # what is left is the region's
    record(rig, "a").hot_pages = (11, 10)
    assert reclaim(rig, 3) == 3
    assert record(rig, "a").pages.pages_in(PageState.LOOSE) == [5, 6, 7, 8, 9]
    for expected in ([9], [8, 9], [7, 8, 9]):
        pool.get_new_blocks(1)
        assert record(rig, "a").pages.pages_in(PageState.HOST) == expected


def test_nobody_is_asked_again_until_something_has_changed(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One region can be named. While a has it, b cannot give anything; a's end changes that."""
    rig = decoding(make_rig, a=12, b=9)
    coordinator = rig.coordinator
    reclaimer = coordinator.reclaimer
    del coordinator.regions._free_ids[1:]
    assert reclaim(rig, 100) == 10
    assert num_away(rig, "a", "b") == [12, 0]
    asked = []
    victims = reclaimer.victims.in_order
    monkeypatch.setattr(reclaimer.victims, "in_order", lambda *args: asked.append(1) or victims(*args))
    assert reclaim(rig, 100) == 0
    assert reclaimer.num_reclaimable(100, NO_HIT) == 0
    assert asked == []
    coordinator.drop("a")
    assert reclaimer.num_reclaimable(100, NO_HIT) == 7
    assert reclaim(rig, 100) == 7
    assert num_away(rig, "b") == [9]


def sharing(make_rig: Any, num_parts: int = 1) -> SchedulerRig:
    """Pages 0 to 3 are shared by a, b and c, pages 4 to 9 by a and b; then each has pages of its own."""
    rig = make_rig(
        num_device_blocks=501, num_parts=num_parts, low=0.0, high=0.99, max_requests=4, max_step_tokens=400
    )
    for name, num_shared, num_own in (("a", 40, 8), ("b", 40, 12), ("c", 16, 16)):
        first = 1000 * ord(name)
        rig.add(name, [*range(num_shared), *range(first, first + num_own)], max_tokens=40)
        for _ in range(4):
            rig.step()
    rig.step()
    leases = rig.coordinator.resident[0].req_to_blocks
    assert [b.ref_cnt for b in leases["a"][:12]] == [3] * 4 + [2] * 6 + [1] * 2
    clean = [record(rig, name).pages.count(PageState.CLEAN) for name in "abc"]
    assert clean == [14, 14, 8]
    return rig  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(("num_ids", "freed"), [(0, 0), (1, 2), (2, 10), (3, 16)])
def test_shared_pages_go_if_all_sharers_can_read_them_from_the_host(
    make_rig: Any, num_parts: int, num_ids: int, freed: int
) -> None:
    """Each gives 4 pages of its own for a region of 2; then a and b give 6, and the three of them 4."""
    rig = sharing(make_rig, num_parts)
    coordinator = rig.coordinator
    del coordinator.regions._free_ids[num_ids:]
    assert coordinator.reclaimer.num_reclaimable(1000, NO_HIT) == freed * num_parts
    assert reclaim(rig, 1000) == freed * num_parts


def test_what_more_requests_share_goes_later(make_rig: Any) -> None:
    rig = sharing(make_rig)
    for name in "abc":
        rig.coordinator.grant_region(record(rig, name))
    assert reclaim(rig, 12) == 12
    assert num_away(rig, "a", "b", "c") == [4, 4, 4]  # what is their own
    assert reclaim(rig, 2) == 2
    for name in "ab":
        assert record(rig, name).pages.pages_in(*AWAY) == [8, 9, 10, 11, 12, 13]
    assert reclaim(rig, 100) == 8
    assert num_away(rig, "a", "b", "c") == [14, 14, 8]
    rig.check()
    rig.run()


def test_a_page_that_one_sharer_could_not_read_stays(make_rig: Any) -> None:
    """c does not know yet that the host has its first pages."""
    rig = sharing(make_rig)
    for name in "abc":
        rig.coordinator.grant_region(record(rig, name))
    pages = record(rig, "c").pages
    pages._states[:4] = bytes([PageState.DIRTY] * 4)
    pages._counts[PageState.CLEAN] -= 4
    assert rig.coordinator.reclaimer.num_reclaimable(1000, NO_HIT) == 18
    assert reclaim(rig, 1000) == 18
    assert record(rig, "a").pages.pages_in(PageState.CLEAN) == [0, 1, 2, 3]


def newcomer(rig: SchedulerRig, prompt: list[int], num_hit: int) -> Record:
    """A request is admitted on a prefix hit of `num_hit` tokens; not scheduled yet."""
    request = rig.add("new", prompt, max_tokens=2)
    manager = rig.scheduler.kv_cache_manager
    blocks, num_computed, _ = manager.get_computed_blocks(request)
    assert num_computed == num_hit
    new = manager.allocate_slots(
        request, len(prompt) - num_hit, num_computed, blocks, full_sequence_must_fit=True
    )
    assert new is not None
    return record(rig, "new")


def test_a_newcomer_gives_up_its_hit_after_all_others(make_rig: Any) -> None:
    rig = decoding(make_rig, v=9)
    rig.add("a", range(60), max_tokens=3)
    while "a" in rig.scheduler.requests:
        rig.step()
    pool = rig.coordinator.pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 30 - 4)  # the hit's pages and keys, and two more pages
    new = newcomer(rig, [*range(60), *range(70, 88)], 60)  # five pages and keys, less four
    assert new.pages.count(*AWAY) == 0
    assert num_away(rig, "v") == [8]
    assert new.region is None


def test_a_newcomer_gets_the_last_region(make_rig: Any) -> None:
    """Its first page is on the host only, so v cannot have the one that is left; it gives up its own hit."""
    rig = decoding(make_rig, v=9)
    rig.add("a", range(60), max_tokens=3)
    while "a" in rig.scheduler.requests:
        rig.step()
    coordinator, pool = rig.coordinator, rig.coordinator.pool
    request = rig.add("again", range(60), max_tokens=1)
    rig.scheduler.waiting.pop_request()
    first = coordinator.host_pool.on_device.find(request.block_hashes[0])
    assert first is not None
    pool.evict_blocks({b.block_id for b in first})
    pool.get_new_blocks(pool.get_num_free_blocks() - 29 - 6)
    del coordinator.regions._free_ids[1:]
    new = newcomer(rig, [*range(60), *range(70, 88)], 60)  # five pages, five keys, two of the region
    assert new.region is not None
    assert num_away(rig, "v") == [0]
    assert new.pages.count(*AWAY) == 1 + 6


def test_what_is_kept_is_counted_again_when_it_is_in_use(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=101, low=0.0, high=0.9, prefix_share=0.5)
    rig.add("a", range(60), max_tokens=3)
    rig.run()
    order = rig.coordinator.leases.order
    kept = rig.coordinator.pool.get_num_free_blocks() - order.num_spare()
    assert kept >= 15
    rig.add("b", range(60), max_tokens=3)
    rig.step()
    left = rig.coordinator.pool.get_num_free_blocks() - order.num_spare()
    assert left <= kept - 14
    rig.run()


def test_a_shortage_is_waited_for_if_regions_can_shrink(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=301, low=0.0, high=0.99, hot_rows=16, max_hot_rows=16)
    rig.add("a", range(48), max_tokens=40)
    for _ in range(5):
        rig.step()
    coordinator = rig.coordinator
    assert not coordinator.wait_for_copies()  # every full page is on the host
    coordinator.grant_region(record(rig, "a"))
    assert coordinator.regions.num_excess_blocks == 3
    assert coordinator.wait_for_copies()
    message = rig.submit()
    assert [w.num_rows for w in message.regions] == [4]
    assert len(coordinator.ledger) == 1
    assert coordinator.regions.num_excess_blocks == 0
    assert coordinator.wait_for_copies()  # what was cut is on its way back
    coordinator.acknowledge(Acknowledgement({0: Progress(message.transfer_id, message.transfer_id)}))
    assert not coordinator.wait_for_copies()


@pytest.mark.parametrize("num_ids", [0, 1])
def test_a_hit_on_host_pages_needs_a_region_that_can_be_named(make_rig: Any, num_ids: int) -> None:
    rig = make_rig(num_device_blocks=121, low=0.0, high=0.99)
    rig.add("a", range(60), max_tokens=3)
    rig.run()
    coordinator = rig.coordinator
    resident = coordinator.resident[0].kv_cache_group_id
    hashed = [b for b in coordinator.pool.blocks if b.block_hash is not None]
    coordinator.pool.evict_blocks({b.block_id for b in hashed if get_group_id(b.block_hash) == resident})
    del coordinator.regions._free_ids[num_ids:]
    request = rig.add("b", range(60), max_tokens=3)
    manager = rig.scheduler.kv_cache_manager
    blocks, num_computed, _ = manager.get_computed_blocks(request)
    assert num_computed == 56
    assert all(block.pool is coordinator.host_pool for block in blocks.blocks[0])
    new = manager.allocate_slots(request, 4, num_computed, blocks, full_sequence_must_fit=True)
    assert (new is not None) == ("b" in coordinator.records) == (num_ids > 0)


def test_a_region_that_goes_with_its_request_is_not_sent(make_rig: Any) -> None:
    """The slot may have another request in the same message."""
    rig = decoding(make_rig, a=6)
    slot = record(rig, "a").slot
    rig.coordinator.grant_region(record(rig, "a"))
    rig.abort("a")
    rig.add("b", range(8), max_tokens=2)
    message = rig.submit()
    assert [b.slot for b in message.bind] == [slot]
    assert message.regions == ()
    rig.collect()
    rig.run()


def test_a_block_that_is_copied_again_is_not_free_when_its_first_copy_ends(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=41, low=0.0, high=0.99)
    rig.add("a", range(12), max_tokens=10)
    while not rig.submit(0).spill:
        rig.collect()
    leases = rig.coordinator.leases
    (transfer,) = rig.coordinator.ledger
    block = transfer.spills[0].device_blocks[0].block_id
    leases._copying[block] = transfer.transfer_id + 5  # it has been reused, and its new page is copied
    rig.collect()
    rig.step()
    assert transfer.transfer_id not in rig.coordinator.ledger
    assert leases._copying[block] == transfer.transfer_id + 5
