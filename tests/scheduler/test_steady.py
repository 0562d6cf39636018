"""Work in a step in which nothing changes, counted rather than timed: no request or page is looked at."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from vllm_hisparse.scheduler.managers import ResidentManager, SourceManager
from vllm_hisparse.scheduler.residency import PageTable
from vllm_hisparse.testing.scheduler import SchedulerRig

PAGE = 16
VISITS = ("__getitem__", "append", "advance", "count", "pages_in")
CALLS = ("get_num_blocks_to_allocate", "allocate_new_blocks", "cache_blocks")

STATES = {
    "full": {"num_device_blocks": 400, "low": 0.1, "high": 0.2},
    "mixed, below low": {"num_device_blocks": 70, "low": 0.5, "high": 0.6},
    "mixed, above high": {"num_device_blocks": 70, "low": 0.5, "high": 0.6},
}


class Watched(dict[str, Any]):
    """A dictionary that counts passes over it."""

    passes = 0

    def values(self) -> Any:
        self.passes += 1
        return super().values()

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()


def counting(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return counted


def decoding(make_rig: Any, **options: Any) -> SchedulerRig:
    """Four requests that have just opened a page each, with room for many more tokens in it."""
    rig = make_rig(
        page_tokens=PAGE, hot_rows=PAGE, max_hot_rows=PAGE, max_model_len=256, max_step_tokens=64, **options
    )
    for index in range(4):
        rig.add(f"r{index}", range(100 * index, 100 * index + 6 * PAGE + 1), max_tokens=40)
    for _ in range(12):
        rig.step()
    assert len(rig.scheduler.running) == 4
    return rig  # type: ignore[no-any-return]


@pytest.mark.parametrize("state", STATES)
def test_no_work_when_nothing_changes(make_rig: Any, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    rig = decoding(make_rig, **STATES[state])
    coordinator = rig.coordinator
    if state == "mixed, above high":
        # Room to restore somebody's page, but nobody as a whole.
        coordinator.pressure.low, coordinator.pressure.high = 0, coordinator.pool.get_num_free_blocks() - 1
    rig.step()
    assert all((r.region is None) is (state == "full") for r in coordinator.records.values())
    counts: Counter[str] = Counter()
    for name in VISITS:
        monkeypatch.setattr(PageTable, name, counting(counts, name, getattr(PageTable, name)))
    for manager in (SourceManager, ResidentManager):
        for name in CALLS:
            monkeypatch.setattr(manager, name, counting(counts, name, getattr(manager, name)))
    coordinator.records = Watched(coordinator.records)
    # The rig's own checks look at everything.
    monkeypatch.setattr(rig, "check", lambda: None)
    rig.watch_refusals = False
    for _ in range(3):
        rig.step()
        assert rig.messages[-1].is_empty
    assert len(rig.scheduler.running) == 4
    assert counts == {}
    assert coordinator.records.passes == 0
    # Nor are requests kept on lists that a step goes through.
    assert not coordinator.outbox.grown
    assert state == "full" or not coordinator.pressure._unsealed


def test_the_early_exit_changes_nothing(make_rig: Any) -> None:
    """The same requests with and without it: outputs, messages, free blocks."""
    seen = []
    for is_short_cut in (True, False):
        rig = make_rig(num_device_blocks=41, num_parts=2, low=0.3, high=0.6, prefix_share=0.2)
        manager = rig.scheduler.kv_cache_manager
        if not is_short_cut:
            rig._allocate = rig._allocate.__self__._allocate
            manager.cache_blocks = manager.cache_blocks.__self__._publish
        for index in range(3):
            rig.add(f"r{index}", range(20 * index, 20 * index + 9 + index), max_tokens=30)
        levels = []
        while rig.scheduler.has_requests():
            rig.step()
            for request in rig.scheduler.running:  # as vLLM does once a step's tokens are known
                manager.cache_blocks(request, request.num_computed_tokens)
            pool = rig.coordinator.pool
            levels.append((pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)))
        rig.run()
        seen.append((rig.outputs, rig.messages, levels))
    assert seen[0] == seen[1]


def test_a_page_more_is_added_up_at_once_where_there_is_room(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group by group vLLM asks only if something may have to be reclaimed."""
    counts: Counter[str] = Counter()
    name = "get_num_blocks_to_allocate"
    for num_device_blocks, is_asked in ((400, False), (62, True)):
        rig = decoding(make_rig, num_device_blocks=num_device_blocks, low=0.0, high=0.1)
        with monkeypatch.context() as patch:
            for manager in (SourceManager, ResidentManager):
                patch.setattr(manager, name, counting(counts, name, getattr(manager, name)))
            before = [len(record.pages) for record in rig.coordinator.records.values()]
            for _ in range(PAGE):
                rig.step()
        assert [len(record.pages) for record in rig.coordinator.records.values()] == [n + 1 for n in before]
        assert (counts[name] > 0) == is_asked
        rig.run()


def test_a_page_is_published_as_soon_as_its_tokens_are_known(make_rig: Any) -> None:
    """Not a step later, when slots are asked for: asynchronous scheduling learns tokens in between."""
    rig = make_rig(page_tokens=4, num_device_blocks=60)
    rig.add("r", range(9), max_tokens=30)
    (request,) = [rig.scheduler.requests["r"]]
    record = None
    while record is None or request.num_computed_tokens != record.next_publication - 1:
        rig.step()
        record = rig.coordinator.records["r"]
    manager, published = rig.scheduler.kv_cache_manager, rig.coordinator.pool.cached_block_hash_to_block
    before = len(published)
    manager.cache_blocks(request, request.num_computed_tokens)
    assert len(published) == before
    manager.cache_blocks(request, request.num_computed_tokens + 1)
    assert len(published) > before
    assert record.next_publication == request.num_computed_tokens + 1 + 4
