"""Who is admitted: capped long requests, prefix hits on either tier, and what is promised for them."""

import itertools
from typing import Any

import pytest

from vllm_hisparse.messages import StepMessage
from vllm_hisparse.scheduler.residency import Residency
from vllm_hisparse.testing.engine_config import EngineOptions, make_vllm_config, minimum_device_blocks
from vllm_hisparse.testing.scheduler import SchedulerRig

POOL = {"num_device_blocks": 41, "low": 0.0, "high": 0.5}


def step(rig: SchedulerRig) -> StepMessage:
    message = rig.submit()
    rig.collect()
    return message


@pytest.mark.parametrize(
    ("num_parts", "indexer_pages", "asynchronous"), itertools.product((1, 3), (1, 3), (False, True))
)
@pytest.mark.parametrize("low", [0.0, 0.1])
@pytest.mark.parametrize("eager", [False, True])
def test_the_smallest_pool_serves_the_longest_request(
    make_rig: Any,
    tmp_path: Any,
    num_parts: int,
    indexer_pages: int,
    asynchronous: bool,
    low: float,
    eager: bool,
) -> None:
    """Twice, the second time on its own prefix, and longer than the pool."""
    options = {
        "num_parts": num_parts,
        "indexer_pages": indexer_pages,
        "async_scheduling": asynchronous,
        "low": low,
        "eager_host_mirror": eager,
        "max_model_len": 160,
        "num_host_blocks": 42,
        "hot_rows": 16,
        "max_hot_rows": 16,
    }
    size = minimum_device_blocks(
        make_vllm_config(EngineOptions(**options), tmp_path), EngineOptions(**options)
    )
    assert size - 1 < num_parts * 40 + -(-40 // indexer_pages)  # the pool cannot hold it
    rig = make_rig(**options, num_device_blocks=size)
    for request_id in ("a", "b"):
        rig.add(request_id, range(120), max_tokens=39)
        rig.run()
    assert len(rig.outputs["a"]) == len(rig.outputs["b"]) == 39
    assert rig.outputs["a"] == rig.outputs["b"]


def test_several_long_requests_finish_one_after_the_other(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=42, num_host_blocks=26, low=0.1, high=0.4)
    for first in range(5):
        rig.add(f"r{first}", range(first * 7, first * 7 + 70), max_tokens=20)
    rig.run(2000)
    assert all(len(tokens) == 20 for tokens in rig.outputs.values())


def test_pages_that_the_same_step_writes_are_not_copied_by_it(make_rig: Any) -> None:
    """b hits pages that a writes in the same step; a copy before the forward would read them too early."""
    rig = make_rig("early", num_device_blocks=81, low=0.6, high=0.99, max_step_tokens=64)
    rig.add("a", range(24), max_tokens=4)
    rig.add("b", [*range(24), 30, 31], max_tokens=4)
    message = step(rig)
    assert rig.coordinator.leases.counters.device_hits == 6
    assert message.spill == ()
    message = step(rig)
    assert len(message.spill) == 6
    rig.run()
    assert rig.coordinator.leases.counters.deduplicated > 0 or len(rig.coordinator.leases._copying) == 0


def test_a_prefix_that_only_the_host_has(make_rig: Any) -> None:
    """The request is None for a moment: its region is leased at admission and sent with its slot."""
    rig = make_rig(**POOL, num_ranks=2)
    rig.add("a", range(48), max_tokens=4)
    rig.run()
    lose_resident_copies(rig, "a")
    rig.add("b", [*range(48), 99], max_tokens=4)
    message = rig.submit()
    record = rig.coordinator.records["b"]
    assert record.region is not None
    assert [w.slot for w in message.regions] == [record.slot] == [b.slot for b in message.bind]
    assert record.pages.residency is Residency.MIXED
    assert rig.coordinator.leases.counters.host_hits == 12
    rig.collect()
    rig.run()


def lose_resident_copies(rig: SchedulerRig, request_id: str) -> None:
    """Evict what the resident groups have published; the indexer's blocks stay."""
    coordinator = rig.coordinator
    resident = {m.kv_cache_group_id for m in coordinator.resident}
    pool = coordinator.pool
    from vllm.v1.core.kv_cache_utils import get_group_id

    ids = {b.block_id for b in pool.blocks if b.block_hash and get_group_id(b.block_hash) in resident}
    assert ids, request_id
    pool.evict_blocks(ids)


@pytest.mark.parametrize("num_ids", [1, 2])
def test_a_newcomer_keeps_a_region_id(make_rig: Any, num_ids: int) -> None:
    """Two blocks are missing for a newcomer whose prefix is on the host; v gives them only for a region."""
    rig = make_rig(num_device_blocks=61, low=0.0, high=0.9)
    rig.add("a", range(32), max_tokens=4)
    rig.run()
    lose_resident_copies(rig, "a")
    rig.add("v", range(100, 184), max_tokens=8)
    for _ in range(6):
        step(rig)
    coordinator = rig.coordinator
    assert coordinator.pool.get_num_free_blocks() == 60 - 42
    del coordinator.regions._free_ids[num_ids:]
    manager = rig.scheduler.kv_cache_manager
    request = rig.add("b", [*range(32), *range(40, 57)], max_tokens=2)
    blocks, num_computed, _ = manager.get_computed_blocks(request)
    assert num_computed == 32
    # 8 indexer blocks of the hit, a region of 2, 5 pages and 5 indexer blocks: 20, and 18 are free.
    new = manager.allocate_slots(request, 17, num_computed, blocks, full_sequence_must_fit=True)
    assert (new is not None) == (num_ids == 2)
    holders = [
        r for r in ("b", "v") if r in coordinator.records and coordinator.records[r].region is not None
    ]
    assert holders == (["b", "v"] if num_ids == 2 else [])


def test_a_newcomer_may_give_up_its_own_hit(make_rig: Any) -> None:
    """Pages of the hit that both tiers have are reclaimed for the request's own growth."""
    rig = make_rig(**POOL)
    rig.add("a", range(60), max_tokens=4)
    rig.run()  # 15 pages and 15 indexer blocks stay published
    assert rig.coordinator.host_pool.num_published >= 14
    rig.add("b", [*range(60), *range(60, 92)], max_tokens=4)
    step(rig)
    record = rig.coordinator.records["b"]
    assert record.pages.num_unpinnable + record.pages.num_host_only > 0
    rig.run()
    assert len(rig.outputs["b"]) == 4


def test_a_newcomer_that_needs_a_region_and_gives_up_pages_gets_one_region(make_rig: Any) -> None:
    """Its first page is on the host only; the others are on both tiers and make room for its own growth."""
    rig = make_rig(**POOL)
    prompt = list(range(60))
    rig.add("a", prompt, max_tokens=4)
    rig.run()
    coordinator = rig.coordinator
    request = rig.add("b", [*prompt, *range(60, 92)], max_tokens=4)
    first = coordinator.host_pool.on_device.find(request.block_hashes[0])
    assert first is not None
    coordinator.pool.evict_blocks({b.block_id for b in first})
    taken = coordinator.pool.get_new_blocks(8)  # as if other requests held them
    rig.scheduler.schedule()
    record = coordinator.records["b"]
    assert record.region is not None
    assert (coordinator.regions.counters.granted, len(coordinator.regions.leased)) == (1, 1)
    assert record.pages.num_host_only > 0
    assert coordinator.leases.counters.unpinned > 0
    coordinator.pool.free_blocks(taken)


def test_blocks_for_external_tokens_are_made_room_for(make_rig: Any) -> None:
    """What a second connector loads is allocated before anything else: the promise holds for it, too."""
    rig = make_rig(**POOL)
    rig.add("a", range(64), max_tokens=20)
    for _ in range(6):
        step(rig)
    assert rig.coordinator.pool.get_num_free_blocks() == 6
    request = rig.add("b", range(100, 121), max_tokens=2)
    manager = rig.scheduler.kv_cache_manager
    blocks = manager.allocate_slots(
        request, 5, 0, manager.empty_kv_cache_blocks, num_external_computed_tokens=16
    )
    assert blocks is not None
    assert len(rig.coordinator.records["b"].pages) == 6
    rig.check()
    manager.free(request)
    rig.check()


def test_without_prefix_caching(make_rig: Any) -> None:
    rig = make_rig(**POOL, prefix_caching=False)
    for request_id in ("a", "b", "c"):
        rig.add(request_id, range(60), max_tokens=12)
    rig.run()
    counters = rig.coordinator.leases.counters
    assert counters.spilled > 0
    assert counters.device_hits == counters.host_hits == counters.deduplicated == 0
    assert rig.coordinator.host_pool.num_published == 0


def test_slots_are_used_again(make_rig: Any) -> None:
    rig = make_rig(max_requests=2)
    for number in range(7):
        rig.add(f"r{number}", range(number, number + 9), max_tokens=3)
    rig.run()
    bound = [b for m in rig.messages for b in m.bind]
    assert [b.request_id for b in bound] == [f"r{n}" for n in range(7)]
    assert {b.slot for b in bound} == {0, 1}


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_hit_that_would_fill_the_pool_is_cut(make_rig: Any, tmp_path: Any, num_parts: int) -> None:
    """Pages that only the device has cannot leave at once; too many of them would never be admitted."""
    options = {"num_parts": num_parts, "low": 0.0, "eager_host_mirror": False, "max_step_tokens": 40}
    smallest = minimum_device_blocks(
        make_vllm_config(EngineOptions(**options), tmp_path), EngineOptions(**options)
    )
    rig = make_rig(**options, num_device_blocks=smallest + 1)
    rig.add("a", range(50), max_tokens=8)
    step(rig)
    rig.preempt()
    request = rig.scheduler.requests["a"]
    blocks = [rig.coordinator.host_pool.get_cached_block(h, [0]) for h in request.block_hashes[:9]]
    assert sum(b is not None for b in blocks) >= 9  # of which only `spare` may be used
    assert rig.coordinator.admission.num_admissible([b[0] for b in blocks if b]) <= 1
    rig.run()
    assert len(rig.outputs["a"]) == 8


def test_what_the_host_cannot_take_must_fit_the_device(make_rig: Any) -> None:
    """A region of two pages, the page that is written, one for rounding and four of a step."""
    admission = make_rig(**POOL).coordinator.admission
    (claim,) = {admission.cap(n, False, 100) for n in (20, 30, 60)}
    assert claim == admission._claim
    assert admission.cap(claim - 1, False, 0) == claim - 1
    assert admission.cap(claim + 5, False, 5) == claim
    assert admission.cap(claim + 5, False, 4) == claim + 5
    assert admission.cap(60, True, 100) == claim - 2  # the region is counted with the hit


@pytest.mark.parametrize(("spare", "num_used"), [(-1, 0), (0, 15)])
def test_host_pages_are_no_hit_where_no_region_fits(make_rig: Any, spare: int, num_used: int) -> None:
    rig = make_rig(num_device_blocks=41, low=0.0, high=0.99)
    rig.add("a", range(60), max_tokens=4)
    rig.run()
    request = rig.add("again", range(60), max_tokens=1)
    coordinator = rig.coordinator
    lose_resident_copies(rig, "a")
    found = [coordinator.host_pool.get_cached_block(h, [0]) for h in request.block_hashes]
    assert all(found)
    coordinator.admission._spare = spare
    assert coordinator.admission.num_admissible([blocks[0] for blocks in found if blocks]) == num_used
