"""Ranks that cannot make copies, or whose reports are lost, repeated or late. The rig compares content."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hisparse.messages import StepMessage
from vllm_hisparse.scheduler import transfers
from vllm_hisparse.scheduler.residency import PageState, Residency
from vllm_hisparse.scheduler.transfers import OVERDUE_STEPS
from vllm_hisparse.testing.logs import errors_logged
from vllm_hisparse.testing.scheduler import SchedulerRig

POOL = {"num_device_blocks": 41, "low": 0.0, "high": 0.9, "num_ranks": 2}


def step(rig: SchedulerRig, *counts: int) -> StepMessage:
    message = rig.submit(*counts)
    rig.collect()
    return message


def num_free_host(rig: SchedulerRig) -> int:
    return rig.coordinator.host_pool.get_num_free_blocks()


@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_a_page_whose_copy_fails_stays_and_is_tried_again(make_rig: Any, failing: list[int]) -> None:
    """Also if the copy is torn, and as long as the other rank's copy of it may still be running."""
    rig = make_rig(**POOL)
    rig.add("a", range(40), max_tokens=20)
    for number in failing:
        rig.ranks[number].fails = True
    while not (message := step(rig, 0, 0)).spill:
        pass
    table = rig.coordinator.records["a"].pages
    assert table.count(PageState.SPILLING) == len(message.spill)  # enqueued on no more than one rank
    assert num_free_host(rig) == 119 - len(message.spill)
    for rank in rig.ranks:
        rank.fails = False
    others = len(step(rig).spill)
    assert rig.coordinator.leases.counters.failed == len(message.spill)
    assert rig.coordinator.host_pool.num_published == others
    assert num_free_host(rig) == 119 - others
    assert table.pages_in(PageState.DIRTY)[: len(message.spill)] == list(range(len(message.spill)))
    again = step(rig)
    assert len(again.spill) >= len(message.spill)
    assert table.pages_in(PageState.CLEAN)[: len(message.spill)] == list(range(len(message.spill)))
    rig.run()
    assert len(rig.outputs["a"]) == 20


def test_a_page_is_tried_again_although_its_request_does_not_grow(make_rig: Any) -> None:
    sizes = {
        "page_tokens": 16,
        "hot_rows": 16,
        "max_hot_rows": 16,
        "max_model_len": 128,
        "max_step_tokens": 64,
    }
    rig = make_rig(**POOL, **sizes)
    rig.add("a", range(64), max_tokens=30)
    rig.ranks[0].fails = True
    record = None
    while record is None or record in rig.coordinator.pressure._unsealed:
        step(rig, 0, 0)
        record = rig.coordinator.records["a"]
    assert record.pages.count(PageState.SPILLING) == 4
    rig.ranks[0].fails = False
    step(rig)
    num_pages = len(record.pages)
    assert len(step(rig).spill) == 4
    assert len(record.pages) == num_pages
    rig.run()


def test_a_request_leaves_before_its_copy_fails(make_rig: Any) -> None:
    rig = make_rig(**POOL)
    rig.add("a", range(40), max_tokens=20)
    rig.ranks[0].fails = True
    while not step(rig, 0, 0).spill:
        pass
    rig.abort("a")
    assert num_free_host(rig) < 119  # rank 1 may still write there
    rig.run()
    assert rig.coordinator.leases.counters.failed > 0
    assert num_free_host(rig) == 119


def test_a_page_that_cannot_be_restored_stays_on_the_host(make_rig: Any) -> None:
    rig = make_rig(**POOL | {"low": 0.2, "high": 0.5})
    rig.add("a", range(60), max_tokens=36)
    rig.add("b", range(100, 128), max_tokens=8)
    while "b" in rig.scheduler.requests:
        rig.step()
    record = rig.coordinator.records["a"]
    away = record.pages.count(PageState.HOST)
    assert away > 0
    rig.coordinator.pressure.low, rig.coordinator.pressure.high = 0, 1
    rig.ranks[1].fails = True
    failed = step(rig).restore
    assert len(failed) == away
    assert all(rig.coordinator.pool.blocks[b].ref_cnt == 0 for copy in failed for b in copy.device_blocks)
    assert record.pages.count(PageState.HOST) == away
    assert record.region is not None
    rig.ranks[1].fails = False
    assert len(step(rig).restore) == away
    assert record.pages.residency is Residency.FULL
    rig.run()


def test_a_region_goes_back_although_its_message_held_copies_that_failed(make_rig: Any) -> None:
    """Slots are dead as soon as the message is applied."""
    rig = make_rig(num_device_blocks=61, low=0.2, high=0.5, hot_rows=16, max_hot_rows=16)
    rig.add("a", range(60), max_tokens=30)
    rig.add("b", range(100, 140), max_tokens=30)
    while not rig.coordinator.regions.num_excess_blocks:
        step(rig)
    rig.ranks[0].fails = True
    coordinator = rig.coordinator
    while not (coordinator.ledger and next(iter(coordinator.ledger)).cuts):
        coordinator.pressure.low, coordinator.pressure.high = 60, 60
        rig.submit(0)
        if not next(iter(coordinator.ledger)).cuts:
            rig.ranks[0].complete(9)
            rig.collect()
    (transfer,) = coordinator.ledger
    blocks = [b for cut in transfer.cuts for b in cut.blocks]
    rig.collect()
    assert transfer.has_failed
    assert all(b.ref_cnt == 0 for b in blocks)
    rig.ranks[0].fails = False
    rig.run()


def test_a_lost_report_delays_and_nothing_else(make_rig: Any) -> None:
    rig = make_rig(**POOL)
    rig.add("a", range(40), max_tokens=20)
    rig.ranks[1].is_silent = True
    for _ in range(6):
        step(rig)
    assert rig.num_lost_reports > 0
    table = rig.coordinator.records["a"].pages
    assert table.count(PageState.SPILLING) > 0
    assert table.count(PageState.ENQUEUED, PageState.CLEAN) == 0
    rig.ranks[1].is_silent = False
    for _ in range(4):  # no news: the rank repeats what it has said
        step(rig)
    assert table.count(PageState.SPILLING) == 0
    assert table.count(PageState.CLEAN) > 0
    rig.run()


def test_the_last_report_is_lost(make_rig: Any) -> None:
    """No message follows that the rank would answer, and no step has a forward."""
    rig = make_rig(**POOL)
    rig.add("a", range(40), max_tokens=4)
    while rig.scheduler.requests:
        for rank in rig.ranks:
            rank.is_silent = True
        step(rig)
    assert len(rig.coordinator.ledger) > 0
    for rank in rig.ranks:
        rank.is_silent = False
    rig.run()


def test_nobody_waits_for_a_rank_that_never_answers(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests grow in a pool too small for both. What its copies would free may never come, so one of
    them is preempted, and both end.
    """
    rig = make_rig(**POOL)
    for name, first in (("a", 0), ("b", 200)):
        rig.add(name, range(first, first + 30), max_tokens=50)
    rig.ranks[1].is_silent = True
    for _ in range(2 * OVERDUE_STEPS):
        step(rig)
        assert rig.scheduler.requests.keys() == {"a", "b"}, "they wait"
    assert not any(request.num_preemptions for request in rig.scheduler.requests.values())
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60))
    with errors_logged() as errors:
        for _ in range(200):
            step(rig)
    assert set(rig.outputs) == {"a", "b"}
    assert [len(tokens) for tokens in rig.outputs.values()] == [50, 50]
    assert [error for error in errors if "completed by ranks [1] for 6" in error]
    rig.ranks[1].is_silent = False
    rig.run()
