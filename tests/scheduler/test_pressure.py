"""Levels of the device pool and what they set off, with numbers worked out by hand.

The pool has 40 blocks beside the null block; a page is 4 tokens and takes one resident and one indexer block;
a new region takes two. Below 20 free blocks pages are copied, below 8 leases go back.
"""

from typing import Any

from vllm_hisparse.messages import StepMessage
from vllm_hisparse.scheduler.residency import PageState, Residency
from vllm_hisparse.testing.scheduler import SchedulerRig

POOL = {"num_device_blocks": 41, "low": 0.2, "high": 0.5}


def step(rig: SchedulerRig) -> StepMessage:
    message = rig.submit()
    rig.collect()
    return message


def pages(rig: SchedulerRig, request_id: str) -> list[str]:
    table = rig.coordinator.records[request_id].pages
    return [table[page].name for page in range(len(table))]


def num_free(rig: SchedulerRig) -> int:
    return rig.coordinator.pool.get_num_free_blocks()


def test_levels(make_rig: Any) -> None:
    rig = make_rig(**POOL)
    assert (rig.coordinator.pressure.low, rig.coordinator.pressure.high) == (8, 20)
    rig.add("a", range(60), max_tokens=20)
    seen = [(step(rig), num_free(rig)) for _ in range(4)]
    assert [free for _, free in seen] == [32, 24, 16, 10]  # 8 blocks for 16 tokens, 6 for the last 12
    # Below high pages are copied that earlier steps have filled: 32 tokens, then 16 more.
    assert [len(message.spill) for message, _ in seen] == [0, 0, 8, 4]
    assert pages(rig, "a") == ["CLEAN"] * 12 + ["DIRTY"] * 3
    for expected in (8, 8, 8, 8):  # the first four generated tokens share page 15
        step(rig)
        assert num_free(rig) == expected
    assert rig.coordinator.records["a"].region is None
    message = step(rig)  # token 64: page 16 leaves 6 free blocks, 2 are missing
    # Two blocks and a region's two: four pages from the tail, of which the region takes none.
    assert num_free(rig) == 8
    assert pages(rig, "a") == ["CLEAN"] * 11 + ["LOOSE"] * 4 + [
        "CLEAN",
        "DIRTY",
    ]  # page 15 was copied just now
    assert len(message.regions) == 1
    assert message.regions[0].num_rows == 8
    assert rig.coordinator.records["a"].pages.residency is Residency.FULL
    rig.run()


def test_nothing_is_copied_above_high(make_rig: Any) -> None:
    rig = make_rig(**POOL | {"num_device_blocks": 201})
    rig.add("a", range(80), max_tokens=10)
    rig.run()
    assert all(not m.spill and m.transfer_id < 0 for m in rig.messages)
    assert rig.coordinator.host_pool.get_num_free_blocks() == 119


def test_without_the_eager_mirror_copies_start_at_low(make_rig: Any) -> None:
    rig = make_rig(**POOL, eager_host_mirror=False)
    rig.add("a", range(60), max_tokens=20)
    seen = [step(rig) for _ in range(9)]
    assert [len(m.spill) for m in seen] == [0] * 8 + [16]  # at 6 free blocks, all that is sealed by then
    rig.run()


def test_a_request_that_waits_makes_others_copy(make_rig: Any) -> None:
    """Low is 0 and the mirror is lazy, so nothing would be copied before a is preempted or ends."""
    rig = make_rig(**POOL | {"low": 0.0}, eager_host_mirror=False)
    rig.add("a", range(64), max_tokens=28)
    for _ in range(5):
        assert not step(rig).spill
    rig.add("b", range(100, 120), max_tokens=2)
    message = step(rig)
    assert (rig.num_refused, len(message.spill)) == (1, 16)
    step(rig)
    assert "b" in rig.coordinator.records
    assert rig.coordinator.records["a"].request.num_preemptions == 0
    rig.run()


def test_a_request_that_waits_for_a_slot_or_for_tokens_does_not(make_rig: Any) -> None:
    rig = make_rig(**POOL | {"num_device_blocks": 201, "low": 0.0}, max_requests=2, eager_host_mirror=False)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        rig.add(name, range(first, first + 40), max_tokens=20)
    rig.run()
    assert not any(message.spill for message in rig.messages)


def test_steady_decode_sends_nothing(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=201)
    rig.add("a", range(16), max_tokens=30)
    rig.run()
    # A message for each of the pages 0-3, 4, 5 ... 11, and one that unbinds the request; else nothing.
    assert sum(not m.is_empty for m in rig.messages) == 1 + 8 + (1 if rig.messages[-1].unbind else 0)


def test_a_full_pool_that_is_reclaimable_admits(make_rig: Any) -> None:
    rig = make_rig(**POOL | {"low": 0.0})
    rig.add("a", range(64), max_tokens=20)
    for _ in range(6):
        step(rig)
    assert num_free(rig) == 6
    rig.add("b", range(100, 115), max_tokens=2)  # 4 pages, 4 indexer blocks
    message = step(rig)
    assert "b" in rig.coordinator.records
    assert rig.num_refused == 0
    # Two blocks were missing: four of a's pages went, two for them and two for a's region.
    assert num_free(rig) == 0
    assert rig.coordinator.records["a"].pages.count(PageState.LOOSE, PageState.HOST) == 4
    assert [write.slot for write in message.regions] == [rig.coordinator.records["a"].slot]
    rig.run()


def test_a_refused_admission_changes_nothing(make_rig: Any) -> None:
    """Nothing is on the host, so nothing can be reclaimed; `watch_refusals` compares the whole state."""
    rig = make_rig(**POOL | {"low": 0.0}, eager_host_mirror=False)
    rig.add("a", range(64), max_tokens=8)
    for _ in range(5):
        step(rig)
    rig.add("b", range(100, 120), max_tokens=2)
    step(rig)
    assert rig.num_refused == 1
    assert "b" not in rig.coordinator.records
    rig.run()


def test_pages_come_back_and_the_region_goes_when_every_rank_knows(make_rig: Any) -> None:
    rig = make_rig(**POOL, num_ranks=2)
    rig.add("a", range(60), max_tokens=36)
    rig.add("b", range(100, 128), max_tokens=8)
    while "b" in rig.scheduler.requests:
        rig.step()
    record = rig.coordinator.records["a"]
    assert record.pages.residency is Residency.MIXED
    rig.coordinator.pressure.low, rig.coordinator.pressure.high = 0, 1  # as if others had left, too
    message = step(rig)
    assert len(message.restore) > 0
    assert record.region is not None  # rows are still on their way
    size = record.region.num_blocks
    returning = rig.submit(1, 1)
    assert record.region is None
    assert returning.regions[0].region == -1
    assert len(rig.coordinator.regions.leased) == 1  # leased until acknowledged
    free = num_free(rig)
    rig.collect()
    assert len(rig.coordinator.regions.leased) == 0
    assert num_free(rig) == free + size
    assert record.pages.residency is Residency.FULL
    rig.run()


def test_between_the_levels_nothing_moves(make_rig: Any) -> None:
    """Hysteresis: a Mixed request above low and below high keeps its region and its pages stay away."""
    rig = make_rig(**POOL)
    rig.add("a", range(60), max_tokens=30)
    rig.add("b", range(100, 128), max_tokens=8)
    while "b" in rig.scheduler.requests:
        rig.step()
    record = rig.coordinator.records["a"]
    assert record.pages.residency is Residency.MIXED
    away = record.pages.num_host_only
    assert 8 <= num_free(rig) < 20 + 2 * away
    rig.coordinator.pressure.high = 39
    while rig.scheduler.has_requests():
        rig.step()
        assert not rig.messages[-1].restore
    rig.run()


def test_a_copy_still_running_protects_its_page(make_rig: Any) -> None:
    """Enqueued, unpinned, reused, completed, in that order; the reuse makes the next forward wait."""
    rig = make_rig(**POOL | {"low": 0.0})
    rig.add("a", range(64), max_tokens=20)
    for _ in range(6):
        rig.step(0)
    assert pages(rig, "a") == ["ENQUEUED"] * 16 + ["DIRTY"]
    rig.add("b", range(100, 115), max_tokens=2)
    message = rig.submit(0)
    table = rig.coordinator.records["a"].pages
    assert table.count(PageState.LANDING) > 0
    assert message.wait
    rig.collect()
    rig.run()


def test_a_page_on_its_way_can_be_taken_back(make_rig: Any) -> None:
    rig = make_rig(**POOL | {"low": 0.0})
    rig.add("a", range(64), max_tokens=20)
    for _ in range(6):
        rig.step(0)
    record = rig.coordinator.records["a"]
    rig.coordinator.reclaimer.reclaim(num_free(rig) + 2)
    assert pages(rig, "a").count("DRAINING") == 4
    rig.coordinator.leases.repin(record, 15)
    assert pages(rig, "a")[15] == "ENQUEUED"
    rig.check()
    rig.run()
