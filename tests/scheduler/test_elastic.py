"""Hot regions change size: they grow while selections miss and blocks are free, and are cut in two phases."""

from typing import Any

import pytest

from vllm_hisparse.messages import Acknowledgement, StepMessage
from vllm_hisparse.scheduler.records import Record
from vllm_hisparse.scheduler.residency import PageState
from vllm_hisparse.testing.scheduler import SchedulerRig

PAGE = 4
FLOOR, START, CAP = 1, 2, 8  # blocks of each part
POOL = {
    "num_device_blocks": 201,
    "num_host_blocks": 400,
    "top_k": PAGE * FLOOR,
    "hot_rows": PAGE * START,
    "max_hot_rows": PAGE * CAP,
    "max_model_len": 256,
    "max_step_tokens": 64,
    "low": 0.3,
    "high": 0.99,  # sealed pages are copied at once
    "num_ranks": 2,
}


def step(rig: SchedulerRig) -> StepMessage:
    message = rig.submit()
    rig.collect()
    return message


def set_levels(rig: SchedulerRig, low: int, high: int) -> None:
    """Watermarks in blocks."""
    rig.coordinator.pressure.low, rig.coordinator.pressure.high = low, high
    rig.coordinator.pressure.note_change()  # levels do not change in operation: nothing else would notice


def num_free(rig: SchedulerRig) -> int:
    return int(rig.coordinator.pool.get_num_free_blocks())


@pytest.fixture(params=[1, 2])
def backed(make_rig: Any, request: pytest.FixtureRequest) -> tuple[SchedulerRig, Record]:
    """A rig with one decoding request, half of whose pages are on the host only."""
    rig = make_rig(**POOL, num_parts=request.param)
    rig.add("a", range(120), max_tokens=100)
    for _ in range(6):
        step(rig)
    record = rig.coordinator.records["a"]
    set_levels(rig, low=num_free(rig) + 15 * request.param, high=200)
    for _ in range(3):
        step(rig)
    taken = rig.coordinator.pool.get_new_blocks(num_free(rig))  # loose pages are lost
    rig.coordinator.pool.free_blocks(taken)
    assert record.pages.count(PageState.HOST) >= 10
    assert record.region is not None
    return rig, record


def grow(rig: SchedulerRig, num_blocks: int, num_steps: int = 4) -> None:
    """Steps with misses, and `num_blocks` blocks above high."""
    set_levels(rig, low=0, high=num_free(rig) - num_blocks)
    rig.num_misses = 50
    for _ in range(num_steps):
        step(rig)
    rig.num_misses = 0


def test_grows_while_selections_miss_and_blocks_are_free(backed: tuple[SchedulerRig, Record]) -> None:
    rig, record = backed
    parts = rig.options.num_parts
    assert record.region.num_blocks == START
    set_levels(rig, low=0, high=num_free(rig) - 9 * parts)
    for _ in range(2):
        step(rig)
    assert record.region.num_blocks == START, "grew although nothing missed"
    rig.num_misses = 50
    sizes = []
    for _ in range(12):
        message = step(rig)
        assert num_free(rig) >= rig.coordinator.pressure.high - 2 * (parts + 1)  # the request's own growth
        sizes += [w.num_rows // PAGE for w in message.regions]
    assert sizes == sorted(sizes)
    assert START < sizes[-1] <= CAP
    assert record.region.num_blocks == sizes[-1]
    rig.run()


def test_a_region_that_shrinks_and_grows_between_two_messages(backed: tuple[SchedulerRig, Record]) -> None:
    """The new blocks are where rows were that the resolver would still find."""
    rig, record = backed
    grow(rig, 9 * rig.options.num_parts)
    before = record.region.block_ids
    num_blocks = len(before[0])
    assert num_blocks >= 4
    set_levels(rig, low=0, high=500)  # no other reason to grow or to shrink
    rig.coordinator.shrink_region(record, 3)
    rig.coordinator.grow_region(record, 2)
    (write,) = step(rig).regions
    assert write.num_rows == PAGE * (num_blocks - 1)
    assert write.num_kept == PAGE * (num_blocks - 3)
    for old, new in zip(before, write.device_blocks, strict=True):
        assert new[: num_blocks - 3] == old[: num_blocks - 3]
        assert not set(new[num_blocks - 3 :]) & set(old)
    rig.coordinator.grow_region(record, 1)
    (write,) = step(rig).regions
    assert (write.num_kept, write.num_rows) == (PAGE * (num_blocks - 1), PAGE * num_blocks)
    rig.run()


def test_what_has_grown_goes_before_pages_and_pages_before_the_rest(
    backed: tuple[SchedulerRig, Record],
) -> None:
    rig, record = backed
    parts = rig.options.num_parts
    grow(rig, 9 * parts)
    grown = record.region.num_blocks - START
    assert grown >= 2
    unpinned = rig.coordinator.leases.counters.unpinned
    set_levels(rig, low=num_free(rig) + grown * parts, high=200)
    message = step(rig)
    assert [w.num_rows for w in message.regions] == [PAGE * START]
    assert rig.coordinator.leases.counters.unpinned == unpinned
    # More is missing than pages can give: what is above the floor goes too, with the last page.
    set_levels(rig, low=200, high=200)
    message = step(rig)
    assert rig.coordinator.leases.counters.unpinned > unpinned
    assert record.pages.num_unpinnable == 0
    assert [w.num_rows for w in message.regions] == [PAGE * FLOOR]
    set_levels(rig, low=0, high=200)
    rig.run()


def test_a_cut_is_leased_until_every_rank_has_acknowledged(backed: tuple[SchedulerRig, Record]) -> None:
    rig, record = backed
    parts = rig.options.num_parts
    grow(rig, 9 * parts)
    lost = [block for part in record.region.blocks for block in part[START:]]
    assert lost
    set_levels(rig, low=num_free(rig) + len(lost), high=200)
    message = rig.submit()
    # The slots are dead for the workers from this message on: the region's blocks end before them.
    (write,) = message.regions
    assert not {b.block_id for b in lost} & {b for part in write.device_blocks for b in part}
    assert message.transfer_id >= 0
    assert all(block.ref_cnt == 1 for block in lost)
    _, result = rig.in_flight[-1]
    meta = result.kv_connector_output.kv_connector_worker_meta
    assert [meta.ack.progress[rank].enqueued for rank in (0, 1)] == [message.transfer_id] * 2
    for _ in range(2):  # one rank of two, twice
        rig.coordinator.acknowledge(Acknowledgement({1: meta.ack.progress[1]}))
        assert all(block.ref_cnt == 1 for block in lost)
    rig.collect()
    assert all(block.ref_cnt == 0 for block in lost)
    set_levels(rig, low=0, high=200)
    rig.run()


def test_sizes_and_restores_in_turn(backed: tuple[SchedulerRig, Record]) -> None:
    """Grown, cut, restored, all while the request decodes; the ranks check every row that it reads."""
    rig, record = backed
    parts = rig.options.num_parts
    for _ in range(3):
        grow(rig, 6 * parts, num_steps=2)
        set_levels(rig, low=num_free(rig) + 8 * parts, high=200)
        step(rig)
        set_levels(rig, low=0, high=1)  # room for all: restores begin, and the region goes back
        for _ in range(4):
            step(rig)
        assert record.region is None
        assert record.pages.num_host_only == 0
        set_levels(rig, low=num_free(rig) + 10 * parts, high=200)
        for _ in range(3):
            step(rig)
        assert record.region is not None
    counters = rig.coordinator.regions.counters
    assert counters.grown_blocks > 0
    assert counters.shrunk_blocks > 0
    assert counters.returned == 3
    set_levels(rig, low=0, high=200)
    rig.run()


@pytest.fixture
def both(make_rig: Any) -> tuple[SchedulerRig, list[Record]]:
    """A rig with two requests that hold regions, and their records; nothing happens by itself."""
    rig = make_rig(**POOL)
    for name, first in (("a", 0), ("b", 500)):
        rig.add(name, range(first, first + 100), max_tokens=100)
    for _ in range(8):
        step(rig)
    records = [rig.coordinator.records[name] for name in ("a", "b")]
    set_levels(rig, low=num_free(rig) + 20, high=400)
    while not all(record.region for record in records):
        step(rig)
    set_levels(rig, low=0, high=400)
    return rig, records


def measured(rig: SchedulerRig, records: list[Record], *misses: float) -> None:
    """Misses arrive, as an acknowledgement brings them."""
    ack = Acknowledgement({}, {r.slot: n for r, n in zip(records, misses, strict=True)})
    rig.coordinator.acknowledge(ack)


def num_blocks(records: list[Record]) -> list[int]:
    return [record.region.num_blocks for record in records]


@pytest.mark.parametrize("misses", [(10, 50), (50, 10)])
def test_who_misses_most_grows_first(
    both: tuple[SchedulerRig, list[Record]], misses: tuple[int, int]
) -> None:
    rig, records = both
    sizes = rig.coordinator.pressure.regions
    measured(rig, records, *misses)
    sizes.grow(1)
    assert num_blocks(records) == [START + (n == 50) for n in misses]
    assert [r.num_misses for r in records] == [0 if n == 50 else n for n in misses], "of its old size"
    sizes.grow(1)  # nothing has been measured since
    assert num_blocks(records) == [START + (n == 50) for n in misses]
    measured(rig, records, *(0 if n == 50 else n for n in misses))
    sizes.grow(2)
    assert num_blocks(records) == [START + 1, START + 1]
    rig.run()


def test_who_hardly_misses_does_not_grow(both: tuple[SchedulerRig, list[Record]]) -> None:
    rig, records = both
    sizes = rig.coordinator.pressure.regions
    measured(rig, records, sizes._min_misses * 0.9, sizes._min_misses)
    sizes.grow(10)
    assert num_blocks(records) == [START, START + 1]
    rig.run()


@pytest.mark.parametrize("misses", [(10, 50), (50, 10)])
def test_who_misses_least_shrinks_first(
    both: tuple[SchedulerRig, list[Record]], misses: tuple[int, int]
) -> None:
    rig, records = both
    sizes = rig.coordinator.pressure.regions
    measured(rig, records, 20, 20)
    sizes.grow(2)
    assert num_blocks(records) == [START + 1, START + 1]
    measured(rig, records, *misses)
    sizes.take_grown(1)
    assert num_blocks(records) == [START + (n == 50) for n in misses]
    rig.run()
