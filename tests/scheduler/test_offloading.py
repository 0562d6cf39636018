"""vLLM's OffloadingConnector keeps indexer keys: prefixes of both are reconciled, nothing is held."""

import random
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from tests.scheduler.conftest import MakeRig
from vllm_hisparse.scheduler.residency import PageState
from vllm_hisparse.testing.scheduler import ALL, SchedulerRig

PAGE = 4
AWAY = (PageState.LOOSE, PageState.HOST)
PROMPT = list(range(40))
ROOMY: dict[str, Any] = {"num_device_blocks": 60, "low": 0.0, "high": 1.0, "num_offload_chunks": 100}


def forget_device(rig: SchedulerRig) -> None:
    """Other requests have used every device block since."""
    pool = rig.coordinator.pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))


def host_blocks(rig: SchedulerRig, request: Any) -> list[KVCacheBlock | None]:
    hashes = request.block_hashes[: len(PROMPT) // PAGE]
    return [rig.coordinator.host_pool.host_block(h) for h in hashes]


def after_another(make_rig: MakeRig, **options: Any) -> tuple[SchedulerRig, Any]:
    """A rig in which a request with `PROMPT` has ended, and that request."""
    rig = make_rig(**ROOMY, **options)
    request = rig.add("first", [*PROMPT, 41], max_tokens=12)
    rig.run()
    assert None not in host_blocks(rig, request)
    return rig, request


def num_loaded(rig: SchedulerRig) -> int:
    """Tokens of the waiting request whose keys are being loaded, and that has them once it runs."""
    request = rig.add("again", [*PROMPT, 42], max_tokens=2)
    rig.step(*[0] * len(rig.ranks))
    if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        return 0
    assert rig.offloading[0].num_loads == len(rig.ranks)
    assert rig.coordinator.records["again"].slot < 0
    return int(request.num_computed_tokens)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_keys_alone_are_loaded(make_rig: MakeRig, num_ranks: int) -> None:
    rig, _ = after_another(make_rig, num_ranks=num_ranks)
    forget_device(rig)
    assert num_loaded(rig) == len(PROMPT)
    record = rig.coordinator.records["again"]
    assert record.pages.num_host_only == len(PROMPT) // PAGE
    assert record.region is not None
    rig.run()
    assert len(rig.outputs["again"]) == 2


def test_only_missing_keys_are_loaded(make_rig: MakeRig) -> None:
    """The device still has the first keys; the rest comes from the store."""
    rig, request = after_another(make_rig)
    pool = rig.coordinator.pool
    kept = [pool.get_cached_block(h, [1]) for h in request.block_hashes[:3]]
    blocks = [block for found in kept for block in found or ()]
    assert len(blocks) == 3
    pool.touch(blocks)
    forget_device(rig)
    pool.free_blocks(blocks)
    assert num_loaded(rig) == len(PROMPT)
    (job,) = rig.offloading[0]._scheduler._jobs.values()
    assert len(job.keys) == len(PROMPT) // PAGE - 3
    rig.run()


@pytest.mark.parametrize("num_pages", [0, 6])
def test_keys_without_pages_are_not_loaded(make_rig: MakeRig, num_pages: int) -> None:
    """The host pool has given up the pages from `num_pages` on: the prefix ends there for every group."""
    rig, request = after_another(make_rig)
    forget_device(rig)
    host_pool = rig.coordinator.host_pool
    gone = [host_pool.take_block(b.block_id) for b in host_blocks(rig, request)[num_pages:] if b is not None]
    host_pool.free_blocks(gone)
    assert num_loaded(rig) == num_pages * PAGE
    rig.run()


def test_pages_without_keys_are_computed(make_rig: MakeRig) -> None:
    rig, _ = after_another(make_rig)
    forget_device(rig)
    rig.offloading[0]._scheduler.manager.reset_cache()
    assert num_loaded(rig) == 0
    rig.run()


def test_abort_while_keys_are_loaded(make_rig: MakeRig) -> None:
    """vLLM keeps the blocks until the load has ended on every rank."""
    rig, _ = after_another(make_rig, num_ranks=2)
    forget_device(rig)
    rig.add("again", [*PROMPT, 42])
    rig.step(0, 0)
    rig.abort("again")
    assert "again" in rig.coordinator.records
    rig.step(ALL, 0)
    assert "again" in rig.coordinator.records
    rig.step(0, ALL)
    rig.run()


def exhaust(rig: SchedulerRig) -> None:
    """Somebody else has taken every free block: vLLM's scheduler, for frees that it defers for ever."""
    pool = rig.coordinator.pool
    rig.scheduler.deferred_frees.append((1 << 60, pool.get_new_blocks(pool.get_num_free_blocks())))


def test_pages_shared_with_the_request_that_asks_make_room(make_rig: MakeRig) -> None:
    """A request whose keys have come holds its pages already; a runs on the same ones. They are all that can
    be reclaimed: what it is promised of them, it gets.
    """
    rig, _ = after_another(make_rig)
    rig.add("a", [*PROMPT, 41], max_tokens=30)
    rig.step()
    rows = rig.coordinator.on_device[0].req_to_blocks
    rig.coordinator.pool.evict_blocks({block.block_id for block in rows["a"]})  # only the store has the keys
    assert num_loaded(rig) == len(PROMPT)
    pages = rig.coordinator.resident[0].req_to_blocks
    assert [block.ref_cnt for block in pages["again"]] == [2] * (len(PROMPT) // PAGE)
    exhaust(rig)
    rig.step()
    rig.step()
    again = rig.coordinator.records["again"]
    assert again.slot >= 0
    # It lacks a page and its keys; both requests need a region of two for what they give up.
    assert [rig.coordinator.records[name].pages.count(*AWAY) for name in ("a", "again")] == [6, 6]
    rig.step()
    assert len(rig.outputs["again"]) == 2


@pytest.mark.parametrize(("num_reclaimable", "is_admitted"), [(12, False), (13, True)])
def test_a_load_leaves_room_for_those_in_flight(
    make_rig: MakeRig, num_reclaimable: int, is_admitted: bool
) -> None:
    """What can be reclaimed is promised once: to the load, after what "again" has to come."""
    rig, _ = after_another(make_rig)
    other = range(100, 120)
    rig.add("other", [*other, 41], max_tokens=2)
    rig.run()
    forget_device(rig)
    rig.add("v", range(1000, 1001 + PAGE * num_reclaimable), max_tokens=30)
    while rig.coordinator.leases.counters.spilled < 13 + num_reclaimable:
        rig.step()
    rig.step()
    victim = rig.coordinator.records["v"]
    rig.coordinator.grant_region(victim)
    assert victim.pages.num_unpinnable == num_reclaimable

    rig.add("again", [*PROMPT, *range(50, 60)], max_tokens=2)
    rig.step(0)
    exhaust(rig)
    assert rig.scheduler._inflight_prefill_reserved_blocks() == 3 + 3  # pages and keys of ten tokens
    late = rig.add("late", [*other, 42], max_tokens=2)
    rig.step(0)  # it takes five keys, and a region of two
    assert (late.status is RequestStatus.WAITING_FOR_REMOTE_KVS) == is_admitted
    rig.abort("v")
    for _ in range(12):
        rig.step()
    assert len(rig.outputs["late"]) == len(rig.outputs["again"]) == 2


def test_a_request_that_holds_its_keys_does_not_wait_for_the_host(make_rig: MakeRig) -> None:
    """long came first; since then short has leased most of the host. Nobody runs, so nothing is gained if
    long waits until the host can take what the device cannot.
    """
    rig = make_rig(**ROOMY | {"num_device_blocks": 45, "num_host_blocks": 26})
    for start, length in ((0, 8), (200, 60)):
        rig.add(f"first{start}", [*range(start, start + length), 41], max_tokens=8)
        rig.run()
    forget_device(rig)
    rig.add("long", [*range(8), *range(300, 362)], max_tokens=2)
    rig.add("short", [*range(200, 260), 42], max_tokens=2)
    rig.step(0)
    statuses = {request.status for request in rig.scheduler.requests.values()}
    assert statuses == {RequestStatus.WAITING_FOR_REMOTE_KVS}
    rig.run()
    assert len(rig.outputs["long"]) == len(rig.outputs["short"]) == 2


def test_pages_are_copied_for_a_request_that_holds_its_keys(make_rig: MakeRig) -> None:
    """Without `eager_host_mirror` nothing is, until somebody lacks a block."""
    rig, _ = after_another(make_rig)
    forget_device(rig)
    rig.coordinator.pressure._copy_below = 0
    rig.add("v", range(1000, 1041), max_tokens=30)
    for _ in range(3):
        rig.step()
    assert num_loaded(rig) == len(PROMPT)
    exhaust(rig)
    assert rig.submit().spill == ()
    rig.collect()
    assert len(rig.submit().spill) == 10
    rig.collect()
    while "again" in rig.scheduler.requests:
        rig.step()
    assert rig.coordinator.records["v"].region is not None


def walk(make_rig: MakeRig, seed: int) -> int:
    """Requests with few prefixes, so that keys are stored and loaded all the time. Returns the loads."""
    chance = random.Random(seed)
    rig = make_rig(
        timing=chance.choice(["early", "late", "split"]),
        num_device_blocks=chance.choice([70, 80, 90]),
        num_host_blocks=chance.choice([90, 160]),
        num_offload_chunks=chance.choice([30, 200]),
        offload_prompt_only=chance.random() < 0.2,
        async_scheduling=chance.random() < 0.5,
        num_parts=chance.choice([1, 1, 2]),
        indexer_pages=chance.choice([1, 1, 3]),
        num_drafts=chance.choice([0, 0, 2]),
        num_ranks=chance.choice([1, 2]),
        hot_rows=12,
        max_hot_rows=16,
        low=chance.choice([0, 0.2, 0.3]),
        high=chance.choice([0.35, 0.6]),
    )
    rig.watch_refusals = False
    for number in range(120):
        if len(rig.scheduler.requests) < 8:
            family, length = chance.randrange(5), chance.choice([30, 50, 70])
            prompt = [(family * 7 + j * 3) % 50 for j in range(length)]
            rig.add(f"r{number}", prompt, chance.randint(1, 24))
        for _ in range(chance.randint(1, 6)):
            rig.step(*[chance.choice([0, 0, 1, ALL]) for _ in rig.ranks])
        if chance.random() < 0.1 and rig.scheduler.requests:
            rig.abort(chance.choice(list(rig.scheduler.requests)))
        if chance.random() < 0.05 and rig.scheduler.running:
            rig.preempt()
    rig.run(4000)
    return rig.offloading[0].num_loads


def test_walks(make_rig: MakeRig) -> None:
    assert sum(walk(make_rig, seed) for seed in range(8)) > 50


@pytest.mark.long
@pytest.mark.timeout(900)
def test_walks_for_long(make_rig: MakeRig) -> None:
    assert sum(walk(make_rig, seed) for seed in range(8, 208)) > 4000


def test_a_load_that_waits_for_steps_in_flight_keeps_its_chunks(make_rig: MakeRig) -> None:
    """From 0.33 on vLLM starts it later than it finds it; a full store needs room for another's keys then."""
    num_chunks = len(PROMPT) // PAGE
    rig = make_rig(**ROOMY | {"num_offload_chunks": num_chunks}, async_scheduling=True, max_step_tokens=24)
    rig.add("first", [*PROMPT, 41], max_tokens=2)
    rig.run()
    forget_device(rig)
    rig.add("other", range(500, 536), max_tokens=4)
    rig.submit()
    again = rig.add("again", [*PROMPT, 42], max_tokens=2)
    rig.submit()
    assert again.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(rig.in_flight) == 2
    rig.collect()
    rig.run()
    assert rig.offloading[0].num_loads == 1
    assert len(rig.outputs["again"]) == 2
