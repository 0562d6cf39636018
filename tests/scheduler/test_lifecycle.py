"""Requests that end, lose their blocks or have their prefixes forgotten, with a page in any of its states."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from vllm_hisparse.scheduler.residency import TRANSITIONS, Event, PageState
from vllm_hisparse.testing.scheduler import SchedulerRig

# With steps in flight vLLM defers block frees of a KV consumer, which no reset survives: see the last test.
PRODUCER = {"async_scheduling": True, "kv_role": "kv_producer"}
ACTIONS: dict[str, Callable[[SchedulerRig, str], Any]] = {
    "abort": lambda rig, request_id: rig.abort(request_id),
    "preempt": lambda rig, request_id: rig.preempt(),
    "reset": lambda rig, request_id: rig.reset(),
}


# Pages that come from another engine: see test_imports.py.
LOCAL_STATES = [s for s in PageState if TRANSITIONS.get((s, Event.IMPORTED)) is None]


def workload(rig: SchedulerRig, length: int) -> None:
    """A request of `length` tokens that outlives two that fill the pool; one shares its prefix."""
    rig.add("a", range(length), max_tokens=30)
    rig.add("b", [*range(20), *range(100, 130)], max_tokens=6)
    rig.add("c", range(200, 240), max_tokens=6)


def run_until(rig: SchedulerRig, state: PageState, seed: int) -> str | None:
    """Step with copies that end at random until a running request has a page in `state`; its id."""
    chance = random.Random(seed)
    for _ in range(150):
        for request in reversed(rig.scheduler.running):
            record = rig.coordinator.records.get(request.request_id)
            if record is not None and record.pages.count(state):
                return record.request_id
        if not rig.scheduler.has_requests():
            return None
        rig.step(*[chance.choice([0, 0, 1]) for _ in rig.ranks])
    return None


@pytest.mark.parametrize(
    ("state", "action"), itertools.product(LOCAL_STATES, ACTIONS), ids=lambda v: getattr(v, "name", v)
)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_every_page_state(make_rig: Any, state: PageState, action: str, num_parts: int) -> None:
    found = 0
    for seed in range(12):
        rig = make_rig(
            num_device_blocks=25 + 16 * num_parts,
            num_parts=num_parts,
            low=0.1,
            high=0.6 - 0.4 * (seed % 2),
            **PRODUCER,
        )
        workload(rig, 24 if seed % 2 else 60)
        request_id = run_until(rig, state, seed)
        if request_id is None:
            continue
        found += 1
        if action == "preempt":
            last = rig.scheduler.running[-1].request_id
            request_id = last
        ACTIONS[action](rig, request_id)
        rig.run()
        if action != "abort":
            assert len(rig.outputs[request_id]) == (30 if request_id == "a" else 6)
        if found == 2:
            return
    assert found, "the workload does not reach the state"


def test_reset_between_enqueued_and_completed(make_rig: Any) -> None:
    """Copies go on, their host blocks stay theirs, and nothing is published that the old weights wrote."""
    rig = make_rig(num_device_blocks=41, low=0.0, high=0.9)
    rig.add("a", range(60), max_tokens=10)
    for _ in range(5):
        rig.step(0)
    host, ledger = rig.coordinator.host_pool, rig.coordinator.ledger
    copies = sum(len(t.spills) for t in ledger)
    assert copies == 15
    assert rig.reset()
    assert host.get_num_free_blocks() == 119 - copies
    assert len(ledger) > 0
    while len(ledger):
        rig.step(1)
    assert host.num_published <= len(rig.coordinator.records["a"].pages)  # of the new weights, if any
    rig.run()
    assert len(rig.outputs["a"]) == 10


def test_after_a_reset_there_is_no_hit(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=41, low=0.0, high=0.9)
    rig.add("a", range(60), max_tokens=4)
    rig.run()
    assert rig.coordinator.host_pool.num_published > 0
    assert rig.reset(running=False)
    assert rig.coordinator.host_pool.num_published == 0
    rig.add("b", range(60), max_tokens=4)
    rig.run()
    assert rig.coordinator.leases.counters.device_hits == rig.coordinator.leases.counters.host_hits == 0


def test_a_reset_that_fails_leaves_regions_alone(make_rig: Any) -> None:
    """A region on its way back is still in use as far as the ranks know."""
    rig = make_rig(num_device_blocks=41, low=0.2, high=0.5)
    rig.add("a", range(60), max_tokens=36)
    rig.add("b", range(100, 128), max_tokens=8)
    while "b" in rig.scheduler.requests:
        rig.step()
    rig.coordinator.pressure.low, rig.coordinator.pressure.high = 0, 1
    while not any(t.cuts for t in rig.coordinator.ledger):
        rig.submit()
        if not any(t.cuts for t in rig.coordinator.ledger):
            rig.collect()
    leased = list(rig.coordinator.regions.leased)
    assert not rig.reset(running=False)
    assert list(rig.coordinator.regions.leased) == leased
    rig.collect()
    rig.run()


def test_the_last_request_leaves_while_copies_run(make_rig: Any) -> None:
    """The engine keeps stepping until the ledger is empty, and then holds nothing."""
    rig = make_rig(num_device_blocks=41, low=0.0, high=0.9)
    rig.add("a", range(60), max_tokens=10)
    for _ in range(4):
        rig.step(0)
    rig.abort("a")
    assert rig.scheduler.has_requests()
    rig.step(0)
    assert rig.messages[-1].unbind == ("a",)
    rig.run()


def test_a_dropped_page_is_not_reused_before_its_copy_has_read_it(make_rig: Any) -> None:
    """a leaves while its pages are copied; b takes the blocks in the next step, which has to wait."""
    rig = make_rig(num_device_blocks=37, low=0.0, high=0.9)
    rig.add("a", range(48), max_tokens=10)
    for _ in range(4):
        rig.step(0)
    rig.abort("a")
    rig.add("b", range(100, 150), max_tokens=4)
    waits = []
    while rig.scheduler.has_requests():
        rig.step(0) if len(waits) < 4 else rig.step()
        waits.append(rig.messages[-1].wait)
    assert any(waits)
    rig.add("c", range(48), max_tokens=4)  # reads what was copied
    rig.run()


def test_reset_with_steps_in_flight_and_deferred_frees(make_rig: Any) -> None:
    """vLLM refuses, as with every consumer connector: deferred frees are blocks in use. Nothing breaks."""
    rig = make_rig(num_device_blocks=41, low=0.1, high=0.9, async_scheduling=True, kv_role="kv_both")
    rig.add("a", range(60), max_tokens=10)
    for _ in range(5):
        rig.step()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        rig.reset()
    rig.check()
    rig.run()
    assert len(rig.outputs["a"]) == 10
    assert rig.reset(running=False)


def test_a_page_is_told_once(make_rig: Any) -> None:
    """A request's pages while nothing happens to them, prompt in chunks and answer."""
    rig = make_rig(num_device_blocks=100, low=0.0, high=0.1)
    rig.add("a", range(40), max_tokens=20)
    told = []
    while rig.scheduler.requests:
        told += [write.page for write in rig.submit().pages]
        rig.collect()
    assert told == list(range(15))
