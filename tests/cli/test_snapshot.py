"""Snapshots of a coordinator under pressure, against the coordinator's own tables."""

from collections import Counter
from pathlib import Path

import pytest

from vllm_hisparse.scheduler.residency import RECLAIMED, PageState, Residency
from vllm_hisparse.scheduler.snapshot import CellKind, page_states, pool_cells, snapshot
from vllm_hisparse.testing.engine_config import EngineOptions
from vllm_hisparse.testing.scheduler import SchedulerRig

PROMPTS = {"a": 40, "b": 36}


@pytest.fixture
def rig(tmp_path: Path) -> SchedulerRig:
    """Two requests in a pool that cannot hold both."""
    rig = SchedulerRig(EngineOptions(num_device_blocks=30, max_model_len=80), tmp_path)
    for first, (request_id, length) in enumerate(PROMPTS.items()):
        rig.add(request_id, range(first * 100, first * 100 + length), max_tokens=30)
    return rig


def under_pressure(rig: SchedulerRig) -> SchedulerRig:
    """The rig as soon as a page is on the host only."""
    for _ in range(200):
        if any(r.pages.count(PageState.HOST) for r in rig.coordinator.records.values()):
            return rig
        rig.step()
    raise AssertionError("no page left the device")


def test_an_idle_pool_is_free(rig: SchedulerRig) -> None:
    state = snapshot(rig.coordinator)
    assert state.requests == ()
    assert state.num_device_blocks == state.num_free_device_blocks == 29
    assert state.num_used_host_blocks == 0
    assert set(pool_cells(rig.coordinator)) == {pool_cells(rig.coordinator)[0]}
    assert pool_cells(rig.coordinator)[0].kind is CellKind.FREE


def test_requests_are_what_their_records_say(rig: SchedulerRig) -> None:
    coordinator = under_pressure(rig).coordinator
    state = snapshot(coordinator)
    assert {r.request_id for r in state.requests} == set(coordinator.records)
    for request in state.requests:
        record = coordinator.records[request.request_id]
        states = page_states(coordinator, request.request_id)
        assert request.pages == Counter(s.name.lower() for s in states)
        assert request.num_host_only == record.pages.num_host_only
        assert request.residency == record.pages.residency.value
        assert request.hot_rows == (record.region.num_rows if record.region else 0)
    assert Residency.MIXED.value in {r.residency for r in state.requests}


def test_totals_add_up(rig: SchedulerRig) -> None:
    coordinator = under_pressure(rig).coordinator
    state = snapshot(coordinator)
    assert state.num_regions >= 1
    assert state.num_hot_rows == sum(r.hot_rows for r in state.requests)
    assert 0 < state.num_used_host_blocks <= state.num_host_blocks
    assert state.page_events["spilled"] >= state.num_used_host_blocks
    assert state.page_events["lost"] >= 1


def test_every_cell_has_the_use_that_its_block_has(rig: SchedulerRig) -> None:
    coordinator = under_pressure(rig).coordinator
    cells = pool_cells(coordinator)
    assert len(cells) == coordinator.pool.num_gpu_blocks - 1
    kinds = Counter(cell.kind for cell in cells)
    pages = Counter(state for r in coordinator.records for state in page_states(coordinator, r))
    parts = coordinator.layout.num_parts
    loose = sum(pages[state] for state in RECLAIMED)
    assert kinds[CellKind.LOOSE] == parts * loose
    assert kinds[CellKind.MIRRORED] == parts * pages[PageState.CLEAN]
    assert kinds[CellKind.FREE] + kinds[CellKind.CACHED] + kinds[CellKind.LOOSE] == (
        coordinator.pool.get_num_free_blocks()
    )
    hot = sum(len(part) for region in coordinator.regions.leased for part in region.blocks)
    assert kinds[CellKind.HOT] == hot
    users = {cell.request_id for cell in cells if cell.kind is CellKind.INDEXER}
    assert users == set(coordinator.records)


def test_a_request_without_blocks_has_no_pages(rig: SchedulerRig) -> None:
    assert page_states(rig.coordinator, "nobody") == ()
