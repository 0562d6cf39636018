"""Pages that several requests have: who may write them, and how they come back.

The rig asserts in every test that no request writes a page of the prefix hit that it started on.
"""

from typing import Any

import pytest

from vllm_hisparse.scheduler.residency import PageState, Residency
from vllm_hisparse.testing.scheduler import SchedulerRig

PAGE = 4


def leave_the_device(rig: SchedulerRig, *names: str) -> None:
    """Every page of these requests that the host has goes and is reused, and the pool is empty again."""
    coordinator = rig.coordinator
    pool = coordinator.pool
    for record in (coordinator.records[name] for name in names):
        if record.region is None:
            coordinator.grant_region(record)
        for page in record.pages.pages_in(PageState.CLEAN):
            coordinator.leases.unpin(record, page)
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    assert not any(coordinator.records[name].pages.count(PageState.LOOSE) for name in names)
    rig.check()


@pytest.mark.parametrize("indexer_pages", [1, 3])
@pytest.mark.parametrize("drafts_by", ["", "ngram", "mtp"])
def test_a_hit_ends_with_a_page_and_nothing_before_it_is_written(
    make_rig: Any, indexer_pages: int, drafts_by: str
) -> None:
    """Prompts that end anywhere in a page that a has, with a's tokens or others: the hit is cut to whole
    indexer blocks, and what is left of the last one is computed into blocks of the request's own.
    """
    speculation = (
        {"num_drafts": 2, "drafts_by": drafts_by, "hot_rows": 12, "max_hot_rows": 12} if drafts_by else {}
    )
    unit = PAGE * indexer_pages
    for length in range(1, 2 * unit + 2):
        for tail in ([], [39], [39] * PAGE):
            rig = make_rig(
                num_device_blocks=121, indexer_pages=indexer_pages, low=0.0, high=0.9, **speculation
            )
            rig.add("a", range(30), max_tokens=30)
            for _ in range(4):
                rig.step()
            rig.add("b", [*range(length), *tail], max_tokens=6)
            rig.step()
            manager = rig.coordinator.resident[0]
            mine, theirs = manager.req_to_blocks["b"], manager.req_to_blocks["a"]
            num_shared = sum(x is y for x, y in zip(mine, theirs, strict=False))
            common, longest = length // unit, (length + len(tail) - 1) // unit
            if drafts_by == "mtp":  # whose last block of a hit is computed again
                assert num_shared == max(min(common, longest + 1) - 1, 0) * indexer_pages
            else:
                assert num_shared == min(common, longest) * indexer_pages
            assert all(block.ref_cnt == 1 for block in mine[num_shared:])
            rig.step()


def backed(rig: SchedulerRig, *names: str) -> None:
    """Requests on one prefix of 40 tokens, whose pages are all on the host."""
    for name in names:
        rig.add(name, [*range(40), *map(ord, name)], max_tokens=50)
        for _ in range(6):
            rig.step()
    for _ in range(4):
        rig.step()
    leave_the_device(rig, *names)


def restore(rig: SchedulerRig, request_id: str) -> None:
    record = rig.coordinator.records[request_id]
    for _ in range(20):
        rig.step()
        if record.region is None:
            return
    raise AssertionError(f"{request_id} does not become Full")


@pytest.mark.parametrize("num_parts", [1, 3])
def test_what_has_come_back_is_a_hit(make_rig: Any, num_parts: int) -> None:
    rig = make_rig(num_device_blocks=41 + 30 * num_parts, num_parts=num_parts, low=0.0, high=0.9)
    backed(rig, "a")
    rig.coordinator.pressure.high = 1
    restore(rig, "a")
    counters = rig.coordinator.leases.counters
    assert counters.restored >= 10
    assert (counters.device_hits, counters.host_hits) == (0, 0)
    rig.add("b", [*range(40), 77], max_tokens=4)
    rig.step()
    assert rig.coordinator.records["b"].pages.residency is Residency.FULL
    # The keys of a's last pages may be gone: whoever made room took them.
    assert (counters.device_hits, counters.host_hits) == (10, 0)
    rig.run()


def test_a_page_on_its_way_back_is_no_hit(make_rig: Any) -> None:
    """vLLM may come to publish a page only now that it has been away and is arriving."""
    rig = make_rig(num_device_blocks=121, low=0.0, high=0.9)
    backed(rig, "a")
    coordinator = rig.coordinator
    (manager,) = coordinator.resident
    record = coordinator.records["a"]
    coordinator.pressure.high = 1
    rig.submit(0)
    assert record.pages.pages_in(PageState.RESTORING)[:10] == list(range(10))
    blocks = manager.req_to_blocks["a"]
    passed, manager.num_cached_block["a"] = manager.num_cached_block["a"], 4
    manager.cache_blocks(record.request, 32, replay_boundaries=())  # comes to pages 4 to 7
    assert [block.block_hash for block in blocks[:10]] == [None] * 10
    rig.collect()
    rig.submit()
    rig.collect()
    assert record.pages.pages_in(PageState.RESTORING) == []
    assert all(block.block_hash is not None for block in blocks[:8])
    assert blocks[8].block_hash is None  # vLLM has not come to it yet
    manager.cache_blocks(record.request, 40, replay_boundaries=())
    assert blocks[8].block_hash is not None
    manager.num_cached_block["a"] = passed
    rig.run()


def test_one_brings_back_what_two_share(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=121, low=0.0, high=0.95)
    backed(rig, "a", "b")
    coordinator = rig.coordinator
    a, b = (coordinator.records[name] for name in "ab")
    assert a.pages.pages_in(PageState.HOST)[:10] == b.pages.pages_in(PageState.HOST)[:10] == list(range(10))
    coordinator.pressure.high = 1
    coordinator.pressure.regions.held.pop(b)  # a comes first
    restore(rig, "a")
    counters = coordinator.leases.counters
    before = counters.restored
    coordinator.pressure.note_region(b)
    restore(rig, "b")
    assert counters.deduplicated >= 10
    assert counters.restored - before < 10
    first = coordinator.leases.device_blocks(a, 0)
    assert first == coordinator.leases.device_blocks(b, 0)
    assert first[0].ref_cnt == 2
    rig.run()


def test_without_a_hit_nothing_is_adopted(make_rig: Any) -> None:
    """A request that starts on nothing is not one that may read pages that are written in this step."""
    rig = make_rig(num_device_blocks=121)
    rig.add("a", range(40), max_tokens=4)
    rig.step()
    assert not rig._adopted
    rig.add("b", range(40), max_tokens=4)
    rig.run()
    assert len(rig._adopted) == 1
