"""Pressure that comes and goes: everything comes back, and nothing is copied to the host twice."""

from collections import Counter
from typing import Any

from vllm_hisparse.scheduler.leases import PageLeases
from vllm_hisparse.scheduler.residency import PageState, Residency
from vllm_hisparse.testing.scheduler import SchedulerRig

NUM_CYCLES = 20
RESIDENTS = ("a", "b")
BURST = 4  # requests that come together

# A page is 16 tokens and takes a resident and an indexer block. The residents together have 16 blocks at
# the start and up to 128 at the end, a burst takes 160: above high without one, below low with one.
POOL = {
    "num_device_blocks": 301,
    "num_host_blocks": 2500,
    "page_tokens": 16,
    "max_requests": 2 + BURST,
    "max_model_len": 520,
    "max_step_tokens": 256,
    "low": 0.45,
    "high": 0.52,
}


class Spills(Counter[tuple[str, int]]):
    """Copies to the host by request and page."""

    def __init__(self, leases: PageLeases) -> None:
        super().__init__()
        spill = leases.spill

        def counted(record: Any, page: int, transfer: Any) -> bool:
            before = leases.counters.spilled
            done = spill(record, page, transfer)
            self[record.request_id, page] += leases.counters.spilled - before
            return done

        leases.spill = counted  # type: ignore[method-assign]


def burst(rig: SchedulerRig, cycle: int) -> None:
    """Requests with prompts of their own that leave after a few tokens."""
    for index in range(BURST):
        first = 1000 * (BURST * cycle + index + 1)
        rig.add(f"w{cycle}.{index}", range(first, first + 300), max_tokens=8)
    while any(request_id.startswith("w") for request_id in rig.scheduler.requests):
        rig.step()


def is_full(rig: SchedulerRig) -> bool:
    records = [rig.coordinator.records[request_id] for request_id in RESIDENTS]
    return all(r.region is None and r.pages.residency is Residency.FULL for r in records)


def calm(rig: SchedulerRig, max_steps: int = 12) -> None:
    """Step until the residents are Full again."""
    for _ in range(max_steps):
        if is_full(rig) and not len(rig.coordinator.ledger):
            return
        rig.step()
    assert is_full(rig), {r: rig.coordinator.records[r].pages.residency for r in RESIDENTS}


def test_up_and_down_twenty_times(make_rig: Any) -> None:
    rig = make_rig(**POOL)
    spills = Spills(rig.coordinator.leases)
    for index, request_id in enumerate(RESIDENTS):
        rig.add(request_id, range(500 * index, 500 * index + 40), max_tokens=470)
    for _ in range(20):
        rig.step()
    for cycle in range(NUM_CYCLES):
        crossings = rig.coordinator.pressure.num_crossings["below_low"]
        burst(rig, cycle)
        assert rig.coordinator.pressure.num_crossings["below_low"] > crossings, "no pressure"
        calm(rig)
    counters = rig.coordinator.leases.counters
    assert counters.lost > 0
    assert counters.restored > 0
    assert counters.repinned > 0
    assert rig.coordinator.regions.counters.granted == rig.coordinator.regions.counters.returned > 1
    assert not rig.coordinator.regions.leased
    assert rig.coordinator.host_pool.num_evictions == 0
    assert max(spills.values()) == 1
    assert all(
        rig.coordinator.records[request_id].pages.count(PageState.HOST, PageState.LOOSE) == 0
        for request_id in RESIDENTS
    )
    for request_id in RESIDENTS:
        rig.abort(request_id)
    rig.run()
