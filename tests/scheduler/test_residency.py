"""The transition table, transition by transition, and what a request's pages add up to."""

import itertools

import pytest

from vllm_hisparse.scheduler.residency import (
    HOST_ONLY,
    ON_DEVICE,
    RECLAIMED,
    SETTLED,
    STATES,
    TRANSITIONS,
    UNPINNABLE,
    Device,
    Event,
    Host,
    IllegalTransition,
    PageState,
    PageTable,
    Residency,
)

S, E = PageState, Event
LEGAL = {
    (S.DIRTY, E.SPILL): S.SPILLING,
    (S.DIRTY, E.DEDUPLICATE): S.CLEAN,
    (S.SPILLING, E.ENQUEUED): S.ENQUEUED,
    (S.SPILLING, E.FAILED): S.DIRTY,
    (S.ENQUEUED, E.UNPIN): S.DRAINING,
    (S.ENQUEUED, E.COMPLETED): S.CLEAN,
    (S.DRAINING, E.REPIN): S.ENQUEUED,
    (S.DRAINING, E.REUSED): S.LANDING,
    (S.DRAINING, E.COMPLETED): S.LOOSE,
    (S.LANDING, E.COMPLETED): S.HOST,
    (S.CLEAN, E.UNPIN): S.LOOSE,
    (S.CLEAN, E.EVICT): S.HOST,
    (S.LOOSE, E.REPIN): S.CLEAN,
    (S.LOOSE, E.REUSED): S.HOST,
    (S.HOST, E.RESTORE): S.RESTORING,
    (S.HOST, E.DEDUPLICATE): S.CLEAN,
    (S.RESTORING, E.COMPLETED): S.CLEAN,
    (S.RESTORING, E.FAILED): S.HOST,
    (S.IMPORTING, E.IMPORTED): S.DIRTY,
    (S.IMPORTING_HOST, E.IMPORTED): S.HOST,
}


@pytest.mark.parametrize(("state", "event"), itertools.product(S, E), ids=lambda v: v.name)
def test_every_pair_of_state_and_event(state: PageState, event: Event) -> None:
    table = PageTable("r")
    table.append(S.DIRTY)
    table.append(state)
    after = LEGAL.get((state, event))
    if after is None:
        message = f"page 1 of request r: event {event.value!r} is illegal in state {state.name}"
        with pytest.raises(IllegalTransition, match=message):
            table.advance(1, event)
        assert table[1] is state
    else:
        assert table.advance(1, event) is after
        assert table[1] is after
    assert table[0] is S.DIRTY
    table.check_integrity()


def test_no_other_transition_exists() -> None:
    assert TRANSITIONS == LEGAL


def test_a_page_can_always_be_read() -> None:
    """In every state the rows are on the device, on the host, or on their way from blocks still intact."""
    for state, (device, host, _) in STATES.items():
        is_read = (state, E.IMPORTED) not in TRANSITIONS  # nothing reads a page before it has arrived
        assert device in (Device.LEASED, Device.LOOSE) or host is not Host.NONE or not is_read, state
    assert {S.DIRTY, S.SPILLING, S.ENQUEUED, S.DRAINING, S.CLEAN, S.LOOSE} == ON_DEVICE
    assert {S.ENQUEUED, S.CLEAN} == UNPINNABLE
    assert {S.CLEAN} == SETTLED
    assert {S.LANDING, S.HOST, S.RESTORING, S.IMPORTING_HOST} == HOST_ONLY
    assert {S.DRAINING, S.LOOSE} == RECLAIMED


def test_pages_come_many_at_once() -> None:
    """Those of a prefix hit, and more of an import behind them."""
    table = PageTable("r0")
    table.append(S.HOST)
    table.extend([S.HOST, S.CLEAN, S.HOST])
    table.extend(iter([S.DIRTY]))
    assert [table[page] for page in range(len(table))] == [S.HOST, S.HOST, S.CLEAN, S.HOST, S.DIRTY]
    assert (table.count(S.HOST), table.count(S.CLEAN), table.count(S.DIRTY)) == (3, 1, 1)
    table.check_integrity()


def test_counters() -> None:
    table = PageTable("r")
    assert [table.append(s) for s in (S.DIRTY, S.CLEAN, S.HOST, S.CLEAN)] == [0, 1, 2, 3]
    assert (table.count(S.CLEAN), table.count(S.DIRTY, S.HOST), table.count()) == (2, 2, 0)
    assert (table.num_unpinnable, table.num_host_only) == (2, 1)
    assert table.pages_in(S.CLEAN, S.HOST) == [1, 2, 3]
    assert table.pages_in(S.LOOSE) == []
    table.advance(1, E.UNPIN)
    table.advance(1, E.REUSED)
    assert (table.num_unpinnable, table.num_host_only) == (1, 2)
    table.check_integrity()


@pytest.mark.parametrize(
    ("states", "residency"),
    [
        ([], Residency.FULL),
        ([S.DIRTY, S.SPILLING, S.ENQUEUED, S.DRAINING, S.CLEAN, S.LOOSE], Residency.FULL),
        ([S.HOST, S.DIRTY], Residency.MIXED),
        ([S.LANDING, S.LOOSE], Residency.MIXED),
        ([S.RESTORING, S.CLEAN], Residency.MIXED),
        ([S.HOST, S.LANDING, S.RESTORING], Residency.NONE),
    ],
)
def test_a_requests_residency_follows_from_its_pages(states: list[PageState], residency: Residency) -> None:
    table = PageTable("r")
    for state in states:
        table.append(state)
    assert table.residency is residency
